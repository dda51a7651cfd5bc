"""Objects of a file store: the slot of each key, and the reads and writes of slots."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence

from kvactors.actor.clock import now
from kvactors.actor.log import get_logger
from kvactors.device.arena import Arena
from kvactors.errors import StoreError
from kvactors.storage.backends.base import Expired
from kvactors.storage.backends.file_survey import (
    FileStatistics,
    Space,
    SpaceReader,
    Stored,
    statistics,
    survey,
)
from kvactors.storage.backends.slab_files import SPARE_FOLDER, SlabFiles
from kvactors.storage.backends.slab_objects import load_batch
from kvactors.storage.backends.slab_steps import GROW_AGAIN, Generations
from kvactors.storage.backends.slab_table import mark_of
from kvactors.storage.backends.slab_threads import SlabThreads
from kvactors.storage.backends.slab_writes import SlabWrites
from kvactors.storage.backends.slot_supply import SlotSupply
from kvactors.storage.counters import StoreCounters
from kvactors.storage.inventory import OwnedInventory
from kvactors.storage.messages import Outcome

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
