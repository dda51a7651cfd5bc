"""A store of preallocated slab files: the default, without a server. `layout` has the folder,
`table` the format of the table."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from kvactors.actor.clock import now
from kvactors.actor.log import get_logger
from kvactors.actor.uncancelled import uncancelled
from kvactors.device.arena import Arena
from kvactors.errors import StoreError
from kvactors.files import open_private
from kvactors.flush_notifier.messages import PathPart
from kvactors.identity import Lineage, StoreIdentity
from kvactors.storage.backend import Expired, Keys, ReadReport, Views, WriteReport
from kvactors.storage.file.io import SlabIo
from kvactors.storage.file.layout import SPARE_FOLDER, SlabFiles
from kvactors.storage.file.slots import GROW_AGAIN_S, SlotSupply
from kvactors.storage.file.table import (
    CHUNK_ENTRIES,
    PAGE,
    SALT,
    WRITTEN_AT,
    Meta,
    SlabPaths,
    StoredSlot,
    blank_entry,
    count_used,
    entry_bytes_for,
    fields_of_lineage,
    mark_of,
    meta_of,
    room_beside,
)
from kvactors.storage.local_store import LocalStore
from kvactors.storage.messages import Outcome

log = get_logger()

SLAB_BYTES = 256 << 20
"""Bytes of a slab, unless the whole capacity is less."""

ANEW_CHECK_S = 0.01
"""Seconds between two looks at whether calls use files that were deleted."""

CLOSE_LIMIT_S = 1.0
"""Seconds that calls may take to end when the store is closed. Threads that hang for longer are
abandoned."""


SPACE_PAUSE_S = 10.0
"""Seconds between two looks at the space, unless a look takes long."""

LOSS_SHOWN_S = 600.0
"""Seconds for which the loss of the store's files is a fault, although it works again."""


WIPE_BYTES = 64 << 20
"""Bytes of freed slots that are overwritten between two looks at the deadline."""

WIPE_LATE = "the deadline has passed"


@dataclass(slots=True, eq=False)
class SlabBatch:
    """Objects that are being written.

    Attributes:
        written: slot and entry, by position, of payloads whose entries are not written yet.
    """

    keys: Keys
    data: Views
    lineages: Sequence[Lineage | None]
    expired: Expired
    outcomes: list[Outcome]
    written: dict[int, tuple[int, bytes]] = field(default_factory=dict)


