"""What readers and writers have in common: batches wait in the actor until few enough are under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from kvactors.actor import Actor, ActorRef, Message, on
from kvactors.actor.clock import now
from kvactors.actor.log import described
from kvactors.cpu_evictor.messages import Probed, ReadDone, StoreCleared, Written
from kvactors.device.arena import Arena
from kvactors.flush_notifier.messages import Cleared, Gained, Gone
from kvactors.storage.backends.checked import CheckedBackend
from kvactors.storage.messages import Finished, Recheck
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
        self._recheck_if_delayed(keys, b"", everything=True)

    def _report(self, held: bytes, gone: bytes, reason: Reason) -> None:
        if gone:
            self.tell(self.notifier, Gone(gone, Tier.STORAGE, reason))
        if held:
            self.tell(self.notifier, Gained(held, Tier.STORAGE, Reason.STORED))

    def _recheck_if_delayed(self, held: bytes, gone: bytes, *, everything: bool = False) -> None:
        """Look again at what was reported, if it waits for room in the notifier's lane: a newer report of another worker may enter before it."""
        if not self._outbox or not (held or gone or everything):
            return
        again = Recheck(held, gone, everything)

        async def sent() -> Recheck:
            await self.sent()
            return again

        self.start_job(sent(), lambda recheck: recheck, lambda _: again)

    @on(Recheck)
    def recheck(self, message: Recheck) -> None:
        """What was reported late is in the lane: report what is not true any more, since a newer report may have entered before it."""
        holds, held = self.backend.holds, split_keys(message.held)
        gone = join_keys(key for key in held if not holds(key))
        back = [key for key in split_keys(message.gone) if holds(key)]
        if message.everything:
            known = set(held)
            back += [key for key in self.backend.keys() if key not in known]  # noqa: SIM118  (no mapping)
        self._report(join_keys(back), gone, Reason.STORAGE_EVICTION)
        self._recheck_if_delayed(join_keys(back), gone)

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
            self.log.error("storage job failed", error=described(error))
            return broken

        self.start_job(work(), lambda finished: finished, failed)

    @on(Finished)
    def finished(self, message: Finished) -> None:
        """A batch is over: the notifier hears of it before the evictor, so that no index learns of a slot's end before the store's gain."""
        self._under_way -= 1
        self._batches += 1
        self._moved += message.moved_bytes
        left = b""
        for keys, reason in (
            (message.evicted, Reason.STORAGE_EVICTION),
            (message.corrupt, Reason.CORRUPT),
            (message.taken, Reason.PROMOTION),
        ):
            names = split_keys(keys)
            gone = join_keys(
                key for key in names if not self.backend.holds(key)
            )  # what is back by now is told by whoever wrote it
            self._report(b"", gone, reason)
            left += gone
            self.backend.told(names)
        stored = join_keys(key for key in split_keys(message.stored) if self.backend.holds(key))  # some may have gone meanwhile
        self._report(stored, b"", Reason.STORED)
        self._recheck_if_delayed(stored, left)
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
