"""Settings and fixtures of every test."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import structlog

from kvactors.actor.log import limit


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the tests with whole traces and of the interop tests."""
    parser.addoption(
        "--traces", metavar="DIR", type=Path, help="request traces (docs/contributing.md)"
    )
    parser.addoption(
        "--interop",
        metavar="DIR",
        help="environments of the interop tests, made by `python -m tests.interop.setup DIR`",
    )


# The time that an example takes depends on the load of the machine.
hypothesis.settings.register_profile(
    "kvactors", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("kvactors")

ROOT = Path(__file__).parents[1]
ENTRIES = pytest.StashKey[set[str]]()
CACHES = {".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", "__pycache__", "build"}

WHOLE_FILE = re.compile(r"^pytestmark = .*pytest\.mark\.full\b", re.MULTILINE)


def pytest_configure(config: pytest.Config) -> None:
    """The markers, also for a pytest that has not found the clone's settings."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell's background job ignores Ctrl-C, and so would the commands that tests start.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Else every command that a test starts compiles the package, half of a short one's time.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Passes while the tests are imported free nothing: `_earlier_objects_are_not_scanned` ends it.
    gc.disable()
    config.addinivalue_line(
        "markers",
        "full: needs what `test-core` does not install (Paddle, Mooncake's client, pyzmq, cmake)",
    )
    config.addinivalue_line(
        "markers",
        "interop: runs the real consumers of KV events; needs --interop=DIR (docs/contributing.md)",
    )
    config.addinivalue_line(
        "markers",
        "engines: runs real inference engines; needs --interop=DIR (docs/contributing.md)",
    )
    config.addinivalue_line(
        "markers", "engines_full: as `engines`, for cases that take too long for every change"
    )
    config.addinivalue_line(
        "markers", "ci: takes half a minute, or runs Debian's prometheus; .ci/run has it"
    )
    config.addinivalue_line(
        "markers", "traces: replays whole request traces; needs --traces DIR (docs/contributing.md)"
    )


def needs_everything(file: Path) -> bool:
    """Whether a test file is marked `full` as a whole."""
    return WHOLE_FILE.search(file.read_text("utf-8")) is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m "not full"` leave out files that are marked as a whole, without importing them."""
    if "not full" not in config.getoption("-m") or collection_path.suffix != ".py":
        return None
    return needs_everything(collection_path) or None


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Name the files that `-m "not full"` leaves out."""
    if "not full" in config.getoption("-m"):
        tests = Path(__file__).parent
        left_out = sorted(file.stem for file in tests.rglob("test_*.py") if needs_everything(file))
        terminalreporter.write_line(f"left out, they need the extra `test`: {', '.join(left_out)}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Interop tests run only when they are asked for, by their marker or by --interop, and those
    with whole traces by theirs or by --traces. Tests inside engines, and those that .ci/run has
    beside the others, need their marker."""
    markers = config.getoption("-m")
    asked_for = {
        "interop": config.getoption("--interop") is not None or "interop" in markers,
        "engines": "engines" in markers,
        "engines_full": "engines_full" in markers,
        "ci": "ci" in markers,
        "traces": config.getoption("--traces") is not None or "traces" in markers,
    }
    unasked = [marker for marker, asked in asked_for.items() if not asked]
    left_out = [item for item in items if any(map(item.get_closest_marker, unasked))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def traces(request: pytest.FixtureRequest) -> Path:
    """The folder of whole request traces."""
    folder = request.config.getoption("--traces")
    if folder is None:
        pytest.fail("whole traces are needed: give their folder with --traces DIR")
    assert isinstance(folder, Path)
    return folder


def entries() -> set[str]:
    """Names of the entries of the clone."""
    return {entry.name for entry in ROOT.iterdir()} - CACHES


def pytest_sessionstart(session: pytest.Session) -> None:
    """Remember the entries of the clone."""
    session.config.stash[ENTRIES] = entries()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if tests have left entries in the clone: a test writes into its temporary folder."""
    left = entries() - session.config.stash[ENTRIES]
    if left and not hasattr(session.config, "workerinput"):
        print(f"\ntests have written into the clone: {', '.join(sorted(left))}", file=sys.stderr)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True, scope="module")
def _earlier_objects_are_not_scanned() -> None:
    """A pass of the garbage collector scans the objects of tests, not the millions of modules and
    collected tests: with all of them a pass takes 0.2 seconds. `gc.unfreeze` in a test ends this,
    until the next file."""
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _structlog_as_imported() -> Iterator[None]:
    """`capture_logs` and commands configure structlog for the whole process, with streams that
    pytest closes after the test. No test leaves out lines that another one has logged."""
    limit.reset()
    yield
    structlog.reset_defaults()


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every ask goes through its channel, so other tasks run between two asks."""
    monkeypatch.setattr("kvactors.actor.loop.are_possible", lambda _: False)