class FileBackend(LocalStore):
    """Objects in slots of slab files, and a table of the key in each slot.

    Args:
        capacity: objects at most, 0 for 80 % of the space that the file system has left.
        depth: reads at the same time.
        write_depth: writes at the same time, 0 for as many as reads.
        block_size: tokens of a block, if lineages are kept; 0 if not.
    """

    wipes = True
    more_space = "Free space, raise the quota of the disk, or lower storage.capacity_bytes"

    def __init__(
        self,
        folder: str | Path,
        digest: bytes,
        block_bytes: int,
        capacity: int = 0,
        *,
        floor: int = 0,
        durability: Literal["written", "synced"] = "written",
        depth: int = 16,
        write_depth: int = 0,
        identity: StoreIdentity | None = None,
        block_size: int = 0,
    ) -> None:
        super().__init__(digest, block_bytes, capacity)
        self.keeps_lineages = block_size > 0
        names = identity or StoreIdentity("", "", digest)
        stride = object_stride(block_bytes)
        per_slab = max(1, SLAB_BYTES // stride)
        meta = Meta(
            digest.hex(),
            block_bytes,
            stride,
            min(per_slab, capacity) if capacity else per_slab,
            model=names.model,
            namespace=names.namespace,
            rank=names.rank,
            ranks=names.ranks,
            entry_bytes=entry_bytes_for(block_size),
        )
        place = Path(folder) / digest.hex()[:16]
        self.files = SlabFiles(place, meta, floor)
        self.io = SlabIo(self.files, depth, write_depth or depth)
        self.supply = SlotSupply(self.files, self.io.workers, self.catalog)
        # Slot and mark of the table entry, by key, of the objects that can be read.
        self.objects: dict[bytes, tuple[int, bytes]] = {}
        self.sequence = 0
        self.arena: Arena | None = None
        self._paths: SlabPaths | None = None
        self._synced = durability == "synced"
        self.calls = 0  # in progress, that use the files
        self._evicted: list[bytes] = []  # by `_evict_for_disk_space`, until a batch reports them
        self._no_eviction_until = 0.0
        self._space = SpaceReader(self.files, capacity)
        self._space_due = 0.0
        self._concern = ""  # why the capacity is too small
        self._loss = ""  # of all objects, for `condition`
        self._loss_shown_until = 0.0
        self._lost = False
        self._advancing: asyncio.Future[None] | None = None  # a step of the generation

    # -- opening and closing

    async def open(self) -> None:
        """See `Backend.open`. If the capacity has shrunk, the objects written last stay."""
        self.files.loop = asyncio.get_running_loop()
        try:
            await self._open_files()
        except BaseException as error:
            await self.close()
            if isinstance(error, OSError) and not isinstance(error, StoreError):
                raise StoreError(f"{self.files.folder}: {error}") from error
            raise

    async def _open_files(self) -> None:
        await self.io.run(self.files.open)
        found = await self.io.run(self.files.scan)
        self.io.open()
        self.generation = self.files.meta.generation
        space = await self.io.run(self._space.read, len(found.found))
        self._settle(space)
        self._space_due = now() + SPACE_PAUSE_S
        log.info(
            "file store open",
            folder=str(self.files.folder),
            capacity_bytes=space.capacity * self.files.meta.stride,
            capacity_objects=space.capacity,
            own_bytes=space.own,
            free_bytes=space.free,
            other_layouts_bytes=space.others,
            objects=len(found.found),
            torn=found.torn,
        )
        evicted, doubles = await self.io.run(self._enter, found.found)
        await self.io.erase(doubles)
        await self.erase(evicted)
        await self._drop_empty_slabs()

    def _enter(self, found: list[StoredSlot]) -> tuple[list[bytes], list[int]]:
        """Take in the objects of the table, the oldest first. Returns the keys beyond the capacity,
        and the slots of earlier writes of a key."""
        evicted: list[bytes] = []
        doubles: list[int] = []
        for sequence, slot, key, mark, salt, *_ in found:
            before = self.objects.get(key)
            if before is not None:
                doubles.append(before[0])
            self.objects[key] = (slot, mark)
            evicted += self.catalog.admit([key], {key: salt}).evicted
            self.sequence = sequence + 1
        used = {slot for slot, _ in self.objects.values()}
        slots = len(self.files.slabs) * self.files.meta.slots_per_slab
        self.supply.give(slot for slot in range(slots) if slot not in used)
        return evicted, doubles

    async def _drop_empty_slabs(self) -> None:
        """Delete slabs at the end that a smaller capacity does not need."""
        per_slab = self.files.meta.slots_per_slab
        last = max((slot for slot, _ in self.objects.values()), default=-1)
        needed = -(-self.supply.capacity // per_slab)
        keep = max(last // per_slab + 1, min(needed, len(self.files.slabs)))
        await self.io.run(self.files.shrink, keep)
        self.supply.free = deque(slot for slot in self.supply.free if slot < keep * per_slab)

    async def close(self) -> None:
        """See `Backend.close`. Takes about a second at most, then abandons hanging threads."""
        self.stuck = not await uncancelled(self.io.close(CLOSE_LIMIT_S))
        if self.stuck and self.arena is not None:
            self.arena.keep()

    async def attach(self, arena: Arena) -> None:
        self.arena = arena
        self.io.attach(arena)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1

    # -- the space, and the loss of the files

    async def follow_space(self) -> None:
        """Reckon the capacity again, unless that was done a moment ago: the free space changes, and
        so do the stores of other layouts."""
        began = now()
        if began < self._space_due:
            return
        self._space_due = float("inf")  # one look at a time
        try:
            space = await self.io.run(self._space.read, len(self.catalog))
        except FileNotFoundError:  # a slab
            self.files.lose()
            self._notice_loss()
        except OSError as error:
            self.files.failed(error)
        else:
            self._settle(space)
        finally:
            self._space_due = now() + max(SPACE_PAUSE_S, 50 * (now() - began))

    def _settle(self, space: Space) -> None:
        if space.capacity > self.supply.capacity:
            self.supply.pause_until = 0.0
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
        if not self.files.lost or self._lost:
            return
        self._lost = True
        self._loss_shown_until = time.monotonic() + LOSS_SHOWN_S
        lost = self.catalog.remove(key for key in self.objects if key not in self.pending)
        self.objects.clear()
        self.removed_outside = True
        log.warning("file store lost", reason=self.files.trouble, objects=len(lost))

    async def _begin_anew(self, expired: Expired) -> bool:
        """Make the files again, which were deleted, once no call uses the old ones. Returns whether
        they are there."""
        while self.files.lost and (self.calls or self.io.busy):
            if expired():
                return False
            await asyncio.sleep(ANEW_CHECK_S)
        if not self.files.lost:
            return True
        with self.in_use():
            try:
                await self.io.run(self.files.remake, self.generation)
            except StoreError:
                return False
            self.io.open()
            self.generation = self.files.meta.generation
            self.supply.restart(len(self.files.slabs) * self.files.meta.slots_per_slab)
            self._space_due, self._lost = 0.0, False
            self._loss = (
                f"{self.files.folder}: the files were deleted by another program, with all "
                f"objects, and made anew: {SPARE_FOLDER}"
            )
            log.info("file store made anew", folder=str(self.files.folder))
        return True

    # -- reading

    async def read(self, keys: Keys, views: Views, expired: Expired) -> ReadReport:
        with self.in_use():
            return await super().read(keys, views, expired)

    def present(self, key: bytes) -> bool:
        return key in self.objects

    async def load_group(self, keys: Keys, into: Views, expired: Expired) -> Sequence[Outcome]:
        if not keys or expired():
            return [Outcome.LATE] * len(keys)
        outcomes = [Outcome.MISS] * len(keys)
        generation = self.generation
        found = {i: self.objects[key] for i, key in enumerate(keys) if key in self.objects}
        if not found:
            return outcomes
        slots, marks = zip(*found.values(), strict=True)
        views = [into[i] for i in found]
        with self.supply.reading(slots):
            read = await self.io.read(slots, views, marks, expired)
        self._notice_loss()
        for (i, one), outcome in zip(found.items(), read, strict=True):
            if outcome == Outcome.OK and generation == self.generation:
                outcomes[i] = outcome
            else:
                outcomes[i] = await self._settled(keys[i], one, outcome, generation)
        return outcomes

    async def _settled(
        self, key: bytes, found: tuple[int, bytes], outcome: Outcome, generation: int
    ) -> Outcome:
        """The outcome of a read that began with `found` (slot and mark) and `generation`. An object
        that is corrupt or missing is given up."""
        slot, _ = found
        if outcome not in (Outcome.CORRUPT, Outcome.MISS):
            return outcome if generation == self.generation else Outcome.MISS
        if self.objects.get(key) != found:  # evicted, cleared or replaced during the read
            return Outcome.MISS
        del self.objects[key]
        if outcome == Outcome.MISS:
            self.supply.give([slot])
            return outcome
        self.supply.quarantine(slot)
        await self.io.erase([slot])
        return outcome

    # -- writing

    async def write(
        self,
        keys: Keys,
        views: Views,
        expired: Expired,
        lineages: Sequence[Lineage | None] = (),
        salts: Sequence[int | None] = (),
    ) -> WriteReport:
        if self.files.lost and not await self._begin_anew(expired):
            return WriteReport(bytes([Outcome.UNAVAILABLE]) * len(keys), [])
        await self.follow_space()
        self.supply.release()
        with self.in_use():
            report = await super().write(keys, views, expired, lineages, salts)
        evicted, self._evicted = self._evicted, []
        return WriteReport(report.outcomes, report.evicted + evicted)

    async def save_group(
        self, keys: Keys, data: Views, expired: Expired, lineages: Sequence[Lineage | None] = ()
    ) -> Sequence[Outcome]:
        """See `LocalStore.save_group`: all payloads, into free slots, and then their entries."""
        batch = SlabBatch(keys, data, lineages, expired, [Outcome.LATE] * len(keys))
        if not keys or expired():
            return batch.outcomes
        try:
            await self._save(batch, range(len(keys)))
            for i, outcome in enumerate(batch.outcomes):
                if outcome == Outcome.NO_SPACE and await self._evict_for_disk_space(first=True):
                    # The slot of another object has its space on the disk.
                    await self._save(batch, [i])
                    if batch.outcomes[i] == Outcome.NO_SPACE:
                        self._no_eviction_until = now() + GROW_AGAIN_S
            await self._seal(batch)
        finally:
            self.supply.give(slot for slot, _ in batch.written.values())
        return batch.outcomes

    async def _save(self, batch: SlabBatch, which: Sequence[int]) -> None:
        """Write payloads to free slots, without eviction for those that the disk refuses."""
        outcomes = [Outcome.LATE] * len(which)
        taken: dict[int, int] = {}  # slots, by position in `which`
        try:
            await self.supply.take_batch(taken, outcomes, self._evict_for_disk_space, batch.expired)
            for i, outcome in zip(which, outcomes, strict=True):
                batch.outcomes[i] = outcome
            if taken:
                await self._write(batch, [which[n] for n in taken], list(taken.values()))
        except BaseException:
            written = {slot for slot, _ in batch.written.values()}
            self.supply.give(slot for slot in taken.values() if slot not in written)
            raise

    async def _write(self, batch: SlabBatch, which: Sequence[int], slots: Sequence[int]) -> None:
        """Write payloads to slots. Slots that hold none afterwards are free."""
        data = [batch.data[i] for i in which]
        found, records = await self.io.write(slots, data, self._blanks(batch, which), batch.expired)
        size = self.files.meta.entry_bytes
        for n, (i, slot, outcome) in enumerate(zip(which, slots, found, strict=True)):
            if outcome == Outcome.OK:
                batch.written[i] = (slot, records[n * size : (n + 1) * size])
            else:
                self.supply.give([slot])
            batch.outcomes[i] = outcome

    def _blanks(self, batch: SlabBatch, which: Sequence[int]) -> list[bytes]:
        """The entries of new objects, but for the checksums."""
        meta, sequence = self.files.meta, self.sequence
        self.sequence += len(which)
        moment = {WRITTEN_AT: (time.time_ns() // 1000).to_bytes(8, "little")}
        room, found = room_beside(meta, moment), []
        for n, i in enumerate(which):
            key, lineage = batch.keys[i], batch.lineages[i] if batch.lineages else None
            fields = fields_of_lineage(lineage, room)
            if not fields and (salt := self.catalog.salt(key)) is not None:
                fields = {SALT: salt.to_bytes(8, "little")}
            found.append(
                blank_entry(meta, key, sequence + n, self.generation, {**moment, **fields})
            )
        return found

    async def _seal(self, batch: SlabBatch) -> None:
        """Write the entries of saved payloads, and if synced, wait for the device: they are objects
        then."""
        # The others were evicted by another batch since, or cleared.
        wanted = [i for i in batch.written if batch.keys[i] in self.catalog]
        if not wanted:
            return
        outcome = await self.io.seal([batch.written[i] for i in wanted], sync=self._synced)
        if self.files.lost:
            outcome = Outcome.UNAVAILABLE
        for i in wanted:
            batch.outcomes[i] = outcome
            if outcome == Outcome.OK:
                slot, entry = batch.written.pop(i)
                self.objects[batch.keys[i]] = (slot, mark_of(entry))
        self._notice_loss()

    async def _evict_for_disk_space(self, *, first: bool = False) -> bool:
        """Evict the least recently used object because the disk has no space, although the
        capacity is not reached. With `first`, its slot is the next one to be taken."""
        if now() < self._no_eviction_until:
            return False
        victim = self.catalog.evict(self.pending)
        if victim is None:
            return False
        self._evicted.append(victim)
        self.counters.evicted += 1
        slot = self.objects[victim][0] if victim in self.objects else None
        await self.erase([victim])
        if first:
            self.supply.first(slot)
        return True

    # -- removing

    async def erase(self, keys: Keys) -> Outcome:
        slots = [self.objects.pop(key)[0] for key in keys if key in self.objects]
        if not slots:
            return Outcome.OK
        with self.supply.erasing(slots):
            return await self.io.erase(slots)

    async def remove(self, keys: Keys) -> None:
        with self.in_use():
            await super().remove(keys)

    async def forget(self, salt: int) -> int:
        with self.in_use():
            unknown = await super().forget(salt)
            try:
                await self.io.run(self.files.sync_table)
            except OSError as error:
                self.files.failed(error)
                raise StoreError(self.files.trouble) from error
        return unknown

    async def clear(self, generation: int = 0) -> None:
        """See `Backend.clear`. Removes no file: the store gets another generation, in memory
        immediately, on the device before this returns. Entries of earlier generations are free
        slots from then on."""
        self.catalog.clear()
        slots = [slot for slot, _ in self.objects.values()]
        self.objects.clear()
        self.generation = max(self.generation + 1, generation)
        if self.files.lost:  # the generation is that of the files that follow
            return
        with self.in_use(), self.supply.erasing(slots):
            self.clear_pending = True
            await self._advance()

    async def _advance(self) -> None:
        """Make the generation of the moment durable, after every earlier step: the first page never
        goes back. The call works on no memory that a caller lent, so a cancelled clear leaves it
        alone: a disk that hangs must not keep the loop from ending."""
        while self._advancing is not None:
            await asyncio.wait([self._advancing])
        number = self.generation

        def advanced(step: asyncio.Future[None]) -> None:
            self._advancing = None
            if step.exception() is None and number == self.generation:
                self.clear_pending = False

        call = self.io.workers.submit(lambda: self.files.advance(number))
        step = self._advancing = asyncio.wrap_future(call)
        step.add_done_callback(advanced)
        await asyncio.wait([step])
        if isinstance(error := step.exception(), OSError):
            raise StoreError(
                f"{self.files.folder}: the store could not be cleared: {error}"
            ) from error
        step.result()

    async def wipe(self, expired: Expired) -> str:
        """See `Backend.wipe`. The slots without an object, a part of them at a time, which is not
        handed out until it is overwritten. A read in flight finds a wrong checksum, and its object
        is not in the store any more."""
        supply, part = self.supply, max(1, WIPE_BYTES // self.files.meta.stride)
        try:
            with self.in_use():
                with supply.reading(retired := supply.retired()):
                    for start in range(0, len(retired), part):
                        if expired():
                            return WIPE_LATE
                        await self.io.run(self.files.wipe, retired[start : start + part])
                # Those that writes have taken are free again, with old bytes, if the writes fail.
                slots = len(self.files.slabs) * self.files.meta.slots_per_slab
                left = slots - len(self.objects) - len(retired)
                while not expired():
                    some = supply.take_now(min(part, left))
                    left -= len(some)
                    if not some:
                        await self.io.run(self.files.wiped)
                        return ""
                    with supply.erasing(some):
                        await self.io.run(self.files.wipe, some)
        except OSError as error:
            self.files.failed(error)
            return self.files.trouble
        return WIPE_LATE

    # -- paths: one reading at a time, in the store's threads

    def begin_paths(self) -> None:
        if self.keeps_lineages:
            self._paths = SlabPaths(self.files, self.objects, self.catalog.slices())

    def end_paths(self) -> None:
        self._paths = None

    async def next_paths(self, most: int) -> list[PathPart] | None:
        """See `Backend.next_paths`. An error of the disk ends the reading."""
        paths, parts = self._paths, None
        if paths is None:
            return None
        try:
            parts = await self.io.run(paths.parts, most)
        except OSError as error:
            self.files.failed(error)
        if parts is None:
            if paths.skipped:
                log.warning(
                    "stored blocks whose lineage is damaged",
                    folder=str(self.files.folder),
                    blocks=paths.skipped,
                )
            if paths is self._paths:
                self._paths = None
        return parts

    # -- its condition

    def trouble(self) -> str:
        return self.files.trouble

    def condition(self) -> str:
        if self.files.lost:
            return self.files.trouble
        if time.monotonic() < self._loss_shown_until:
            return self._loss
        return self._concern or self.supply.concern()

    def take_removed(self) -> list[bytes]:
        self.removed_outside = False
        return super().take_removed()


def object_stride(block_bytes: int) -> int:
    """Bytes that an object takes in a slab: a block, in whole pages."""
    return -(-block_bytes // PAGE) * PAGE


# -- the space


FREE_SPACE_SHARE = 0.8
"""Of the free space and what the store has already: its capacity if none is set."""

SMALL_CAPACITY_BYTES = 256 << 20
"""A capacity that follows the free space is a fault below this."""


class Space(NamedTuple):
    """Space for the objects of a store, in bytes."""

    capacity: int  # in objects
    own: int
    free: int  # that the file system has left
    others: int  # of stores of other layouts
    concern: str  # why the capacity is less than it should be, and the remedy


class SpaceReader:
    """Reckons the capacity of a store. Every call blocks and belongs in a thread, one call at a
    time."""

    def __init__(self, files: SlabFiles, wanted: int) -> None:
        self._files = files
        self._wanted = wanted  # objects as configured, 0 for a share of the space
        self._counted: dict[Path, tuple[tuple[int, int], int]] = {}

    def read(self, objects: int) -> Space:
        """The space as it is now. It never makes less of the capacity than the `objects` that the
        store holds within what is configured: nothing is gained by their eviction. OSError."""
        files, wanted, stride = self._files, self._wanted, self._files.meta.stride
        own, free, others = files.own_bytes(), files.free_bytes(), 0
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
            share = int(FREE_SPACE_SHARE * (free + own)) - files.floor
            if files.slabs:  # it grows by whole slabs
                slab = files.meta.slots_per_slab * stride
                share = min(share, (len(files.slabs) + max(0, free - files.floor) // slab) * slab)
            capacity = max(1, objects, share // stride)
            if capacity * stride < SMALL_CAPACITY_BYTES:
                concern = (
                    "its capacity follows the free space and is below 256 MiB: free space at "
                    f"{files.folder}, or set storage.capacity_bytes or a smaller "
                    f"storage.free_space_floor ({files.floor:,} bytes)"
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


def bytes_held(table: Path) -> int:
    """Bytes of the objects of a store, by its table. StoreError, OSError."""
    found = 0
    with os.fdopen(open_private(table, os.O_RDONLY), "rb") as file:
        meta = meta_of(file.read(PAGE), str(table))
        while chunk := file.read(CHUNK_ENTRIES * meta.entry_bytes):
            found += count_used(chunk, meta)
    return found * meta.stride
