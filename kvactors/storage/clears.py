"""The order of clears and batches of one store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from kvactors.actor.clock import now


class Clears:
    """A clear waits for the writes in flight. Until one has succeeded, nothing is read or written.
    After one of a salt that has failed, the whole store must be cleared.

    Attributes:
        begun: clears that were begun.
        running: clears that are in progress.
        pending: whether no clear of the whole store has succeeded since the last one that was
            begun.
        pending_since: when that began, on the loop's clock.
    """

    def __init__(self) -> None:
        self.begun = self.running = 0
        self.pending = False
        self.pending_since: float | None = None
        self._last = 0  # number of the last clear of the whole store
        self._writing: set[asyncio.Future[None]] = set()

    @property
    def closed(self) -> bool:
        """Whether the contents of the store must not be used."""
        return bool(self.running) or self.pending

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A write is in flight."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writing.add(done)
        try:
            yield
        finally:
            self._writing.discard(done)
            done.set_result(None)

    @asynccontextmanager
    async def clearing(self, *, whole: bool = True) -> AsyncIterator[None]:
        """A clear is in progress, of the whole store or of a salt. Entered when no write is in
        flight. It has failed if the block raises."""
        self.begun += 1
        self.running += 1
        number = self.begun
        if whole:
            self._last = number
            self._await_clear()
        try:
            while self._writing:
                await asyncio.wait(list(self._writing))
            yield
            if number == self._last:
                self.pending, self.pending_since = False, None
        except BaseException:
            self._await_clear()
            raise
        finally:
            self.running -= 1

    def _await_clear(self) -> None:
        if not self.pending:
            self.pending, self.pending_since = True, now()
