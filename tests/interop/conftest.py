"""Runs every interop test in a separate pytest process with its own network (`network.isolated`),
which makes the fixtures."""

from __future__ import annotations

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
        own_proc: whether the programs read /proc.
    """

    group: str
    limit: int
    own_proc: bool = False


SUITES = {
    "interop": Suite("routers", 600),
    "engines_full": Suite("engines", 3000, own_proc=True),
    "engines": Suite("engines", 1500, own_proc=True),
}
"""By marker. A test takes the first of those that it has."""
SHARED = "INTEROP_SHARED"
"""The environment variable with a folder that all tests of a session share."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an interop test inside, or, if this is inside, as it stands."""
    marker = next((name for name in SUITES if pyfuncitem.get_closest_marker(name)), None)
    if marker is None or INSIDE_NETWORK:
        return None
    folder = pyfuncitem.config.getoption("--interop")
    if folder is None:
        pytest.fail(
            f"{marker} tests need the environments of other programs: `pytest -m {marker} "
            "--interop DIR`, where DIR is made by "
            f"`python -m tests.interop.setup DIR {SUITES[marker].group}`",
            pytrace=False,
        )
    _run_inside(pyfuncitem, Path(folder).resolve(), marker)
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The outer pytest waits for the inner one, which has its own limit."""
    for item in items:
        for marker, suite in SUITES.items():
            if item.get_closest_marker(marker) and not INSIDE_NETWORK:
                item.add_marker(pytest.mark.timeout(suite.limit + 60))


def _run_inside(item: pytest.Function, folder: Path, marker: str) -> None:
    limit = SUITES[marker].limit
    folder_of_test: Any = item.funcargs["tmp_path"]
    test = f"{item.path.relative_to(ROOT)}::{item.nodeid.partition('::')[2]}"
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
        f"--timeout={limit - 10}",
        "-m",
        marker,
        f"--interop={folder}",
        test,
    ]
    try:
        done = subprocess.run(
            isolated(command, own_proc=SUITES[marker].own_proc),
            cwd=ROOT,
            env=os.environ | {INSIDE: "1", SHARED: str(folder_of_test.parent)},
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        pytest.fail(
            f"not done in {limit} s:\n{(error.stdout or b'').decode(errors='replace')[-5000:]}",
            pytrace=False,
        )
    print(done.stdout)
    if done.returncode:
        pytest.fail(f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}", pytrace=False)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(exitstatus: int) -> Iterator[None]:
    """The inner pytest ends without the interpreter's exit, where Mooncake's client aborts the
    process if it has lost its masters and was left open (`std::terminate` of a thread)."""
    yield
    if INSIDE_NETWORK:
        sys.stdout.flush()
        os._exit(exitstatus)


@pytest.fixture
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """A case with nothing in it yet. When the test has passed, it is judged (`Scene.judge`)."""
    if not INSIDE_NETWORK:
        yield None
        return
    raise_loopback()
    if not is_isolated():
        raise InteropError("this network has more interfaces than loopback")
    made = Scene(Environments(Path(request.config.getoption("--interop"))), tmp_path)
    try:
        yield made
    finally:
        made.close()
