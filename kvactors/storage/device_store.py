"""A store that accesses device memory itself: the contract `DeviceStore`, and its actor."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

from kvactors.actor import Actor, ActorRef, Message, on
from kvactors.actor.clock import now
from kvactors.actor.context import MEMORY_LIMIT, Job, JobsRunOn, Timer
from kvactors.actor.log import described
from kvactors.device.arena import HostSlots
from kvactors.errors import StoreError
from kvactors.identity import Lineage
from kvactors.storage.attempts import StoreAttempts
from kvactors.storage.backend import (
    Expired,
    ReadReport,
    StoreCounters,
    StoreStatistics,
    WriteReport,
)
from kvactors.storage.messages import (
    DeviceFetched,
    DeviceSaved,
    FetchDevice,
    SaveDevice,
    StorageReply,
    TransferDone,
    TransferLate,
)

# -- the contract


class DeviceStore(ABC):
    """Blocks are addressed by the tokens of their whole path. One call runs at a time. Errors are
    counts, never exceptions: a fetch or a save that fails has moved 0 blocks.

    Attributes:
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
        """

    @abstractmethod
    async def save(self, tokens: bytes, start: int, blocks: tuple[int, ...], seconds: float) -> int:
        """Write blocks of a path from device blocks. Arguments and the end are as in `fetch`."""

    @abstractmethod
    async def close(self) -> None:
        """Release everything."""

    def _unavailable(self, blocks: int) -> int:
        """Count blocks that were not moved because a call failed, or was not made in a pause."""
        self.unavailable += blocks
        return 0

    def statistics(self) -> StoreStatistics:
        """Counters. Such a store does not list its objects."""
        return (
            StoreCounters()
            .statistics(0, self.block_bytes)
            ._replace(
                reads=self.reads,
                writes=self.writes,
                misses=self.misses,
                unavailable=self.unavailable,
                breaker=self.attempts.state,
            )
        )


WAITING = 64
"""Saves that wait at most. Beyond that the oldest is refused."""

ANSWERS: dict[type[Message], type[DeviceFetched | DeviceSaved]] = {
    FetchDevice: DeviceFetched,
    SaveDevice: DeviceSaved,
}


class DeviceStoreActor(Actor):
    """Owns the transfers: one at a time, fetches before saves. While a transfer takes longer than
    its deadline, waiting and new ones are answered immediately, as a miss or as not saved, so that
    no request waits for a store that does not return."""

    ROLE: ClassVar[str] = "storage_direct"
    SENDS: ClassVar[Mapping[str, tuple[type[Message], ...]]] = {
        "cpu_evictor": (DeviceFetched, DeviceSaved)
    }

    def __init__(
        self,
        ref: ActorRef,
        *,
        backend: DeviceStore,
        plane: StoragePlane,
        evictor: ActorRef[StorageReply],
    ) -> None:
        super().__init__(ref)
        self.backend = backend
        self.plane = plane
        self.evictor = evictor
        self._busy = False
        self._fetches: deque[FetchDevice] = deque()
        self._saves: deque[SaveDevice] = deque()
        self._number = 0
        self._late = False
        self._timer: Timer | None = None
        backend.late_since = None

    @on(FetchDevice)
    def fetch(self, message: FetchDevice) -> None:
        self._fetches.append(message)
        self._next()

    @on(SaveDevice)
    def save(self, message: SaveDevice) -> None:
        self._saves.append(message)
        while len(self._saves) > WAITING:
            self._refuse(self._saves.popleft())
        self._next()

    @on(TransferDone)
    def transfer_done(self, message: TransferDone) -> None:
        self._busy = self._late = False
        self.backend.late_since = None
        self._number += 1
        if self._timer is not None:
            self._timer.cancel()
        self.tell(self.evictor, message.answer)
        self._next()

    @on(TransferLate)
    def transfer_late(self, message: TransferLate) -> None:
        """The deadline of a transfer has passed: transfers no longer wait for the store."""
        if self._busy and message.number == self._number:
            self._late = True
            self.backend.late_since = now()
            self.log.warning(
                "device store does not return", waiting=len(self._fetches) + len(self._saves)
            )
            self._next()

    def _refuse(self, one: FetchDevice | SaveDevice) -> None:
        self.tell(self.evictor, ANSWERS[type(one)](one.op, 0))

    def _next(self) -> None:
        for waiting in (self._fetches, self._saves):
            while (self._late or self.ref.switched_off) and waiting:
                self._refuse(waiting.popleft())
        if self._busy or not (self._fetches or self._saves):
            return
        self._busy = True
        move = self.plane.fetch if self._fetches else self.plane.save
        one = (self._fetches or self._saves).popleft()
        answer = ANSWERS[type(one)]
        self._timer = self.after(max(0.0, one.deadline - now()), TransferLate(self._number))

        async def work() -> TransferDone:
            seconds, good = one.deadline - now(), 0
            if seconds > 0:
                good = await move(one.memory_generation, one.tokens, one.start, one.blocks, seconds)
            if type(good) is not int or not 0 <= good <= len(one.blocks):
                raise StoreError(
                    f"the store returned {good!r} for a transfer of {len(one.blocks)} blocks"
                )
            return TransferDone(answer(one.op, good))

        def failed(error: Exception) -> TransferDone:
            self.log.error("back end raised", error=described(error))
            return TransferDone(answer(one.op, 0))

        self.start_job(work(), lambda done: done, failed)

    def job_limit(self, *, failed: bool) -> float | None:
        """See `Actor.job_limit`. After a failure of this actor the next incarnation waits for the
        transfer, since device blocks cannot be withheld from reuse. The rest of the cache works."""
        return None if failed else MEMORY_LIMIT

    def left_behind(self, jobs: Mapping[asyncio.Task[None], Job], *, restart: bool) -> None:
        """See `Actor.left_behind`. Another actor failed, with which this one restarts: the cache
        fails."""
        if restart:
            raise JobsRunOn(
                f"a transfer of the store has not ended {MEMORY_LIMIT:g} s after a failure, and "
                "accesses device blocks"
            )


class StoragePlane(Protocol):
    """What the storage actors use of a `DataPlane`, which has the descriptions: moves between a
    store and host slots, and between a store and device blocks."""

    slots: HostSlots

    async def read(
        self, generation: int, keys: Sequence[bytes], slots: Sequence[int], expired: Expired
    ) -> ReadReport: ...

    async def write(
        self,
        generation: int,
        keys: Sequence[bytes],
        slots: Sequence[int],
        expired: Expired,
        lineages: Sequence[Lineage | None] = (),
        salts: Sequence[int] = (),
    ) -> WriteReport: ...

    async def fetch(
        self, generation: int, tokens: bytes, start: int, blocks: tuple[int, ...], seconds: float
    ) -> int: ...

    async def save(
        self, generation: int, tokens: bytes, start: int, blocks: tuple[int, ...], seconds: float
    ) -> int: ...
