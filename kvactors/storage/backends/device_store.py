"""`DeviceStore`: the contract of a store that accesses device memory itself."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvactors.storage.attempts import StoreAttempts
from kvactors.storage.counters import StoreStatistics


class DeviceStore(ABC):
    """Blocks are addressed by the tokens of their whole path. One call runs at a time. Errors are
    counts, never exceptions: a fetch or a save that fails has moved 0 blocks.

    Attributes:
        attempts: whether look-ups, reads and writes work.
        ready_timeout: seconds that `open` may take, where they are more than
            `actors.open_timeout_s`.
        late_since: start, on the loop's clock, of a call that takes longer than it may; None if
            there is none.
    """

    ready_timeout: float = 0.0
    late_since: float | None = None

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.attempts = StoreAttempts(type(self).__name__)
        self.reads = self.writes = self.misses = self.unavailable = 0

    @abstractmethod
    async def open(self) -> None:
        """Connect.

        Raises:
            StoreError, SinkError: the store cannot be used.
        """

    @abstractmethod
    async def fetch(
        self, tokens: bytes, start: int, blocks: tuple[int, ...], seconds: float
    ) -> int:
        """Read blocks of a path into device blocks. When the call has ended, cancelled or not, no
        device block is accessed any more.

        Args:
            tokens: of the path (little-endian uint32), up to the last block at least.
            start: index of the first block to read, which goes into blocks[0].
            blocks: device blocks.
            seconds: limit of the call.

        Returns:
            How many blocks, from the first on, arrived.
        """

    @abstractmethod
    async def save(self, tokens: bytes, start: int, blocks: tuple[int, ...], seconds: float) -> int:
        """Write blocks of a path from device blocks. The arguments and the end are as in `fetch`.

        Returns:
            How many blocks, from the first on, are stored.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release everything."""

    def _unavailable(self, blocks: int) -> int:
        """Count blocks that were not moved because a call failed, or was not made in a pause."""
        self.unavailable += blocks
        return 0

    def statistics(self) -> StoreStatistics:
        """Counters. Such a store does not list its objects."""
        return StoreStatistics(
            objects=0,
            object_bytes=self.block_bytes,
            reads=self.reads,
            writes=self.writes,
            existing=0,
            misses=self.misses,
            corrupt=0,
            no_space=0,
            unavailable=self.unavailable,
            late=0,
            evicted=0,
            breaker=self.attempts.state,
        )
