"""Threads that work for the loop, not against it."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

NICE = 10
"""Worker threads yield to the loop's: with more runnable threads than cores its lag would grow tenfold otherwise."""


def lower_priority() -> None:
    """Make the calling thread yield; on a system without thread priorities it works at the common one."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
