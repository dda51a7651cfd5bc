"""Benchmarks: `NAME` runs one and prints its table. Without a name all run, and their tables are
written to docs/benchmarks.md.

Exit status 1 if a benchmark failed. The tables of the others are written nevertheless.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console

from kvactors.errors import ConfigError
from kvactors.scenario.output import to_stdout, write_json
from kvactors.signals import sigterm_ends
from tests.benchmarks.machine import ROOT
from tests.benchmarks.page import filled, names_of
from tests.benchmarks.report import print_bench
from tests.benchmarks.runs import NAMES, RUNS, Peers, measure, obstacle, read, selected

PAGE = ROOT / "docs" / "benchmarks.md"
ALWAYS = {"name", "json", "page"}
"""Options that no benchmark takes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark, or all of them and write the page. Returns the exit status."""
    options = parsed(arguments)
    if options.name is None:
        return write_page(options)
    try:
        with sigterm_ends():
            report = options.run(**options.taken)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print_bench(report, Console(stderr=to_stdout(options.json)))
    if options.json is not None:
        write_json(report, options.json)
    return 0


def write_page(options: argparse.Namespace) -> int:
    """Run, and write the page. Returns the exit status."""
    page: Path = options.page
    chosen, places = selected(options.only), names_of(page.read_text())
    if missing := [one.name for one in chosen if one.name not in places]:
        print(f"{page} has no place for the tables {', '.join(missing)}", file=sys.stderr)
        return 2
    peers = Peers(options.vllm_python, options.sglang_python, options.lmcache_python)
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        if options.source is not None:
            records = read(options.source, [one.name for one in chosen])
        else:
            folder = options.to or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            records = {}
            for run in chosen:
                if why := obstacle(run, peers, quick=options.quick):
                    print(f"{run.name}: not run, {why}", flush=True)
                    continue
                try:
                    records[run.name] = measure(run, peers, folder, quick=options.quick)
                except RuntimeError as error:
                    print(f"{run.name}: {error}", file=sys.stderr, flush=True)
                    failed.append(run.name)
                    continue
                print(f"{run.name}: {summary(records[run.name])}", flush=True)
        try:
            page.write_text(filled(page.read_text(), records))  # it may have been edited since
        except (OSError, ValueError) as error:
            print(f"{page} was not written: {error}", file=sys.stderr)
            return 1
    print(f"{page}: {len(records)} of {len(chosen)} tables written")
    return 1 if failed or not records else 0


def summary(record: dict[str, Any]) -> str:
    """A run in a few words."""
    rows = record["report"]["rows"]
    return (
        f"{len(rows)} rows, {sum(row['ratio'] < 1 for row in rows)} below 1, "
        f"{record['seconds']:.0f} s"
    )


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line. With a name, `run` is the benchmark and `taken` its options."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    names = list(dict.fromkeys(one.bench for one in RUNS))
    parser.add_argument("name", nargs="?", choices=names, help="a benchmark")
    parser.add_argument("--json", type=Path, help="where to write its report, - for stdout")
    parser.add_argument("--blocks", type=int, help="of the filled index, for index")
    parser.add_argument(
        "--from", dest="source", type=Path, help="take the JSON files of this folder, run nothing"
    )
    parser.add_argument("--to", type=Path, help="keep the JSON files in this folder")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=[], help="these runs alone")
    parser.add_argument("--quick", action="store_true", help="short runs, to check the command")
    parser.add_argument("--vllm-python", default="", help="an interpreter that has vLLM")
    parser.add_argument("--sglang-python", default="", help="an interpreter that has SGLang")
    parser.add_argument("--lmcache-python", default="", help="an interpreter that has LMCache")
    options = parser.parse_args(arguments)
    if options.source is not None and (options.to is not None or options.quick):
        parser.error("--from runs nothing: --to and --quick have no effect with it")
    if options.source is not None and not options.source.is_dir():
        parser.error(f"--from {options.source} is no folder")
    for peer in ("vllm_python", "sglang_python", "lmcache_python"):
        if python := getattr(options, peer):
            if not Path(python).exists():
                parser.error(f"there is no {python}")
            # benchmarks run in another folder. A link to the interpreter is not followed: it is
            # what makes a virtual environment
            setattr(options, peer, str(Path(python).absolute()))
    if options.name is None:
        if options.json is not None or options.blocks is not None:
            parser.error("--json and --blocks are for one benchmark: name it")
        return options
    run = import_module(f"tests.benchmarks.{options.name}").run
    given = {key: value for key, value in vars(options).items() if value and key not in ALWAYS}
    if unknown := sorted(given.keys() - inspect.signature(run).parameters.keys()):
        parser.error(f"the benchmark {options.name} takes no {', '.join(unknown)}")
    options.run, options.taken = run, given
    return options


if __name__ == "__main__":
    raise SystemExit(main())
