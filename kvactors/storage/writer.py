"""`StorageWriter`: writes host slots to the store, clears it, and reports the objects from earlier
processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from kvactors.actor import ActorRef, Message, PeerRestarted, on
from kvactors.errors import StoreError
from kvactors.flush_notifier.messages import BlocksAdded, BlocksRemoved, PathsFound, TierCleared
from kvactors.storage.backends.checked import CheckedBackend
from kvactors.storage.batches import Batch
from kvactors.storage.messages import (
    BatchDone,
    ClearStore,
    Outcome,
    PathsRead,
    ReadPaths,
    ReportLost,
    StoreCleared,
    Write,
    Written,
)
from kvactors.storage.worker import StorageWorker, expired
from kvactors.types import join_hashes, split_hashes


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
        """See `StorageWorker.started`."""
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


def clear_batch(store: CheckedBackend, op: int, salt: int | None = None) -> Batch:
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
