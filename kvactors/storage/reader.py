"""StorageReader: answers what the store can give, and fills host slots from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from kvactors.actor import Message, on
from kvactors.cpu_evictor.messages import Probed, ReadDone
from kvactors.flush_notifier.messages import Cleared, Gained, Gone
from kvactors.storage.messages import Finished, Outcome, Probe, Read
from kvactors.storage.worker import StorageWorker
from kvactors.units import join_keys, split_keys


class StorageReader(StorageWorker):
    """Owns the reads it has under way."""

    ROLE: ClassVar[str] = "storage_reader"
    SENDS: ClassVar[Mapping[str, tuple[type[Message], ...]]] = {
        "cpu_evictor": (Probed, ReadDone),
        "flush_notifier": (Gained, Gone, Cleared),
    }

    @on(Probe)
    def probe(self, message: Probe) -> None:
        """The catalog knows."""
        self.tell(self.evictor, Probed(message.op, self.backend.probe(split_keys(message.keys))))

    @on(Read)
    def read(self, message: Read) -> None:
        """Read a batch. What an exclusive store hands out stops counting here, before anything else can be written."""
        keys = split_keys(message.keys)
        views = [self.arena.view(slot) for slot in message.slots]
        if message.take:
            self.backend.take(keys)

        async def work() -> Finished:
            report = await self.backend.read(keys, views, self.expired(message.deadline))
            taken = [key for key in keys if key not in self.backend.catalog] if message.take else []
            await self.backend.erase(taken)
            moved = report.outcomes.count(Outcome.OK) * self.backend.block_bytes
            answer = ReadDone(message.op, report.outcomes)
            return Finished(answer, b"", b"", join_keys(report.gone), join_keys(taken), moved)

        lost = ReadDone(message.op, bytes([Outcome.UNAVAILABLE]) * len(keys))
        self.enqueue(work, Finished(lost, b"", b"", b"", message.keys if message.take else b"", 0))
