"""The package's logger: every event goes to the standard library's logger `kvactors`.

Without a handler of the application, logging writes warnings and errors to stderr. An
application that has configured structlog receives the events there too. Values of local variables
are never logged. An event that repeats is limited: see `RateLimit`."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, NoReturn, cast

import structlog
from structlog.typing import EventDict

LONGEST_TEXT = 300
"""Characters of an error's text that are logged at most."""

BURST = 10
"""Lines of one event about one part that are logged within WINDOW."""

WINDOW = 60.0
"""Seconds after which BURST lines of an event are logged again."""

MOST_EVENTS = 1024
"""Events that are limited separately. With more, all begin anew."""

PARTS = ("actor", "component", "part", "rank", "sink", "source", "store", "call", "variable")
"""Fields that name the part an event is about. Each part has its own limit."""

TEXT = structlog.processors.KeyValueRenderer()

STANDARD = logging.getLogger("kvactors")


class RateLimit:
    """Limits the lines of each event about each part to BURST in WINDOW seconds.

    The first line after a window has the number of lines that were left out in it, in the field
    `suppressed`.
    """

    def __init__(self) -> None:
        self._events: dict[tuple[object, ...], tuple[float, int]] = {}

    def reset(self) -> None:
        self._events.clear()

    def admit(self, event: str, fields: Mapping[str, Any]) -> int | None:
        """Count a line. Returns the lines left out since the last one, None to leave it out."""
        key = (event, *(str(fields[name]) for name in PARTS if name in fields))
        at = time.monotonic()
        since, count = self._events.get(key, (at, 0))
        left_out = 0
        if at - since >= WINDOW:
            since, count, left_out = at, 0, max(0, count - BURST)
        if len(self._events) >= MOST_EVENTS and key not in self._events:
            self._events.clear()
        self._events[key] = since, count + 1
        return left_out if count < BURST else None


limit = RateLimit()


def _emit(method: str, level: int, event: str, fields: EventDict) -> None:
    left_out = limit.admit(event, fields)
    if left_out is None:
        return
    if left_out:
        fields["suppressed"] = left_out
    if structlog.is_configured():
        # A structlog that writes to the standard library's loggers brings the event there.
        over_standard = isinstance(
            structlog.get_config()["logger_factory"], structlog.stdlib.LoggerFactory
        )
        with suppress(Exception):
            getattr(structlog.get_logger("kvactors"), method)(event, **fields)
        if over_standard:
            return
    if STANDARD.isEnabledFor(level):
        text = f"{event} {TEXT(None, method, fields)}".rstrip()
        STANDARD.log(level, "%s", text, extra={"kvactors_event": event, "kvactors_fields": fields})


def _write(_: object, method: str, fields: EventDict) -> NoReturn:
    # A handler or a stream of the application that fails must not fail an actor.
    with suppress(Exception):
        level = getattr(logging, method.upper())
        if structlog.is_configured() or STANDARD.isEnabledFor(level):
            _emit(method, level, fields.pop("event"), fields)
    raise structlog.DropEvent


def get_logger(**context: Any) -> structlog.BoundLogger:
    """A logger that adds fields to every event.

    `debug` is for developers, `info` for a change that is part of normal work, `warning` for a
    fault outside the cache, which continues, and `error` for a fault inside, or a loss.
    """
    wrapped = structlog.wrap_logger(STANDARD, [_write], structlog.BoundLogger, dict)
    return cast("structlog.BoundLogger", wrapped.bind(**context))


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (ISO 8601, UTC), level, event, logger and the event's fields."""

    render = structlog.processors.JSONRenderer(default=str)

    def format(self, record: logging.LogRecord) -> str:
        time_utc = datetime.fromtimestamp(record.created, UTC)
        line = {
            "time": time_utc.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": getattr(record, "kvactors_event", None) or record.getMessage(),
            "logger": record.name,
        }
        # The named ones come first, and a field of the same name does not replace them.
        fields = getattr(record, "kvactors_fields", {})
        return str(self.render(None, "", {**line, **fields, **line}))


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


def frames(error: BaseException) -> list[str]:
    """Where an error comes from, innermost last, without the values of local variables: they may
    hold prompts."""
    return [
        f"{frame.filename}:{frame.lineno} in {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
    ]
