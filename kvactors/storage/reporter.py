"""`StoreReporter`: keeps the notifier informed of the keys in a store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvactors.actor import Actor, ActorRef
from kvactors.actor.context import State
from kvactors.flush_notifier.messages import (
    BlocksAdded,
    BlocksRemoved,
    PathPart,
    Report,
    RequestScope,
    TierCleared,
)
from kvactors.storage import reports
from kvactors.storage.backends.checked import CheckedBackend
from kvactors.storage.batches import changes_of
from kvactors.storage.messages import (
    BatchDone,
    NextPage,
    PathsRead,
    ReadPaths,
    Recheck,
    StoreCleared,
)
from kvactors.storage.reports import PathReport, ReportPages
from kvactors.types import Reason, Tier, join_hashes, split_hashes


class StoreReporter:
    """The reports of one storage actor, which passes its messages on to the methods here.

    Attributes:
        pages: a report on the keys of the whole store.
        paths: a report on the paths of its blocks.

    Args:
        root_of: the root hash that requests of a scope have now. None: paths are not reported.
    """

    def __init__(
        self,
        actor: Actor,
        store: CheckedBackend,
        notifier: ActorRef[Report],
        root_of: Callable[[RequestScope], bytes] | None = None,
    ) -> None:
        self.pages = ReportPages(store.inventory)
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
        """Report the changes of a batch."""
        changes = changes_of(done, self._store)
        for keys, reason in changes.removed:
            self._actor.tell(self._notifier, BlocksRemoved(keys, Tier.STORAGE, reason))
        self._store.inventory.acknowledge_removed(changes.acknowledged)
        if changes.stored:
            self._actor.tell(
                self._notifier, BlocksAdded(changes.stored, Tier.STORAGE, Reason.STORED)
            )
        self._recheck_if_delayed(changes.stored, b"".join(keys for keys, _ in changes.removed))
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

        self._actor.start_job(
            self._store.next_paths(reports.PATH_PAGE), read, lambda _: PathsRead(None)
        )

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
