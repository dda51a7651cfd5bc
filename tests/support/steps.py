"""Coroutines without an event loop."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_unsuspended(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits.

    Raises:
        AssertionError: it waits.
    """
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    work.close()
    raise AssertionError("the coroutine waits")
