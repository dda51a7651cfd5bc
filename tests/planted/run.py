"""Plants each bug alone in a copy of the tree and runs the tests that must notice it.

    python tests/planted/run.py [--only NAME ...] [--jobs 2] [--list]

Exit 0 if every bug was caught and the same tests pass on the unchanged copy, else 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from catalogue import BUGS, ROOT, Bug, Stale, list_of, planted
from rich.console import Console

TREE = ("kvactors", "tests", "docs", "scenarios", "native/cuda", "pyproject.toml", "README.md")
LIMIT = 200.0
"""Seconds for a bug's tests, enough to detect a hang."""

TEST_LIMIT = 60
"""Seconds for one of them (pytest-timeout)."""

NO_EDITABLE = """import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"]
"""
"""`sitecustomize` of a copy: an editable install would redirect imports to the tree that was
copied."""


class Verdict(NamedTuple):
    """caught: a test failed, or hung. by: the first such test. how: fails, hang, passes, or why
    pytest could not run it."""

    name: str
    caught: bool
    how: str
    by: str
    seconds: float
    failing: tuple[str, ...]
    output: str


def copy_tree(to: Path) -> Path:
    """Copy the package, its tests and the files they read into a separate folder, with the native
    module in use."""
    for name in TREE:
        here = ROOT / name
        if here.is_dir():
            shutil.copytree(
                here,
                to / name,
                ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"),
                dirs_exist_ok=True,
            )
        elif here.exists():
            shutil.copy2(here, to / name)
    native = importlib.util.find_spec("kvactors._native")
    if native is None or native.origin is None:
        raise SystemExit("kvactors._native is not built: nothing can be tested")
    shutil.copy2(native.origin, to / "kvactors")
    (to / "sitecustomize.py").write_text(NO_EDITABLE, "utf-8")
    command = [sys.executable, "-c", "import kvactors._native; print(kvactors.__file__)"]
    found = subprocess.run(
        command, cwd=to, env=environment_of(to), capture_output=True, text=True, check=False
    )
    if not found.stdout.startswith(str(to)):
        raise SystemExit(
            f"the copy in {to} is not what Python imports there: {found.stdout}{found.stderr}"
        )
    return to


def environment_of(tree: Path) -> dict[str, str]:
    """The environment in which a copy is imported before any other kvactors. No bytecode caches:
    they would confuse a file with its version of a second ago."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return {**mine, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}


def run_tests(tree: Path, catchers: Sequence[str], options: Sequence[str], limit: float) -> Verdict:
    """Run tests in a copy for `limit` seconds at most. Nothing outside it can be imported in its
    place."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="planted-tests-") as scratch:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--tb=line",
            f"--timeout={TEST_LIMIT}",
        ]
        with subprocess.Popen(
            [*command, "-m", "ci or not ci", f"--basetemp={scratch}/t", *options, *catchers],
            cwd=tree,
            env=environment_of(tree),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, code = process.communicate(timeout=limit)[0], process.returncode
            except subprocess.TimeoutExpired:
                os.killpg(
                    process.pid, signal.SIGKILL
                )  # a separate session: this ends its children as well
                output, code = process.communicate()[0], None
    return verdict_of(code, output, time.monotonic() - began)


def verdict_of(code: int | None, output: str, seconds: float) -> Verdict:
    """The meaning of pytest's exit status and output: 1 is a test that failed, 2 to 5 are tests
    that
    could not be run. None: killed."""
    found = re.findall(r"^(?:FAILED|ERROR) (tests/\S+?::.*?)(?: - (.*))?$", output, re.MULTILINE)
    failing = tuple(test for test, _ in found)
    by = failing[0].removeprefix("tests/") if failing else ""
    if code is None:
        return Verdict("", True, "hang", by or "(killed)", seconds, failing, output)
    if code == 1 and failing:
        return Verdict(
            "", True, "hang" if "Timeout" in found[0][1] else "fails", by, seconds, failing, output
        )
    how = "passes" if code == 0 else f"pytest ended with {code}"
    return Verdict("", False, how, by, seconds, failing, output)


@contextmanager
def changed(tree: Path, file: Path, text: str) -> Iterator[None]:
    """Another text of a file, in a copy, while the block runs."""
    file = tree / file.relative_to(ROOT)
    source = file.read_text("utf-8")
    file.write_text(text, "utf-8")
    try:
        yield
    finally:
        file.write_text(source, "utf-8")


def try_all(bugs: Sequence[Bug], jobs: int, console: Console) -> tuple[list[str], list[Verdict]]:
    """Which catchers fail without any bug (they prove nothing, and are left out), and how each
    bug does under the others."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        free = [copy_tree(Path(folder) / f"tree-{i}") for i in range(jobs)]
        broken: list[str] = []

        def clean(catchers: Sequence[str]) -> None:
            tree = free.pop()  # there are as many trees as threads
            verdict = run_tests(tree, catchers, ["--maxfail=20"], 6 * LIMIT)
            free.append(tree)
            if verdict.how != "passes":
                console.print(verdict.output[-3000:], markup=False)
                broken.extend(verdict.failing or [verdict.how])

        def one(bug: Bug, change: tuple[Path, str]) -> Verdict:
            tree = free.pop()
            with changed(tree, *change):
                options = ["-x", *(f"--deselect={test}" for test in broken if "::" in test)]
                verdict = run_tests(tree, bug.tests, options, LIMIT)._replace(name=bug.name)
            free.append(tree)
            console.print(
                f"{verdict.name}: {verdict.how} {verdict.by} ({verdict.seconds:.1f} s)",
                markup=False,
            )
            return verdict

        # In this thread: `ast.parse` of Python 3.11 fails now and then in several threads at once.
        changes = [planted(bug) for bug in bugs]
        catchers = [*dict.fromkeys(catcher for bug in bugs for catcher in bug.tests)]
        with ThreadPoolExecutor(jobs) as threads:
            list(threads.map(clean, [part for i in range(jobs) if (part := catchers[i::jobs])]))
            verdicts = list(threads.map(one, bugs, changes))
    return broken, verdicts


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", metavar="NAME", choices=[m.name for m in BUGS])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="print a table of the bugs and end")
    chosen = parser.parse_args(arguments)
    bugs = [m for m in BUGS if not chosen.only or m.name in chosen.only]
    if chosen.list:
        print(list_of(bugs), end="")
        return 0
    console = Console(width=None if sys.stdout.isatty() else 200)
    try:
        for bug in bugs:
            planted(bug)
    except Stale as error:
        console.print(str(error), markup=False)
        return 1
    broken, verdicts = try_all(bugs, max(1, min(chosen.jobs, len(bugs))), console)
    for verdict in verdicts:
        if not verdict.caught:
            console.print(f"NOT CAUGHT: {verdict.name}: {verdict.how}", markup=False)
    caught = sum(verdict.caught for verdict in verdicts)
    clean = f"fails {len(broken)} of" if broken else "passes"
    console.print(
        f"{caught} of {len(verdicts)} caught; the unmutated copy {clean} the same tests",
        markup=False,
    )
    for test in broken:
        console.print(f"fails without any bug, and was left out: {test}", markup=False)
    return 0 if caught == len(verdicts) and not broken else 1


if __name__ == "__main__":
    sys.exit(main())
