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
    PathPart,
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

IN_FLIGHT = 2
"""Batches that an actor has at the store at a time. The others wait, which bounds the bytes in
flight."""


class Batch(NamedTuple):
    """A call to the store."""

    work: Callable[[], Coroutine[Any, Any, BatchDone]]
    failed: BatchDone
    slots: Sequence[int] = ()
    keys: bytes = b""


# -- pages of a report


REPORT_PAGE = 1024
"""Keys in one message, and in one turn, of a report on the whole store."""

PATH_PAGE = 256
"""Blocks whose paths are read together and sent in one message."""


class Page(NamedTuple):
    """Joined keys to report: those that the store holds, or those that it lost."""

    held: bytes
    gone: bytes


class ReportPages:
    """A report: first every key that the store lost, then every key that it holds."""

    def __init__(self, inventory: GuardedBackend) -> None:
        self.active = False
        self._inventory = inventory
        self._snapshot_due = False
        self._unreported: Iterator[bytes] = iter(())

    def restart(self) -> None:
        """Report every key that the store holds, from the first one on."""
        self._snapshot_due = True

    def next(self) -> Page | None:
        """The next page, None at the end. Keys are listed here and not before, so that no earlier
        message of the actor can enter the notifier's channel later."""
        gone = join_hashes(self._inventory.take_removed())
        if gone:
            return Page(b"", gone)
        if self._snapshot_due:
            self._snapshot_due, self._unreported = False, self._inventory.snapshot()
        page = list(islice(self._unreported, REPORT_PAGE))
        if not page:
            return None
        return Page(join_hashes(key for key in page if self._inventory.holds(key)), b"")


class PathReport:
    """Reading of the paths of a store's blocks, and the reports on them to the notifier."""

    def __init__(self, root_of: Callable[[RequestScope], bytes] | None) -> None:
        self.active = False
        self._root_of = root_of
        self._due = self._again = False

    def restart(self) -> None:
        """Read the paths, from the first one on, after the report on the keys."""
        self._due = self._root_of is not None

    def begins(self) -> bool:
        """The keys are reported: whether the reading of paths begins now."""
        if not self._due:
            return False
        self._due = False
        if self.active:
            self._again = True
            return False
        self.active = True
        return True

    def begins_again(self) -> bool:
        """A page was read: whether the reading starts over, because a restart came in between."""
        again, self._again = self._again, False
        return again

    def named(self, parts: tuple[PathPart, ...]) -> PathsFound | None:
        """The message on a page of parts; None if there is nothing to send."""
        root_of = self._root_of
        if not parts or root_of is None:
            return None
        return PathsFound(
            parts,
            frozenset(part.parent for part in parts if root_of(part.scope) == part.parent),
        )


# -- reports to the notifier


