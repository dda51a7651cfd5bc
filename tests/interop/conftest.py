"""Runs every interop test by a pytest of its own in a network of its own (`network.isolated`); the
fixtures are made there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.interop.environments import Environments, InteropError
from tests.interop.network import is_isolated, isolated, raise_loopback
from tests.interop.scene import Scene

INSIDE = "INTEROP_INSIDE"
"""The environment variable that marks the inner pytest."""
ROOT = Path(__file__).parents[2]
LIMIT = 240
"""Seconds that one test may take. Only a hang takes as long."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an interop test inside, or, if this is inside, as it stands."""
    if pyfuncitem.get_closest_marker("interop") is None or INSIDE in os.environ:
        return None
    folder = pyfuncitem.config.getoption("--interop")
    if folder is None:
        pytest.fail(
            "interop tests need the consumers' environments: `pytest -m interop --interop DIR`, "
            "where DIR is made by "
            "`python -m tests.interop.setup DIR routers`",
            pytrace=False,
        )
    _run_inside(pyfuncitem, Path(folder).resolve())
    return True


def _run_inside(item: pytest.Function, folder: Path) -> None:
    base, test = (
        item.funcargs["tmp_path"] / "inside",
        f"{item.path.relative_to(ROOT)}::{item.nodeid.partition('::')[2]}",
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rN",
        "-s",
        "-p",
        "no:cacheprovider",
        f"--basetemp={base}",
        f"--timeout={LIMIT - 10}",
        "-m",
        "interop",
        f"--interop={folder}",
        test,
    ]
    try:
        done = subprocess.run(
            isolated(command),
            cwd=ROOT,
            env=os.environ | {INSIDE: "1"},
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        pytest.fail(
            f"not done in {LIMIT} s:\n{(error.stdout or b'').decode(errors='replace')[-5000:]}",
            pytrace=False,
        )
    print(done.stdout)
    if done.returncode:
        pytest.fail(f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}", pytrace=False)


@pytest.fixture
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """A case with nothing in it yet. When the test has passed, it is judged (`Scene.judge`)."""
    if INSIDE not in os.environ:
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
