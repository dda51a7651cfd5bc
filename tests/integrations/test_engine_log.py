"""Log lines of kvactors inside an engine."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from kvactors.actor.log import get_logger
from kvactors.integrations.engine import log_to


class Lines(logging.Handler):
    """Keeps the lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """kvactors' logger, without a handler."""
    logger = logging.getLogger("kvactors")
    monkeypatch.setattr(logger, "handlers", [logging.NullHandler()])
    level = logger.level
    yield logger
    logger.setLevel(level)


def engine_logger() -> tuple[logging.Logger, Lines]:
    lines = Lines()
    logger = logging.Logger("engine", logging.INFO)
    logger.addHandler(lines)
    return logger, lines


def test_lines_go_to_the_engine_s_handlers_once(
    ours: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, "propagate", False)  # pytest has handlers at the root
    engine, lines = engine_logger()
    for _ in range(2):
        log_to(engine)
    get_logger().info("store open")
    get_logger().debug("detail")
    assert lines.lines == ["store open"]


@pytest.mark.parametrize("at", ["kvactors", None], ids=["kvactors", "root"])
def test_a_handler_of_the_application_is_the_only_one(ours: logging.Logger, at: str | None) -> None:
    engine, lines = engine_logger()
    own = Lines()
    logger = logging.getLogger(at)
    logger.addHandler(own)
    try:
        log_to(engine)
        get_logger().warning("store fails")
    finally:
        logger.removeHandler(own)
    assert (own.lines, lines.lines) == (["store fails"], [])
