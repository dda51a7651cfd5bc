"""The interface of a data plane: copies between device blocks and host slots, and the store below
them.

Work names device blocks and host slots by number, and the memory generation that the sender took
them in. A plane whose memory has been lost since then refuses such work (`DataPlane.refuses`), so
that no byte of an earlier generation reaches a block or an object of this one."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from enum import Enum
from typing import Any

from kvactors.device.arena import HostSlots
from kvactors.device.base import DeviceBlocks
from kvactors.device.events import StreamEvent
from kvactors.errors import DeviceError, StoreError
from kvactors.identity import Lineage
from kvactors.lifecycle import Opening
from kvactors.storage.backend import Backend, Expired, ReadReport, SlotViews, WriteReport
from kvactors.storage.device_store import DeviceStore
from kvactors.storage.guarded import GuardedBackend
from kvactors.storage.messages import Outcome

# -- The interface to the CUDA streams of an engine: waits for copies, and events.


NO_STREAMS = (
    "the device blocks are not in the memory of a GPU of this process, so CUDA streams are out of "
    "reach: pass an event, or wait for the stream before the call"
)


class EngineStreams:
    """An engine's streams, each given by the driver's handle. These are out of reach."""

    def check_streams(self) -> None:
        """DeviceError if no stream of an engine can wait for loads, and no caller in its place."""
        raise DeviceError(NO_STREAMS)

    def make_stream_wait(self, stream: int, blocks: Sequence[int], layer: int) -> bool:
        """Make a stream wait until one layer (counted from the layout's first) of copies in flight
        into device blocks has arrived. False: it does not wait for all of the blocks, and its owner
        must wait in another way. DeviceError if the driver refuses."""
        return False

    def begin_stream_wait(self, stream: int, blocks: Sequence[int]) -> asyncio.Future[None] | None:
        """Make a stream wait for copies into device blocks, later copies included. The future is
        done when the stream waits for a copy into every block, and never if a block has none. Its
        exception is the driver's DeviceError. The caller cancels a future that it needs no longer.
        None: the owner of the stream must wait in another way."""
        return None

    def record_event(self, stream: int) -> StreamEvent:
        """Record an event on a stream: it completes after the work put there so far.
        DeviceError."""
        raise DeviceError(NO_STREAMS)


class StreamsOfRanks(EngineStreams):
    """Streams of other processes. Their owner waits for loads."""

    def check_streams(self) -> None:
        """A caller waits in the streams' place."""


STREAMS_OF_RANKS = StreamsOfRanks()

Progress = Callable[[int], None]
"""Called on the loop with the number of leading layers whose bytes have arrived on the device,
each time that number grows."""

StatusChanged = Callable[[bool, bool, int], None]
"""Called on the loop with the new status: whether copies can be made, whether memory may have been
lost, and the memory generation."""

CLOSE_LIMIT = 10.0
"""Seconds that closing waits for a copy in flight."""


class Direction(Enum):
    """The direction of a copy."""

    TO_HOST = "to_host"
    TO_DEVICE = "to_device"
    WITHIN = "within"  # of the device: in place of the slots are device blocks to copy to


class DataPlane(ABC):
    """Moves the bytes of blocks. backend, store: the store below the host slots, and the same with
    its answers checked. device_store: the store that moves device memory itself."""

    def __init__(
        self,
        device: DeviceBlocks,
        slots: HostSlots,
        backend: Backend | None,
        device_store: DeviceStore | None,
        *,
        store_timeout: float,
    ) -> None:
        self.device = device
        self.slots = slots
        self.backend = backend
        self.store = None if backend is None else GuardedBackend(backend, store_timeout)
        self.device_store = device_store
        self._changed: StatusChanged | None = None
        self._unacknowledged = False  # whether a loss has not been handled

    # -- status

    @property
    def generation(self) -> int:
        """The memory generation: the count of losses of device or host memory."""
        return 0

    @property
    def trouble(self) -> str:
        """Why copies are impossible. Empty while they are possible."""
        return ""

    def refuses(self, generation: int) -> bool:
        """Whether work that names memory of this generation must not be carried out: the memory
        has been lost since."""
        return generation != self.generation

    @property
    def available(self) -> bool:
        """Whether copies can be made."""
        return not self.trouble

    def on_status(self, changed: StatusChanged) -> None:
        """Call `changed` from now on when copies become possible or impossible, and when memory is
        lost. Calls it immediately if copies are impossible or a loss has not been acknowledged."""
        self._changed = changed
        if self._unacknowledged or not self.available:
            changed(self.available, self._unacknowledged, self.generation)

    def report_status(self, *, lost: bool) -> None:
        """Report that copies have become possible or impossible, and whether memory was lost."""
        self._unacknowledged |= lost
        if self._changed is not None:
            self._changed(self.available, lost, self.generation)

    def acknowledge_loss(self) -> None:
        """The last loss has been handled: a later caller of `on_status` is not notified of it."""
        self._unacknowledged = False

    def statistics(self) -> Any:
        """Figures of the copies, None without any."""

    # -- work

    async def copy(
        self,
        generation: int,
        direction: Direction,
        blocks: Sequence[int],
        slots: Sequence[int],
        progress: Progress | None = None,
    ) -> tuple[int, ...]:
        """Copy every pair (blocks[j], slots[j]), with `progress` to the device layer by layer.
        Returns the indices of pairs whose bytes did not arrive, all of them if the memory was lost.
        No copy runs after this has returned or been cancelled."""
        if self.refuses(generation):
            return tuple(range(len(blocks)))
        return await self.copy_pairs(direction, blocks, slots, progress)

    @abstractmethod
    async def copy_pairs(
        self,
        direction: Direction,
        blocks: Sequence[int],
        slots: Sequence[int],
        progress: Progress | None = None,
    ) -> tuple[int, ...]:
        """Carry out `copy`."""

    @property
    def streams(self) -> EngineStreams:
        return STREAMS_OF_RANKS

    async def read(
        self, generation: int, keys: Sequence[bytes], slots: Sequence[int], expired: Expired
    ) -> ReadReport:
        """Read objects of the store into slots; UNAVAILABLE if the memory was lost. expired:
        whether the deadline has passed. Keys not begun by then are LATE."""
        if self.store is None or self.refuses(generation):
            return ReadReport(bytes([Outcome.UNAVAILABLE]) * len(keys), [])
        return await self.store.read(keys, SlotViews(self.slots, slots), expired)

    async def write(
        self,
        generation: int,
        keys: Sequence[bytes],
        slots: Sequence[int],
        expired: Expired,
        lineages: Sequence[Lineage | None] = (),
        salts: Sequence[int] = (),
    ) -> WriteReport:
        """Write objects from slots; UNAVAILABLE if the memory was lost. Arguments as in `read`;
        `lineages` and `salts` have one entry per key, or none."""
        if self.store is None or self.refuses(generation):
            return WriteReport(bytes([Outcome.UNAVAILABLE]) * len(keys), [])
        return await self.store.write(keys, SlotViews(self.slots, slots), expired, lineages, salts)

    async def fetch(
        self, generation: int, tokens: bytes, start: int, blocks: tuple[int, ...], seconds: float
    ) -> int:
        """Read blocks of a path, whose tokens are given whole, from its block `start` on into
        device blocks, by the store that moves device memory. Returns how many blocks, from the
        first on, have their bytes; 0 if the memory was lost."""
        if self.device_store is None or self.refuses(generation):
            return 0
        return await self.device_store.fetch(tokens, start, blocks, seconds)

    async def save(
        self, generation: int, tokens: bytes, start: int, blocks: tuple[int, ...], seconds: float
    ) -> int:
        """Write blocks of a path from device blocks. Arguments and result as in `fetch`."""
        if self.device_store is None or self.refuses(generation):
            return 0
        return await self.device_store.save(tokens, start, blocks, seconds)

    # -- from opening to closing

    @asynccontextmanager
    async def opened(self, opening: Opening) -> AsyncIterator[AsyncExitStack]:
        """Open every part. On exit close the parts in reverse within the shutdown's limit, and free
        the memory. If a part cannot be opened, the parts before it are closed. Yields the stack, on
        which the caller puts what must be closed before the plane.
        """
        shutdown = opening.shutdown
        shutdown.waits.enter()
        try:
            async with AsyncExitStack() as stack:
                await self._open(stack, opening)
                yield stack
        finally:
            shutdown.begin()
            shutdown.over(stuck=self.backend is not None and bool(self.backend.stuck))
            if not shutdown.forked:
                self._free()

    @abstractmethod
    async def _open(self, stack: AsyncExitStack, opening: Opening) -> None:
        """Open the parts one after another."""

    async def _open_stores(self, stack: AsyncExitStack, opening: Opening) -> None:
        close = opening.shutdown.step
        if self.store is not None:
            stack.push_async_callback(close, "store", self.store.close)
            await opening.step("store", self.store.open, StoreError)
        if (store := self.device_store) is not None:
            stack.push_async_callback(close, "device store", store.close)
            await opening.step("device store", store.open, StoreError, store.ready_timeout)

    def _free(self) -> None:
        self.slots.close()

    def abandon_pending(self) -> None:
        """No block and no slot is used again: work that waits only for them need not wait."""
