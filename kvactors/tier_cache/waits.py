"""Bounds of waiting: of keys for host slots, and of steps that leave the interpreter to storage."""

from __future__ import annotations

import time

EMPTY_STEP = 0.001  # seconds: a step that computes something takes longer
PAUSE = 0.0002  # seconds after an empty step


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


AGAIN = 5.0  # seconds for which a key that has waited in vain is a MISS

WAITING = 65_536
"""Keys at most that wait, or have waited in vain. Beyond that the oldest is forgotten."""


class RoomWaits:
    """Bounds the time for which keys wait because no host slot is free.

    A key that has waited in vain is refused for a while, so that an engine which asks in every step
    is not held up again and again.
    """

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.refused = 0
        self._since: dict[bytes, float] = {}
        self._until: dict[bytes, float] = {}  # up to when a key is refused

    def refuses(self, key: bytes, now: float) -> bool:
        """Whether a key has waited in vain a short time ago. If not, its wait begins."""
        until = self._until.get(key)
        if until is not None and now < until:
            return True
        self._until.pop(key, None)
        self._since.setdefault(key, now)
        trim(self._since)
        return False

    def may_wait(self, key: bytes, now: float) -> bool:
        """No slot is free for a key: whether it waits on."""
        if self.refuses(key, now):
            return False
        if now - self._since.get(key, now) < self.patience:
            return True
        self._since.pop(key, None)
        self._until[key] = now + AGAIN
        trim(self._until)
        self.refused += 1
        return False

    def got_slot(self, key: bytes) -> None:
        if self._since or self._until:
            self._since.pop(key, None)
            self._until.pop(key, None)

    def forget_before(self, now: float) -> int:
        """Forget keys that the engine has stopped asking for. Returns how many."""
        before = len(self._since)
        while self._since:
            key, since = next(iter(self._since.items()))
            if now - since < self.patience + AGAIN:
                break
            del self._since[key]
        return before - len(self._since)

    def clear(self) -> None:
        self._since.clear()
        self._until.clear()


def trim(times: dict[bytes, float]) -> None:
    """Forget the oldest entries beyond `WAITING`."""
    while len(times) > WAITING:
        del times[next(iter(times))]
