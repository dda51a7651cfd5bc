"""What readers and writers have in common: batches wait in the actor until few enough are under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from kvactors.actor import Actor, ActorRef, Message, on
from kvactors.actor.clock import now
from kvactors.cpu_evictor.messages import Probed, ReadDone, StoreCleared, Written
from kvactors.device.arena import Arena
from kvactors.flush_notifier.messages import Cleared, Gained, Gone
from kvactors.storage.backends.checked import CheckedBackend
from kvactors.storage.messages import Finished
from kvactors.units import Reason, Tier, join_keys, split_keys

UNDER_WAY = 2
"""Batches an actor has at the store at once; the others wait, so that bytes in flight are bounded."""


class WorkerStatistics(NamedTuple):
    """A moment's picture of a reader or writer."""

    batches: int
    moved_bytes: int
    under_way: int
    waiting: int


class StorageWorker(Actor):
    """Runs batches against the back end, tells the notifier what changed, then the evictor."""

    def __init__(self, ref: ActorRef, *, backend: CheckedBackend, arena: Arena, evictor: ActorRef, notifier: ActorRef) -> None:
        super().__init__(ref)
        self.backend = backend
        self.arena = arena
        self.evictor = evictor
        self.notifier = notifier
        self._waiting: deque[tuple[Callable[[], Coroutine[Any, Any, Finished]], Finished]] = deque()
        self._under_way = self._batches = self._moved = 0

    def started(self) -> None:
        """What the life before was about to tell is told by this one."""
        if self.life:
            self.report_all()

    def report_all(self) -> None:
        """Tell the notifier every name that the store does not hold any more, and every name it holds."""
        while lost := join_keys(self.backend.lost()):
            self.tell(self.notifier, Gone(lost, Tier.STORAGE, Reason.RESTART))
        keys = join_keys(self.backend.keys())
        if keys:
            self.tell(self.notifier, Gained(keys, Tier.STORAGE, Reason.STORED))

    def enqueue(self, work: Callable[[], Coroutine[Any, Any, Finished]], broken: Finished) -> None:
        """Run a batch when its turn comes. broken: what to say if the back end raises, which its contract forbids."""
        self._waiting.append((work, broken))
        self._start_next()

    def _start_next(self) -> None:
        while self._waiting and self._under_way < UNDER_WAY:
            self.run_now(*self._waiting.popleft())

    def run_now(self, work: Callable[[], Coroutine[Any, Any, Finished]], broken: Finished) -> None:
        """Run work without waiting for its turn. broken: as in `enqueue`."""
        self._under_way += 1

        def failed(error: BaseException) -> Finished:
            self.log.error("storage job failed", error=repr(error))
            return broken

        self.start_job(work(), lambda finished: finished, failed)

    @on(Finished)
    def finished(self, message: Finished) -> None:
        """A batch is over: the notifier hears of it before the evictor, so that no index learns of a slot's end before the store's gain."""
        self._under_way -= 1
        self._batches += 1
        self._moved += message.moved_bytes
        for keys, reason in (
            (message.evicted, Reason.STORAGE_EVICTION),
            (message.corrupt, Reason.CORRUPT),
            (message.taken, Reason.PROMOTION),
        ):
            names = split_keys(keys)
            gone = join_keys(
                key for key in names if not self.backend.holds(key)
            )  # what is back by now is told by whoever wrote it
            if gone:
                self.tell(self.notifier, Gone(gone, Tier.STORAGE, reason))
            self.backend.told(names)
        stored = join_keys(key for key in split_keys(message.stored) if self.backend.holds(key))  # some may have gone meanwhile
        if stored:
            self.tell(self.notifier, Gained(stored, Tier.STORAGE, Reason.STORED))
        if isinstance(message.answer, StoreCleared):
            self.tell(self.notifier, Cleared(Tier.STORAGE, Reason.CLEAR))
            self.report_all()  # what was written since the store was cleared
        self.tell(self.evictor, message.answer)
        self._start_next()

    def expired(self, deadline: float) -> Callable[[], bool]:
        """Whether a batch's deadline has come."""
        return lambda: now() >= deadline

    def worker_statistics(self) -> WorkerStatistics:
        """A moment's picture."""
        return WorkerStatistics(self._batches, self._moved, self._under_way, len(self._waiting))


TO_EVICTOR: tuple[type[Message], ...] = (Probed, ReadDone, Written, StoreCleared)
"""Every answer a storage actor may give."""
