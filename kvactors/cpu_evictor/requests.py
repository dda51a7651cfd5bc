"""Requests of CpuEvictor to the swapper and to storage that are in flight: one table, by operation
number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import ClassVar, Protocol, TypeVar

import msgspec

from kvactors.actor import ActorRef
from kvactors.actor.message import Message
from kvactors.cpu_evictor.actions import Action, Send, send
from kvactors.cpu_evictor.messages import HostReply
from kvactors.cpu_evictor.slots import HostBlock
from kvactors.data_plane.base import Direction
from kvactors.flush_notifier.messages import Report
from kvactors.gpu_swapper.messages import Copy
from kvactors.settings import StorageConfig
from kvactors.storage.messages import (
    ClearStore,
    DeviceStoreMessage,
    FetchDevice,
    ProbeStore,
    Read,
    ReaderMessage,
    SaveDevice,
    Write,
    WriterMessage,
)
from kvactors.types import join_hashes


@dataclass(frozen=True, slots=True)
class Peers:
    """The actors that CpuEvictor sends to.

    Attributes:
        device_store: the actor of a store that moves device memory itself, None without one.
    """

    index: ActorRef[HostReply]
    swapper: ActorRef[Copy]
    readers: Sequence[ActorRef[ReaderMessage]]
    writers: Sequence[ActorRef[WriterMessage]]
    notifier: ActorRef[Report]
    device_store: ActorRef[DeviceStoreMessage] | None = None


class CopyJob(Protocol):
    """A job that copies between device blocks and host slots."""

    def on_copied(self, first: int, size: int, failed: frozenset[int]) -> list[Action]:
        """A copy of `size` blocks has ended. first: as given to `RequestTable.copy`. failed:
        indices of the blocks whose bytes did not arrive."""


class ProbeJob(Protocol):
    """A job that asks which blocks the store has."""

    def on_probed(self, found: int) -> list[Action]:
        """The store has the first `found` blocks."""


class ReadJob(Protocol):
    """A job that reads blocks from storage into host slots."""

    def on_read(self, first: int, outcomes: bytes) -> list[Action]:
        """The read has ended, with one `Outcome` for each block. first: as given to
        `RequestTable.read`."""


class FetchJob(Protocol):
    """A job that reads blocks from a device store into device blocks."""

    def on_fetched(self, first: int, fetched: int) -> list[Action]:
        """The first `fetched` blocks from position `first` on have arrived."""


class SaveToDeviceStoreJob(Protocol):
    """A job that writes device blocks to a device store."""

    def on_saved(self) -> list[Action]:
        """The device blocks are not read any longer."""


class Request(msgspec.Struct, frozen=True, eq=False):
    """A request in flight.

    Attributes:
        peer: the actor that answers.
        size: blocks that it is about.
        ORDER: in which order the requests to a failed peer are ended.
        HOLDS_SLOTS: whether host slots can be in use for it.
        HOLDS_WRITES: whether writes are held back until it is answered.
        STOPS_READS: whether no read may begin until it is answered.
        LOADS_PEER: whether its blocks count when a peer of a pool is chosen.
    """

    ORDER: ClassVar[int] = 0
    HOLDS_SLOTS: ClassVar[bool] = True
    HOLDS_WRITES: ClassVar[bool] = False
    STOPS_READS: ClassVar[bool] = False
    LOADS_PEER: ClassVar[bool] = False

    peer: ActorRef
    size: int


class CopyRequest(Request, frozen=True, eq=False):
    """A copy between device blocks and host slots."""

    job: CopyJob
    first: int


class FetchRequest(Request, frozen=True, eq=False):
    """A read by a device store."""

    HOLDS_SLOTS: ClassVar[bool] = False
    ORDER: ClassVar[int] = 1

    job: FetchJob
    first: int


class SaveRequest(Request, frozen=True, eq=False):
    """A write by a device store."""

    HOLDS_SLOTS: ClassVar[bool] = False
    ORDER: ClassVar[int] = 2

    job: SaveToDeviceStoreJob


class ClearRequest(Request, frozen=True, eq=False):
    """A clear of the store.

    Attributes:
        op: of the `ClearHost` that is answered when it ends.
        salt: see `ClearHost`.
    """

    ORDER: ClassVar[int] = 3
    HOLDS_SLOTS: ClassVar[bool] = False
    STOPS_READS: ClassVar[bool] = True

    op: int
    salt: int | None


class ProbeRequest(Request, frozen=True, eq=False):
    """A probe before a read. Writes are held back until it is answered: a store of limited size
    must not evict for them what is about to be read."""

    ORDER: ClassVar[int] = 4
    HOLDS_WRITES: ClassVar[bool] = True
    LOADS_PEER: ClassVar[bool] = True

    job: ProbeJob


class StoredRequest(ProbeRequest, frozen=True, eq=False):
    """A probe before a write. It holds no writes back."""

    ORDER: ClassVar[int] = 5
    HOLDS_WRITES: ClassVar[bool] = False
    LOADS_PEER: ClassVar[bool] = False


class ReadRequest(Request, frozen=True, eq=False):
    """A read from storage into host slots."""

    ORDER: ClassVar[int] = 6
    LOADS_PEER: ClassVar[bool] = True

    job: ReadJob
    first: int


class WriteRequest(Request, frozen=True, eq=False):
    """A write of host slots to storage."""

    ORDER: ClassVar[int] = 7
    LOADS_PEER: ClassVar[bool] = True

    blocks: Sequence[HostBlock]


R = TypeVar("R", bound=Request)
M = TypeVar("M", bound=Message)


class RequestTable:
    """The table of requests in flight. Each method that begins one enters it and returns the
    message to send. `take` removes it when its completion arrives.

    Attributes:
        generation: memory generation that requests are stamped with.
    """

    def __init__(
        self, peers: Peers, storage: StorageConfig, generation: int, clock: Callable[[], float]
    ) -> None:
        self.peers = peers
        self.storage = storage
        self.generation = generation
        self.clock = clock
        self._ops = count(1)
        self._table: dict[int, Request] = {}
        # Blocks in flight of each storage actor, and one more for each request.
        actors: tuple[ActorRef, ...] = (*peers.readers, *peers.writers)
        self._load = {peer.name: 0 for peer in actors}
        self._probes = self._clears = 0

    @property
    def idle(self) -> bool:
        """Whether no request is in flight."""
        return not self._table

    @property
    def may_read(self) -> bool:
        """Whether there is a store to read from. One that is being cleared counts as empty."""
        return bool(self.peers.readers) and not self._clears

    @property
    def holds_writes(self) -> bool:
        """Whether a probe or a read that holds writes back is in flight."""
        return self._probes > 0

    @property
    def holds_slots(self) -> bool:
        """Whether host slots can be in use for a request in flight."""
        return any(request.HOLDS_SLOTS for request in self._table.values())

    def hold_writes(self) -> None:
        """Hold writes back, as a probe does, until `release_writes`."""
        self._probes += 1

    def release_writes(self) -> None:
        """The reads that follow from a probe have begun."""
        self._probes -= 1

    # -- begin

    def copy(
        self,
        job: CopyJob,
        direction: Direction,
        device_blocks: Sequence[int],
        blocks: Sequence[HostBlock],
        *,
        first: int = 0,
        layerwise: bool = False,
    ) -> Send[Copy]:
        """Copy between device blocks and slots. The caller holds the pins."""
        op = next(self._ops)
        self._table[op] = CopyRequest(self.peers.swapper, len(blocks), job, first)
        slots = tuple([block.slot for block in blocks])
        message = Copy(op, direction, tuple(device_blocks), slots, layerwise, self.generation)
        return send(self.peers.swapper, message)

    def probe(self, job: ProbeJob, hashes: Sequence[bytes], deadline: float) -> Send[ProbeStore]:
        """Ask how many leading blocks can be read from storage, in order to read them."""
        op, reader = next(self._ops), self._least_loaded(self.peers.readers)
        self._table[op] = ProbeRequest(reader, len(hashes), job)
        self._probes += 1
        self._load[reader.name] += len(hashes) + 1
        return send(reader, ProbeStore(op, join_hashes(hashes), deadline))

    def ask_stored(
        self, job: ProbeJob, hashes: Sequence[bytes], deadline: float
    ) -> Send[ProbeStore]:
        """Ask how many leading blocks storage has, in order to write the others."""
        op, reader = next(self._ops), self._least_loaded(self.peers.readers)
        self._table[op] = StoredRequest(reader, len(hashes), job)
        return send(reader, ProbeStore(op, join_hashes(hashes), deadline))

    def read(
        self, job: ReadJob, first: int, blocks: Sequence[HostBlock], deadline: float
    ) -> Send[Read]:
        """Fill slots from storage. The caller holds the pins."""
        op, reader = next(self._ops), self._least_loaded(self.peers.readers)
        self._table[op] = ReadRequest(reader, len(blocks), job, first)
        # The objects that an exclusive store hands out give space to the writes.
        self._probes += self.storage.exclusive
        self._load[reader.name] += len(blocks) + 1
        hashes = join_hashes(block.hash for block in blocks)
        slots = tuple([block.slot for block in blocks])
        exclusive = self.storage.exclusive
        return send(reader, Read(op, hashes, slots, deadline, exclusive, self.generation))

    def write(self, blocks: Sequence[HostBlock]) -> Send[Write]:
        """Write slots to storage, least recently used first. The caller holds the pins."""
        op, writer = next(self._ops), self._least_loaded(self.peers.writers)
        self._table[op] = WriteRequest(writer, len(blocks), blocks)
        self._load[writer.name] += len(blocks) + 1
        hashes = join_hashes(block.hash for block in blocks)
        slots = tuple([block.slot for block in blocks])
        lineages = tuple([block.lineage for block in blocks])
        deadline = self.clock() + self.storage.timeout_s
        salts = tuple([block.salt for block in blocks])
        message = Write(
            op, hashes, slots, deadline, self.generation, lineages if any(lineages) else (), salts
        )
        return send(writer, message)

    def clear_store(self, asked: int, salt: int | None) -> Send[ClearStore]:
        """Clear the store, or remove the objects of a salt.

        Args:
            asked: op of the `ClearHost` that is answered when it ends.
            salt: see `ClearHost`.
        """
        op, writer = next(self._ops), self.peers.writers[0]
        self._table[op] = ClearRequest(writer, 0, asked, salt)
        self._clears += 1
        return send(writer, ClearStore(op, salt))

    def fetch(
        self,
        job: FetchJob,
        tokens: bytes,
        start: int,
        device_blocks: tuple[int, ...],
        deadline: float,
        *,
        first: int,
    ) -> Send[FetchDevice]:
        """Have the device store read blocks `start`.. of a path into device blocks."""
        op, device_store = next(self._ops), self._device_store()
        self._table[op] = FetchRequest(device_store, len(device_blocks), job, first)
        message = FetchDevice(op, tokens, start, device_blocks, deadline, self.generation)
        return send(device_store, message)

    def save(
        self,
        job: SaveToDeviceStoreJob,
        tokens: bytes,
        start: int,
        device_blocks: tuple[int, ...],
    ) -> Send[SaveDevice]:
        """Have the device store write blocks `start`.. of a path from device blocks."""
        op, device_store = next(self._ops), self._device_store()
        self._table[op] = SaveRequest(device_store, len(device_blocks), job)
        deadline = self.clock() + self.storage.timeout_s
        message = SaveDevice(op, tokens, start, device_blocks, deadline, self.generation)
        return send(device_store, message)

    # -- end

    def get(self, op: int, kind: type[R]) -> R | None:
        """The request of that kind with this number; None if there is none."""
        request = self._table.get(op)
        return request if isinstance(request, kind) else None

    def take(self, op: int, kind: type[R]) -> R | None:
        """Remove a request that has ended; None if there is none of that kind with this number."""
        request = self._table.get(op)
        if not isinstance(request, kind):
            return None
        del self._table[op]
        self._probes -= request.HOLDS_WRITES
        self._probes -= self.storage.exclusive and isinstance(request, ReadRequest)
        self._clears -= request.STOPS_READS
        if request.LOADS_PEER:
            self._load[request.peer.name] -= request.size + 1
        return request

    def open_at(self, peer: str) -> list[tuple[int, Request]]:
        """Requests that an actor has not answered, with their numbers, in the order in which they
        are ended if it fails."""
        found = [one for one in self._table.items() if one[1].peer.name == peer]
        return sorted(found, key=lambda one: one[1].ORDER)

    def _device_store(self) -> ActorRef[DeviceStoreMessage]:
        if self.peers.device_store is None:
            raise RuntimeError("no store that moves device memory is configured")
        return self.peers.device_store

    def _least_loaded(self, actors: Sequence[ActorRef[M]]) -> ActorRef[M]:
        """One of a pool. A substitute answers at once and so never has any load: it is chosen only
        if all are switched off."""
        if len(actors) == 1:
            return actors[0]
        return min(actors, key=lambda actor: (actor.switched_off, self._load[actor.name]))
