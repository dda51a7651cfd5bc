"""Substitutes of optional actors that are switched off. Each handles the messages of its role:
look-ups are misses, and nothing is written."""

from __future__ import annotations

from typing import ClassVar

from kvactors.actor import Actor, ActorRef, Envelope, on
from kvactors.errors import SinkError
from kvactors.flush_notifier.deliver import SinkSet
from kvactors.flush_notifier.ledger import Ledger
from kvactors.flush_notifier.messages import (
    BlocksAdded,
    BlocksRemoved,
    NamespaceChanged,
    PathCached,
    PathsFound,
    Report,
    Resync,
    SetIdleLimit,
    TierCleared,
    WaitFlushed,
)
from kvactors.settings import FlushConfig
from kvactors.storage.actors import StorageReader, StorageWriter, unwritten
from kvactors.storage.device_store import DeviceStoreActor
from kvactors.storage.messages import (
    DeviceFetched,
    DeviceSaved,
    FetchDevice,
    Outcome,
    Probed,
    ProbeStore,
    Read,
    ReadDone,
    ReportLost,
    SaveDevice,
    Write,
)

OFF = "the flush notifier is switched off after too many failures: see cache.health()"


class NoNotifier(Actor):
    """Drops every fact: its successor is sent all of them. The ledger has none, for inspection."""

    ROLE: ClassVar[str] = "flush_notifier"

    def __init__(self, ref: ActorRef, *, block_size: int, config: FlushConfig) -> None:
        super().__init__(ref)
        self.ledger = Ledger(block_size, ())
        self.sinks = SinkSet((), self.ledger, config)

    @on(PathCached)
    @on(BlocksAdded)
    @on(BlocksRemoved)
    @on(TierCleared)
    @on(PathsFound)
    @on(NamespaceChanged)
    def fact(self, fact: Report) -> None:
        """Drop a fact."""

    @on(SetIdleLimit)
    def set_idle_limit(self, message: SetIdleLimit) -> None:
        """The successor is made with the limit."""

    @on(WaitFlushed)
    def wait_flushed(self, message: WaitFlushed, envelope: Envelope[bool]) -> None:
        """End a wait for the healthy sinks, as there are none. Refuse a wait for all sinks."""
        if message.healthy:
            self.answer(envelope, True)
        else:
            self.refuse(envelope, SinkError(OFF))

    @on(Resync)
    def resync(self, message: Resync, envelope: Envelope[bool]) -> None:
        self.refuse(envelope, SinkError(OFF))


class NoReader(StorageReader):
    """Every look-up and every read is a miss. The contents of the store are still reported."""

    @on(ProbeStore)
    def probe(self, message: ProbeStore) -> None:
        self.tell(self.evictor, Probed(message.op, 0))

    @on(Read)
    def read(self, message: Read) -> None:
        outcomes = bytes([Outcome.UNAVAILABLE]) * len(message.slots)
        self.tell(self.evictor, ReadDone(message.op, outcomes))


class NoWriter(StorageWriter):
    """Every write is refused. A clear is still carried out, and the contents of the store are
    reported: writes in flight at the failure may have changed them."""

    @on(Write)
    def write(self, message: Write) -> None:
        self.tell(self.evictor, unwritten(message, Outcome.UNAVAILABLE).answer)

    @on(ReportLost)
    def report_lost(self, message: ReportLost) -> None:
        """Ignored: the successor recounts."""


class NoDeviceStore(DeviceStoreActor):
    """Every fetch is a miss, and no block is saved."""

    @on(FetchDevice)
    def fetch(self, message: FetchDevice) -> None:
        self.tell(self.evictor, DeviceFetched(message.op, 0))

    @on(SaveDevice)
    def save(self, message: SaveDevice) -> None:
        self.tell(self.evictor, DeviceSaved(message.op, 0))
