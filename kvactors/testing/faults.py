"""Parts that misbehave on command, around real ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import anyio

from kvactors.device.arena import Arena
from kvactors.errors import SinkError
from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.sinks.base import Sink, SnapshotSource
from kvactors.storage.backends.base import (
    Backend,
    Expired,
    ReadReport,
    StoreStatistics,
    WriteReport,
)
from kvactors.storage.backends.file import FileBackend
from kvactors.storage.messages import Outcome

FaultMode = Literal["", "down", "hang", "fail_every", "lose_answers"]
StoreFaultMode = Literal["", "down", "full", "slow"]


class FaultySink(Sink):
    """A sink around another. fault_mode: down (refuses every call), hang (never answers),
    fail_every (refuses every n-th call), lose_answers (carries out the call and then fails), or
    nothing. calls: number of calls."""

    def __init__(self, inner: Sink) -> None:
        self.inner = inner
        self.name = inner.name
        self.block_size = inner.block_size
        self.filter = inner.filter
        self.takes_clear = inner.takes_clear
        self.by_name = inner.by_name
        self.announces_full = inner.announces_full
        self.ready_timeout = inner.ready_timeout
        self.by_tokens = inner.by_tokens
        self.repeats = inner.repeats
        self.resync_interval = inner.resync_interval
        self.fault_mode: FaultMode = ""
        self.every = 2
        self.calls = 0

    @property
    def view(self) -> Any:
        """The inner sink's, if it has one."""
        return getattr(self.inner, "view", None)

    @property
    def live_view(self) -> Any:
        """The inner sink's, if it has one."""
        return getattr(self.inner, "live_view", None)

    @property
    def num_acknowledged(self) -> int:
        """The inner sink's count, 0 during a fault since the answer is lost."""
        return 0 if self.fault_mode else self.inner.num_acknowledged

    @num_acknowledged.setter
    def num_acknowledged(self, count: int) -> None:
        self.inner.num_acknowledged = count

    async def open(self) -> None:
        """See `Sink.open`."""
        await self.inner.open()

    def set_snapshot_source(self, source: SnapshotSource) -> None:
        """See `Sink.set_snapshot_source`."""
        self.inner.set_snapshot_source(source)

    async def begin_epoch(self, epoch: int) -> None:
        """See `Sink.begin_epoch`."""
        await self._before()
        await self.inner.begin_epoch(epoch)
        self._after()

    async def deliver(self, tasks: Sequence[FlushTask]) -> None:
        """See `Sink.deliver`."""
        await self._before()
        await self.inner.deliver(tasks)
        self._after()

    async def close(self) -> None:
        """See `Sink.close`."""
        await self.inner.close()

    async def _before(self) -> None:
        self.calls += 1
        if self.fault_mode == "hang":
            await anyio.sleep_forever()
        if self.fault_mode == "down" or (
            self.fault_mode == "fail_every" and self.calls % self.every == 0
        ):
            raise SinkError(f"sink {self.name!r} was told to fail")

    def _after(self) -> None:
        if self.fault_mode == "lose_answers":
            raise SinkError(f"sink {self.name!r} was told to lose its answer")


class FaultyBackend(Backend):
    """A store around another. fault_mode: down (nothing can be had), full (nothing can be written),
    slow (every call takes `delay` seconds more), or nothing."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner.fingerprint, inner.block_bytes)
        self.inner = inner
        self.exclusive = inner.exclusive
        self.slot_trailer_bytes = inner.slot_trailer_bytes
        self.counters = inner.counters
        self.fault_mode: StoreFaultMode = ""
        self.delay = 0.0

    async def _pause(self) -> None:
        if self.fault_mode == "slow":
            await anyio.sleep(self.delay)

    def _all(self, keys: Sequence[bytes], outcome: Outcome) -> bytes:
        outcomes = bytes([outcome]) * len(keys)
        self.inner.record_outcomes(outcomes)
        return outcomes

    async def open(self) -> None:
        """See `Backend.open`."""
        await self.inner.open()

    async def attach(self, arena: Arena) -> None:
        """See `Backend.attach`."""
        await self.inner.attach(arena)

    def probe(self, keys: Sequence[bytes]) -> int | None:
        """See `Backend.probe`."""
        return 0 if self.fault_mode == "down" else self.inner.probe(keys)

    async def ask(self, keys: Sequence[bytes], expired: Expired) -> int:
        """See `Backend.ask`."""
        await self._pause()
        return await self.inner.ask(keys, expired)

    def take(self, keys: Sequence[bytes]) -> None:
        """See `Backend.take`."""
        self.inner.take(keys)

    async def read(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired
    ) -> ReadReport:
        """See `Backend.read`."""
        await self._pause()
        if self.fault_mode == "down":
            return ReadReport(self._all(keys, Outcome.UNAVAILABLE), [])
        return await self.inner.read(keys, views, expired)

    async def write(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired
    ) -> WriteReport:
        """See `Backend.write`."""
        await self._pause()
        if self.fault_mode in ("down", "full"):
            return WriteReport(
                self._all(
                    keys, Outcome.UNAVAILABLE if self.fault_mode == "down" else Outcome.NO_SPACE
                ),
                [],
            )
        return await self.inner.write(keys, views, expired)

    async def remove(self, keys: Sequence[bytes]) -> None:
        """See `Backend.remove`."""
        await self.inner.remove(keys)

    async def clear(self, generation: int = 0) -> None:
        """See `Backend.clear`."""
        await self.inner.clear(generation)

    async def close(self) -> None:
        """See `Backend.close`."""
        await self.inner.close()

    def keys(self) -> list[bytes]:
        """See `Backend.keys`."""
        return self.inner.keys()

    def iter_keys(self) -> Iterator[bytes]:
        """See `Backend.iter_keys`."""
        return self.inner.iter_keys()

    def count(self) -> int:
        """See `Backend.count`."""
        return self.inner.count()

    def holds(self, key: bytes) -> bool:
        """See `Backend.holds`."""
        return self.inner.holds(key)

    def statistics(self) -> StoreStatistics:
        """See `Backend.statistics`."""
        return self.inner.statistics()


def corrupt_objects(store: FileBackend, every: int) -> int:
    """Flip a bit in the payload of every n-th slot of a file store, on the disk.
    Returns the number of slots."""
    files, flipped = store.files, 0
    for slot in range(0, len(files.slabs) * files.meta.slots_per_slab, every):
        slab, index = divmod(slot, files.meta.slots_per_slab)
        with (files.folder / f"slab-{slab:04}").open("r+b", buffering=0) as file:
            at = index * files.meta.stride + slot % files.meta.block_bytes
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1 << slot % 8]))
        flipped += 1
    return flipped
