"""What readers and writers have in common: batches wait in the actor until few enough are under
way."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from kvactors.actor import Actor, ActorRef, Message, on
from kvactors.actor.actor import State
from kvactors.actor.clock import now
from kvactors.actor.jobs import Job
from kvactors.actor.log import described
from kvactors.device.arena import Arena
from kvactors.errors import KVActorsError
from kvactors.flush_notifier.messages import Cleared, Gained, Gone
from kvactors.storage.backends.checked import CheckedBackend
from kvactors.storage.messages import (
    Finished,
    NextPage,
    Probed,
    ReadDone,
    Recheck,
    StoreCleared,
    Written,
)
from kvactors.types import Reason, Tier, join_keys, split_keys

UNDER_WAY = 2
"""Batches an actor has at the store at once; the others wait, so that bytes in flight are
bounded."""

REPORT_PAGE = 1024
"""Keys in one message, and in one turn, of a report on the whole store."""


class WorkerStatistics(NamedTuple):
    """A moment's picture of a reader or writer."""

    batches: int
    moved_bytes: int
    under_way: int
    waiting: int


class StorageWorker(Actor):
    """Runs batches against the back end, tells the notifier what changed, then the evictor."""

    def __init__(
        self,
        ref: ActorRef,
        *,
        backend: CheckedBackend,
        arena: Arena,
        evictor: ActorRef,
        notifier: ActorRef,
    ) -> None:
        super().__init__(ref)
        self.backend = backend
        self.arena = arena
        self.evictor = evictor
        self.notifier = notifier
        self._waiting: deque[
            tuple[Callable[[], Coroutine[Any, Any, Finished]], Finished, Sequence[int], bytes]
        ] = deque()
        self._under_way = self._batches = self._moved = 0
        self._snapshot_due = self._paging = (
            False  # a report on the whole store: to be started; a NextPage is in the channel
        )
        self._unreported: Iterator[bytes] = iter(())
        self._reading = False  # the paths of the store are being read, for the notifier
        self._reported: list[asyncio.Future[None]] = []  # in `sent`

    def started(self) -> None:
        """What the earlier incarnation was about to report is reported by this one."""
        if self.life:
            self.report_all()

    async def stopped(self) -> None:
        """See `Actor.stopped`."""
        self._paging = self._reading = False
        self._report_complete()

    async def sent(self) -> None:
        """See `Actor.sent`: with every page of a report, and of paths, that has begun, or begins
        when this incarnation starts."""
        while self._paging or self._reading or self.state is State.STARTING:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._reported.append(waiter)
            await waiter
        await super().sent()

    def report_ended(self) -> None:
        """The last page of a report is sent."""
        self._report_complete()

    def _report_complete(self) -> None:
        if self._paging or self._reading:
            return
        waiters, self._reported = self._reported, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def report_all(self) -> None:
        """Report every key that the store lost, and every key it holds, in pages of one turn each.
        An unfinished report starts anew."""
        self._snapshot_due = True
        self.report_lost()

    def report_lost(self) -> None:
        """Report every key that the store lost, in pages of one turn each."""
        if self._paging:
            return
        if (
            self.context.outbox.waiting
        ):  # a turn begins only after all earlier messages have entered their channels
            self._paging = True
            self.to_self(NextPage())
        else:
            self._report_page()

    @on(NextPage)
    def next_page(self, _: NextPage) -> None:
        """Continue a report. The keys are listed here, not before: no earlier message of this actor
        can enter the notifier's channel later."""
        self._paging = False
        self._report_page()

    def _report_page(self) -> None:
        lost = join_keys(self.backend.inventory.take_removed())
        if lost:
            self._report(b"", lost, Reason.RESTART)
            self._recheck_if_delayed(b"", lost)
        else:
            if self._snapshot_due:
                self._snapshot_due, self._unreported = False, self.backend.inventory.snapshot()
            page = list(islice(self._unreported, REPORT_PAGE))
            if not page:
                self.report_ended()
                return
            held = join_keys(key for key in page if self.backend.holds(key))
            self._report(held, b"", Reason.STORED)
            self._recheck_if_delayed(held, b"")
        self._paging = True
        self.to_self(NextPage())

    def _report(self, held: bytes, gone: bytes, reason: Reason) -> None:
        if gone:
            self.tell(self.notifier, Gone(gone, Tier.STORAGE, reason))
        if held:
            self.tell(self.notifier, Gained(held, Tier.STORAGE, Reason.STORED))

    def _recheck_if_delayed(self, held: bytes, gone: bytes) -> None:
        """Look again at what was reported, if it waits for room in the notifier's lane: a newer
        report of another worker may enter before it."""
        if not self.context.outbox.waiting or not (held or gone):
            return
        again = Recheck(held, gone)

        async def sent() -> Recheck:
            await super(StorageWorker, self).sent()
            return again

        self.start_job(sent(), lambda recheck: recheck, lambda _: again)

    @on(Recheck)
    def recheck(self, message: Recheck) -> None:
        """What was reported late is in the lane: report what is not true any more, since a newer
        report may have entered before it."""
        holds = self.backend.holds
        gone = join_keys(key for key in split_keys(message.held) if not holds(key))
        back = join_keys(key for key in split_keys(message.gone) if holds(key))
        self._report(back, gone, Reason.STORAGE_EVICTION)
        self._recheck_if_delayed(back, gone)
        self.report_lost()

    def enqueue(
        self,
        work: Callable[[], Coroutine[Any, Any, Finished]],
        broken: Finished,
        slots: Sequence[int] = (),
        keys: bytes = b"",
    ) -> None:
        """Run a batch when its turn comes. broken: the answer if the back end raises, which its
        contract forbids. slots, keys: what the batch accesses in the arena and in the store."""
        self._waiting.append((work, broken, slots, keys))
        self._start_next()

    def _start_next(self) -> None:
        while self._waiting and self._under_way < UNDER_WAY:
            self.run_now(*self._waiting.popleft())

    def run_now(
        self,
        work: Callable[[], Coroutine[Any, Any, Finished]],
        broken: Finished,
        slots: Sequence[int] = (),
        keys: bytes = b"",
    ) -> None:
        """Run work without waiting for its turn. The arguments are those of `enqueue`."""
        self._under_way += 1

        def failed(error: BaseException) -> Finished:
            self.log.error("storage job failed", error=described(error))
            return broken

        self.start_job(work(), lambda finished: finished, failed, slots=slots, keys=keys)

    def left_behind(self, jobs: Mapping[asyncio.Task[None], Job], *, restart: bool) -> None:
        """The next incarnation goes on without them. Their slots are not handed out until they have
        ended, and what they did to the store is reported then."""
        for task, job in jobs.items():
            task.add_done_callback(
                partial(self._late_end, self.arena.withhold(job.slots), job.keys)
            )

    def _late_end(
        self, release: Callable[[], None], keys: bytes, _task: asyncio.Task[None]
    ) -> None:
        release()
        with suppress(KVActorsError):  # the cache is closed
            self.ref.try_tell(Recheck(keys, keys))

    @on(Finished)
    def finished(self, message: Finished) -> None:
        """A batch is over: the notifier hears of it before the evictor, so that no index learns of
        a slot's end before the store's gain."""
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
            self.backend.inventory.acknowledge_removed(names)
        stored = join_keys(
            key for key in split_keys(message.stored) if self.backend.holds(key)
        )  # some may have gone meanwhile
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
