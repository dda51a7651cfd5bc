"""A store of preallocated slab files: the default, without any server. See `slab_files` for the
files, `slab_table` for what is in them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import anyio
import xxhash

from kvactors.actor.clock import now
from kvactors.actor.log import get_logger
from kvactors.actor.uncancelled import to_the_end, uncancelled
from kvactors.device.arena import Arena
from kvactors.errors import StoreError
from kvactors.flush_notifier.messages import PathPart
from kvactors.identity import StoreIdentity
from kvactors.lineage import Lineage
from kvactors.storage.backends.base import Expired, WriteReport
from kvactors.storage.backends.file_survey import FileStatistics, Stored, statistics, survey
from kvactors.storage.backends.owned import OwnedBackend
from kvactors.storage.backends.slab_files import SlabFiles
from kvactors.storage.backends.slab_lineage import entry_bytes_for, fields_of_lineage, room_beside
from kvactors.storage.backends.slab_memory import extent
from kvactors.storage.backends.slab_objects import load
from kvactors.storage.backends.slab_paths import PathReading
from kvactors.storage.backends.slab_steps import GROW_AGAIN, Generations, Growth
from kvactors.storage.backends.slab_table import PAGE, WRITTEN_AT, Meta, entry_of, mark_of
from kvactors.storage.backends.slots import Slots
from kvactors.storage.messages import Outcome
from kvactors.threads import Workers

T = TypeVar("T")

log = get_logger()

SLAB_BYTES = 256 << 20
"""Bytes of a slab, unless the whole capacity is less."""

CLOSING = 1.0
"""Seconds that calls may take to end when the store is closed; threads that hang longer are
abandoned."""


class FileBackend(OwnedBackend):
    """folder: of this model, namespace and rank. fingerprint: digest of the store's identity.
    capacity: objects at most, 0 for 80 % of what the file system has to give. floor: bytes of the
    file system left free. durability: written (the system has it: survives the process) or synced
    (the device has it: survives the power). depth: reads and writes at once. identity: the names
    behind the digest. block_size: tokens of a block, if lineages are kept; 0 if not."""

    def __init__(
        self,
        folder: str | Path,
        fingerprint: bytes,
        block_bytes: int,
        capacity: int = 0,
        *,
        floor: int = 0,
        durability: Literal["written", "synced"] = "written",
        read_only: bool = False,
        depth: int = 4,
        identity: StoreIdentity | None = None,
        block_size: int = 0,
    ) -> None:
        super().__init__(fingerprint, block_bytes, capacity)
        stride = -(-block_bytes // PAGE) * PAGE
        per_slab = max(1, SLAB_BYTES // stride)
        names = identity if identity is not None else StoreIdentity("", "", fingerprint)
        meta = Meta(
            fingerprint.hex(),
            block_bytes,
            stride,
            min(per_slab, capacity) if capacity else per_slab,
            model=names.model,
            namespace=names.namespace,
            rank=names.rank,
            ranks=names.ranks,
            entry_bytes=entry_bytes_for(block_size),
        )
        self.files = SlabFiles(
            Path(folder) / fingerprint.hex()[:16], meta, read_only=read_only, floor=floor
        )
        self.read_only, self.answerable = read_only, not read_only
        self.keeps_lineages = block_size > 0 and not read_only
        self.durability = durability
        self._wanted = capacity
        self._depth = depth
        self._threads = Workers(depth, "kvactors-file")
        self._objects: dict[
            bytes, tuple[int, bytes]
        ] = {}  # slot and mark of the table entry, of what can be read
        self._lineages: dict[bytes, tuple[Lineage]] = {}  # of what is being written
        self._paths = PathReading(self.files, self._in_thread)
        self._written: dict[
            bytes, tuple[int, bytes]
        ] = {}  # slot and entry, of payloads whose entries are not written yet
        self.slots = Slots()
        self.growth = Growth(self.files, self.slots, self._threads)
        self._generations = Generations(self.files, self._threads)
        self._torn = self._sequence = self._capacity = 0
        self._scan_s = self._no_eviction_until = 0.0
        self._arena: Arena | None = None

    async def open(self) -> None:
        """See what is there; the objects written last stay if the capacity is smaller now.
        StoreError if it cannot be used; then, or when cancelled, nothing is left open."""
        try:
            await self._open()
        except BaseException:
            await self.close()
            raise

    async def _open(self) -> None:
        began = asyncio.get_running_loop().time()
        found, self._torn, self._capacity = await self._in_thread(survey, self.files, self._wanted)
        self.generation = self.files.meta.generation
        self.catalog.capacity = self.growth.capacity = self._capacity
        evicted, doubles = await self._in_thread(self._enter, found)
        self._scan_s = asyncio.get_running_loop().time() - began
        if not self.read_only:
            await self._in_thread(self.files.free, doubles)
            await self.erase(evicted)
            await self._drop_empty_slabs()

    def _enter(self, found: list[Stored]) -> tuple[list[bytes], list[int]]:
        """Take in what was found; the keys that exceed the capacity, and the slots of earlier
        writes of a key."""
        evicted: list[bytes] = []
        doubles: list[int] = []
        for sequence, slot, key, mark in found:
            before = self._objects.get(key)
            if before is not None:
                doubles.append(before[0])
            self._objects[key] = (slot, mark)
            evicted += self.catalog.admit([key]).evicted
            self._sequence = sequence + 1
        used = {slot for slot, _ in self._objects.values()}
        slots = len(self.files.slabs) * self.files.meta.slots_per_slab
        self.slots.give(slot for slot in range(slots) if slot not in used)
        return evicted, doubles

    async def _drop_empty_slabs(self) -> None:
        """Slabs at the end that a smaller capacity does not need."""
        per_slab = self.files.meta.slots_per_slab
        last = max((slot for slot, _ in self._objects.values()), default=-1)
        needed = -(-self._capacity // per_slab)
        keep = max(last // per_slab + 1, min(needed, len(self.files.slabs)))
        await self._in_thread(self.files.shrink, keep)
        self.slots.free = deque(slot for slot in self.slots.free if slot < keep * per_slab)

    async def attach(self, arena: Arena) -> None:
        """See `Backend.attach`: slots of the arena are whole pages, so that their last page may be
        read and written to its end."""
        self._arena = arena

    def trouble(self) -> str:
        """See `Backend.trouble`."""
        return self.files.trouble

    def present(self, key: bytes) -> bool:
        """See `OwnedBackend.present`."""
        return key in self._objects

    # -- reading

    async def load(self, key: bytes, into: memoryview) -> Outcome:
        """See `OwnedBackend.load`."""
        found = self._objects.get(key)
        if found is None:
            return Outcome.MISS
        (slot, mark), generation = found, self.generation
        self.slots.begin_read(slot)
        try:
            outcome = await self._in_thread(load, self.files, slot, mark, into, self._arena)
        finally:
            self.slots.end_read(slot)
        if outcome not in (Outcome.CORRUPT, Outcome.MISS):
            return outcome if generation == self.generation else Outcome.MISS
        if self.read_only or self._objects.get(key) != found:
            return (
                Outcome.MISS
            )  # evicted, cleared or replaced while it was read, here or by the process that writes
        del self._objects[key]
        if outcome == Outcome.MISS:
            self.slots.give([slot])
            return outcome
        self.slots.suspect(slot, now())
        self._fit()
        await self._in_thread(self.files.free, [slot])
        return outcome

    def _fit(self) -> None:
        """What is in quarantine holds nothing."""
        self.catalog.capacity = max(1, self._capacity - self.slots.quarantined)

    # -- writing

    async def write(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired
    ) -> WriteReport:
        """See `Backend.write`. Slots in quarantine are tried again before anything is evicted in
        their place."""
        short = self.slots.quarantined and len(self.catalog) + len(keys) > self.catalog.capacity
        if short and (self.slots.release(now()) or self.slots.release_first_offenders()):
            self._fit()
        return await super().write(keys, views, expired)

    async def write_slots(
        self,
        keys: Sequence[bytes],
        arena: Arena,
        slots: Sequence[int],
        expired: Expired,
        lineages: Sequence[Lineage | None] = (),
    ) -> WriteReport:
        """See `Backend.write_slots`. Keys that are there, or that another batch is writing, are not
        this one's."""
        given = zip(keys, lineages, strict=False)
        there = (
            self.catalog,
            self.pending,
        )  # what is being written may have been evicted from the catalog by another batch
        mine = {
            key: (one,)
            for key, one in given
            if one is not None and not any(key in names for names in there)
        }
        self._lineages |= mine
        try:
            return await super().write_slots(keys, arena, slots, expired)
        finally:
            for key, entry in mine.items():
                if (
                    self._lineages.get(key) is entry
                ):  # another batch may have set its own since this one was refused the key
                    del self._lineages[key]

    async def save(self, key: bytes, data: memoryview) -> Outcome:
        """See `OwnedBackend.save`: the payload, into a free slot; `seal` makes it an object."""
        if self.read_only:
            return Outcome.NO_SPACE
        outcome = await self._save_once(key, data)
        if outcome == Outcome.NO_SPACE and await self._squeeze(first=True):
            outcome = await self._save_once(
                key, data
            )  # in the place of another object, which has its space on the disk
            if outcome == Outcome.NO_SPACE:
                self._no_eviction_until = now() + GROW_AGAIN
        return outcome

    async def _save_once(self, key: bytes, data: memoryview) -> Outcome:
        slot, outcome = await self._take_slot()
        if slot is None:
            return outcome
        sequence, self._sequence = self._sequence, self._sequence + 1
        try:
            (lineage,) = self._lineages.get(key, (None,))
            outcome, entry = await self._in_thread(
                self._save, key, slot, sequence, self.generation, data, lineage
            )
        except BaseException:
            self.slots.give([slot])
            raise
        if outcome == Outcome.CORRUPT:
            self.slots.suspect(slot, now())
            self._fit()
            return Outcome.UNAVAILABLE
        if outcome != Outcome.OK:
            self.slots.give([slot])
            return outcome
        if slot in self.slots.suspects:
            self.slots.passed(slot)
        self._written[key] = (slot, entry)
        return outcome

    def _save(
        self,
        key: bytes,
        slot: int,
        sequence: int,
        generation: int,
        data: memoryview,
        lineage: Lineage | None,
    ) -> tuple[Outcome, bytes]:
        outcome = self.files.write(slot, *extent(data, self._arena))
        checksum = xxhash.xxh3_64_intdigest(data)
        if (
            outcome == Outcome.OK
            and slot in self.slots.suspects
            and not self.files.proved(slot, checksum)
        ):
            return Outcome.CORRUPT, b""
        fields = {WRITTEN_AT: (time.time_ns() // 1000).to_bytes(8, "little")}
        fields |= fields_of_lineage(lineage, room_beside(self.files.meta))
        return outcome, entry_of(self.files.meta, key, checksum, sequence, generation, fields)

    async def _take_slot(self) -> tuple[int | None, Outcome]:
        """A free slot: one that is there, one of a new slab, one that was in quarantine, or that of
        the least recently used object."""
        slots = self.slots
        while True:
            if slots.release(now()):
                self._fit()
            if slots.free:
                return slots.free.popleft(), Outcome.OK
            outcome = await self.growth.more()
            if slots.free or outcome == Outcome.OK:
                continue  # those of a new slab may have been taken by others already
            if outcome != Outcome.NO_SPACE:
                return None, outcome
            if slots.release_first_offenders():
                self._fit()
            elif not await self._squeeze():
                return None, outcome

    async def _squeeze(self, *, first: bool = False) -> bool:
        """Evict the least recently used object although the capacity is not reached: the disk has
        no space. first: its slot is the next one."""
        victim = self.catalog.evict(self.pending) if now() >= self._no_eviction_until else None
        if victim is None:
            return False
        self.squeezed.append(victim)
        self.evicted += 1
        slot = self._objects[victim][0] if victim in self._objects else None
        await self.erase([victim])
        if first:
            self.slots.first(slot)
        return True

    async def seal(self, keys: Sequence[bytes]) -> Outcome:
        """See `OwnedBackend.seal`: their entries, and for `synced` everything to the device."""
        entries = [self._written[key] for key in keys]
        outcome = await self._in_thread(self._seal_entries, entries)
        for key in keys:
            slot_entry = self._written.pop(key)
            if outcome == Outcome.OK:
                self._objects[key] = (slot_entry[0], mark_of(slot_entry[1]))
            else:
                self.slots.give([slot_entry[0]])
        return outcome

    def _seal_entries(self, entries: list[tuple[int, bytes]]) -> Outcome:
        return self.files.seal(entries, sync=self.durability == "synced")

    def abandon(self, keys: Iterable[bytes]) -> None:
        """See `OwnedBackend.abandon`."""
        for key in keys:
            slot_entry = self._written.pop(key, None)
            if slot_entry is not None:
                self.slots.give([slot_entry[0]])

    async def erase(self, keys: Sequence[bytes]) -> None:
        """See `OwnedBackend.erase`."""
        slots = [self._objects.pop(key)[0] for key in keys if key in self._objects]
        try:
            if slots and not self.read_only:
                await self._in_thread(self.files.free, slots)
        finally:
            self.slots.give(slots)

    async def clear(self, generation: int = 0) -> None:
        """See `Backend.clear`: the store gets another generation, in memory at once and on the
        device before this returns. Entries of the one before are free slots from then on, whatever
        is left of them."""
        if self.read_only:
            raise StoreError(
                f"{self.files.folder} is open read-only: the process that writes there can clear it"
            )
        self.catalog.clear()
        slots = [slot for slot, _ in self._objects.values()]
        self._objects.clear()
        self.generation = max(self.generation + 1, generation)
        try:
            await self._generations.advance(lambda: self.generation)
        finally:
            self.slots.give(slots)

    @property
    def uncleared(self) -> bool:  # type: ignore[override]
        """See `Backend.uncleared`."""
        return self._generations.uncleared

    # -- paths

    def begin_paths(self) -> None:
        """See `Backend.begin_paths`."""
        if self.keeps_lineages:
            self._paths.begin()

    async def next_paths(self, most: int) -> list[PathPart] | None:
        """See `Backend.next_paths`."""
        return await self._paths.next(most)

    def end_paths(self) -> None:
        """See `Backend.end_paths`."""
        self._paths.end()

    async def each(self, work: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """`depth` at once."""
        queue = iter(work)

        async def worker() -> None:
            for item in queue:
                await item()

        async with anyio.create_task_group() as tasks:
            for _ in range(min(self._depth, len(work))):
                tasks.start_soon(worker)

    async def close(self) -> None:
        """Close the files and give up the lock, within about a second: threads that hang are
        abandoned."""
        await uncancelled(self._close())

    async def _close(self) -> None:
        ended = await self._threads.drained(CLOSING)
        self._threads.close()
        if ended:
            self.files.close()
            return
        self.stuck = True
        if self._arena is not None:
            self._arena.keep()
        log.warning(
            "store threads hang and are abandoned",
            folder=str(self.files.folder),
            threads=self._threads.busy,
        )
        self.files.unlock()
        self._threads.afterwards(
            self.files.drop
        )  # a descriptor in use must not become another file's

    def file_statistics(self) -> FileStatistics:
        """A moment's picture of the files."""
        return statistics(self.files, self.slots, self._torn, self._scan_s, self._capacity)

    async def _in_thread(self, function: Callable[..., T], *args: object) -> T:
        """A blocking call in a thread, to its end even if cancelled: it works on memory that is
        lent to it."""
        return await to_the_end(asyncio.wrap_future(self._threads.submit(lambda: function(*args))))
