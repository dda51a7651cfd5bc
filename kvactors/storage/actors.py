"""The storage actors: they read host slots from the store, write them to it, clear it, and keep the
notifier informed of its keys."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, ClassVar, NamedTuple

from kvactors.actor import Actor, ActorRef, Message, PeerRestarted, on
from kvactors.actor.clock import now
from kvactors.actor.context import Job, State
from kvactors.actor.log import described
from kvactors.errors import KVActorsError, StoreError
from kvactors.flush_notifier.messages import (
    BlocksAdded,
    BlocksRemoved,
    PathsFound,
    Report,
    TierCleared,
)
from kvactors.identity import RequestScope
from kvactors.storage.device_store import StoragePlane
from kvactors.storage.guarded import GuardedBackend
from kvactors.storage.messages import (
    BatchDone,
    ClearStore,
    NextPage,
    Outcome,
    PathsRead,
    Probed,
    ProbeStore,
    Read,
    ReadDone,
    ReadPaths,
    Recheck,
    ReportLost,
    StorageReply,
    StoreCleared,
    Write,
    Written,
)
from kvactors.types import Reason, Tier, join_hashes, split_hashes

BATCHES_IN_FLIGHT = 2
"""Batches that an actor has at the store at a time. The others wait, which bounds the bytes in
flight."""


class Batch(NamedTuple):
    """A call to the store."""

    work: Callable[[], Coroutine[Any, Any, BatchDone]]
    failed: BatchDone
    slots: Sequence[int] = ()
    keys: bytes = b""


REPORT_PAGE = 1024
"""Keys in one message, and in one turn, of a report on the whole store."""

PATH_PAGE = 256
"""Blocks whose paths are read together and sent in one message."""


class StorageWorker(Actor):
    """Runs batches against the store, and reports its keys to the notifier. The notifier is sent
    the changes of a batch before the evictor is sent its result, so that no index sees a slot's end
    before the store's gain.

    Args:
        root_of: the root hash that requests of a scope have now. None: paths are not reported.
    """

    def __init__(
        self,
        ref: ActorRef,
        *,
        backend: GuardedBackend,
        plane: StoragePlane,
        evictor: ActorRef[StorageReply],
        notifier: ActorRef[Report],
        root_of: Callable[[RequestScope], bytes] | None = None,
    ) -> None:
        super().__init__(ref)
        self.backend = backend
        self.plane = plane
        self.evictor = evictor
        self.notifier = notifier
        self._in_flight = 0  # batches
        self._waiting: deque[Batch] = deque()
        self._paging = False  # a NextPage is in this actor's channel
        self._all_due = False  # every key that the store holds is to be reported
        self._unreported: Iterator[bytes] = iter(())
        self._root_of = root_of if backend.keeps_lineages else None
        self._reading_paths = False
        self._paths_due = False  # after the report on the keys
        self._reread_paths = False  # from the first one on, once the page in progress was read
        self._report_waiters: list[asyncio.Future[None]] = []

    def started(self) -> None:
        """A restarted actor reports the whole store: reports of its earlier incarnation may be
        lost."""
        if self.incarnation:
            self.report_all()

    async def stopped(self) -> None:
        self._paging = self._reading_paths = False
        self._wake()

    async def sent(self) -> None:
        """See `Actor.sent`. Includes every page of a report in progress."""
        while self.reporting:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._report_waiters.append(waiter)
            await waiter
        await super().sent()

    def _wake(self) -> None:
        waiters, self._report_waiters = self._report_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # -- batches

    def enqueue(self, batch: Batch) -> None:
        if self.ref.switched_off:
            self.tell(self.evictor, batch.failed.answer)
            return
        self._waiting.append(batch)
        self._start_batches()

    def _start_batches(self) -> None:
        while self._waiting and self._in_flight < BATCHES_IN_FLIGHT:
            self.run_now(self._waiting.popleft())

    def run_now(self, batch: Batch) -> None:

        def failed(error: BaseException) -> BatchDone:
            self.log.error("storage job failed", error=described(error))
            return batch.failed

        self._in_flight += 1
        self.start_job(batch.work(), lambda done: done, failed, slots=batch.slots, keys=batch.keys)

    @on(BatchDone)
    def batch_done(self, message: BatchDone) -> None:
        self._in_flight -= 1
        self._report_batch(message)
        if self.backend.removed_outside():
            self.report_lost_keys()
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

    # -- reports of the whole store: every key that it lost, then every key that it holds

    @property
    def reporting(self) -> bool:
        """Whether a report is in progress, or begins when the actor starts."""
        return self._paging or self._reading_paths or self.state is State.STARTING

    def report_all(self) -> None:
        """Report every key that the store lost and every key that it holds. An unfinished report
        starts over."""
        self._all_due = True
        self.report_lost_keys()

    def report_lost_keys(self) -> None:
        if self._paging:
            return
        if self.context.outbox.waiting:
            # The next turn begins after all earlier messages have entered their channels.
            self._continue_report()
        else:
            self._report_page()

    def _continue_report(self) -> None:
        self._paging = True
        self.to_self(NextPage())

    @on(NextPage)
    def next_page(self, _: NextPage) -> None:
        self._paging = False
        self._report_page()

    def _report_page(self) -> None:
        """Keys are listed here and not before, so that no earlier message of this actor can enter
        the notifier's channel later."""
        gone, held = join_hashes(self.backend.take_removed()), b""
        if not gone:
            if self._all_due:
                self._all_due, self._unreported = False, self.backend.snapshot()
            page = list(islice(self._unreported, REPORT_PAGE))
            if not page:
                self._keys_reported()
                self._wake()
                return
            held = join_hashes(self.backend.holding(page))
        self._report(held, gone, Reason.RESTART)
        self._continue_report()

    def _keys_reported(self) -> None:
        """Every page of a report on keys has been sent."""

    def _report(self, held: bytes, gone: bytes, reason: Reason) -> None:
        if gone:
            self.tell(self.notifier, BlocksRemoved(gone, Tier.STORAGE, reason))
        if held:
            self.tell(self.notifier, BlocksAdded(held, Tier.STORAGE, Reason.STORED))
        self._recheck_if_delayed(held, gone)

    def _recheck_if_delayed(self, held: bytes, gone: bytes) -> None:
        """Check a report again if the notifier's lane is full: a newer report of
        another actor may enter before it."""
        outbox = self.context.outbox
        if not outbox.waiting or not (held or gone):
            return
        again = Recheck(held, gone)

        async def entered() -> Recheck:
            await outbox.wait_empty()
            return again

        self.start_job(entered(), lambda recheck: recheck, lambda _: again)

    @on(Recheck)
    def recheck(self, message: Recheck) -> None:
        """A delayed report has entered the notifier's lane: correct the outdated parts."""
        reported = split_hashes(message.held)
        held = set(self.backend.holding(reported))
        back = join_hashes(self.backend.holding(split_hashes(message.gone)))
        gone = join_hashes(key for key in reported if key not in held)
        self._report(back, gone, Reason.STORAGE_EVICTION)
        self.report_lost_keys()

    def _report_batch(self, done: BatchDone) -> None:
        """Report the changes of a batch that are still true. A key that came back since is reported
        by the actor that wrote it."""
        gone = b""
        for keys, reason in (
            (done.evicted, Reason.STORAGE_EVICTION),
            (done.corrupt, Reason.CORRUPT),
            (done.taken, Reason.PROMOTION),
        ):
            if not keys:
                continue
            split = split_hashes(keys)
            held = set(self.backend.holding(split))
            if lost := join_hashes(key for key in split if key not in held):
                self.tell(self.notifier, BlocksRemoved(lost, Tier.STORAGE, reason))
                gone += lost
            self.backend.acknowledge_removed(split)
        stored = join_hashes(self.backend.holding(split_hashes(done.stored)))
        if stored:
            self.tell(self.notifier, BlocksAdded(stored, Tier.STORAGE, Reason.STORED))
        self._recheck_if_delayed(stored, gone)
        if isinstance(done.answer, StoreCleared):
            if done.answer.salt is not None:
                self.report_lost_keys()
                return
            self.tell(self.notifier, TierCleared(Tier.STORAGE, Reason.CLEAR))
            self.report_all()  # objects written since the clear


