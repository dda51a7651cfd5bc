"""`StorageWorker`: the common part of the storage actors and their substitutes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from kvactors.actor import Actor, ActorRef, on
from kvactors.actor.clock import now
from kvactors.actor.context import Job
from kvactors.actor.log import described
from kvactors.errors import KVActorsError
from kvactors.flush_notifier.messages import Report, RequestScope
from kvactors.storage.backends.checked import CheckedBackend
from kvactors.storage.batches import Batch, BatchQueue
from kvactors.storage.messages import BatchDone, NextPage, Recheck, StorageReply
from kvactors.storage.plane import StoragePlane
from kvactors.storage.reporter import StoreReporter


class StorageWorker(Actor):
    """Runs batches against the store. The notifier is sent the changes of a batch before the
    evictor is sent its result, so that no index sees a slot's end before the store's gain."""

    def __init__(
        self,
        ref: ActorRef,
        *,
        backend: CheckedBackend,
        plane: StoragePlane,
        evictor: ActorRef[StorageReply],
        notifier: ActorRef[Report],
        root_of: Callable[[RequestScope], bytes] | None = None,
    ) -> None:
        super().__init__(ref)
        self.backend = backend
        self.plane = plane
        self.evictor = evictor
        self.batches = BatchQueue()
        self.reporter = StoreReporter(self, backend, notifier, root_of)

    def started(self) -> None:
        """A restarted actor reports the whole store: reports of its earlier incarnation may be
        lost."""
        if self.incarnation:
            self.reporter.report_all()

    async def stopped(self) -> None:
        """See `Actor.stopped`."""
        self.reporter.stop()

    async def sent(self) -> None:
        """See `Actor.sent`. Includes every page of a report in progress."""
        await self.reporter.wait()
        await super().sent()

    @on(NextPage)
    def next_page(self, _: NextPage) -> None:
        """Continue a report."""
        self.reporter.next_page()

    @on(Recheck)
    def recheck(self, message: Recheck) -> None:
        """A delayed report has entered the notifier's lane."""
        self.reporter.recheck(message)

    # -- batches

    def enqueue(self, batch: Batch) -> None:
        """Run a batch when its turn comes."""
        self.batches.add(batch)
        self._start_batches()

    def _start_batches(self) -> None:
        for batch in self.batches.startable():
            self._start(batch)

    def run_now(self, batch: Batch) -> None:
        """Run a batch without waiting for its turn."""
        self.batches.in_flight += 1
        self._start(batch)

    def _start(self, batch: Batch) -> None:
        def failed(error: BaseException) -> BatchDone:
            self.log.error("storage job failed", error=described(error))
            return batch.failed

        self.start_job(batch.work(), lambda done: done, failed, slots=batch.slots, keys=batch.keys)

    @on(BatchDone)
    def batch_done(self, message: BatchDone) -> None:
        """A batch has ended."""
        self.batches.in_flight -= 1
        self.reporter.report_batch(message)
        if self.backend.removed_outside():
            self.reporter.report_lost()
        self.tell(self.evictor, message.answer)
        self._start_batches()

    def left_behind(self, jobs: Mapping[asyncio.Task[None], Job], *, restart: bool) -> None:
        """See `Actor.left_behind`. The next incarnation starts without these jobs. Their slots are
        not handed out until they have ended, and their changes are reported then."""
        for task, job in jobs.items():
            release = self.plane.slots.withhold(job.slots)
            task.add_done_callback(partial(self._ended_late, release, job.keys))

    def _ended_late(
        self, release: Callable[[], None], keys: bytes, _task: asyncio.Task[None]
    ) -> None:
        release()
        with suppress(KVActorsError):  # the cache is closed
            self.ref.try_tell(Recheck(keys, keys))


def expired(deadline: float) -> Callable[[], bool]:
    """Whether a batch's deadline has passed."""
    return lambda: now() >= deadline
