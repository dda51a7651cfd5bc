"""The only source of time: the running loop's clock, so that a loop of virtual time controls every
deadline and timer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


def now() -> float:
    """Seconds on the running loop's clock."""
    return asyncio.get_running_loop().time()


def clock_of(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """The clock of a loop, by the shortest call: asyncio's own loops read the monotonic clock."""
    return time.monotonic if type(loop).time is asyncio.BaseEventLoop.time else loop.time
