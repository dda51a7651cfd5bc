"""StorageWriter: writes host slots to the store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from kvactors.actor import ActorRef, Message, PeerRestarted, on
from kvactors.errors import StoreError
from kvactors.flush_notifier.messages import Cleared, Gained, Gone, Named, Origin, PathPart
from kvactors.storage.messages import (
    ClearStore,
    Finished,
    Outcome,
    PathsRead,
    ReadPaths,
    Recount,
    StoreCleared,
    Write,
    Written,
)
from kvactors.storage.worker import StorageWorker
from kvactors.types import join_keys, split_keys

PATH_PAGE = 256
"""Blocks whose paths are read at once and sent in one message."""


class StorageWriter(StorageWorker):
    """Owns the writes it has in flight. root_of: the root hash that requests of an origin have now;
    None if there are no sinks.

    The first writer reports what the store has kept from before. If the store keeps lineages, the
    paths of these blocks follow in the background, a page at a time: `Gained` for a key has entered
    the notifier's channel before the key is named.
    """

    ROLE: ClassVar[str] = "storage_writer"
    SENDS: ClassVar[Mapping[str, tuple[type[Message], ...]]] = {
        "cpu_evictor": (Written, StoreCleared),
        "flush_notifier": (Gained, Gone, Cleared, Named),
    }

    def __init__(
        self, ref: ActorRef, *, root_of: Callable[[Origin], bytes] | None = None, **rest: Any
    ) -> None:
        super().__init__(ref, **rest)
        self._root_of = root_of
        self._announces = root_of is not None and self.backend.keeps_lineages
        self._paths_due = self._read_again = False

    @on(Write)
    def write(self, message: Write) -> None:
        """Write a batch, unless the store was cleared after it was sent."""
        keys, sent = split_keys(message.keys), (self.evictor.life, message.op)

        async def work() -> Finished:
            if sent < self.backend.fence:
                return late
            if message.era != self.backend.era:
                return lost
            until = self.expired(message.deadline)
            report = await self.backend.write_slots(
                keys, self.arena, message.slots, until, message.lineages
            )
            safe = (Outcome.OK, Outcome.EXISTS)
            pairs = list(zip(keys, report.outcomes, strict=True))
            stored = join_keys(
                key for key, outcome in pairs if outcome in safe and self.backend.holds(key)
            )
            evicted = join_keys(key for key in report.evicted if not self.backend.holds(key))
            moved = report.outcomes.count(Outcome.OK) * self.backend.block_bytes
            return Finished(Written(message.op, report.outcomes), stored, evicted, b"", b"", moved)

        lost = Finished(
            Written(message.op, bytes([Outcome.UNAVAILABLE]) * len(keys)), b"", b"", b"", b"", 0
        )
        late = Finished(
            Written(message.op, bytes([Outcome.LATE]) * len(keys)), b"", b"", b"", b"", 0
        )
        self.enqueue(work, lost, message.slots, message.keys)

    @on(ClearStore)
    def clear(self, message: ClearStore) -> None:
        """Empty the store. Batches that were sent before, to any writer, are not written from here
        on."""
        self.backend.fence = max(self.backend.fence, (self.evictor.life, message.op))
        self._clear(message.op)

    def _clear(self, op: int) -> None:
        async def work() -> Finished:
            try:
                await self.backend.clear()
            except StoreError as error:
                return Finished(StoreCleared(op, str(error)), b"", b"", b"", b"", 0)
            return Finished(StoreCleared(op), b"", b"", b"", b"", 0)

        self.run_now(
            work, Finished(StoreCleared(op, "the store's writer failed"), b"", b"", b"", b"", 0)
        )

    @on(Recount)
    def recount(self, message: Recount) -> None:
        """Tell of names that ceased to be there outside of any batch; repeat a clear that did not
        reach all of the store."""
        if self.backend.needs_clear():
            self._clear(0)
        self.report_lost()

    def started(self) -> None:
        """The notifier hears what the store has kept from before, by one writer for all."""
        super().started()
        self._paths_due = self._announces and self._first
        if not self.life and self._first:
            self.report_all()
        if self.life and self.backend.needs_clear():
            self._clear(0)

    @on(PeerRestarted)
    def peer_restarted(self, message: PeerRestarted) -> None:
        """A new notifier is told everything."""
        if message.name == "flush_notifier" and self._first:
            self._paths_due = self._announces
            self.report_all()

    # -- paths

    def report_ended(self) -> None:
        """See `StorageWorker.report_ended`: now the paths of these blocks, if the notifier does not
        have them."""
        if self._paths_due:
            self._paths_due = False
            self._read_again = self._reading
            if not self._reading:
                self._begin_paths()
        super().report_ended()

    def _begin_paths(self) -> None:
        self._reading, self._read_again = True, False
        self.backend.begin_paths()
        self._read_paths()

    def _read_paths(self) -> None:
        def read(parts: list[PathPart] | None) -> PathsRead:
            return PathsRead(None if parts is None else tuple(parts))

        self.start_job(self.backend.next_paths(PATH_PAGE), read, lambda _: PathsRead(None))

    @on(PathsRead)
    def paths_read(self, message: PathsRead) -> None:
        """Parts of paths: the notifier is sent them. The next ones are read after these have
        entered its channel."""
        if self._read_again:
            self._begin_paths()
        elif message.parts is None:
            self._reading = False
            self._report_complete()
        else:
            if message.parts and self._root_of is not None:
                roots = frozenset(
                    part.parent
                    for part in message.parts
                    if self._root_of(part.origin) == part.parent
                )
                self.tell(self.notifier, Named(message.parts, roots))
            self.to_self(ReadPaths())

    @on(ReadPaths)
    def read_paths(self, _: ReadPaths) -> None:
        """Read the next parts."""
        self._read_paths()

    @property
    def _first(self) -> bool:
        return self.ref.name.endswith("-0")
