"""Standard streams of a command: closed ones, a reader that has gone, and locales without the
characters of a text."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

GONE = 128 + 13
"""Exit status of a command whose output nothing reads any more, as a shell gives it (SIGPIPE)."""


@contextmanager
def usable_streams() -> Iterator[None]:
    """Standard output and error take any text while the block runs.

    A closed stream discards its text. Its number is taken, so that no file of the command gets it
    and other programs' messages with it. Characters that the locale lacks are written as escapes.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    closed = [name for name in ("stdout", "stderr") if getattr(sys, name) is None]
    for name in closed:
        setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123
    for stream in (sys.stdout, sys.stderr):
        if (reconfigure := getattr(stream, "reconfigure", None)) is not None:
            reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        for name in closed:
            getattr(sys, name).close()
            setattr(sys, name, None)


def reader_gone() -> bool:
    """Whether standard output is a pipe that nothing reads any more."""
    with suppress(OSError, ValueError, AttributeError):
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(events & select.POLLERR for _, events in poll.poll(0))
    return False


def flush_stdout() -> None:
    """Write what is buffered. After an error the rest is dropped, so that the interpreter's end
    does not try again."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError, ValueError, AttributeError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)
        raise
