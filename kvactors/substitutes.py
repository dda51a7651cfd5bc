"""What runs in the place of an optional actor while it is switched off: every message is answered
at once, as a miss or as not done."""

from __future__ import annotations

from kvactors.actor import Envelope, on
from kvactors.errors import SinkError
from kvactors.flush_notifier.actor import FlushNotifier
from kvactors.flush_notifier.ledger import Fact
from kvactors.flush_notifier.messages import Resync, Settle
from kvactors.storage.direct import StorageDirect
from kvactors.storage.messages import (
    FetchDevice,
    Fetched,
    Outcome,
    Probe,
    Probed,
    Read,
    ReadDone,
    Recount,
    Saved,
    SaveDevice,
    Write,
    Written,
)
from kvactors.storage.reader import StorageReader
from kvactors.storage.writer import StorageWriter


class NoNotifier(FlushNotifier):
    """Drops every fact. Its successor is sent all of them again."""

    def started(self) -> None:
        """No sink is called."""

    def fact(self, fact: Fact) -> None:
        """Dropped."""

    @on(Settle)
    def settle(self, message: Settle, envelope: Envelope[bool]) -> None:
        """No sink is healthy; a wait for all of them is refused."""
        if message.healthy:
            self.answer(envelope, True)
        else:
            self.refuse(
                envelope,
                SinkError(
                    "the flush notifier is switched off after too many failures: see cache.health()"
                ),
            )

    @on(Resync)
    def resync(self, message: Resync, envelope: Envelope[bool]) -> None:
        """There is no sink to send anything."""
        self.refuse(
            envelope,
            SinkError(
                "the flush notifier is switched off after too many failures: see cache.health()"
            ),
        )


class NoReader(StorageReader):
    """Every look-up and every read is a miss. What the store holds is still reported."""

    @on(Probe)
    def probe(self, message: Probe) -> None:
        """Nothing is there."""
        self.tell(self.evictor, Probed(message.op, 0))

    @on(Read)
    def read(self, message: Read) -> None:
        """Nothing can be read."""
        self.tell(
            self.evictor, ReadDone(message.op, bytes([Outcome.UNAVAILABLE]) * len(message.slots))
        )


class NoWriter(StorageWriter):
    """Every write is refused. A clear is still carried out, and what the store holds is reported:
    writes in flight at the failure may have changed that."""

    @on(Write)
    def write(self, message: Write) -> None:
        """Nothing can be written."""
        self.tell(
            self.evictor, Written(message.op, bytes([Outcome.UNAVAILABLE]) * len(message.slots))
        )

    @on(Recount)
    def recount(self, message: Recount) -> None:
        """Its successor does that."""


class NoDirect(StorageDirect):
    """Every fetch is a miss, every save is not done."""

    @on(FetchDevice)
    def fetch(self, message: FetchDevice) -> None:
        """Nothing is there."""
        self.tell(self.evictor, Fetched(message.op, 0))

    @on(SaveDevice)
    def save(self, message: SaveDevice) -> None:
        """Nothing is saved."""
        self.tell(self.evictor, Saved(message.op, 0))
