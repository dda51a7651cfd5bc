"""One load: blocks of a path on their way to the device, from host slots and from storage."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import inf
from typing import ClassVar

from kvactors.cpu_evictor.actions import Action, StartTimer, StopTimer, send
from kvactors.cpu_evictor.memory import HostMemory
from kvactors.cpu_evictor.messages import FetchDeadline, LayersLoaded, Load, Loaded, LoadStalled
from kvactors.cpu_evictor.slots import HostBlock, SlotState
from kvactors.data_plane.base import Direction
from kvactors.identity import lineage
from kvactors.storage.messages import Outcome
from kvactors.types import split_hashes

NOT_FETCHED = dict.fromkeys(Outcome, "failed") | {
    Outcome.OK: "cleared",  # the host tier was cleared during the read
    Outcome.MISS: "gone",
    Outcome.CORRUPT: "gone",
    Outcome.LATE: "late",
}
"""The reason why a read with this outcome brought no block, see `HostStatistics`."""

DEVICE_STORE = 0
"""The window that stands for a device store's read."""


class LoadJob:
    """Loads the leading run of the wanted blocks that host and storage have, and answers with
    `Loaded`.

    Blocks that are to stay on the host are pinned until the load ends. Stored blocks stream: each
    turn of the movement takes a window of slots, reads into it, and copies it to the device, while
    later windows are read. Copies begin as soon as there are device blocks to copy into (a `Load`
    without blocks gets them with `SetTargets`). Before that it leaves half of the slots for transit
    alone: the eviction that frees the device blocks may need them. Positions count from the first
    wanted block.

    Args:
        memory: host memory.
        message: the load.
        layerwise: whether the index is sent `LayersLoaded` as layers arrive.
    """

    URGENT: ClassVar[bool] = True

    __slots__ = (
        "_arrived",
        "_copies",
        "_device_blocks",
        "_fetch_from",
        "_generation",
        "_hashes",
        "_late",
        "_layers",
        "_layerwise",
        "_memory",
        "_message",
        "_over",
        "_path",
        "_probing",
        "_protected",
        "_reached",
        "_reads",
        "_reason",
        "_sources",
        "_staged",
        "_stop",
        "_stored",
        "_timed",
        "_windows",
    )

    def __init__(self, memory: HostMemory, message: Load, *, layerwise: bool) -> None:
        self._memory = memory
        self._message = message
        self._layerwise = layerwise
        self._path = split_hashes(message.hashes)
        self._protected = frozenset(self._path)  # not evicted for the load
        self._hashes = self._path[message.start :]  # wanted ones, by position
        self._device_blocks = message.blocks or None  # None: not placed yet
        self._generation = memory.host.generation
        self._sources: dict[int, HostBlock] = {}  # pinned blocks that stay there, by position
        self._stored: list[int] = []  # positions that storage has
        self._fetch_from: list[int] = []  # those of them that are to be read, the next one last
        self._stop = 0  # the blocks before this position are sources, or stored
        self._reason = "failed"  # why the stored blocks from `_stop` on do not come
        self._windows = 0  # reads and copies so far
        self._reads: dict[int, list[tuple[int, HostBlock]]] = {}  # positions and blocks by window
        self._staged: list[tuple[int, HostBlock]] = []  # pinned until there are targets
        self._copies: dict[int, Sequence[tuple[int, HostBlock]]] = {}
        self._arrived: set[int] = set()  # positions whose bytes are on the device
        self._layers: dict[int, int] = {}  # arrived layers of each copy
        self._reached = 0  # layers that the index was sent
        self._probing = False  # storage has not answered which blocks it has
        self._late = False  # storage is not waited for any longer
        self._over = False  # answered or cancelled: completions only give back slots
        self._timed = False

    def begin(self) -> list[Action]:
        """Pin the blocks on the host, look the rest up in storage, and start to copy."""
        message, memory, host = self._message, self._memory, self._memory.host
        requests = memory.requests
        if message.memory_generation != requests.generation:
            return [send(requests.peers.index, Loaded(message.op, 0, 0))]
        memory.loads[message.op] = self
        host.touch(reversed(self._path))
        found = list(enumerate(host.readable_run(self._hashes)))
        self._stop = len(found)
        copies = self._bring(found)
        actions: list[Action] = []
        missing = [
            block_hash
            for block_hash in self._hashes[self._stop :]
            if host.readable(block_hash) is None
        ]
        if missing and message.fetch and (seconds := message.deadline - requests.clock()) > 0:
            if requests.may_read:
                self._probing = self._timed = True
                actions.append(StartTimer(self, seconds, FetchDeadline(message.op)))
                actions.append(requests.probe(self, missing, message.deadline))
            elif requests.peers.device_store is not None:
                self._probing = True
                actions += self._fetch_from_device_store()
        return [*actions, *copies, *self._answer_if_complete()]

    def set_targets(self, device_blocks: tuple[int, ...]) -> list[Action]:
        """The device blocks of a load that began without."""
        self._device_blocks = device_blocks
        staged, self._staged = self._staged, []
        found = [*self._sources.items(), *staged]
        actions = self._copy([one for one in found if one[0] < self._stop])
        actions += self._release([block for at, block in staged if at >= self._stop])
        actions += self._fetch_from_device_store()
        actions += self._stream()
        return actions + self._answer_if_complete()

    def cancel(self) -> list[Action]:
        """The load is cancelled before it has targets."""
        staged = [block for _, block in self._staged]
        return self._end() + self._release(staged) + self._release_from(0)

    def let_go(self) -> list[Action]:
        """Other movements need slots: those of a load that cannot copy yet come back, and are read
        again when it can."""
        staged, self._staged = self._staged, []
        again = [at for at, _ in staged if at < self._stop]
        self._stored = sorted({*self._stored, *again})
        self._fetch_from = sorted({*self._fetch_from, *again}, reverse=True)
        return self._release([block for _, block in staged])

    def on_deadline(self) -> list[Action]:
        """Blocks that have not come from storage are misses."""
        self._stop_fetching("late")
        return self._answer_if_complete()

    def give_up(self) -> list[Action]:
        """See `Movement.give_up`."""
        self._stop_fetching("no_slot")
        return self._answer_if_complete()

    def on_copies_unavailable(self) -> list[Action]:
        """Copies cannot be made for now: storage is not waited for. With anything in flight into
        the device blocks the load is stalled, not over: they may still be written."""
        self._stop_fetching("failed")
        if self._copies and self._device_blocks is not None:
            return [send(self._memory.requests.peers.index, LoadStalled(self._message.op))]
        return self._answer_if_complete()

    # -- storage

    def on_probed(self, found: int) -> list[Action]:
        """See `ProbeJob.on_probed`: the first `found` missing blocks are read, in windows."""
        self._probing = False
        if self._late or self._over:
            return []
        memory, host = self._memory, self._memory.host
        if found < memory.storage.min_fetch_blocks:
            memory.counts.count_not_fetched("few", found)
            found = 0  # not worth a read
        on_host: list[tuple[int, HostBlock]] = []
        for position in range(self._stop, len(self._hashes)):
            block = host.readable(self._hashes[position])
            if block is not None:
                on_host.append((position, block))
            elif not found:
                break
            else:
                found -= 1
                self._stored.append(position)
            self._stop = position + 1
        self._fetch_from = self._stored[::-1]
        actions = self._bring(on_host) + self._stream()
        return actions + self._answer_if_complete()

    def _stream(self) -> list[Action]:
        """Take windows of slots, and wait for more once there are device blocks to copy into."""
        memory, host = self._memory, self._memory.host
        if not self._fetch_from:
            return []
        if self._device_blocks is None:
            spare = host.free - (host.num_slots - host.capacity) // 2
            return self.take(spare) if spare > 0 else []
        return memory.movements.enter(self)

    @property
    def op(self) -> int:
        """See `Movement.op`: a load has the deadline of its request."""
        return 0

    @property
    def lacking(self) -> int:
        """See `Movement.lacking`."""
        return len(self._fetch_from)

    def take(self, most: int) -> list[Action]:
        """See `Movement.take`: read the next blocks into slots. Blocks beyond an inclusive tier's
        capacity only pass through."""
        message, memory, host = self._message, self._memory, self._memory.host
        requests, fetched = memory.requests, self._fetch_from
        if self._generation != host.generation or not requests.may_read:
            # Blocks from before a clear may not enter the host tier.
            self._stop_fetching("cleared")
            return self._answer_if_complete()
        actions: list[Action] = []
        most = min(most, len(fetched))
        if not memory.exclusive:
            staying = most - memory.surplus(message.salt, most)
            actions += memory.make_space(staying, 0, self._protected, {message.salt: staying})
        found: list[tuple[int, HostBlock]] = []
        reads: list[tuple[int, HostBlock]] = []
        while fetched and len(reads) < most:
            position = fetched[-1]
            block_hash, above = self._hashes[position], message.start + position
            if (block := host.blocks.get(block_hash)) is not None:
                if block.arriving:
                    break  # another movement brings it: this one goes on from the host then
                found.append((position, block))
                fetched.pop()
                continue
            if not host.free:
                break
            fetched.pop()
            parent = self._path[above - 1] if above else message.root
            stays = not memory.exclusive and host.resident < host.capacity
            block = host.add(
                block_hash,
                parent,
                SlotState.RESIDENT if stays else SlotState.TRANSIT,
                lineage(message.lineages, above, len(self._path), parent),
                (message.salt, 0, inf),
            )
            reads.append((position, block))
        if not fetched:
            host.touch(reversed(self._path))
        if reads:
            self._windows += 1
            self._reads[self._windows] = reads
            blocks = [block for _, block in reads]
            actions.append(requests.read(self, self._windows, blocks, message.deadline))
        return actions + self._bring(found) + self._answer_if_complete()

    def on_read(self, first: int, outcomes: bytes) -> list[Action]:
        """See `ReadJob.on_read`: copy the blocks read to the device. first: the window."""
        memory, host, reads = self._memory, self._memory.host, self._reads.pop(first)
        failed = frozenset(i for i, outcome in enumerate(outcomes) if outcome != Outcome.OK)
        landed = host.land([block for _, block in reads], failed)
        memory.counts.fetched += len(landed)
        actions = memory.announce_fetched(
            [block for block in landed if block.state is SlotState.RESIDENT]
        )
        lost = next((i for i, (_, block) in enumerate(reads) if block.dropped), None)
        if lost is not None and not (self._late or self._over):
            self._cut(reads[lost][0], NOT_FETCHED[Outcome(outcomes[lost])])
        stop = 0 if self._late or self._over else self._stop
        useful = [one for one in reads if one[0] < stop and not one[1].dropped]
        for position, block in reads:
            if block.state is SlotState.TRANSIT and position >= stop:
                host.drop(block)
        for _, block in useful:
            host.pin(block)
        if self._device_blocks is None:
            self._staged += useful
            return actions
        return actions + self._copy(useful) + self._answer_if_complete()

    def _is_fetching(self) -> bool:
        return not self._late and bool(self._probing or self._fetch_from or self._reads)

    def _stop_fetching(self, reason: str) -> None:
        """Storage is not waited for any longer. reason: name of the count."""
        if self._is_fetching():
            reading = [position for reads in self._reads.values() for position, _ in reads]
            self._cut(min([*self._fetch_from[-1:], *reading], default=self._stop), reason)
            self._late = True

    def _cut(self, position: int, reason: str) -> None:
        """The blocks from this position on do not come. reason: name of the count."""
        if position < self._stop:
            self._stop, self._reason = position, reason
        self._fetch_from = [one for one in self._fetch_from if one < position]
        if not self._fetch_from:
            self._memory.movements.leave(self)

    def _fetch_from_device_store(self) -> list[Action]:
        """Read the blocks that the host lacks straight into the device blocks, as soon as they are
        known. The load is not answered before the store has ended: the index would hand out blocks
        that the store still writes."""
        requests, message, blocks = self._memory.requests, self._message, self._device_blocks
        if requests.peers.device_store is None or blocks is None or not self._probing:
            return []
        first = self._stop
        start = message.start + first
        self._copies[DEVICE_STORE] = []
        return [
            requests.fetch(
                self, message.tokens, start, blocks[first:], message.deadline, first=first
            )
        ]

    def on_fetched(self, first: int, fetched: int) -> list[Action]:
        """See `FetchJob.on_fetched`."""
        self._probing = False
        del self._copies[DEVICE_STORE]
        positions = range(first, first + fetched)
        self._arrived.update(positions)
        self._stored += positions
        self._memory.counts.fetched += fetched
        return self._answer_if_complete()

    # -- copies

    def _bring(self, found: Sequence[tuple[int, HostBlock]]) -> list[Action]:
        """Pin blocks of the host, given with their positions, and copy them once there are device
        blocks. Those in transit leave as soon as they are copied, as those that are read do."""
        memory, host = self._memory, self._memory.host
        for position, block in found:
            host.pin(block)
            if block.state is SlotState.TRANSIT:
                if self._device_blocks is None:
                    self._staged.append((position, block))
                continue
            if memory.exclusive and block.state is SlotState.RESIDENT:
                host.move(block, SlotState.LEAVING)
            self._sources[position] = block
        return self._copy(found)

    def _copy(self, blocks: Sequence[tuple[int, HostBlock]]) -> list[Action]:
        """Copy pinned blocks to the device, given with their positions."""
        if not blocks or self._device_blocks is None:
            return []
        self._windows += 1
        self._copies[self._windows] = blocks
        if self._layerwise:
            self._layers[self._windows] = 0
        copy = self._memory.requests.copy(
            self,
            Direction.TO_DEVICE,
            [self._device_blocks[position] for position, _ in blocks],
            [block for _, block in blocks],
            first=self._windows,
            layerwise=self._layerwise,
        )
        return [copy]

    def on_layers(self, first: int, layers: int) -> list[Action]:
        """The first `layers` layers of a copy have arrived. first: its window."""
        if first not in self._layers:
            return []
        self._layers[first] = layers
        return self._report_layers()

    def _report_layers(self) -> list[Action]:
        reached = min(self._layers.values(), default=0)
        if reached <= self._reached or self._is_fetching() or self._over:
            return []
        self._reached = reached
        progress = LayersLoaded(self._message.op, reached, self._stop)
        return [send(self._memory.requests.peers.index, progress)]

    def on_copied(self, first: int, size: int, failed: frozenset[int]) -> list[Action]:
        """See `CopyJob.on_copied`. first: the window."""
        blocks = self._copies.pop(first)
        self._arrived.update(blocks[i][0] for i in range(size) if i not in failed)
        self._layers.pop(first, None)
        actions = self._release([block for at, block in blocks if at not in self._sources])
        return actions + (self._answer_if_complete() or self._report_layers())

    def _release(self, blocks: Sequence[HostBlock]) -> list[Action]:
        """Unpin blocks that were read. Those that only pass through leave."""
        memory, host = self._memory, self._memory.host
        actions = memory.remove(
            [block for block in blocks if block.state is SlotState.TRANSIT and block.pins == 1]
        )
        for block in blocks:
            host.unpin(block)
        return actions

    # -- the end

    def _answer_if_complete(self) -> list[Action]:
        waiting = self._copies or self._is_fetching()
        if self._over or waiting or self._device_blocks is None:
            return []
        return self._answer()

    def _answer(self) -> list[Action]:
        """Report how many blocks arrived. Sources that did leave an exclusive tier when the index
        discards them. The others stay."""
        memory, host, op = self._memory, self._memory.host, self._message.op
        actions = self._end()
        arrived = 0
        while arrived in self._arrived:
            arrived += 1
        memory.counts.loaded += arrived
        from_storage = bisect_left(self._stored, arrived)
        if lost := len(self._stored) - from_storage:
            memory.counts.count_not_fetched(self._reason, lost)
        actions += self._release_from(arrived)
        for block in self._sources.values():
            if block.state is SlotState.LEAVING:
                host.mark_on_device(block)
            host.unpin(block)
        self._sources = {}
        loaded = Loaded(op, arrived, arrived - from_storage)
        actions.append(send(memory.requests.peers.index, loaded))
        return actions

    def _end(self) -> list[Action]:
        self._over = True
        self._memory.loads.pop(self._message.op, None)
        self._memory.movements.leave(self)
        return [StopTimer(self)] if self._timed else []

    def _release_from(self, first: int) -> list[Action]:
        """Unpin the sources from position `first` on. Those that were leaving stay as far as the
        capacity allows."""
        memory = self._memory
        released = [self._sources.pop(p) for p in sorted(self._sources, reverse=True) if p >= first]
        only = [block for block in released if block.pins == 1]
        actions = memory.keep_if_space(
            [b for b in only if b.state is SlotState.LEAVING and not b.on_device]
        )
        for block in released:
            memory.host.unpin(block)
        return actions
