"""A store of preallocated slab files: the default, without a server. `layout` has the folder,
`table` the format of the table."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

from kvactors.actor.clock import now
from kvactors.actor.log import get_logger
from kvactors.actor.uncancelled import uncancelled, wait_uncancelled
from kvactors.device.arena import Arena
from kvactors.errors import StoreError
from kvactors.identity import StoreIdentity
from kvactors.lineage import Lineage
from kvactors.storage.backend import Backend, Expired, ReadReport, StoreCounters, WriteReport
from kvactors.storage.catalog import Catalog, OwnedInventory
from kvactors.storage.file.io import SlabThreads, SlabWrites, load_batch
from kvactors.storage.file.layout import SPARE_FOLDER, SlabFiles
from kvactors.storage.file.slots import GROW_AGAIN, Slots, SlotSupply
from kvactors.storage.file.table import (
    CHUNK,
    PAGE,
    Meta,
    PathReading,
    Stored,
    Survey,
    TableReader,
    count_used,
    entry_bytes_for,
    mark_of,
    meta_of,
)
from kvactors.storage.local_store import OwnedBatches
from kvactors.storage.messages import Outcome
from kvactors.threads import Workers

SLAB_BYTES = 256 << 20
"""Bytes of a slab, unless the whole capacity is less."""

ANEW_CHECK_S = 0.01
"""Seconds between two looks at whether calls use files that were deleted."""

CLOSING = 1.0
"""Seconds that calls may take to end when the store is closed. Threads that hang for longer are
abandoned."""


class FileBackend(Backend):
    """Objects in slots of slab files, and a table of the key in each slot.

    Args:
        folder: of the stores of one model, namespace and rank.
        capacity: objects at most, 0 for 80 % of the space that the file system has left.
        floor: bytes of the file system to leave free.
        durability: "written" (survives the process) or "synced" (survives a power failure).
        read_only: look at a store that another process may be writing.
        depth: reads at the same time.
        write_depth: writes at the same time, 0 for as many as reads.
        identity: the names behind `digest`.
        block_size: tokens of a block, if lineages are kept; 0 if not.
        scrub_rate: bytes a second that a scrub reads, 0 for none.
    """

    exclusive = True
    wipes = True

    def __init__(
        self,
        folder: str | Path,
        digest: bytes,
        block_bytes: int,
        capacity: int = 0,
        *,
        floor: int = 0,
        durability: Literal["written", "synced"] = "written",
        read_only: bool = False,
        depth: int = 16,
        write_depth: int = 0,
        identity: StoreIdentity | None = None,
        block_size: int = 0,
        scrub_rate: int = 0,
    ) -> None:
        inventory = OwnedInventory(0 if read_only else capacity, answerable=not read_only)
        super().__init__(digest, block_bytes, inventory)
        names = identity or StoreIdentity("", "", digest)
        meta = _meta(names, digest, block_bytes, capacity, entry_bytes_for(block_size))
        place = Path(folder) / digest.hex()[:16]
        self.files = SlabFiles(place, meta, read_only=read_only, floor=floor)
        self.keeps_lineages = block_size > 0 and not read_only
        self.threads = SlabThreads(self.files, depth, write_depth or depth)
        self.medium = SlabMedium(
            self.files,
            self.threads,
            inventory,
            self.counters,
            capacity,
            synced=durability == "synced",
        )
        self.view: SlabView | None = None
        if read_only:
            self.view = SlabView(self.medium, self.files, self.threads, inventory)
        if self.keeps_lineages:
            self.paths = PathReading(self.files, self.threads)
        self._inventory = inventory
        self._calls = 0  # in progress, that use the files
        self.scrub: Scrub | None = None
        if scrub_rate and not read_only:
            self.scrub = Scrub(
                self.medium, inventory.catalog, block_bytes, meta.stride, scrub_rate, self._in_use
            )
        self._batches = OwnedBatches(
            self.medium, inventory, self.counters, block_bytes, self.medium
        )

    @property
    def generation(self) -> int:  # type: ignore[override]
        """See `Backend.generation`."""
        return self.medium.generation

    @property
    def clear_pending(self) -> bool:  # type: ignore[override]
        """See `Backend.clear_pending`."""
        return self.medium.generations.pending

    @property
    def removed_outside(self) -> bool:  # type: ignore[override]
        """See `Backend.removed_outside`."""
        return self.medium.removed_outside

    async def open(self) -> None:
        """See `Backend.open`. If the capacity has shrunk, the objects written last stay."""
        self.files.loop = asyncio.get_running_loop()
        try:
            await (self.medium.open() if self.view is None else self.view.open())
        except BaseException:
            await self.close()
            raise
        if self.scrub is not None:
            self.scrub.start()

    async def close(self) -> None:
        """See `Backend.close`. Takes about a second at most, then abandons hanging threads."""
        if self.scrub is not None:
            await uncancelled(self.scrub.stop(CLOSING))
        self.stuck = not await uncancelled(self.threads.close(self.files, CLOSING))
        if self.stuck and self.medium.arena is not None:
            self.medium.arena.keep()

    async def attach(self, arena: Arena) -> None:
        """See `Backend.attach`."""
        self.medium.arena = arena
        self.threads.io.attach(arena)

    def probe(self, keys: Sequence[bytes]) -> int | None:
        """See `Backend.probe`. A view looks for new objects first, in `ask`."""
        return self._batches.probe(keys) if self.view is None else None

    async def ask(self, keys: Sequence[bytes], expired: Expired) -> int:
        """See `Backend.ask`."""
        if self.view is not None:
            await self.view.refresh()
        return self._batches.probe(keys)

    async def read(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired
    ) -> ReadReport:
        """See `Backend.read`."""
        with self._in_use():
            return await self._batches.read(keys, views, expired)

    async def write(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired
    ) -> WriteReport:
        """See `Backend.write`."""
        if self.view is None:
            if self.files.lost and not await self._begin_anew(expired):
                refused = bytes([Outcome.UNAVAILABLE]) * len(keys)
                self.counters.written(refused)
                return WriteReport(refused, [])
            await self.medium.follow_space()
        self.medium.supply.prepare(len(keys))
        with self._in_use():
            return await self._batches.write(keys, views, expired)

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """A call uses the files inside."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1

    async def _begin_anew(self, expired: Expired) -> bool:
        """Make the files again, which were deleted, once no call uses the old ones. Returns whether
        they are there."""
        while self.files.lost and (self._calls or self.threads.busy):
            if expired():
                return False
            await asyncio.sleep(ANEW_CHECK_S)
        if self.files.lost:
            with self._in_use():
                try:
                    await self.medium.begin_anew()
                except StoreError:
                    return False
        return True

    async def write_slots(
        self,
        keys: Sequence[bytes],
        arena: Arena,
        slots: Sequence[int],
        expired: Expired,
        lineages: Sequence[Lineage | None] = (),
        salts: Sequence[int | None] = (),
    ) -> WriteReport:
        """See `Backend.write_slots`."""
        with self.medium.writes.lineages.of_batch(keys, lineages, self._inventory):
            return await super().write_slots(keys, arena, slots, expired, (), salts)

    async def remove(self, keys: Sequence[bytes]) -> None:
        """See `Backend.remove`."""
        with self._in_use():
            await self._batches.remove(keys)

    async def clear(self, generation: int = 0) -> None:
        """See `Backend.clear`. Advances the generation and removes no file."""
        with self._in_use():
            await self.medium.clear(generation)

    async def forget(self, salt: int) -> int:
        """See `Backend.forget`."""
        with self._in_use():
            unknown = await self._batches.forget(salt)
            await self.medium.sync_table()
        return unknown

    async def wipe(self, expired: Expired) -> str:
        """See `Backend.wipe`."""
        with self._in_use():
            return await self.medium.wipe(expired)

    def trouble(self) -> str:
        """See `Backend.trouble`."""
        return self.files.trouble

    def condition(self) -> str:
        """See `Backend.condition`."""
        return self.medium.condition()

    def take_removed(self) -> list[bytes]:
        """See `Backend.take_removed`."""
        self.medium.removed_outside = False
        return super().take_removed()


