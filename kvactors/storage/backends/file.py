"""A store of preallocated slab files: the default, without a server. `slab_files` has the layout of
the folder, `slab_table` the format of the table."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from kvactors.actor.uncancelled import uncancelled
from kvactors.device.arena import Arena
from kvactors.errors import StoreError
from kvactors.identity import StoreIdentity
from kvactors.lineage import Lineage
from kvactors.storage.backends.base import Backend, Expired, ReadReport, WriteReport
from kvactors.storage.backends.owned_batches import OwnedBatches
from kvactors.storage.backends.slab_files import SlabFiles
from kvactors.storage.backends.slab_lineage import entry_bytes_for
from kvactors.storage.backends.slab_medium import SlabMedium
from kvactors.storage.backends.slab_paths import PathReading
from kvactors.storage.backends.slab_scrub import Scrub
from kvactors.storage.backends.slab_table import PAGE, Meta
from kvactors.storage.backends.slab_threads import SlabThreads
from kvactors.storage.backends.slab_view import SlabView
from kvactors.storage.inventory import OwnedInventory
from kvactors.storage.messages import Outcome

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
