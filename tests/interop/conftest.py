"""Runs interop tests in a separate pytest process with its own network (`network.isolated`), which
makes the fixtures: each test in one of its own, or the tests of a module, which share what they
start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.interop.environments import Environments, InteropError
from tests.interop.network import is_isolated, isolated, raise_loopback
from tests.interop.scene import Scene

INSIDE = "INTEROP_INSIDE"
"""The environment variable that marks the inner pytest."""
INSIDE_NETWORK = INSIDE in os.environ
"""Whether this is the inner pytest."""
ROOT = Path(__file__).parents[2]


class Suite(NamedTuple):
    """The tests of one marker.

    Attributes:
        group: the environments that they need.
        limit: seconds that one test may take. Only a hang takes as long.
        by_module: whether the tests of a module share a process. The import of an engine takes
            longer than most tests.
    """

    group: str
    limit: int
    by_module: bool = False


SUITES = {
    "interop": Suite("routers", 600),
    "engines_full": Suite("engines", 3000, by_module=True),
    "engines": Suite("engines", 1500, by_module=True),
}
"""By marker. A test takes the first of those that it has."""
SHARED = "INTEROP_SHARED"
"""The environment variable with a folder that all tests of a session share."""
RESULTS = "INTEROP_RESULTS"
"""The environment variable with the file of results: a line for each test, its id and its error."""
FAILURES = pytest.StashKey[dict[str, str]]()
"""The errors of the tests that ran inside, by id. Empty: the test has passed."""


def suite_of(item: pytest.Item) -> str | None:
    """The marker of an interop test."""
    return next((name for name in SUITES if item.get_closest_marker(name)), None)


def run_with(item: pytest.Item, marker: str) -> list[pytest.Item]:
    """The tests that share a process with this one."""
    if not SUITES[marker].by_module:
        return [item]
    return [one for one in item.session.items if one.path == item.path and suite_of(one) == marker]


def pytest_sessionstart() -> None:
    """Prepare the network of the inner pytest."""
    if INSIDE_NETWORK:
        raise_loopback()
        if not is_isolated():
            raise InteropError("this network has more interfaces than loopback")


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: Any) -> bool | None:
    """Fixtures that start programs are made inside alone. Those of a session start none."""
    if INSIDE_NETWORK or not fixturedef.func.__module__.startswith("tests.interop."):
        return None
    fixturedef.cached_result = (True, fixturedef.cache_key(request), None)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an interop test inside, or, if this is inside, as it stands."""
    marker = suite_of(pyfuncitem)
    if marker is None or INSIDE_NETWORK:
        return None
    folder = pyfuncitem.config.getoption("--interop")
    if folder is None:
        pytest.fail(
            f"{marker} tests need the environments of other programs: `pytest -m {marker} "
            "--interop=DIR`, where DIR is made by "
            f"`python -m tests.interop.setup DIR {SUITES[marker].group}`",
            pytrace=False,
        )
    failures = pyfuncitem.session.stash.setdefault(FAILURES, {})
    if pyfuncitem.nodeid not in failures:
        _run_inside(pyfuncitem, Path(folder).resolve(), marker, failures)
    if failures[pyfuncitem.nodeid]:
        pytest.fail(failures[pyfuncitem.nodeid], pytrace=False)
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The outer pytest waits for the inner one, which has its own limit."""
    for item in items:
        marker = suite_of(item)
        if marker is not None and not INSIDE_NETWORK:
            limit = SUITES[marker].limit * len(run_with(item, marker))
            item.add_marker(pytest.mark.timeout(limit + 60))


def _run_inside(item: pytest.Function, folder: Path, marker: str, failures: dict[str, str]) -> None:
    suite, tests = SUITES[marker], run_with(item, marker)
    folder_of_test: Path = item._request.getfixturevalue("tmp_path")
    results = folder_of_test / "results"
    results.touch()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rN",
        "-s",
        "-p",
        "no:cacheprovider",
        f"--basetemp={folder_of_test / 'inside'}",
        f"--timeout={suite.limit - 10}",
        "-m",
        marker,
        f"--interop={folder}",
        *(f"{one.path.relative_to(ROOT)}::{one.nodeid.partition('::')[2]}" for one in tests),
    ]
    ends = ""
    try:
        done = subprocess.run(
            isolated(command),
            cwd=ROOT,
            env=os.environ
            | {INSIDE: "1", SHARED: str(folder_of_test.parent), RESULTS: str(results)},
            capture_output=True,
            text=True,
            timeout=suite.limit * len(tests),
            check=False,
        )
        print(done.stdout)
        ends = f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode(errors="replace")[-5000:]
        ends = f"not done in {error.timeout} s:\n{output}"
    failures.update({one.nodeid: ends for one in tests})  # of those that did not come to their end
    # a test that fails has a line of its teardown too, after that of its failure
    failures.update(json.loads(line) for line in reversed(results.read_text().splitlines()))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the result of a test inside for the outer pytest."""
    if INSIDE_NETWORK and (report.failed or report.when == "teardown"):
        error = report.longreprtext[-8000:] if report.failed else ""
        with Path(os.environ[RESULTS]).open("a") as file:
            file.write(json.dumps([report.nodeid, error]) + "\n")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(exitstatus: int) -> Iterator[None]:
    """The inner pytest ends without the interpreter's exit, where Mooncake's client aborts the
    process if it has lost its masters and was left open (`std::terminate` of a thread)."""
    yield
    if INSIDE_NETWORK:
        sys.stdout.flush()
        os._exit(exitstatus)


@pytest.fixture(scope="session")
def environments(request: pytest.FixtureRequest) -> Environments:
    """The environments of the consumers."""
    return Environments(Path(request.config.getoption("--interop") or "."))


@pytest.fixture
def scene(environments: Environments, tmp_path: Path) -> Iterator[Scene]:
    """A case with nothing in it yet. When the test has passed, it is judged (`Scene.judge`)."""
    made = Scene(environments, tmp_path)
    try:
        yield made
    finally:
        made.close()
