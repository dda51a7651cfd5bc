"""What every data plane has in common."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

Progress = Callable[[int], None]
"""Called on the loop with the number of leading layers whose bytes have arrived on the device,
each time that number grows."""

CLOSE_LIMIT = 10.0
"""Seconds that closing waits for a copy in flight."""


class Direction(Enum):
    """The direction of a copy."""

    TO_HOST = "to_host"
    TO_DEVICE = "to_device"