class StoreReporter:
    """The reports of one storage actor, which passes its messages on to the methods here.

    Args:
        root_of: the root hash that requests of a scope have now. None: paths are not reported.
    """

    def __init__(
        self,
        actor: Actor,
        store: GuardedBackend,
        notifier: ActorRef[Report],
        root_of: Callable[[RequestScope], bytes] | None = None,
    ) -> None:
        self.pages = ReportPages(store)
        self.paths = PathReport(root_of if store.keeps_lineages else None)
        self._actor = actor
        self._store = store
        self._notifier = notifier
        self._waiters: list[asyncio.Future[None]] = []

    # -- reports in progress

    @property
    def active(self) -> bool:
        """Whether a report is in progress, or begins when the actor starts."""
        starting = self._actor.state is State.STARTING
        return self.pages.active or self.paths.active or starting

    async def wait(self) -> None:
        """Return when no report is in progress."""
        while self.active:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def stop(self) -> None:
        """The actor has stopped."""
        self.pages.active = self.paths.active = False
        self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # -- the keys of the store

    def report_all(self) -> None:
        """Report every key that the store lost and every key that it holds. An unfinished report
        starts over."""
        self.pages.restart()
        self.report_lost()

    def report_lost(self) -> None:
        """Report every key that the store lost."""
        if self.pages.active:
            return
        if self._actor.context.outbox.waiting:
            # The next turn begins after all earlier messages have entered their channels.
            self._continue()
        else:
            self._report_page()

    def _continue(self) -> None:
        self.pages.active = True
        self._actor.to_self(NextPage())

    def next_page(self) -> None:
        """Handle NextPage."""
        self.pages.active = False
        self._report_page()

    def _report_page(self) -> None:
        page = self.pages.next()
        if page is not None:
            self._report(page.held, page.gone, Reason.RESTART)
            self._continue()
            return
        if self.paths.begins():
            self._begin_paths()
        self._wake()

    def _report(self, held: bytes, gone: bytes, reason: Reason) -> None:
        if gone:
            self._actor.tell(self._notifier, BlocksRemoved(gone, Tier.STORAGE, reason))
        if held:
            self._actor.tell(self._notifier, BlocksAdded(held, Tier.STORAGE, Reason.STORED))
        self._recheck_if_delayed(held, gone)

    def _recheck_if_delayed(self, held: bytes, gone: bytes) -> None:
        """Check a report again if the notifier's lane is full: a newer report of
        another actor may enter before it."""
        outbox = self._actor.context.outbox
        if not outbox.waiting or not (held or gone):
            return
        again = Recheck(held, gone)

        async def entered() -> Recheck:
            await outbox.wait_empty()
            return again

        self._actor.start_job(entered(), lambda recheck: recheck, lambda _: again)

    def recheck(self, message: Recheck) -> None:
        """Handle Recheck: correct the outdated parts of a delayed report."""
        holds = self._store.holds
        gone = join_hashes(key for key in split_hashes(message.held) if not holds(key))
        back = join_hashes(key for key in split_hashes(message.gone) if holds(key))
        self._report(back, gone, Reason.STORAGE_EVICTION)
        self.report_lost()

    def report_batch(self, done: BatchDone) -> None:
        """Report the changes of a batch that are still true. A key that came back since is reported
        by the actor that wrote it."""
        holding = self._store.holding
        removed, acknowledged = list[tuple[bytes, Reason]](), list[bytes]()
        for keys, reason in (
            (done.evicted, Reason.STORAGE_EVICTION),
            (done.corrupt, Reason.CORRUPT),
            (done.taken, Reason.PROMOTION),
        ):
            if not keys:
                continue
            split = split_hashes(keys)
            held = set(holding(split))
            if gone := join_hashes(key for key in split if key not in held):
                removed.append((gone, reason))
            acknowledged += split
        stored = join_hashes(holding(split_hashes(done.stored))) if done.stored else b""
        for gone, reason in removed:
            self._actor.tell(self._notifier, BlocksRemoved(gone, Tier.STORAGE, reason))
        self._store.acknowledge_removed(acknowledged)
        if stored:
            self._actor.tell(self._notifier, BlocksAdded(stored, Tier.STORAGE, Reason.STORED))
        self._recheck_if_delayed(stored, b"".join(gone for gone, _ in removed))
        if isinstance(done.answer, StoreCleared) and done.answer.salt is not None:
            self.report_lost()
        elif isinstance(done.answer, StoreCleared):
            self._actor.tell(self._notifier, TierCleared(Tier.STORAGE, Reason.CLEAR))
            self.report_all()  # objects written since the clear

    # -- the paths of its blocks

    def _begin_paths(self) -> None:
        self._store.begin_paths()
        self.read_paths()

    def read_paths(self) -> None:
        """Handle ReadPaths: read the next parts."""

        def read(parts: list[PathPart] | None) -> PathsRead:
            return PathsRead(None if parts is None else tuple(parts))

        self._actor.start_job(self._store.next_paths(PATH_PAGE), read, lambda _: PathsRead(None))

    def paths_read(self, message: PathsRead) -> None:
        """Handle PathsRead: send the notifier the parts. The next are read after the message has
        entered its channel."""
        if self.paths.begins_again():
            self._begin_paths()
        elif message.parts is None:
            self.paths.active = False
            self._wake()
        else:
            named = self.paths.named(message.parts)
            if named is not None:
                self._actor.tell(self._notifier, named)
            self._actor.to_self(ReadPaths())


