"""Commands that SIGTERM ends as Ctrl-C does, and their standard streams."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

Result = TypeVar("Result")

STATUS = 128 + signal.SIGTERM
"""Exit status of a command that SIGTERM ended, as a shell gives it."""

_received: list[int] = []
"""SIGTERMs and SIGINTs that the command of this process has received."""

_main: list[asyncio.Task[Any]] = []
"""The main task of its event loop, while it runs."""


def _receive(number: int, _frame: object) -> None:
    """Cancel the main task, or raise KeyboardInterrupt where there is none, or a second time.

    Python drops an exception that a handler raises in a finalizer, in a callback or in the import
    system, so the signal is remembered. asyncio cancels its main task for SIGINT only, and not in a
    process that ignores SIGINT, such as a background job of a shell script.
    """
    _received.append(number)
    if not _main or len(_received) > 1:
        raise KeyboardInterrupt
    _main[0].get_loop().call_soon_threadsafe(_main[0].cancel)


def _is_main_thread() -> bool:
    """Whether handlers can be set."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def sigterm_ends() -> Iterator[None]:
    """SIGTERM ends the command in the block as Ctrl-C does, and the process exits with STATUS."""
    if not _is_main_thread() or signal.getsignal(signal.SIGTERM) is _receive:
        yield
        return
    _received.clear()
    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, _receive)}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        before[signal.SIGINT] = signal.signal(signal.SIGINT, _receive)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if signal.SIGTERM in _received:  # any result or error of the command is dropped
            sys.exit(STATUS)


def run_terminable(main: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run` for a command: SIGTERM cancels `main`, and the process exits with STATUS."""
    if not _is_main_thread():
        return asyncio.run(main)

    async def cancellable() -> Result:
        task = asyncio.current_task()
        assert task is not None
        _main.append(task)
        if _received:  # before the loop began, and the exception was dropped
            task.cancel()
        try:
            return await main
        finally:
            _main.clear()

    with sigterm_ends():
        try:
            return asyncio.run(cancellable())
        finally:
            if _received:
                raise KeyboardInterrupt


@contextmanager
def signals_noted(arrived: list[int]) -> Iterator[None]:
    """SIGINT and SIGTERM that arrive in the block interrupt nothing: their numbers are appended to
    `arrived`. No effect outside of the main thread."""
    numbers: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)
    if not _is_main_thread() or None in map(signal.getsignal, numbers):
        yield
        return
    before = {
        number: signal.signal(number, lambda number, _: arrived.append(number))
        for number in numbers
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- standard streams: closed ones, a reader that has gone, locales without the characters


GONE = 128 + 13
"""Exit status of a command whose output nothing reads any more, as a shell gives it (SIGPIPE)."""


def usable_streams() -> None:
    """Make standard output and error take any text: characters that the locale lacks are written
    as escapes. The number of a closed stream is taken, so that no file of the command gets it, and
    the messages of libraries with it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123
        if (reconfigure := getattr(getattr(sys, name), "reconfigure", None)) is not None:
            reconfigure(errors="backslashreplace")


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
