"""Commands that SIGTERM ends as Ctrl-C does: their processes end and their temporary folders are
removed."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import tempfile
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

Result = TypeVar("Result")

STATUS = 128 + signal.SIGTERM
"""Exit status of a command that SIGTERM ended, as a shell gives it."""


_received: list[int] = []
"""SIGTERMs that the command of this process has received."""

_interrupts: list[int] = []
"""SIGINTs that it has received outside of an event loop."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt. Python drops it in a finalizer or in the import system, so it is
    remembered."""
    _interrupts.append(number)
    signal.default_int_handler(number, frame)


def run_terminable(main: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run` for a command: SIGTERM cancels `main`, and the process exits with STATUS.

    A handler that raises would interrupt the code that the loop executes at that moment. In a
    finalizer or a callback Python drops the exception and the command runs on. asyncio itself
    cancels the main task for SIGINT only, and not in a process that ignores SIGINT, such as a
    background job of a shell script.

    Raises:
        SystemExit: SIGTERM has ended `main`.
    """
    if threading.current_thread() is not threading.main_thread():  # where handlers cannot be set
        return asyncio.run(main)
    received = _received
    if signal.getsignal(signal.SIGINT) is _interrupt:  # asyncio sets its handler for this one only
        signal.signal(signal.SIGINT, signal.default_int_handler)
    dropped = bool(_interrupts)
    try:
        return asyncio.run(_cancelled_by_sigterm(main, received, dropped=dropped))
    finally:
        if received:  # any result or error of `main` is dropped
            sys.exit(STATUS)
        if dropped:
            raise KeyboardInterrupt


async def _cancelled_by_sigterm(
    main: Coroutine[Any, Any, Result], received: list[int], *, dropped: bool
) -> Result:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def cancel(number: int, _frame: object) -> None:
        received.append(number)
        if len(received) > 1:  # sent again: `main` takes too long to end
            raise KeyboardInterrupt
        loop.call_soon_threadsafe(task.cancel)

    before = signal.signal(signal.SIGTERM, cancel)
    if received or dropped:  # before this handler was set, and the exception was dropped
        task.cancel()
    try:
        return await main
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def temporary_folder(prefix: str = "kvactors-") -> Iterator[str]:
    """A new folder that is removed in the end, whenever SIGINT or SIGTERM arrives.

    The handler of a signal may raise between the system call that makes a folder and the
    assignment that remembers it. The folder is therefore made with both signals held back.
    """
    folder = None
    try:
        with _signals_held_back():
            folder = tempfile.TemporaryDirectory(prefix=prefix)
        yield folder.name
    finally:
        if folder is not None:
            folder.cleanup()


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """SIGINT and SIGTERM that arrive in the block are raised at its end."""
    arrived: list[int] = []
    try:
        with signals_noted(arrived):
            yield
    finally:
        for number in arrived:
            signal.raise_signal(number)


@contextmanager
def signals_noted(arrived: list[int]) -> Iterator[None]:
    """SIGINT and SIGTERM that arrive in the block interrupt nothing: their numbers are appended to
    `arrived`. No effect outside of the main thread."""
    numbers: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or None in map(
        signal.getsignal, numbers
    ):
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


@contextmanager
def sigterm_ends() -> Iterator[None]:
    """SIGTERM interrupts the part of a command that runs without an event loop. The process exits
    with STATUS. An interrupt by SIGINT is not lost either."""
    received = _received
    received.clear()
    _interrupts.clear()

    def end(number: int, _frame: object) -> None:
        received.append(number)
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a background job of a shell script
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if interrupt is signal.default_int_handler:
            signal.signal(signal.SIGINT, interrupt)
        _interrupts.clear()
        if received:  # any result or error of the command is dropped
            received.clear()
            sys.exit(STATUS)


# -- standard streams: closed ones, a reader that has gone, locales without the characters


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
