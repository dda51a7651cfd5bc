"""The only source of time: the running loop's clock, so that a loop of virtual time controls every
deadline and timer."""

from __future__ import annotations

import asyncio


def now() -> float:
    """Seconds on the running loop's clock."""
    return asyncio.get_running_loop().time()


def deadline_after(seconds: float) -> float:
    """Absolute deadline `seconds` from now. ValueError unless the number is positive and finite."""
    if not 0 < seconds < float("inf"):
        raise ValueError(
            f"a deadline must be a positive, finite number of seconds, not {seconds!r}"
        )
    return now() + seconds
