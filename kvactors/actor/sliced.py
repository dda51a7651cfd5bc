"""Work in steps: generators that yield wherever other actors may run."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TypeVar

T = TypeVar("T")

Steps = Generator[None, None, T]
"""Work in bounded steps, and its result."""


def finish(steps: Steps[T] | Iterator[None]) -> T:
    """Run all steps without a pause.

    Returns:
        The result of the work.
    """
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
