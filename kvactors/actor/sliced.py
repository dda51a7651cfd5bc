"""Work in slices: generators that yield wherever other actors may run."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from functools import lru_cache
from itertools import cycle, repeat
from typing import TypeVar

T = TypeVar("T")

Sliced = Generator[None, None, T]
"""Work in bounded slices, and its result."""


def pace(size: int) -> Callable[[], bool]:
    """A counter of the items in slices of `size`: true at each call that ends a slice."""
    return cycle(_pattern(size)).__next__


@lru_cache(64)
def _pattern(size: int) -> tuple[bool, ...]:
    return (*repeat(False, size - 1), True)


def finish(work: Sliced[T] | Iterator[None]) -> T:
    """Run all slices without a pause."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
