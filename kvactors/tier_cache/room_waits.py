"""Keys that wait for a host slot, to be fetched or to be stored. Pure state."""

from __future__ import annotations

AGAIN = 5.0
"""Seconds for which a key that has waited in vain is a MISS."""

WAITING = 65_536
"""Keys at most that wait, or have waited in vain. Beyond that the oldest is forgotten."""


class RoomWaits:
    """Bounds the time for which keys wait because no host slot is free.

    A key that has waited in vain is refused for a while, so that an engine which asks in every step
    is not held up again and again.

    Args:
        patience: seconds that a key may wait.

    Attributes:
        refused: keys that have waited in vain, since the start.
    """

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.refused = 0
        self._since: dict[bytes, float] = {}
        self._until: dict[bytes, float] = {}  # up to when a key is refused

    def __len__(self) -> int:
        return len(self._since)

    def may_wait(self, key: bytes, now: float) -> bool:
        """No slot is free for a key: whether it waits on."""
        until = self._until.get(key)
        if until is not None:
            if now < until:
                return False
            del self._until[key]
        since = self._since.setdefault(key, now)
        if now - since < self.patience:
            trim(self._since)
            return True
        del self._since[key]
        self._until[key] = now + AGAIN
        trim(self._until)
        self.refused += 1
        return False

    def got_slot(self, key: bytes) -> None:
        """A key waits no more."""
        if self._since or self._until:
            self._since.pop(key, None)
            self._until.pop(key, None)

    def forget_before(self, now: float) -> int:
        """Forget keys that the engine has not asked for since they were to be refused. Returns how
        many."""
        before = len(self._since)
        while self._since:
            key, since = next(iter(self._since.items()))
            if now - since < self.patience + AGAIN:
                break
            del self._since[key]
        return before - len(self._since)

    def clear(self) -> None:
        """Nothing waits."""
        self._since.clear()
        self._until.clear()


def trim(times: dict[bytes, float]) -> None:
    """Forget the oldest entries beyond `WAITING`."""
    while len(times) > WAITING:
        del times[next(iter(times))]
