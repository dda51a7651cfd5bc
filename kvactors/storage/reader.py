"""`StorageReader`: looks blocks up in the store, and reads them into host slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from kvactors.actor import Message, on
from kvactors.flush_notifier.messages import BlocksAdded, BlocksRemoved, TierCleared
from kvactors.storage.batches import Batch
from kvactors.storage.messages import BatchDone, Outcome, Probed, ProbeStore, Read, ReadDone
from kvactors.storage.worker import StorageWorker, expired
from kvactors.types import join_hashes, split_hashes


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
