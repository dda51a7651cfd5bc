"""A store of preallocated slab files: the default, without any server. See `slab_files` for the files, `slab_table` for what is in them."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import anyio

from kvactors.actor.uncancelled import to_the_end
from kvactors.device.arena import Arena
from kvactors.errors import StoreError
from kvactors.storage.backends.header import header_of
from kvactors.storage.backends.owned import OwnedBackend
from kvactors.storage.backends.slab_files import SlabFiles, address_of
from kvactors.storage.backends.slab_table import PAGE, Found, Meta, entry_of, scan
from kvactors.storage.messages import Outcome
from kvactors.threads import Workers

T = TypeVar("T")

SLAB_BYTES = 256 << 20
"""Bytes of a slab, unless the whole capacity is less."""


class FileStatistics(NamedTuple):
    """A moment's picture of the files. direct: whether the page cache is passed by. quarantined: slots that held bad objects. torn: entries that
    made no sense when the store was opened. scan_s: seconds to find out what was there."""

    slots: int
    free: int
    slabs: int
    direct: bool
    quarantined: int
    torn: int
    scan_s: float


class FileBackend(OwnedBackend):
    """folder: of this namespace and rank. capacity: objects at most, 0 for as many as fit. floor: bytes of the file system left free. durability:
    written (the system has it: survives the process) or synced (the device has it: survives the power). depth: reads and writes at once."""

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
    ) -> None:
        super().__init__(fingerprint, block_bytes, capacity)
        stride = -(-block_bytes // PAGE) * PAGE
        per_slab = max(1, SLAB_BYTES // stride)
        meta = Meta(fingerprint.hex(), block_bytes, stride, min(per_slab, capacity) if capacity else per_slab)
        self.files = SlabFiles(Path(folder) / fingerprint.hex()[:16], meta, read_only=read_only, floor=floor)
        self.read_only = read_only
        self.durability = durability
        self._depth = depth
        self._threads = Workers(depth, "kvactors-file")
        self._objects: dict[bytes, tuple[int, bytes]] = {}  # slot and table entry, of what can be read
        self._written: dict[bytes, tuple[int, bytes]] = {}  # the same, of payloads whose entries are not written yet
        self._free: deque[int] = deque()
        self._readers: Counter[int] = Counter()
        self._zombies: set[int] = set()  # free once nobody reads them any more
        self._quarantined = self._torn = self._sequence = 0
        self._scan_s = 0.0
        self._growing: asyncio.Task[Outcome] | None = None
        self._arena: Arena | None = None

    async def open(self) -> None:
        """See what is there, newest objects first to stay if the capacity is smaller now. StoreError if it cannot be used."""
        began = asyncio.get_running_loop().time()
        found, self._torn = await self._in_thread(self._scan)
        evicted: list[bytes] = []
        doubles: list[int] = []
        for one in found:
            before = self._objects.get(one.key)
            if before is not None:
                doubles.append(before[0])
            self._objects[one.key] = (one.slot, self._entry(one))
            evicted += self.catalog.admit([one.key]).evicted
            self._sequence = one.sequence + 1
        self._scan_s = asyncio.get_running_loop().time() - began
        used = {slot for slot, _ in self._objects.values()}
        slots = len(self.files.slabs) * self.files.meta.slots_per_slab
        self._free.extend(slot for slot in range(slots) if slot not in used)
        if not self.read_only:
            await self._in_thread(self.files.free, doubles)
            await self.erase(evicted)
            await self._drop_empty_slabs()

    def _scan(self) -> tuple[list[Found], int]:
        try:
            return scan(self.files.open(), self.fingerprint, self.block_bytes)
        except OSError as error:
            raise StoreError(f"{self.files.folder}: {error}") from error

    def _entry(self, one: Found) -> bytes:
        return self._header_entry(one.key, one.checksum, one.sequence)

    def _header_entry(self, key: bytes, checksum: int, sequence: int) -> bytes:
        return entry_of(header_of(self.fingerprint, key, self.block_bytes, checksum), sequence)

    async def _drop_empty_slabs(self) -> None:
        """Slabs at the end that a smaller capacity does not need."""
        per_slab = self.files.meta.slots_per_slab
        last = max((slot for slot, _ in self._objects.values()), default=-1)
        needed = -(-self.catalog.capacity // per_slab) if self.catalog.capacity else len(self.files.slabs)
        keep = max(last // per_slab + 1, min(needed, len(self.files.slabs)))
        await self._in_thread(self.files.shrink, keep)
        self._free = deque(slot for slot in self._free if slot < keep * per_slab)

    async def attach(self, arena: Arena) -> None:
        """See `Backend.attach`: slots of the arena are whole pages, so that their last page may be read and written to its end."""
        self._arena = arena

    def keys(self) -> list[bytes]:
        """See `Backend.keys`; a reader beside another process is answerable for nothing."""
        return [] if self.read_only else super().keys()

    def holds(self, key: bytes) -> bool:
        """See `Backend.holds`; a view of another process's store answers for nothing."""
        return not self.read_only and super().holds(key)

    def _where(self, view: memoryview) -> tuple[int, int]:
        """Address of a view, and bytes from there on that are its slot's."""
        address, arena = address_of(view), self._arena
        if arena is not None and 0 <= address - arena.address < arena.num_slots * arena.stride:
            return address, arena.stride
        return address, len(view)

    # -- reading

    async def load(self, key: bytes, into: memoryview) -> Outcome:
        """See `OwnedBackend.load`."""
        found = self._objects.get(key)
        if found is None:
            return Outcome.MISS
        slot, entry = found
        self._readers[slot] += 1
        try:
            outcome = await self._in_thread(self._load, key, slot, entry, into)
        finally:
            self._readers[slot] -= 1
            if not self._readers[slot]:
                del self._readers[slot]
                if slot in self._zombies:
                    self._zombies.remove(slot)
                    self._free.append(slot)
        if outcome == Outcome.CORRUPT:
            if self.read_only:
                return Outcome.MISS  # whoever writes here may have put something else there
            if self._objects.get(key) == found:
                del self._objects[key]
                self._quarantined += 1  # its slot is left alone for this life
                await self._in_thread(self.files.free, [slot])
        return outcome

    def _load(self, key: bytes, slot: int, entry: bytes, into: memoryview) -> Outcome:
        if not self.files.in_place():
            return Outcome.MISS  # somebody deleted the folder: what is left of it goes with this process
        outcome = self.files.read(slot, *self._where(into))
        if outcome == Outcome.MISS:
            return Outcome.CORRUPT  # the slab is shorter than it was
        if outcome != Outcome.OK:
            return outcome
        expected = self._expected(key, entry, into)
        return Outcome.OK if expected == entry == self.files.entry(slot) else Outcome.CORRUPT

    def _expected(self, key: bytes, entry: bytes, payload: memoryview) -> bytes:
        sequence = int.from_bytes(entry[96:104], "little")
        return entry_of(header_of(self.fingerprint, key, payload), sequence)

    # -- writing

    async def save(self, key: bytes, data: memoryview) -> Outcome:
        """See `OwnedBackend.save`: the payload, into a free slot; `seal` makes it an object."""
        if self.read_only:
            return Outcome.NO_SPACE
        slot, outcome = await self._take_slot()
        if slot is None:
            return outcome
        sequence, self._sequence = self._sequence, self._sequence + 1
        try:
            outcome, entry = await self._in_thread(self._save, key, slot, sequence, data)
        except BaseException:
            self._free.append(slot)
            raise
        if outcome == Outcome.OK:
            self._written[key] = (slot, entry)
        else:
            self._free.append(slot)
        return outcome

    def _save(self, key: bytes, slot: int, sequence: int, data: memoryview) -> tuple[Outcome, bytes]:
        outcome = self.files.write(slot, *self._where(data))
        return outcome, entry_of(header_of(self.fingerprint, key, data), sequence)

    async def _take_slot(self) -> tuple[int | None, Outcome]:
        while not self._free:
            if self._growing is None:
                self._growing = asyncio.get_running_loop().create_task(self._grow())
            growing = self._growing
            outcome = await to_the_end(growing)
            if self._growing is growing:
                self._growing = None
            if outcome != Outcome.OK and not self._free:
                return None, outcome
        return self._free.popleft(), Outcome.OK

    async def _grow(self) -> Outcome:
        per_slab, slabs = self.files.meta.slots_per_slab, len(self.files.slabs)
        # Slots that wait for their readers, or are quarantined, may ask for one slab more than the capacity does.
        limit = -(-self.catalog.capacity // per_slab) + 1 if self.catalog.capacity else 0
        if limit and slabs >= limit:
            return Outcome.NO_SPACE
        outcome = await self._in_thread(self.files.grow)
        if outcome == Outcome.OK:
            self._free.extend(range(slabs * per_slab, (slabs + 1) * per_slab))
        return outcome

    async def seal(self, keys: Sequence[bytes]) -> Outcome:
        """See `OwnedBackend.seal`: their entries, and for `synced` everything to the device."""
        entries = [self._written[key] for key in keys]
        outcome = await self._in_thread(self._seal_entries, entries)
        for key in keys:
            slot_entry = self._written.pop(key)
            if outcome == Outcome.OK:
                self._objects[key] = slot_entry
            else:
                self._free.append(slot_entry[0])
        return outcome

    def _seal_entries(self, entries: list[tuple[int, bytes]]) -> Outcome:
        return self.files.seal(entries, sync=self.durability == "synced")

    def abandon(self, keys: Iterable[bytes]) -> None:
        """See `OwnedBackend.abandon`."""
        for key in keys:
            slot_entry = self._written.pop(key, None)
            if slot_entry is not None:
                self._free.append(slot_entry[0])

    async def erase(self, keys: Sequence[bytes]) -> None:
        """See `OwnedBackend.erase`."""
        slots = [self._objects.pop(key)[0] for key in keys if key in self._objects]
        try:
            if slots and not self.read_only:
                await self._in_thread(self.files.free, slots)
        finally:
            for slot in slots:
                if self._readers[slot]:
                    self._zombies.add(slot)
                else:
                    self._free.append(slot)

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
        """Close the files; every call has been waited for."""
        await self._threads.drained(10.0)
        self._threads.close()
        self.files.close()

    def file_statistics(self) -> FileStatistics:
        """A moment's picture of the files."""
        slabs = len(self.files.slabs)
        return FileStatistics(
            slabs * self.files.meta.slots_per_slab, len(self._free), slabs, self.files.direct, self._quarantined, self._torn,
            self._scan_s,
        )  # fmt: skip

    async def _in_thread(self, function: Callable[..., T], *args: object) -> T:
        """A blocking call in a thread, to its end even if cancelled: it works on memory that is lent to it."""
        return await to_the_end(asyncio.wrap_future(self._threads.submit(lambda: function(*args))))
