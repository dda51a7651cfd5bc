"""A scrub of a file store: damage is found before its object is needed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from kvactors.storage.backends.slab_medium import SlabMedium
from kvactors.storage.catalog import Catalog

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
