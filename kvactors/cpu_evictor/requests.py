"""Requests of CpuEvictor to the swapper and to storage that are in flight: one table, by operation
number. A request continues the job that made it when it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec

from kvactors.actor import ActorRef, Timer
from kvactors.actor.effects import Effects
from kvactors.actor.message import Message
from kvactors.cpu_evictor.messages import HostReply
from kvactors.cpu_evictor.slots import BlockTraits, HostBlock, SlotState
from kvactors.data_plane.base import Direction
from kvactors.flush_notifier.messages import Report
from kvactors.gpu_swapper.messages import Copy
from kvactors.identity import lineage
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
from kvactors.types import join_hashes, split_hashes

if TYPE_CHECKING:
    from kvactors.cpu_evictor.memory import HostMemory


@dataclass(frozen=True, slots=True)
class Peers:
    """The actors that CpuEvictor sends to."""

    index: ActorRef[HostReply]
    swapper: ActorRef[Copy]
    readers: Sequence[ActorRef[ReaderMessage]]
    writers: Sequence[ActorRef[WriterMessage]]
    notifier: ActorRef[Report]
    device_store: ActorRef[DeviceStoreMessage] | None = None


class HostJob:
    """One movement of blocks through host memory, from its message to its answer.

    It takes slots in turns (`Movements`) and makes requests, which continue it when they end. A job
    overrides what it takes part in.

    Attributes:
        op: number in its `SlotDeadline`, 0 for a job without one.
        generation: of the host tier at the start.
        waiting: positions that have no slot yet, the next one last.
        passing: positions of blocks that only pass through, on their way to storage.
        to_write: positions of blocks that take a slot although they do not stay.
        moving: positions and blocks of those in flight, by their number.
    """

    URGENT: ClassVar[bool] = False
    message: Any
    op = windows = 0
    passing: frozenset[int] = frozenset()
    to_write: frozenset[int] = frozenset()
    timer: Timer | None = None

    def __init__(self, memory: HostMemory, message: Any) -> None:
        self.memory = memory
        self.host, self.requests, self.out = memory.host, memory.requests, memory.out
        self.message = message
        self.hashes = split_hashes(message.hashes)
        self.generation = memory.host.generation
        self.waiting: list[int] = []
        self.moving: dict[int, list[tuple[int, HostBlock]]] = {}

    def stop_timer(self) -> None:
        """The deadline does not matter any longer."""
        if self.timer is not None:
            self.timer.cancel()

    def new_window(self, blocks: list[tuple[int, HostBlock]]) -> int:
        """The number of a copy or read of these blocks that is about to begin."""
        self.windows += 1
        self.moving[self.windows] = blocks
        return self.windows

    # -- slots

    def take(self, most: int) -> None:
        """Take up to `most` slots, as far as there are free ones, and fill them."""

    def give_up(self) -> None:
        """No slot will come: end without the blocks that lack one."""
        self.waiting.clear()

    def fill(self, most: int) -> list[tuple[int, HostBlock]]:
        """Put up to `most` waiting blocks into free slots, without those that are in the tier by
        now. Returns their positions and the blocks."""
        host, blocks = self.host, list[tuple[int, HostBlock]]()
        while self.waiting and len(blocks) < most and host.free:
            position = self.waiting.pop()
            stays = position not in self.passing and host.resident < host.capacity
            if self.hashes[position] not in host.blocks and (stays or position in self.to_write):
                blocks.append((position, self.add(position, stays=stays)))
        return blocks

    def add(self, position: int, *, stays: bool) -> HostBlock:
        """Put a block into a free slot. stays: whether it becomes resident."""
        parent, lineages = self.parent(position), self.message.lineages
        state = SlotState.RESIDENT if stays else SlotState.TRANSIT
        origin = lineage(lineages, position, len(self.hashes), parent)
        return self.host.add(self.hashes[position], parent, state, origin, self.traits(position))

    def parent(self, position: int) -> bytes:
        """Hash of the block before."""
        root: bytes = self.message.root
        return self.hashes[position - 1] if position else root

    def traits(self, position: int) -> BlockTraits:
        """Salt and hints of a block."""
        return self.message.salt, 0, inf

    # -- requests that have ended

    def on_copied(self, window: int, failed: frozenset[int]) -> None:
        """A copy has ended. failed: indices of the blocks whose bytes did not arrive."""

    def on_layers(self, window: int, layers: int) -> None:
        """The first `layers` layers of a copy have arrived."""

    def on_probed(self, found: int) -> None:
        """The store has the first `found` blocks."""

    def on_read(self, window: int, outcomes: bytes) -> None:
        """A read has ended, with one `Outcome` for each block."""

    def on_fetched(self, first: int, fetched: int) -> None:
        """The first `fetched` blocks from position `first` on have arrived in device blocks."""

    def on_saved(self) -> None:
        """The device store does not read the device blocks any longer."""


class Request(msgspec.Struct, frozen=True, eq=False):
    """A request in flight.

    Attributes:
        ORDER: in which order the requests to a failed peer are ended.
        HOLDS_SLOTS: whether host slots can be in use for it.
        HOLDS_WRITES: whether writes are held back until it is answered.
        LOADS_PEER: whether its blocks count when a peer of a pool is chosen.
    """

    ORDER: ClassVar[int] = 0
    HOLDS_SLOTS: ClassVar[bool] = True
    HOLDS_WRITES: ClassVar[bool] = False
    LOADS_PEER: ClassVar[bool] = False

    peer: ActorRef
    size: int


class CopyRequest(Request, frozen=True, eq=False):
    """A copy between device blocks and host slots."""

    job: HostJob
    window: int


class FetchRequest(Request, frozen=True, eq=False):
    """A read by a device store. first: position of its first block."""

    HOLDS_SLOTS: ClassVar[bool] = False
    ORDER: ClassVar[int] = 1

    job: HostJob
    first: int


class SaveRequest(Request, frozen=True, eq=False):
    """A write by a device store."""

    HOLDS_SLOTS: ClassVar[bool] = False
    ORDER: ClassVar[int] = 2

    job: HostJob


class ClearRequest(Request, frozen=True, eq=False):
    """A clear of the store. No read may begin until it is answered.

    Attributes:
        op: of the `ClearHost` that is answered when it ends.
    """

    ORDER: ClassVar[int] = 3
    HOLDS_SLOTS: ClassVar[bool] = False

    op: int
    salt: int | None


class ProbeRequest(Request, frozen=True, eq=False):
    """A probe before a read. Writes are held back until it is answered: a store of limited size
    must not evict for them what is about to be read."""

    ORDER: ClassVar[int] = 4
    HOLDS_WRITES: ClassVar[bool] = True
    LOADS_PEER: ClassVar[bool] = True

    job: HostJob


class StoredRequest(ProbeRequest, frozen=True, eq=False):
    """A probe before a write. It holds no writes back."""

    ORDER: ClassVar[int] = 5
    HOLDS_WRITES: ClassVar[bool] = False
    LOADS_PEER: ClassVar[bool] = False


class ReadRequest(Request, frozen=True, eq=False):
    """A read from storage into host slots."""

    ORDER: ClassVar[int] = 6
    LOADS_PEER: ClassVar[bool] = True

    job: HostJob
    window: int


class WriteRequest(Request, frozen=True, eq=False):
    """A write of host slots to storage."""

    ORDER: ClassVar[int] = 7
    LOADS_PEER: ClassVar[bool] = True

    blocks: Sequence[HostBlock]


R = TypeVar("R", bound=Request)
M = TypeVar("M", bound=Message)


class RequestTable:
    """The table of requests in flight. Each method that begins one enters it and sends its message.
    `take` removes it when its completion arrives.

    Attributes:
        holding: requests in flight that hold writes back, and a probe whose reads begin now.
    """

    def __init__(
        self,
        peers: Peers,
        storage: StorageConfig,
        generation: int,
        clock: Callable[[], float],
        out: Effects,
    ) -> None:
        self.peers = peers
        self.storage = storage
        self.generation = generation
        self.clock = clock
        self.out = out
        self.holding = 0
        self._ops = count(1)
        self._table: dict[int, Request] = {}
        # Blocks in flight of each storage actor, and one more for each request.
        actors: tuple[ActorRef, ...] = (*peers.readers, *peers.writers)
        self._load = {peer.name: 0 for peer in actors}
        self._clears = 0

    @property
    def idle(self) -> bool:
        """Whether no request is in flight."""
        return not self._table

    @property
    def may_read(self) -> bool:
        """Whether there is a store to read from. One that is being cleared counts as empty."""
        return bool(self.peers.readers) and not self._clears

    @property
    def holds_slots(self) -> bool:
        """Whether host slots can be in use for a request in flight."""
        return any(request.HOLDS_SLOTS for request in self._table.values())

    # -- begin

    def copy(
        self,
        job: HostJob,
        direction: Direction,
        device_blocks: Sequence[int],
        blocks: Sequence[HostBlock],
        window: int,
        *,
        layerwise: bool = False,
    ) -> None:
        """Copy between device blocks and slots. The caller holds the pins."""
        swapper = self.peers.swapper
        op = self._enter(CopyRequest(swapper, len(blocks), job, window))
        slots = tuple([block.slot for block in blocks])
        targets = tuple(device_blocks)
        self.out.send(swapper, Copy(op, direction, targets, slots, layerwise, self.generation))

    def probe(
        self,
        job: HostJob,
        hashes: Sequence[bytes],
        deadline: float,
        kind: type[ProbeRequest] = ProbeRequest,
    ) -> int:
        """Ask how many leading blocks storage has. Returns the number of the request.

        Args:
            kind: `StoredRequest` in order to write the others, not to read these.
        """
        reader = self._least_loaded(self.peers.readers)
        op = self._enter(kind(reader, len(hashes), job))
        self.out.send(reader, ProbeStore(op, join_hashes(hashes), deadline))
        return op

    def read(self, job: HostJob, window: int, blocks: Sequence[HostBlock], deadline: float) -> None:
        """Fill slots from storage. The caller holds the pins."""
        reader = self._least_loaded(self.peers.readers)
        op = self._enter(ReadRequest(reader, len(blocks), job, window))
        hashes = join_hashes(block.hash for block in blocks)
        slots = tuple([block.slot for block in blocks])
        exclusive = self.storage.exclusive
        self.out.send(reader, Read(op, hashes, slots, deadline, exclusive, self.generation))

    def write(self, blocks: Sequence[HostBlock]) -> None:
        """Write slots to storage, least recently used first. The caller holds the pins."""
        writer = self._least_loaded(self.peers.writers)
        op = self._enter(WriteRequest(writer, len(blocks), blocks))
        hashes = join_hashes(block.hash for block in blocks)
        slots = tuple([block.slot for block in blocks])
        lineages = tuple([block.lineage for block in blocks])
        given = lineages if any(lineages) else ()
        deadline = self.clock() + self.storage.timeout_s
        salts = tuple([block.salt for block in blocks])
        self.out.send(writer, Write(op, hashes, slots, deadline, self.generation, given, salts))

    def clear_store(self, asked: int, salt: int | None) -> None:
        """Clear the store, or remove the objects of a salt. asked: op of the `ClearHost` that is
        answered when it ends."""
        writer = self.peers.writers[0]
        op = self._enter(ClearRequest(writer, 0, asked, salt))
        self.out.send(writer, ClearStore(op, salt))

    def fetch(
        self, job: HostJob, first: int, start: int, blocks: tuple[int, ...], deadline: float
    ) -> None:
        """Have the device store read blocks `start`.. of the job's path into device blocks."""
        device_store = self._device_store()
        op = self._enter(FetchRequest(device_store, len(blocks), job, first))
        tokens = job.message.tokens
        message = FetchDevice(op, tokens, start, blocks, deadline, self.generation)
        self.out.send(device_store, message)

    def save(self, job: HostJob, start: int, blocks: tuple[int, ...]) -> None:
        """Have the device store write blocks `start`.. of the job's path from device blocks."""
        device_store = self._device_store()
        op = self._enter(SaveRequest(device_store, len(blocks), job))
        tokens, deadline = job.message.tokens, self.clock() + self.storage.timeout_s
        message = SaveDevice(op, tokens, start, blocks, deadline, self.generation)
        self.out.send(device_store, message)

    # -- end

    def get(self, op: int, kind: type[R]) -> R | None:
        """The request of that kind with this number; None if there is none."""
        request = self._table.get(op)
        return request if isinstance(request, kind) else None

    def take(self, op: int, kind: type[R]) -> R | None:
        """Remove a request that has ended; None if there is none of that kind with this number."""
        request = self.get(op, kind)
        if request is not None:
            del self._table[op]
            self._count(request, -1)
        return request

    def open_at(self, peer: str) -> list[tuple[int, Request]]:
        """Requests that an actor has not answered, with their numbers, in the order in which they
        are ended if it fails."""
        found = [one for one in self._table.items() if one[1].peer.name == peer]
        return sorted(found, key=lambda one: one[1].ORDER)

    def _enter(self, request: Request) -> int:
        op = next(self._ops)
        self._table[op] = request
        self._count(request, 1)
        return op

    def _count(self, request: Request, change: int) -> None:
        self._clears += change * isinstance(request, ClearRequest)
        # The objects that an exclusive store hands out give space to the writes.
        taken = self.storage.exclusive and isinstance(request, ReadRequest)
        self.holding += change * (request.HOLDS_WRITES or taken)
        if request.LOADS_PEER:
            self._load[request.peer.name] += change * (request.size + 1)

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
