"""Pauses between the empty steps of an engine whose requests all wait for storage."""

from __future__ import annotations

import time

EMPTY_STEP = 0.001
"""Seconds. A step that computes something takes longer."""

PAUSE = 0.0002
"""Seconds after an empty step."""


class StepPace:
    """Leaves the interpreter to the threads of storage between empty steps.

    An engine whose requests all wait for fetches runs one step after another without a pause. Each
    part of a fetch that is Python code would wait for the interpreter's switch interval (5 ms).
    """

    def __init__(self) -> None:
        self._ended = 0.0

    def step_ended(self) -> None:
        """A step has ended while fetches are in flight. Pause if it was an empty one."""
        now = time.monotonic()
        if now - self._ended < EMPTY_STEP:
            time.sleep(PAUSE)
            now = time.monotonic()
        self._ended = now
