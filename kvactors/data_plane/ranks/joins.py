"""Ranks join one after another, so that the keys of one store at a time are in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvactors.actor.clock import now
from kvactors.data_plane.ranks.link import PAGE_LIMIT, Link
from kvactors.data_plane.ranks.names import RankNames, in_slices


class Joins:
    """Attributes:
    progress: when the last page of keys arrived, on the clock of the loop.
    """

    def __init__(self) -> None:
        self.progress = 0.0
        self._current: asyncio.Future[None] | None = None

    @property
    def deadline(self) -> float:
        """When the rank that joins must have sent its next page; 0.0 if none joins."""
        return self.progress + PAGE_LIMIT if self._current else 0.0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until no other rank joins, and keep others from joining."""
        while self._current is not None:
            await asyncio.wait((self._current,))
        turn = self._current = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            self._current = None
            turn.set_result(None)

    async def receive_keys(self, names: RankNames, link: Link) -> bool:
        """Receive the keys of a rank's store. False if a page did not come in time."""
        joining = names.join(link.identity.rank, link.identity.generation)
        try:
            last = not link.identity.objects
            while joining.wanted and not last:
                page = await link.next_page()
                if page is None:
                    return False
                joining.page(page.keys)
                last = page.last
                self.progress = now()
                await asyncio.sleep(0)
            await in_slices(joining.merge())
            return True
        finally:
            joining.abandon()
