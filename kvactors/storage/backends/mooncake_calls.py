"""Objects of a batch in each transfer of a pool."""

from __future__ import annotations

from collections.abc import Iterator

CALL_SECONDS = 0.1
"""Time that a transfer may take. None can be cut short. A call costs about 0.4 ms of processor time
beside its bytes, and its first and last objects leave cores idle, so longer transfers cost less."""

LEAST_BYTES, MOST_BYTES = 16 << 20, 64 << 20
LEAST_OBJECTS, MOST_OBJECTS = 4, 1024
"""Limits of a transfer. A transfer with the least objects may exceed the limits of bytes."""

COUNTED_BYTES = 4 << 20
"""Bytes of a transfer from which the rate is estimated, at least."""

WEIGHT = 0.25
"""Of the last transfer in the rate."""


class CallSize:
    """Chooses the number of objects of a transfer from the rate of earlier ones.

    Attributes:
        most_objects: of a transfer.

    Args:
        block_bytes: bytes of an object.
    """

    def __init__(self, block_bytes: int) -> None:
        self.most_objects = MOST_OBJECTS
        self._block_bytes = block_bytes
        self._rate = 0.0  # bytes a second

    def parts(self, count: int) -> Iterator[slice]:
        """The objects of each transfer of a batch, in equal parts."""
        size = int(max(LEAST_BYTES, min(MOST_BYTES, self._rate * CALL_SECONDS)))
        step = min(self.most_objects, max(LEAST_OBJECTS, size // self._block_bytes))
        calls = -(-count // step)
        start = 0
        for left in range(calls, 0, -1):
            end = start + -((start - count) // left)
            yield slice(start, end)
            start = end

    def took(self, objects: int, seconds: float) -> None:
        """A transfer moved so many objects."""
        moved = objects * self._block_bytes
        if moved >= COUNTED_BYTES and seconds > 0:
            rate = moved / seconds
            self._rate += (WEIGHT if self._rate else 1.0) * (rate - self._rate)