def object_stride(block_bytes: int) -> int:
    """Bytes that an object takes in a slab: a block, in whole pages."""
    return -(-block_bytes // PAGE) * PAGE


def _meta(
    names: StoreIdentity, digest: bytes, block_bytes: int, capacity: int, entry_bytes: int
) -> Meta:
    stride = object_stride(block_bytes)
    per_slab = max(1, SLAB_BYTES // stride)
    return Meta(
        digest.hex(),
        block_bytes,
        stride,
        min(per_slab, capacity) if capacity else per_slab,
        model=names.model,
        namespace=names.namespace,
        rank=names.rank,
        ranks=names.ranks,
        entry_bytes=entry_bytes,
    )


# -- objects


log = get_logger()

SPACE_PAUSE_S = 10.0
"""Seconds between two looks at the space, unless a look takes long."""

LOSS_SHOWN_S = 600.0
"""Seconds for which the loss of the store's files is a fault, although it works again."""


WIPE_BYTES = 64 << 20
"""Bytes of freed slots that are overwritten between two looks at the deadline."""

WIPE_LATE = "the deadline has passed"


def _no_deadline() -> bool:
    return False


class SlabMedium:
    """The medium of `FileBackend` (see `Medium`). State changes on the event loop, and blocking
    calls run in threads.

    Attributes:
        objects: slot and mark of the table entry, by key, of the objects that can be read.
        written: slot and entry, by key, of payloads whose entries are not written yet.
        writes: writes payloads.
        generation: of the store. Objects are written under it.
        removed_outside: objects left the store outside of batches, and the indexes have not been
            informed.
        arena: memory whose slots are whole pages, so that the last page of a slot may be read and
            written to its end. None: only the bytes of a view may be.
    """

    def __init__(
        self,
        files: SlabFiles,
        threads: SlabThreads,
        inventory: OwnedInventory,
        counters: StoreCounters,
        wanted: int,
        *,
        synced: bool,
    ) -> None:
        """wanted: capacity in objects, 0 for a share of the space. synced: `seal` waits until the
        device has the bytes."""
        self.objects: dict[bytes, tuple[int, bytes]] = {}
        self.written: dict[bytes, tuple[int, bytes]] = {}
        self.generation = 0
        self.removed_outside = False
        self.arena: Arena | None = None
        self.supply = SlotSupply(files, threads, inventory.catalog)
        self.generations = Generations(files, threads.workers)
        self._slots = self.supply.slots
        self.writes = SlabWrites(files, threads, self._slots, inventory.catalog.salt)
        self._files = files
        self._threads = threads
        self._inventory = inventory
        self._counters = counters
        self._synced = synced
        self._torn = 0
        self._scan_s = 0.0
        self._evicted: list[bytes] = []  # by `_squeeze`, until a batch reports them
        self._no_eviction_until = 0.0
        self._space = SpaceReader(files, wanted)
        self._space_due = 0.0
        self._concern = ""  # why the capacity is too small
        self._loss = ""  # of all objects, for `condition`
        self._loss_shown_until = 0.0
        self._lost = False

    # -- opening

    async def open(self) -> None:
        """Open the files and take in their objects.

        Raises:
            StoreError: the files cannot be used.
        """
        began = now()
        _, found, space = await self._threads.run(survey, self._files, self._space)
        self._threads.io.open()
        self.generation, self._torn = self._files.meta.generation, found.torn
        if space is not None:
            self._settle(space)
            self._space_due = now() + SPACE_PAUSE_S
            log.info(
                "file store open",
                folder=str(self._files.folder),
                capacity_bytes=space.capacity * self._files.meta.stride,
                capacity_objects=space.capacity,
                own_bytes=space.own,
                free_bytes=space.free,
                other_layouts_bytes=space.others,
                objects=len(found.found),
                torn=found.torn,
            )
        evicted, doubles = await self._threads.run(self._enter, found.found)
        self._scan_s = now() - began
        await self._threads.io.erase(doubles)
        await self.erase(evicted)
        await self._drop_empty_slabs()

    def _enter(self, found: list[Stored]) -> tuple[list[bytes], list[int]]:
        """Take in the objects of the table, the oldest first.

        Returns:
            The keys beyond the capacity, and the slots of earlier writes of a key.
        """
        evicted: list[bytes] = []
        doubles: list[int] = []
        for sequence, slot, key, mark, salt in found:
            before = self.objects.get(key)
            if before is not None:
                doubles.append(before[0])
            self.objects[key] = (slot, mark)
            evicted += self._inventory.catalog.admit([key], {key: salt}).evicted
            self.writes.sequence = sequence + 1
        used = {slot for slot, _ in self.objects.values()}
        slots = len(self._files.slabs) * self._files.meta.slots_per_slab
        self._slots.give(slot for slot in range(slots) if slot not in used)
        return evicted, doubles

    async def _drop_empty_slabs(self) -> None:
        """Delete slabs at the end that a smaller capacity does not need."""
        per_slab = self._files.meta.slots_per_slab
        last = max((slot for slot, _ in self.objects.values()), default=-1)
        needed = -(-self.supply.capacity // per_slab)
        keep = max(last // per_slab + 1, min(needed, len(self._files.slabs)))
        await self._threads.run(self._files.shrink, keep)
        self._slots.free = deque(slot for slot in self._slots.free if slot < keep * per_slab)

    # -- the space, and the loss of the files

    async def follow_space(self) -> None:
        """Reckon the capacity again, unless that was done a moment ago: the free space changes, and
        so do the stores of other layouts."""
        began = now()
        if began < self._space_due:
            return
        self._space_due = float("inf")  # one look at a time
        try:
            space = await self._threads.run(self._space.read, len(self._inventory.catalog))
        except FileNotFoundError:  # a slab
            self._files.lose()
            self._notice_loss()
        except OSError as error:
            self._files.failed(error)
        else:
            self._settle(space)
        finally:
            self._space_due = now() + max(SPACE_PAUSE_S, 50 * (now() - began))

    def _settle(self, space: Space) -> None:
        if space.capacity > self.supply.capacity:
            self.supply.growth.pause_until = 0.0
        self.supply.set_capacity(space.capacity)
        if space.concern and not self._concern:
            log.warning(
                "file store is too small",
                reason=space.concern,
                capacity_objects=space.capacity,
                free_bytes=space.free,
                other_layouts_bytes=space.others,
            )
        self._concern = space.concern

    def _notice_loss(self) -> None:
        """Give up every object, once the files were found deleted. New ones are in the catalog
        still, for the batches that write them."""
        if not self._files.lost or self._lost:
            return
        self._lost = True
        self._loss_shown_until = time.monotonic() + LOSS_SHOWN_S
        lost = self._inventory.catalog.remove(
            key for key in self.objects if key not in self._inventory.pending
        )
        self.objects.clear()
        self.removed_outside = True
        log.warning("file store lost", reason=self._files.trouble, objects=len(lost))

    async def begin_anew(self) -> None:
        """Make the files again, after they were deleted. No other call may be running.

        Raises:
            StoreError: that is not possible.
        """
        await self._threads.run(self._files.remake, self.generation)
        self._threads.io.open()
        self.generation = self._files.meta.generation
        self._slots.restart(len(self._files.slabs) * self._files.meta.slots_per_slab)
        self._space_due, self._lost = 0.0, False
        self._loss = (
            f"{self._files.folder}: the files were deleted by another program, with all objects, "
            f"and made anew: {SPARE_FOLDER}"
        )
        log.info("file store made anew", folder=str(self._files.folder))

    def condition(self) -> str:
        """See `Backend.condition`. For any thread."""
        if self._files.lost:
            return self._files.trouble
        if time.monotonic() < self._loss_shown_until:
            return self._loss
        return self._concern or self.supply.growth.concern()

    # -- reading

    def present(self, key: bytes) -> bool:
        """See `Medium.present`."""
        return key in self.objects

    async def load(self, key: bytes, into: memoryview) -> Outcome:
        """See `Medium.load`."""
        return (await self.load_group([key], [into], _no_deadline))[0]

    async def load_group(
        self, keys: Sequence[bytes], into: Sequence[memoryview], expired: Expired
    ) -> Sequence[Outcome]:
        """See `Groups.load_group`."""
        outcomes = [Outcome.MISS] * len(keys)
        generation = self.generation
        found = {i: self.objects[key] for i, key in enumerate(keys) if key in self.objects}
        if not found:
            return outcomes
        slots = [slot for slot, _ in found.values()]
        with self._slots.reading(slots):
            wanted = [(*one, into[i]) for i, one in found.items()]
            read = await load_batch(self._files, self._threads, wanted, self.arena, expired)
        self._notice_loss()
        for (i, one), outcome in zip(found.items(), read, strict=True):
            if outcome == Outcome.OK and generation == self.generation:
                outcomes[i] = outcome
            else:
                outcomes[i] = await self._settled(keys[i], one, outcome, generation)
        return outcomes

    async def check(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        """Read objects for a scrub: damaged ones are given up, and reported gone with the next
        batch. None counts as read or used."""
        outcomes = await self.load_group(keys, into, _no_deadline)
        damaged = [key for key, one in zip(keys, outcomes, strict=True) if one == Outcome.CORRUPT]
        if damaged:
            self._counters.outcomes[Outcome.CORRUPT] += len(damaged)
            pending = self._inventory.pending
            self._inventory.catalog.remove(key for key in damaged if key not in pending)
            self.removed_outside = True
            log.error("corrupt object", found_by="scrub", objects=len(damaged))

    async def _settled(
        self, key: bytes, found: tuple[int, bytes], outcome: Outcome, generation: int
    ) -> Outcome:
        """The outcome of a read that has ended. An object that is corrupt or missing is given up.

        Args:
            key: of the object.
            found: its slot and mark when the read began.
            outcome: of the read.
            generation: of the store when the read began.
        """
        slot, _ = found
        if outcome not in (Outcome.CORRUPT, Outcome.MISS):
            return outcome if generation == self.generation else Outcome.MISS
        if self._files.read_only or self.objects.get(key) != found:
            # Evicted, cleared or replaced during the read, by this process or by the one that
            # writes here.
            return Outcome.MISS
        del self.objects[key]
        if outcome == Outcome.MISS:
            self._slots.give([slot])
            return outcome
        self.supply.quarantine(slot)
        await self._threads.io.erase([slot])
        return outcome

    # -- writing

    async def save(self, key: bytes, data: memoryview) -> Outcome:
        """See `Medium.save`: the payload, into a free slot. `seal` makes it an object."""
        return (await self.save_group([key], [data], _no_deadline))[0]

    async def save_group(
        self, keys: Sequence[bytes], data: Sequence[memoryview], expired: Expired
    ) -> Sequence[Outcome]:
        """See `Groups.save_group`."""
        if self._files.read_only:
            return [Outcome.NO_SPACE] * len(keys)
        outcomes = await self._save_once(keys, data, expired)
        for i, outcome in enumerate(outcomes):
            if outcome != Outcome.NO_SPACE or not await self._squeeze(first=True):
                continue
            # The slot of another object has its space on the disk.
            outcomes[i] = (await self._save_once([keys[i]], [data[i]], expired))[0]
            if outcomes[i] == Outcome.NO_SPACE:
                self._no_eviction_until = now() + GROW_AGAIN
        return outcomes

    async def _save_once(
        self, keys: Sequence[bytes], data: Sequence[memoryview], expired: Expired
    ) -> list[Outcome]:
        """Write payloads to free slots, without eviction for those that the disk refuses."""
        outcomes = [Outcome.LATE] * len(keys)
        taken: dict[int, int] = {}  # slots, by position
        try:
            await self.supply.take_batch(taken, outcomes, self._squeeze, expired)
            if taken:
                payloads = [keys[i] for i in taken], [data[i] for i in taken]
                written = await self._write(*payloads, list(taken.values()), expired)
                for i, outcome in zip(taken, written, strict=True):
                    outcomes[i] = outcome
        except BaseException:
            self._slots.give(slot for i, slot in taken.items() if keys[i] not in self.written)
            raise
        return outcomes

    async def _write(
        self,
        keys: Sequence[bytes],
        data: Sequence[memoryview],
        slots: Sequence[int],
        expired: Expired,
    ) -> list[Outcome]:
        """Write payloads to slots. Slots that hold none afterwards are free, or in quarantine."""
        found = await self.writes.write(keys, data, slots, self.generation, expired)
        outcomes = []
        for key, slot, (outcome, entry) in zip(keys, slots, found, strict=True):
            if outcome == Outcome.OK:
                self.written[key] = (slot, entry)
            elif outcome == Outcome.CORRUPT:
                self.supply.quarantine(slot)
                outcome = Outcome.UNAVAILABLE
            else:
                self._slots.give([slot])
            outcomes.append(outcome)
        return outcomes

    async def _squeeze(self, *, first: bool = False) -> bool:
        """Evict the least recently used object because the disk has no space, although the
        capacity is not reached.

        Args:
            first: its slot is the next one to be taken.
        """
        if now() < self._no_eviction_until:
            return False
        victim = self._inventory.catalog.evict(self._inventory.pending)
        if victim is None:
            return False
        self._evicted.append(victim)
        self._counters.evicted += 1
        slot = self.objects[victim][0] if victim in self.objects else None
        await self.erase([victim])
        if first:
            self._slots.first(slot)
        return True

    def take_evicted(self) -> list[bytes]:
        """See `Medium.take_evicted`."""
        evicted, self._evicted = self._evicted, []
        return evicted

    async def seal(self, keys: Sequence[bytes]) -> Outcome:
        """See `Medium.seal`: write the entries, and if synced, wait for the device."""
        entries = [self.written[key] for key in keys]
        outcome = await self._threads.io.seal(entries, sync=self._synced)
        for key in keys:
            slot, entry = self.written.pop(key)
            if outcome == Outcome.OK and not self._files.lost:
                self.objects[key] = (slot, mark_of(entry))
            else:
                self._slots.give([slot])
        self._notice_loss()
        return Outcome.UNAVAILABLE if self._files.lost else outcome

    def abandon(self, keys: Iterable[bytes]) -> None:
        """See `Medium.abandon`."""
        for key in keys:
            slot_entry = self.written.pop(key, None)
            if slot_entry is not None:
                self._slots.give([slot_entry[0]])

    # -- removing

    async def erase(self, keys: Sequence[bytes]) -> Outcome:
        """See `Medium.erase`."""
        slots = [self.objects.pop(key)[0] for key in keys if key in self.objects]
        with self._slots.erasing(slots):
            if not slots or self._files.read_only:
                return Outcome.OK
            return await self._threads.io.erase(slots)

    async def sync_table(self) -> None:
        """Wait until the device has every entry that was written or erased.

        Raises:
            StoreError: the disk refused.
        """
        try:
            await self._threads.run(self._files.sync_table)
        except OSError as error:
            self._files.failed(error)
            raise StoreError(self._files.trouble) from error

    async def wipe(self, expired: Expired) -> str:
        """See `Backend.wipe`. The slots without an object, a part of them at a time, which is not
        handed out until it is overwritten. A read in flight finds a wrong checksum, and its object
        is not in the store any more."""
        slots, part = self._slots, max(1, WIPE_BYTES // self._files.meta.stride)
        try:
            with slots.reading(retired := slots.retired()):
                for start in range(0, len(retired), part):
                    if expired():
                        return WIPE_LATE
                    await self._threads.run(self._files.wipe, retired[start : start + part])
            # Those that writes have taken are free again, with old bytes, if the writes fail.
            meta = self._files.meta
            left = len(self._files.slabs) * meta.slots_per_slab - len(self.objects) - len(retired)
            while not expired():
                some = slots.take(min(part, left))
                left -= len(some)
                if not some:
                    await self._threads.run(self._files.wiped)
                    return ""
                with slots.erasing(some):
                    await self._threads.run(self._files.wipe, some)
        except OSError as error:
            self._files.failed(error)
            return self._files.trouble
        return WIPE_LATE

    async def clear(self, generation: int) -> None:
        """Drop every object: the store gets another generation, in memory immediately, on the
        device before this returns. Entries of earlier generations are free slots from then on.

        Raises:
            StoreError: the disk refused, or the store is read-only.
        """
        if self._files.read_only:
            raise StoreError(
                f"{self._files.folder} is open read-only: the process that writes there can clear "
                "it"
            )
        self._inventory.catalog.clear()
        slots = [slot for slot, _ in self.objects.values()]
        self.objects.clear()
        self.generation = max(self.generation + 1, generation)
        if self._files.lost:  # the generation is that of the files that follow
            return
        with self._slots.erasing(slots):
            await self.generations.advance(lambda: self.generation)

    async def each(self, work: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """See `Medium.each`: as many concurrently as there are threads."""
        await self._threads.each(work)

    def statistics(self) -> FileStatistics:
        """Sizes of the files."""
        return statistics(self._files, self._slots, self._torn, self._scan_s, self.supply.capacity)


# -- the space


SHARE = 0.8
"""Of the free space and what the store has already: its capacity if none is set."""

LITTLE_BYTES = 256 << 20
"""A capacity that follows the free space is a fault below this."""


class FileStatistics(NamedTuple):
    """A moment's picture of the files.

    Attributes:
        direct: whether the page cache is passed by.
        quarantined: slots that held bad objects and are not used now.
        torn: entries that made no sense when the store was opened.
        scan_s: seconds to find out what was there.
        capacity: objects at most.
    """

    slots: int
    free: int
    slabs: int
    direct: bool
    quarantined: int
    torn: int
    scan_s: float
    capacity: int


class Space(NamedTuple):
    """Space for the objects of a store.

    Attributes:
        capacity: objects at most.
        own: bytes that its slabs occupy.
        free: bytes that the file system has left.
        others: bytes of the objects of stores of other layouts.
        concern: why the capacity is less than it should be, and the remedy. Empty if it is not.
    """

    capacity: int
    own: int
    free: int
    others: int
    concern: str


class SpaceReader:
    """Reckons the capacity of a store. Every call blocks and belongs in a thread, one call at a
    time.

    Args:
        files: of the store.
        wanted: capacity in objects as configured, 0 for a share of the space.
    """

    def __init__(self, files: SlabFiles, wanted: int) -> None:
        self._files = files
        self._wanted = wanted
        self._counted: dict[Path, tuple[tuple[int, int], int]] = {}

    def read(self, objects: int) -> Space:
        """The space as it is now. It never makes less of the capacity than the `objects` that the
        store holds within what is configured: nothing is gained by their eviction. OSError."""
        files, wanted, stride = self._files, self._wanted, self._files.meta.stride
        own, free, others = own_bytes(files), files.free_bytes(), 0
        concern = ""
        if wanted:
            others = self._bytes_of_others()
            left = wanted - -(-others // stride)
            capacity = max(1, left, min(wanted, objects))
            if 2 * left < wanted:
                concern = (
                    "stores of other layouts hold more than half of its capacity: "
                    f"'kvactors store prune {files.folder.parent}' removes them"
                )
        else:
            share = int(SHARE * (free + own)) - files.floor
            if files.slabs:  # it grows by whole slabs
                slab = files.meta.slots_per_slab * stride
                share = min(share, (len(files.slabs) + max(0, free - files.floor) // slab) * slab)
            capacity = max(1, objects, share // stride)
            if capacity * stride < LITTLE_BYTES:
                concern = (
                    "its capacity follows the free space and is below 256 MiB: free space at "
                    f"{files.folder}, or set storage.capacity_bytes"
                )
        return Space(capacity, own, free, others, concern)

    def _bytes_of_others(self) -> int:
        """Bytes of the objects of other layouts (identities) beside this store, under the same
        model, namespace and rank."""
        found = 0
        for table in self._files.folder.parent.glob("*/table"):
            if table.parent == self._files.folder:
                continue
            try:
                state = table.lstat()
                stamp = (state.st_mtime_ns, state.st_size)
                if self._counted.get(table, (None,))[0] != stamp:
                    self._counted[table] = (stamp, bytes_held(table))
                found += self._counted[table][1]
            except OSError:  # removed since, damaged, or of another version
                continue
        return found


def survey(files: SlabFiles, space: SpaceReader | None) -> tuple[TableReader, Survey, Space | None]:
    """Open the files, read the table, and reckon the capacity, except for a view. Blocks.
    StoreError."""
    try:
        slots = files.open()
        table = TableReader(files)
        found = table.read(slots)
        return table, found, None if space is None else space.read(len(found.found))
    except StoreError:  # an OSError, which names the folder already
        raise
    except OSError as error:
        raise StoreError(f"{files.folder}: {error}") from error


def bytes_held(table: Path) -> int:
    """Bytes of the objects of a store, by its table. StoreError, OSError."""
    found = 0
    with table.open("rb") as file:
        meta = meta_of(file.read(PAGE), str(table))
        while chunk := file.read(CHUNK * meta.entry_bytes):
            found += count_used(chunk, meta)
    return found * meta.stride


def own_bytes(files: SlabFiles) -> int:
    """Bytes that the store's slabs occupy. OSError."""
    slabs = (files.folder / f"slab-{number:04}" for number in range(len(files.slabs)))
    return sum(slab.lstat().st_blocks * 512 for slab in slabs)


def statistics(
    files: SlabFiles, slots: Slots, torn: int, scan_s: float, capacity: int
) -> FileStatistics:
    """A moment's picture."""
    slabs = len(files.slabs)
    total = slabs * files.meta.slots_per_slab
    return FileStatistics(
        total, len(slots.free), slabs, files.direct, slots.quarantined, torn, scan_s, capacity
    )


# -- a view of a store that another process writes


REFRESH_S = 0.2
"""Seconds between two looks at the table. A look that takes long is followed by a pause of nine
times that."""

STEP = 1024
"""Objects that are taken in before other tasks may run."""


class SlabView:
    """Objects of a read-only store, as its table has them.

    Args:
        medium: reads the objects.
        files: of the store.
        threads: read the table.
        inventory: the keys of the store.
    """

    def __init__(
        self,
        medium: SlabMedium,
        files: SlabFiles,
        threads: SlabThreads,
        inventory: OwnedInventory,
    ) -> None:
        self._medium = medium
        self._files = files
        self._threads = threads
        self._inventory = inventory
        self._table: TableReader | None = None
        self._version: tuple[int, int] | None = None  # of the table as it was read
        self._read_twice = False  # the clock of the file system has ticked since that version
        self._keys: dict[int, bytes] = {}  # by slot
        self._due = 0.0

    async def open(self) -> None:
        """Open the files and take in their objects. StoreError, also if there is no store yet."""
        self._table, found, _ = await self._threads.run(survey, self._files, None)
        self._threads.io.open()
        await self._take_in(found)
        self._due = now() + REFRESH_S
        log.info("file store view open", folder=str(self._files.folder), objects=len(self._keys))

    async def refresh(self) -> None:
        """Take in what has changed, unless that was done a moment ago. The objects stay as they
        are if the table cannot be read now."""
        began = now()
        if began < self._due:
            return
        self._due = float("inf")  # one look at a time
        try:
            # Changes that were read are taken in even if the caller is cancelled.
            await wait_uncancelled(asyncio.ensure_future(self._follow()))
        finally:
            self._due = now() + max(REFRESH_S, 9 * (now() - began))

    async def _follow(self) -> None:
        try:
            if self._table is None:
                await self._open_again()
            elif await self._threads.run(self._files.in_place):
                await self._take_in(await self._threads.run(self._changes, self._table))
            else:
                await self._lose()
        except OSError as error:
            self._files.failed(error)

    def _changes(self, table: TableReader) -> Survey:
        """Blocks. OSError, StoreError."""
        version = self._files.version()
        if version == self._version and self._read_twice:
            return Survey([], [], 0)
        found = table.read(self._files.follow())
        self._read_twice, self._version = version == self._version, version
        return found

    async def _take_in(self, found: Survey) -> None:
        objects, catalog = self._medium.objects, self._inventory.catalog
        changed, new = iter(found.changed), iter(found.found)
        while slots := list(islice(changed, STEP)):
            gone = []
            for slot in slots:
                key = self._keys.pop(slot, b"")
                if objects.get(key, (-1,))[0] == slot:
                    del objects[key]
                    gone.append(key)
            self._inventory.acknowledge_removed(catalog.remove(gone))
            await asyncio.sleep(0)
        while some := list(islice(new, STEP)):
            self._enter(some)
            await asyncio.sleep(0)

    def _enter(self, found: list[Stored]) -> None:
        for one in found:
            self._keys[one.slot] = one.key
            self._medium.objects[one.key] = (one.slot, one.mark)
        self._inventory.catalog.admit([one.key for one in found])

    async def _lose(self) -> None:
        """The files were deleted. They are opened again when no read uses them any more, once the
        process that writes has made them anew."""
        self._table = None
        await self._take_in(Survey([], list(self._keys), 0))
        log.warning("the files of a view were deleted", folder=str(self._files.folder))

    async def _open_again(self) -> None:
        if self._threads.busy:
            return
        try:
            await self._threads.run(self._files.close)
            await self.open()
        except StoreError as error:
            self._files.failed(error)


# -- the scrub


STEP_BYTES = 1 << 20
"""Bytes that are read together, at least one object."""

PAUSE_S = 10.0
"""Seconds between two passes, so that an empty store is not looked at without end."""


class Scrub:
    """Reads the objects of a store one after another, at a bounded rate.

    Args:
        medium: reads the objects, and gives up damaged ones.
        catalog: of the store.
        block_bytes: size of an object.
        stride: bytes that an object takes on the disk.
        rate: bytes a second.
        in_use: a call uses the files inside.
    """

    def __init__(
        self,
        medium: SlabMedium,
        catalog: Catalog,
        block_bytes: int,
        stride: int,
        rate: int,
        in_use: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._medium = medium
        self._catalog = catalog
        self._seconds = stride / rate  # an object
        self._views = [
            memoryview(bytearray(block_bytes)) for _ in range(max(1, STEP_BYTES // stride))
        ]
        self._in_use = in_use
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """The store is open."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self, limit: float) -> None:
        """Read no more. Waits for a read in flight, at most `limit` seconds."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=limit)

    async def _run(self) -> None:
        while True:
            await self.read_all()
            await asyncio.sleep(PAUSE_S)

    async def read_all(self) -> None:
        """One pass. Objects that are written during it may be left out."""
        for keys in self._pages():
            with self._in_use():
                await self._medium.check(keys, self._views[: len(keys)])
            await asyncio.sleep(len(keys) * self._seconds)

    def _pages(self) -> Iterator[list[bytes]]:
        step = len(self._views)
        for part in self._catalog.slices():
            for start in range(0, len(part), step):
                yield part[start : start + step]


class Generations:
    """Writes the store's generation to the first page.

    Attributes:
        pending: whether the last one is not there yet.
    """

    def __init__(self, files: SlabFiles, threads: Workers) -> None:
        self.pending = False
        self._files = files
        self._threads = threads
        self._last: asyncio.Task[None] | None = None

    async def advance(self, generation: Callable[[], int]) -> None:
        """Make the generation of the moment durable, after every earlier step: the first page never
        goes back. StoreError if the disk refuses."""
        self.pending = True
        advancing = self._last = asyncio.get_running_loop().create_task(
            self._advance(self._last, generation)
        )
        try:
            await wait_uncancelled(advancing)
        finally:
            if self._last is advancing:
                self._last = None

    async def _advance(
        self, before: asyncio.Task[None] | None, generation: Callable[[], int]
    ) -> None:
        if before is not None:
            await asyncio.wait([before])
        number = generation()
        try:
            await asyncio.wrap_future(self._threads.submit(lambda: self._files.advance(number)))
        except OSError as error:
            raise StoreError(
                f"{self._files.folder}: the store could not be cleared: {error}"
            ) from error
        if number == generation():
            self.pending = False
