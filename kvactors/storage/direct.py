"""StorageDirect: speaks to a store that moves device memory itself and is addressed by tokens (AttentionStore)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, ClassVar

from kvactors.actor import Actor, ActorRef, Message, on
from kvactors.actor.clock import now
from kvactors.actor.log import described
from kvactors.cpu_evictor.messages import Fetched, Saved
from kvactors.errors import StoreError
from kvactors.storage.backends.base import StoreStatistics
from kvactors.storage.backends.direct import DirectBackend
from kvactors.storage.messages import FetchDevice, Moved, SaveDevice

WAITING = 64
"""Saves that wait at most; the oldest is shed then."""


class StorageDirect(Actor):
    """Owns the moves it has under way: one at a time, fetches before saves."""

    ROLE: ClassVar[str] = "storage_direct"
    SENDS: ClassVar[Mapping[str, tuple[type[Message], ...]]] = {"cpu_evictor": (Fetched, Saved)}

    def __init__(self, ref: ActorRef, *, backend: DirectBackend, evictor: ActorRef) -> None:
        super().__init__(ref)
        self.backend = backend
        self.evictor = evictor
        self.shed = 0
        self._busy = False
        self._fetches: deque[FetchDevice] = deque()
        self._saves: deque[SaveDevice] = deque()

    @on(FetchDevice)
    def fetch(self, message: FetchDevice) -> None:
        """Read blocks into device memory."""
        self._fetches.append(message)
        self._next()

    @on(SaveDevice)
    def save(self, message: SaveDevice) -> None:
        """Write blocks from device memory."""
        self._saves.append(message)
        while len(self._saves) > WAITING:
            self.shed += 1
            self.tell(self.evictor, Saved(self._saves.popleft().op, 0))
        self._next()

    @on(Moved)
    def moved(self, message: Moved) -> None:
        """A move is over."""
        self._busy = False
        self.tell(self.evictor, message.answer)
        self._next()

    def _next(self) -> None:
        if self._busy or not (self._fetches or self._saves):
            return
        self._busy = True
        if self._fetches:
            one: FetchDevice | SaveDevice = self._fetches.popleft()
            self._start(self.backend.fetch, one, lambda good: Fetched(one.op, good))
        else:
            one = self._saves.popleft()
            self._start(self.backend.save, one, lambda good: Saved(one.op, good))

    def _start(
        self,
        move: Callable[[bytes, int, tuple[int, ...], float], Coroutine[Any, Any, int]],
        one: FetchDevice | SaveDevice,
        answer: Callable[[int], Fetched | Saved],
    ) -> None:
        async def work() -> Moved:
            seconds = one.deadline - now()
            good = await move(one.tokens, one.start, one.blocks, seconds) if seconds > 0 else 0
            if type(good) is not int or not 0 <= good <= len(one.blocks):
                raise StoreError(f"{len(one.blocks)} blocks were to be moved, and {good!r} is no count of them")
            return Moved(answer(good))

        def failed(error: Exception) -> Moved:
            self.log.error("back end raised", error=described(error))
            return Moved(answer(0))

        self.start_job(work(), lambda moved: moved, failed)

    def store_statistics(self) -> StoreStatistics:
        """A moment's picture of the store."""
        return self.backend.statistics()
