"""StorageWriter: writes host slots to the store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from kvactors.actor import Message, PeerRestarted, on
from kvactors.cpu_evictor.messages import StoreCleared, Written
from kvactors.errors import StoreError
from kvactors.flush_notifier.messages import Cleared, Gained, Gone
from kvactors.storage.messages import ClearStore, Finished, Outcome, Recount, Write
from kvactors.storage.worker import StorageWorker
from kvactors.units import join_keys, split_keys


class StorageWriter(StorageWorker):
    """Owns the writes it has under way."""

    ROLE: ClassVar[str] = "storage_writer"
    SENDS: ClassVar[Mapping[str, tuple[type[Message], ...]]] = {
        "cpu_evictor": (Written, StoreCleared),
        "flush_notifier": (Gained, Gone, Cleared),
    }

    @on(Write)
    def write(self, message: Write) -> None:
        """Write a batch, unless the store was cleared after it was sent."""
        keys, sent = split_keys(message.keys), (self.evictor.life, message.op)

        async def work() -> Finished:
            if sent < self.backend.fence:
                return late
            if message.era != self.backend.era:
                return lost
            report = await self.backend.write_slots(keys, self.arena, message.slots, self.expired(message.deadline))
            safe = (Outcome.OK, Outcome.EXISTS)
            pairs = list(zip(keys, report.outcomes, strict=True))
            stored = join_keys(key for key, outcome in pairs if outcome in safe and self.backend.holds(key))
            evicted = join_keys(key for key in report.evicted if not self.backend.holds(key))
            moved = report.outcomes.count(Outcome.OK) * self.backend.block_bytes
            return Finished(Written(message.op, report.outcomes), stored, evicted, b"", b"", moved)

        lost = Finished(Written(message.op, bytes([Outcome.UNAVAILABLE]) * len(keys)), b"", b"", b"", b"", 0)
        late = Finished(Written(message.op, bytes([Outcome.LATE]) * len(keys)), b"", b"", b"", b"", 0)
        self.enqueue(work, lost, message.slots, message.keys)

    @on(ClearStore)
    def clear(self, message: ClearStore) -> None:
        """Empty the store. Batches that were sent before, to any writer, are not written from here on."""
        self.backend.fence = max(self.backend.fence, (self.evictor.life, message.op))
        self._clear(message.op)

    def _clear(self, op: int) -> None:
        async def work() -> Finished:
            try:
                await self.backend.clear()
            except StoreError as error:
                return Finished(StoreCleared(op, str(error)), b"", b"", b"", b"", 0)
            return Finished(StoreCleared(op), b"", b"", b"", b"", 0)

        self.run_now(work, Finished(StoreCleared(op, "the store's writer failed"), b"", b"", b"", b"", 0))

    @on(Recount)
    def recount(self, message: Recount) -> None:
        """Tell of names that ceased to be there outside of any batch; repeat a clear that did not reach all of the store."""
        if self.backend.needs_clear():
            self._clear(0)
        self.report_lost()

    def started(self) -> None:
        """The notifier hears what the store has kept from before, by one writer for all."""
        super().started()
        if not self.life and self._first:
            self.report_all()
        if self.life and self.backend.needs_clear():
            self._clear(0)

    @on(PeerRestarted)
    def peer_restarted(self, message: PeerRestarted) -> None:
        """A new notifier is told everything."""
        if message.name == "flush_notifier" and self._first:
            self.report_all()

    @property
    def _first(self) -> bool:
        return self.ref.name.endswith("-0")