def expired(deadline: float) -> Callable[[], bool]:
    """Whether a batch's deadline has passed."""
    return lambda: now() >= deadline


# -- reader


class StorageReader(StorageWorker):
    """Owns its reads in flight."""

    ROLE: ClassVar[str] = "storage_reader"
    SENDS: ClassVar[Mapping[str, tuple[type[Message], ...]]] = {
        "cpu_evictor": (Probed, ReadDone),
        "flush_notifier": (BlocksAdded, BlocksRemoved, TierCleared),
    }

    @on(ProbeStore)
    def probe(self, message: ProbeStore) -> None:
        """A store that this process owns answers immediately. A shared pool must be asked."""
        keys = split_hashes(message.keys)
        found = 0 if self.ref.switched_off else self.backend.probe(keys)
        if found is not None:
            self.tell(self.evictor, Probed(message.op, found))
            return

        async def work() -> BatchDone:
            run = await self.backend.ask(keys, expired(message.deadline))
            return BatchDone(Probed(message.op, run))

        self.enqueue(Batch(work, BatchDone(Probed(message.op, 0))))

    @on(Read)
    def read(self, message: Read) -> None:
        """Read a batch. Objects that an exclusive store handed out are removed. The others stay,
        since a read that failed may succeed later."""
        keys = split_hashes(message.keys)

        async def work() -> BatchDone:
            report = await self.plane.read(
                message.memory_generation, keys, message.slots, expired(message.deadline)
            )
            taken = list[bytes]()
            if message.take:
                results = zip(keys, report.outcomes, strict=True)
                taken = [key for key, outcome in results if outcome == Outcome.OK]
                await self.backend.remove(taken)
            return BatchDone(
                ReadDone(message.op, report.outcomes),
                corrupt=join_hashes(report.gone),
                taken=join_hashes(taken),
            )

        outcomes = bytes([Outcome.UNAVAILABLE]) * len(keys)
        unread = BatchDone(ReadDone(message.op, outcomes))
        self.enqueue(Batch(work, unread, message.slots, message.keys))


