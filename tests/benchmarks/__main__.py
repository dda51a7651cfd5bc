"""Benchmarks: `NAME ..` runs some, none runs all. Each prints its table, and with `--write` the table
is written to docs/benchmarks.md.

Exit status 1 if a benchmark failed. The others run nevertheless.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from rich.console import Console

from kvactors.errors import ConfigError
from kvactors.scenario.output import to_stdout, write_json
from kvactors.signals import sigterm_ends
from tests.benchmarks.frame import PAGE, PEERS, ROOT, origin, print_report, put_table, table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run benchmarks. Returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parsed(words)
    names = options.names or list(PEERS)
    if len(names) == 1:
        return run_one(names[0], options)
    if options.json is not None:
        print("--json is for one benchmark", file=sys.stderr)
        return 2
    rest = [word for word in words if word not in names]
    # each in a process of its own: memory and threads of one are no load of the next
    commands = [[sys.executable, "-m", "tests.benchmarks", name, *rest] for name in names]
    return max(min(1, subprocess.run(one, cwd=ROOT, check=False).returncode) for one in commands)


def run_one(name: str, options: argparse.Namespace) -> int:
    """Run a benchmark in this process. Returns the exit status."""
    pythons = {peer: getattr(options, f"{peer}_python") for peer in PEERS[name]}
    peers = {peer: str(Path(python).absolute()) for peer, python in pythons.items() if python}
    load = os.getloadavg()[0]
    try:
        if options.write:
            put_table(options.page.read_text(), name, "")
        with sigterm_ends():
            run = import_module(f"tests.benchmarks.{name}").run
            given = {f"{peer}_python": python for peer, python in peers.items()}
            report = run(quick=options.quick, **given)
    except ConfigError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    print_report(name, report, Console(stderr=to_stdout(options.json)))
    write_json(report, options.json)
    if options.write:
        text = table(report, origin(peers, load))
        options.page.write_text(put_table(options.page.read_text(), name, text))
    return 0


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--json", type=Path, help="where to write the report, - for stdout")
    parser.add_argument("--write", action="store_true", help="write the tables of the page")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page")
    parser.add_argument("--quick", action="store_true", help="short runs, to check the command")
    for peer in ("vllm", "sglang", "lmcache"):
        parser.add_argument(f"--{peer}-python", default="", help=f"an interpreter that has {peer}")
    options = parser.parse_args(words)
    for name in options.names:
        if name not in PEERS:
            parser.error(f"there is no benchmark {name}, only {', '.join(PEERS)}")
    for peer in ("vllm", "sglang", "lmcache"):
        if (python := getattr(options, f"{peer}_python")) and not Path(python).exists():
            parser.error(f"there is no {python}")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
