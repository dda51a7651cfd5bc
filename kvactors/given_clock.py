"""A clock that the caller of `kvactors.open` has given."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from kvactors.actor.log import get_logger
from kvactors.arguments import kind

log = get_logger()


class GivenClock:
    """Reads a clock of the caller. The time of a reading that fails is that of the reading before,
    and the first such reading is logged: ages stand still, and requests are served.

    Args:
        clock: returns seconds.

    Raises:
        TypeError: it is no function, or its first reading is no number.
        ValueError: the first reading is not finite.
    """

    __slots__ = ("_clock", "_failed", "_last")

    def __init__(self, clock: Callable[[], float]) -> None:
        if not callable(clock):
            raise TypeError(f"clock must be a function that returns seconds, not {kind(clock)}")
        self._clock, self._failed = clock, False
        self._last = seconds_of(clock())

    def __call__(self) -> float:
        """Seconds."""
        try:
            self._last = seconds_of(self._clock())
        except Exception as error:
            if not self._failed:
                log.warning("clock failed", error=repr(error))
            self._failed = True
        return self._last


def seconds_of(value: Any) -> float:
    """A reading of a clock. TypeError if it is no number, ValueError if it is not finite."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(
        value, (int, float, np.integer, np.floating)
    ):
        raise TypeError(f"clock must return a number of seconds, not {kind(value)}")
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    if not math.isfinite(seconds):
        raise ValueError(f"clock must return a finite number of seconds, not {seconds}")
    return seconds
