"""What every test starts from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import structlog


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option of the interop tests, unless kvactors' plugin has added it
    (`kvactors.testing.plugin`)."""
    with contextlib.suppress(ValueError):
        parser.addoption(
            "--interop",
            metavar="DIR",
            help="environments of the interop tests, made by `python -m tests.interop.setup DIR`",
        )


def pytest_configure(config: pytest.Config) -> None:
    """The marker of the interop tests, also for a pytest that has not found the clone's
    settings."""
    config.addinivalue_line(
        "markers",
        "interop: runs the real consumers of KV events; needs --interop DIR (docs/contributing.md)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Interop tests run only when they are asked for, by their marker or by --interop."""
    if config.getoption("--interop") is not None or "interop" in config.getoption("-m"):
        return
    left_out = [item for item in items if item.get_closest_marker("interop") is not None]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.get_closest_marker("interop") is None]


@pytest.fixture(autouse=True)
def _structlog_as_imported() -> Iterator[None]:
    """`capture_logs` and commands configure structlog for the whole process, with streams that
    pytest closes after the test."""
    yield
    structlog.reset_defaults()
