"""The contract of a store that moves device memory itself."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvactors.storage.backends.base import StoreStatistics
from kvactors.storage.breaker import Breaker


class DirectBackend(ABC):
    """Blocks are named by the tokens of their whole path. Errors are counts, never exceptions: a
    fetch or save that fails has moved 0 blocks. Both return once no device block is touched any
    more, cancelled or not. One call at a time."""

    ready_timeout: float = 0.0
    """Seconds that `open` may take, where they are more than `actors.start`."""

    late_since: float | None = None
    """Since when a call has taken longer than it may, on the clock of the loop; None if none
    does."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.breaker = Breaker()
        self.reads = self.writes = self.misses = self.unavailable = 0

    @property
    def era(self) -> int:
        """How often device memory may have been lost (if it is elsewhere): blocks of an earlier era
        hold other bytes."""
        return 0

    @abstractmethod
    async def open(self) -> None:
        """Connect. StoreError or SinkError if that cannot be."""

    @abstractmethod
    async def fetch(
        self, tokens: bytes, start: int, blocks: tuple[int, ...], seconds: float
    ) -> int:
        """Read blocks start, start + 1, .. of a path into device blocks; how many, from the first
        on, arrived."""

    @abstractmethod
    async def save(self, tokens: bytes, start: int, blocks: tuple[int, ...], seconds: float) -> int:
        """Write blocks start, start + 1, .. of a path from device blocks; how many, from the first
        on, are stored."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of everything."""

    def statistics(self) -> StoreStatistics:
        """A moment's picture; such a store does not say what it holds."""
        return StoreStatistics(
            0,
            self.block_bytes,
            self.reads,
            self.writes,
            0,
            self.misses,
            0,
            0,
            self.unavailable,
            0,
            0,
            self.breaker.state(),
        )
