"""Requests of CpuEvictor to the swapper and to storage that are in flight: one table, by operation
number. A request continues the job that made it when it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from kvactors.actor import ActorRef
from kvactors.actor.context import Effects
from kvactors.actor.message import Control, Message
from kvactors.cpu_evictor.messages import HostReply
from kvactors.cpu_evictor.slots import HostBlock
from kvactors.data_plane.base import Direction
from kvactors.fetch_cost import FetchCost
from kvactors.flush_notifier.messages import Report
from kvactors.gpu_swapper.messages import Copied, Copy
from kvactors.settings import StorageConfig
from kvactors.storage.messages import (
    ClearStore,
    DeviceFetched,
    DeviceSaved,
    DeviceStoreMessage,
    FetchDevice,
    Outcome,
    Probed,
    ProbeStore,
    Read,
    ReadDone,
    ReaderMessage,
    SaveDevice,
    StoreCleared,
    Write,
    WriterMessage,
    Written,
)
from kvactors.types import join_hashes


@dataclass(frozen=True, slots=True)
class Peers:
    """The actors that CpuEvictor sends to."""

    index: ActorRef[HostReply]
    swapper: ActorRef[Copy]
    readers: Sequence[ActorRef[ReaderMessage]]
    writers: Sequence[ActorRef[WriterMessage]]
    notifier: ActorRef[Report]
    device_store: ActorRef[DeviceStoreMessage] | None = None


class Kind(NamedTuple):
    """A kind of request.

    Attributes:
        answer: the message that ends it.
        report: what a job needs of the answer.
        unanswered: the report on so many blocks if the peer fails.
        holds_slots: whether host slots can be in use for it.
        holds_writes: whether writes are held back until it is answered: a store of limited size
            must not evict for them what is about to be read.
        loads_peer: whether its blocks count when a peer of a pool is chosen.
    """

    answer: type[Any]
    report: Callable[[Any], Any]
    unanswered: Callable[[int], Any]
    holds_slots: bool = False
    holds_writes: bool = False
    loads_peer: bool = False


def _nothing(_size: int) -> int:
    return 0


def _unavailable(size: int) -> bytes:
    return bytes([Outcome.UNAVAILABLE]) * size


_outcomes, _found, _moved = attrgetter("outcomes"), attrgetter("found"), attrgetter("num_blocks")
COPY = Kind(Copied, lambda end: frozenset(end.failed), lambda size: range(size), holds_slots=True)
FETCH = Kind(DeviceFetched, _moved, _nothing)
SAVE = Kind(DeviceSaved, _moved, _nothing)
CLEAR = Kind(StoreCleared, lambda end: end, lambda _size: None)
READ_PROBE = Kind(Probed, _found, _nothing, holds_slots=True, holds_writes=True, loads_peer=True)
WRITE_PROBE = Kind(Probed, _found, _nothing, holds_slots=True)
READ = Kind(ReadDone, _outcomes, _unavailable, holds_slots=True, loads_peer=True)
WRITE = Kind(Written, _outcomes, _unavailable, holds_slots=True, loads_peer=True)


class Request(NamedTuple):
    """A request in flight.

    Attributes:
        size: blocks that it is about.
        then: called with the report of its answer.
        progress: called with the layers of a copy that have arrived.
    """

    kind: Kind
    peer: ActorRef
    size: int
    then: Callable[[Any], None]
    progress: Callable[[int], None] | None = None


M = TypeVar("M", bound=Message)


class RequestTable:
    """The table of requests in flight. Each method that begins one enters it and sends its message.
    `take` removes it when its answer arrives.

    Attributes:
        holding: requests in flight that hold writes back, and a probe whose reads begin now.
        cost: times of reads and of the probes before them.
    """

    def __init__(
        self,
        peers: Peers,
        storage: StorageConfig,
        generation: int,
        clock: Callable[[], float],
        out: Effects,
    ) -> None:
        self.peers, self.storage, self.clock, self.out = peers, storage, clock, out
        self.generation = generation  # of the memory
        self.holding, self.cost = 0, FetchCost(clock)
        self._ops = count(1)
        self._table: dict[int, Request] = {}
        # Blocks in flight of each storage actor, and one more for each request.
        actors: tuple[ActorRef, ...] = (*peers.readers, *peers.writers)
        self._load = {peer.name: 0 for peer in actors}
        self._clears = 0

    @property
    def idle(self) -> bool:
        return not self._table

    @property
    def may_read(self) -> bool:
        """Whether there is a store to read from. One that is being cleared counts as empty."""
        return bool(self.peers.readers) and not self._clears

    @property
    def holds_slots(self) -> bool:
        return any(request.kind.holds_slots for request in self._table.values())

    # -- begin. Callers hold the pins of blocks

    def copy(
        self,
        direction: Direction,
        device_blocks: Sequence[int],
        blocks: Sequence[HostBlock],
        then: Callable[[frozenset[int]], None],
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Copy between device blocks and slots. `then` gets the indices that failed."""
        swapper = self.peers.swapper
        op = self._enter(Request(COPY, swapper, len(blocks), then, progress))
        pairs = (tuple(device_blocks), tuple([block.slot for block in blocks]))
        layerwise = progress is not None
        self.out.send(swapper, Copy(op, direction, *pairs, layerwise, self.generation))

    def probe(
        self,
        hashes: Sequence[bytes],
        deadline: float,
        then: Callable[[int], None],
        kind: Kind = READ_PROBE,
    ) -> int:
        """Ask how many leading blocks storage has. Returns the number of the request."""
        reader = self._least_loaded(self.peers.readers)
        if kind is READ_PROBE:
            then = self.cost.ask(then)
        op = self._enter(Request(kind, reader, len(hashes), then))
        self.out.send(reader, ProbeStore(op, join_hashes(hashes), deadline))
        return op

    def read(
        self, blocks: Sequence[HostBlock], deadline: float, then: Callable[[bytes], None]
    ) -> None:
        """Fill slots from storage. `then` gets one `Outcome` for each."""
        reader = self._least_loaded(self.peers.readers)
        size = len(blocks)
        op = self._enter(Request(READ, reader, size, self.cost.read(size, then)))
        hashes = join_hashes(block.hash for block in blocks)
        slots = tuple([block.slot for block in blocks])
        exclusive = self.storage.exclusive
        self.out.send(reader, Read(op, hashes, slots, deadline, exclusive, self.generation))

    def write(self, blocks: Sequence[HostBlock], then: Callable[[bytes], None]) -> None:
        """Write slots to storage, least recently used first. `then` gets one `Outcome` for each."""
        writer = self._least_loaded(self.peers.writers)
        op = self._enter(Request(WRITE, writer, len(blocks), then))
        hashes = join_hashes(block.hash for block in blocks)
        slots = tuple([block.slot for block in blocks])
        lineages = tuple([block.lineage for block in blocks])
        given = lineages if any(lineages) else ()
        deadline = self.clock() + self.storage.timeout_s
        salts = tuple([block.salt for block in blocks])
        self.out.send(writer, Write(op, hashes, slots, deadline, self.generation, given, salts))

    def clear_store(self, salt: int | None, then: Callable[[StoreCleared | None], None]) -> None:
        """Clear the store, or remove the objects of a salt. No read may begin until the answer.
        `then` gets None if the writer fails."""
        writer = self.peers.writers[0]
        self.out.send(writer, ClearStore(self._enter(Request(CLEAR, writer, 0, then)), salt))

    def fetch(
        self,
        tokens: bytes,
        start: int,
        blocks: tuple[int, ...],
        deadline: float,
        then: Callable[[int], None],
    ) -> None:
        """Have the device store read blocks `start`.. of a path into device blocks. `then` gets the
        number of leading blocks that have come."""
        store = self._device_store()
        op = self._enter(Request(FETCH, store, len(blocks), then))
        self.out.send(store, FetchDevice(op, tokens, start, blocks, deadline, self.generation))

    def save(
        self, tokens: bytes, start: int, blocks: tuple[int, ...], then: Callable[[int], None]
    ) -> None:
        """Have the device store write blocks `start`.. of a path from device blocks."""
        store, deadline = self._device_store(), self.clock() + self.storage.timeout_s
        op = self._enter(Request(SAVE, store, len(blocks), then))
        self.out.send(store, SaveDevice(op, tokens, start, blocks, deadline, self.generation))

    # -- end

    def get(self, op: int, answer: type[Control]) -> Request | None:
        """The request with this number that this message answers; None if there is none."""
        request = self._table.get(op)
        return request if request is not None and request.kind.answer is answer else None

    def take(self, op: int, answer: type[Control]) -> Request | None:
        """Remove a request that has ended, as found by `get`."""
        request = self.get(op, answer)
        if request is not None:
            del self._table[op]
            self._count(request, -1)
        return request

    def open_at(self, peer: str) -> list[tuple[int, Request]]:
        """Requests that an actor has not answered, with their numbers."""
        return [one for one in self._table.items() if one[1].peer.name == peer]

    def _enter(self, request: Request) -> int:
        op = next(self._ops)
        self._table[op] = request
        self._count(request, 1)
        return op

    def _count(self, request: Request, change: int) -> None:
        kind = request.kind
        self._clears += change * (kind is CLEAR)
        # The objects that an exclusive store hands out give space to the writes.
        taken = self.storage.exclusive and kind is READ
        self.holding += change * (kind.holds_writes or taken)
        if kind.loads_peer:
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
