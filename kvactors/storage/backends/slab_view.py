"""A view of a file store that another process writes: it follows the table."""

from __future__ import annotations

import asyncio
from itertools import islice

from kvactors.actor.clock import now
from kvactors.actor.log import get_logger
from kvactors.actor.uncancelled import wait_uncancelled
from kvactors.errors import StoreError
from kvactors.storage.backends.file_survey import Stored, Survey, TableReader, survey
from kvactors.storage.backends.slab_files import SlabFiles
from kvactors.storage.backends.slab_medium import SlabMedium
from kvactors.storage.backends.slab_threads import SlabThreads
from kvactors.storage.inventory import OwnedInventory

log = get_logger()

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