# -- what the actors have in common


class StorageWorker(Actor):
    """Runs batches against the store. The notifier is sent the changes of a batch before the
    evictor is sent its result, so that no index sees a slot's end before the store's gain."""

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
        self._in_flight = 0  # batches
        self._waiting: deque[Batch] = deque()
        self.reporter = StoreReporter(self, backend, notifier, root_of)

    def started(self) -> None:
        """A restarted actor reports the whole store: reports of its earlier incarnation may be
        lost."""
        if self.incarnation:
            self.reporter.report_all()

    async def stopped(self) -> None:
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
        self._waiting.append(batch)
        self._start_batches()

    def _start_batches(self) -> None:
        while self._waiting and self._in_flight < IN_FLIGHT:
            self.run_now(self._waiting.popleft())

    def run_now(self, batch: Batch) -> None:
        """Run a batch without waiting for its turn."""
        self._in_flight += 1
        self._start(batch)

    def _start(self, batch: Batch) -> None:
        def failed(error: BaseException) -> BatchDone:
            self.log.error("storage job failed", error=described(error))
            return batch.failed

        self.start_job(batch.work(), lambda done: done, failed, slots=batch.slots, keys=batch.keys)

    @on(BatchDone)
    def batch_done(self, message: BatchDone) -> None:
        """A batch has ended."""
        self._in_flight -= 1
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
        found = self.backend.probe(keys)
        if found is not None:
            self.tell(self.evictor, Probed(message.op, found))
            return

        async def work() -> BatchDone:
            return done(await self.backend.ask(keys, expired(message.deadline)))

        def done(run: int) -> BatchDone:
            return BatchDone(Probed(message.op, run))

        self.enqueue(Batch(work, done(0)))

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
                self.backend.take(taken)
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


class StoreOwner(StorageWorker):
    """Clears the store, and reports its contents: a writer, or its substitute.

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
            self.reporter.paths.restart()
            if not self.incarnation:
                self.reporter.report_all()
        if self.incarnation and self.backend.needs_clear():
            self.run_now(clear_batch(self.backend, 0))

    @on(PeerRestarted)
    def peer_restarted(self, message: PeerRestarted) -> None:
        """A restarted notifier needs all reports again."""
        if message.name == "flush_notifier" and is_first(self.ref):
            self.reporter.paths.restart()
            self.reporter.report_all()

    @on(ClearStore)
    def clear(self, message: ClearStore) -> None:
        """Clear the store, or remove the objects of a salt. Batches that were sent earlier, to any
        writer, are not written any more."""
        self.backend.fence = max(self.backend.fence, (self.evictor.incarnation, message.op))
        self.run_now(clear_batch(self.backend, message.op, message.salt))

    @on(PathsRead)
    def paths_read(self, message: PathsRead) -> None:
        """Parts of paths were read."""
        self.reporter.paths_read(message)

    @on(ReadPaths)
    def read_paths(self, _: ReadPaths) -> None:
        """Read the next parts of paths."""
        self.reporter.read_paths()


class StorageWriter(StoreOwner):
    """Owns its writes in flight."""

    @on(Write)
    def write(self, message: Write) -> None:
        """Write a batch, unless the store was cleared after it was sent."""
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
            holding, safe = self.backend.holding, (Outcome.OK, Outcome.EXISTS)
            results = zip(keys, report.outcomes, strict=True)
            back = set(holding(report.evicted))
            return BatchDone(
                Written(message.op, report.outcomes),
                stored=join_hashes(holding([key for key, outcome in results if outcome in safe])),
                evicted=join_hashes(key for key in report.evicted if key not in back),
            )

        failed = unwritten(message, Outcome.UNAVAILABLE)
        self.enqueue(Batch(work, failed, message.slots, message.keys))

    @on(ReportLost)
    def report_lost(self, message: ReportLost) -> None:
        """Report keys that the store lost outside of batches. Repeat a clear that did not reach the
        whole store."""
        if self.backend.needs_clear():
            self.run_now(clear_batch(self.backend, 0))
        self.reporter.report_lost()


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
