"""Make the virtual environments of the consumers, from a package index alone: `python -m
tests.interop.setup DIR [GROUP ..]`.

An environment that is there and was made from the same pins is left as it is.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.interop.environments import PINS, STAMP, InteropError, Pins, made_from, pins

BUDGET = 900.0
"""Seconds that all environments together may take."""
AT_ONCE = 2
"""Environments made at once."""


def make(directory: Path, one: Pins, until: float) -> str:
    """Make one environment unless it is there; returns what was done."""
    folder = directory / one.name
    if made_from(folder) == one.stamp:
        return "is there"
    begun = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    try:
        venv.EnvBuilder(with_pip=bool(one.packages or one.bare)).create(folder)
    except (OSError, subprocess.CalledProcessError) as error:
        raise InteropError(f"{folder}: cannot make a virtual environment: {error}") from None
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    if one.packages:
        run(one, [*pip, *one.packages], until)
    if one.bare:
        run(one, [*pip, "--no-deps", *one.bare], until)
    if one.check:
        run(one, [python, "-c", one.check], until)
    (folder / STAMP).write_text(json.dumps(one.stamp, indent=1))
    return f"made in {time.monotonic() - begun:.0f} s"


def run(one: Pins, command: Sequence[str], until: float) -> None:
    """Run a command of an environment. InteropError with the end of its output if it fails or takes
    too long."""
    shown = " ".join(command)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=max(1.0, until - time.monotonic()),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InteropError(f"{one.name}: not done in time: {shown}") from None
    except OSError as error:
        raise InteropError(f"{one.name}: {shown}: {error}") from None
    if done.returncode:
        raise InteropError(
            f"{one.name}: exit status {done.returncode} of: "
            f"{shown}\n{(done.stdout + done.stderr)[-3000:]}"
        )


def setup(
    directory: Path, groups: Sequence[str], budget: float = BUDGET, path: Path = PINS
) -> list[str]:
    """Make every environment of some groups; returns a line for each. InteropError names those that
    could not be made."""
    known = pins(path)
    unknown = set(groups) - known.keys()
    if unknown:
        raise InteropError(
            f"there is no group {min(unknown)!r} of environments; there are: {', '.join(known)}"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InteropError(f"{directory}: {error}") from None
    until = time.monotonic() + budget
    wanted = [one for group in groups for one in known[group]]
    lines, failures = [], []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = [(one, pool.submit(make, directory, one, until)) for one in wanted]
        for one, result in results:
            try:
                lines.append(f"{directory / one.name}: {result.result()}")
            except InteropError as error:
                failures.append(str(error))
    if failures:
        raise InteropError("\n".join(failures))
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.interop.setup", description=__doc__)
    parser.add_argument(
        "directory", type=Path, help="folder of the environments; made if it is not there"
    )
    parser.add_argument(
        "groups",
        nargs="*",
        metavar="GROUP",
        help="groups of environments (pins.toml); all if none is named",
    )
    parser.add_argument(
        "--budget", type=float, default=BUDGET, help="seconds that all of them together may take"
    )
    given = parser.parse_args(arguments)
    try:
        for line in setup(given.directory.resolve(), given.groups or list(pins()), given.budget):
            print(line)
    except InteropError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
