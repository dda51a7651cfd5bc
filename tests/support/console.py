"""The console of the test suite's reports."""

from __future__ import annotations

from rich.console import Console

WIDTH = 160
"""Columns in a file or a pipe."""


def wide_console() -> Console:
    """The terminal, or a console in which a wide table is whole."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)
