"""Outputs of `kvactors top`: the terminal's screen, plain text, or JSON."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
from rich.console import Console, ScreenContext

from kvactors.scenario.output import to_stdout, write_output
from kvactors.top.screen import frame
from kvactors.top.view import View


class Show(ABC):
    """Shows views."""

    @abstractmethod
    def view(self, view: View) -> None:
        """Show a view."""

    def ended(self) -> bool:
        """Whether the user has ended it. Called several times a second."""
        return False


@contextmanager
def output(json: Path | None, *, once: bool) -> Iterator[Show]:
    """The output that options and terminal ask for, while the block runs."""
    if json is not None:
        if to_stdout(json):
            yield JsonLines(lambda line: write_output(line, "-"))
            return
        with json.open("wb", buffering=0) as file:
            yield JsonLines(file.write)
        return
    console = Console()
    if once or not console.is_terminal:
        yield Plain(console)
        return
    screen = Screen(console)
    with screen.entered():
        yield screen


class JsonLines(Show):
    """Writes views as lines of JSON."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write

    def view(self, view: View) -> None:
        """Write one line."""
        self._write(msgspec.json.encode(view) + b"\n")


class Plain(Show):
    """Prints frames one after another, without colours."""

    def __init__(self, console: Console) -> None:
        width = console.width if console.is_terminal else None
        self._console = Console(width=width, no_color=True, highlight=False)
        self._first = True

    def view(self, view: View) -> None:
        """Print one frame."""
        if not self._first:
            self._console.print()
        self._first = False
        self._console.print(frame(view, self._console))
        self._console.file.flush()


class Screen(Show):
    """Shows frames on the whole terminal, in the colours that it has.

    Args:
        console: the terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._screen: ScreenContext = console.screen(hide_cursor=True)
        self._size = console.size
        self._view: View | None = None
        self._keys = _Keys()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The terminal shows the frames while the block runs, and is as it was after it."""
        with self._suspending():
            try:
                self._enter()
                yield
            finally:
                self._leave()

    def view(self, view: View) -> None:
        """Show one frame."""
        self._view, self._size = view, self._console.size
        self._screen.update(frame(view, self._console))

    def ended(self) -> bool:
        """Whether q was typed. A terminal of another size is filled again."""
        if self._view is not None and self._console.size != self._size:
            self.view(self._view)
        return "q" in self._keys.typed()

    def _enter(self) -> None:
        self._keys.enter()
        self._screen.__enter__()

    def _leave(self) -> None:
        self._screen.__exit__(None, None, None)
        self._keys.leave()

    @contextmanager
    def _suspending(self) -> Iterator[None]:
        """Ctrl-Z gives the terminal back until the process goes on."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def suspend(number: int, _frame: FrameType | None) -> None:
            self._leave()
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)  # returns when the process goes on
            signal.signal(number, suspend)
            self._enter()
            if self._view is not None:
                self.view(self._view)

        before = signal.signal(signal.SIGTSTP, suspend)
        try:
            yield
        finally:
            signal.signal(signal.SIGTSTP, before)


class _Keys:
    """Keys that the user types, which the terminal does not show."""

    def __init__(self) -> None:
        self._before: list[Any] | None = None

    def enter(self) -> None:
        """Read single keys."""
        with suppress(termios.error, OSError, ValueError):  # standard input is no terminal
            number = sys.stdin.fileno()
            self._before = termios.tcgetattr(number)
            changed = termios.tcgetattr(number)
            changed[3] &= ~(termios.ECHO | termios.ICANON)
            termios.tcsetattr(number, termios.TCSANOW, changed)

    def leave(self) -> None:
        """Set the terminal as it was."""
        if self._before is not None:
            with suppress(termios.error, OSError, ValueError):
                termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, self._before)
            self._before = None

    def typed(self) -> str:
        """The keys since the last call."""
        if self._before is None:
            return ""
        with suppress(OSError, ValueError):
            number = sys.stdin.fileno()
            if select.select([number], [], [], 0)[0]:
                return os.read(number, 1024).decode(errors="replace")
        return ""
