"""StorageReader: answers what the store can give, and fills host slots from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from kvactors.actor import Message, on
from kvactors.flush_notifier.messages import Cleared, Gained, Gone
from kvactors.storage.messages import Finished, Outcome, Probe, Probed, Read, ReadDone
from kvactors.storage.worker import StorageWorker
from kvactors.types import join_keys, split_keys


class StorageReader(StorageWorker):
    """Owns the reads it has under way."""

    ROLE: ClassVar[str] = "storage_reader"
    SENDS: ClassVar[Mapping[str, tuple[type[Message], ...]]] = {
        "cpu_evictor": (Probed, ReadDone),
        "flush_notifier": (Gained, Gone, Cleared),
    }

    @on(Probe)
    def probe(self, message: Probe) -> None:
        """A store of our own knows at once; a shared pool must be asked."""
        keys = split_keys(message.keys)
        found = self.backend.probe(keys)
        if found is not None:
            self.tell(self.evictor, Probed(message.op, found))
            return

        async def work() -> Finished:
            return done(await self.backend.ask(keys, self.expired(message.deadline)))

        def done(run: int) -> Finished:
            return Finished(Probed(message.op, run), b"", b"", b"", b"", 0)

        self.enqueue(work, done(0))

    @on(Read)
    def read(self, message: Read) -> None:
        """Read a batch. What an exclusive store hands out stops counting here, before anything else
        can be written."""
        keys = split_keys(message.keys)
        if message.take:
            self.backend.take(keys)

        async def work() -> Finished:
            if message.era != self.backend.era:
                return lost
            report = await self.backend.read_slots(
                keys, self.arena, message.slots, self.expired(message.deadline)
            )
            taken = [key for key in keys if not self.backend.holds(key)] if message.take else []
            await self.backend.remove(taken)
            moved = report.outcomes.count(Outcome.OK) * self.backend.block_bytes
            answer = ReadDone(message.op, report.outcomes)
            return Finished(answer, b"", b"", join_keys(report.gone), join_keys(taken), moved)

        unread = ReadDone(message.op, bytes([Outcome.UNAVAILABLE]) * len(keys))
        lost = Finished(unread, b"", b"", b"", message.keys if message.take else b"", 0)
        self.enqueue(work, lost, message.slots, message.keys)
