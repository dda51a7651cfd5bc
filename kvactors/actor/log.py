"""The package's logger: events go where the application's logging sends them. Never writes to
stdout by default, and never logs the values of local variables.

An application that has configured structlog receives the events there. Otherwise they go to the
standard library's logger `kvactors`, whose warnings and errors appear on stderr unless the
application has set handlers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import structlog

LONGEST_TEXT = 300
"""Characters of an error's text that are logged at most."""


class Logger:
    """Events as short phrases with fields. context: fields of every event."""

    __slots__ = ("_context",)

    def __init__(self, **context: Any) -> None:
        self._context = context

    def bind(self, **context: Any) -> Logger:
        """The same with more fields."""
        return Logger(**{**self._context, **context})

    def debug(self, event: str, **fields: Any) -> None:
        """For developers."""
        self._write("debug", logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        """A change that is part of normal work."""
        self._write("info", logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        """A fault outside the cache, which continues."""
        self._write("warning", logging.WARNING, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        """A fault inside, or a loss."""
        self._write("error", logging.ERROR, event, fields)

    def _write(self, method: str, level: int, event: str, fields: dict[str, Any]) -> None:
        with suppress(
            Exception
        ):  # a handler or a stream of the application that fails must not fail an actor
            self._emit(method, level, event, fields)

    def _emit(self, method: str, level: int, event: str, fields: dict[str, Any]) -> None:
        if structlog.is_configured():
            getattr(structlog.get_logger(**self._context), method)(event, **fields)
            return
        logger = logging.getLogger("kvactors")
        if logger.isEnabledFor(level):
            text = " ".join(
                f"{name}={value!r}" for name, value in {**self._context, **fields}.items()
            )
            logger.log(level, "%s", f"{event} {text}".rstrip())


def get_logger(**context: Any) -> Logger:
    """A logger that adds fields to every event."""
    return Logger(**context)


@contextmanager
def structlog_settings(**settings: Any) -> Iterator[None]:
    """Configure structlog for a while. Afterwards it is as it was, unconfigured included."""
    before = structlog.get_config() if structlog.is_configured() else None
    structlog.configure(**settings)
    try:
        yield
    finally:
        structlog.reset_defaults()
        if before is not None:
            structlog.configure(**before)


def described(error: BaseException) -> str:
    """An error of foreign code as a short text, even if its `str` fails."""
    try:
        text = str(error)
    except BaseException as unprintable:
        text = f"(no text: {type(unprintable).__name__})"
    if len(text) > LONGEST_TEXT:
        text = f"{text[:LONGEST_TEXT]}.."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