# -- writer


class StorageWriter(StorageWorker):
    """Owns its writes in flight, clears the store, and reports its contents.

    The first writer reports the objects that the store has kept from an earlier process. If the
    store keeps lineages, the paths of these blocks follow in the background, a page at a time:
    `BlocksAdded` of a key has entered the notifier's channel before a path names the key.
    """

    ROLE: ClassVar[str] = "storage_writer"
    SENDS: ClassVar[Mapping[str, tuple[type[Message], ...]]] = {
        "cpu_evictor": (Written, StoreCleared),
        "flush_notifier": (BlocksAdded, BlocksRemoved, TierCleared, PathsFound),
    }

    def started(self) -> None:
        super().started()
        if is_first(self.ref):
            self._paths_due = self._root_of is not None
            if not self.incarnation:
                self.report_all()
        if self.incarnation and self.backend.needs_clear():
            self.run_now(clear_batch(self.backend, 0))

    @on(PeerRestarted)
    def peer_restarted(self, message: PeerRestarted) -> None:
        """A restarted notifier needs all reports again."""
        if message.name == "flush_notifier" and is_first(self.ref):
            self._paths_due = self._root_of is not None
            self.report_all()

    @on(ClearStore)
    def clear(self, message: ClearStore) -> None:
        """Clear the store, or remove the objects of a salt. Batches that were sent earlier, to any
        writer, are not written any more."""
        self.backend.fence = max(self.backend.fence, (self.evictor.incarnation, message.op))
        self.run_now(clear_batch(self.backend, message.op, message.salt))

    @on(Write)
    def write(self, message: Write) -> None:
        keys, sent = split_hashes(message.keys), (self.evictor.incarnation, message.op)

        async def work() -> BatchDone:
            if sent < self.backend.fence:
                return unwritten(message, Outcome.LATE)
            report = await self.plane.write(
                message.memory_generation,
                keys,
                message.slots,
                expired(message.deadline),
                message.lineages,
                message.salts,
            )
            results = zip(keys, report.outcomes, strict=True)
            safe = (Outcome.OK, Outcome.EXISTS)
            return BatchDone(
                Written(message.op, report.outcomes),
                stored=join_hashes(key for key, outcome in results if outcome in safe),
                evicted=join_hashes(report.evicted),
            )

        failed = unwritten(message, Outcome.UNAVAILABLE)
        self.enqueue(Batch(work, failed, message.slots, message.keys))

    @on(ReportLost)
    def report_lost(self, message: ReportLost) -> None:
        """Report keys that the store lost outside of batches. Repeat a clear that did not reach the
        whole store."""
        if self.backend.needs_clear():
            self.run_now(clear_batch(self.backend, 0))
        self.report_lost_keys()

    # -- reports of the paths of the store's blocks, after the report on the keys

    def _keys_reported(self) -> None:
        if not self._paths_due:
            return
        self._paths_due = False
        if self._reading_paths:
            self._reread_paths = True
        else:
            self._begin_paths()

    def _begin_paths(self) -> None:
        self._reading_paths, self._reread_paths = True, False
        self.backend.begin_paths()
        self.read_paths(ReadPaths())

    @on(ReadPaths)
    def read_paths(self, _: ReadPaths) -> None:
        """The last parts have entered the notifier's channel: read the next ones."""
        self.start_job(
            self.backend.next_paths(PATH_PAGE),
            lambda parts: PathsRead(None if parts is None else tuple(parts)),
            lambda _: PathsRead(None),
        )

    @on(PathsRead)
    def paths_read(self, message: PathsRead) -> None:
        """Send the notifier the parts, and the roots among their parents that requests have now."""
        root_of = self._root_of
        if self._reread_paths:
            self._begin_paths()
        elif message.parts is None or root_of is None:
            self._reading_paths = False
            self._wake()
        else:
            if message.parts:
                roots = {
                    part.parent for part in message.parts if root_of(part.scope) == part.parent
                }
                self.tell(self.notifier, PathsFound(message.parts, frozenset(roots)))
            self.to_self(ReadPaths())


def unwritten(message: Write, outcome: Outcome) -> BatchDone:
    """The result of a batch that was not written."""
    return BatchDone(Written(message.op, bytes([outcome]) * len(message.slots)))


def is_first(writer: ActorRef) -> bool:
    """Whether a writer is the one that reports the whole store at the start."""
    return writer.name.endswith("-0")


def clear_batch(store: GuardedBackend, op: int, salt: int | None = None) -> Batch:
    """The batch that clears the store, or removes the objects of a salt. op: of the ClearStore, 0
    for a repetition."""

    async def work() -> BatchDone:
        unknown = 0
        try:
            if salt is None:
                await store.clear()
            else:
                unknown = await store.forget(salt)
        except StoreError as error:
            return BatchDone(StoreCleared(op, str(error)))
        return BatchDone(StoreCleared(op, salt=salt, unknown=unknown))

    return Batch(work, BatchDone(StoreCleared(op, "the store's writer failed")))
