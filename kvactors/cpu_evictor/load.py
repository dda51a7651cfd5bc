"""One load: blocks of a path on their way to the device, from host slots and from storage."""

from __future__ import annotations

from math import inf

from kvactors.cpu_evictor.actions import Action, StartTimer, StopTimer, send
from kvactors.cpu_evictor.memory import HostMemory
from kvactors.cpu_evictor.messages import FetchDeadline, LayersLoaded, Load, Loaded, LoadStalled
from kvactors.cpu_evictor.slots import HostBlock, SlotState
from kvactors.gpu_swapper.messages import Direction
from kvactors.lineage import lineage
from kvactors.storage.messages import Outcome
from kvactors.types import split_hashes


class LoadJob:
    """Loads the leading run of the wanted blocks that host and storage have, and answers with
    `Loaded`.

    Sources are pinned in path order: blocks of the host first, then those that storage has. They
    are copied as soon as there are device blocks to copy into (a `Load` without blocks gets them
    with `SetTargets`). Positions count from the first wanted block.

    Args:
        memory: host memory.
        message: the load.
        loads: table of loads in flight. The job is in it from `begin` until it ends.
        layerwise: whether the index is sent `LayersLoaded` as layers arrive.
    """

    __slots__ = (
        "_arrived",
        "_copies",
        "_device_blocks",
        "_fetching",
        "_from_host",
        "_hashes",
        "_late",
        "_layers",
        "_layerwise",
        "_loads",
        "_memory",
        "_message",
        "_over",
        "_reading",
        "_sources",
        "_timed",
    )

    def __init__(
        self, memory: HostMemory, message: Load, loads: dict[int, LoadJob], *, layerwise: bool
    ) -> None:
        self._memory = memory
        self._message = message
        self._loads = loads
        self._layerwise = layerwise
        self._hashes = split_hashes(message.hashes)  # of the path
        self._device_blocks = message.blocks or None  # None: not placed yet
        self._sources: list[HostBlock] = []  # pinned, in path order
        self._from_host: list[bool] = []  # of each source; False: from storage
        self._reading: list[HostBlock] = []  # sources that storage is read into
        self._arrived: set[int] = set()  # positions whose bytes are on the device
        self._copies = 0  # in flight into the device blocks, a device store's read included
        self._layers: dict[int, int] = {}  # arrived layers of each copy, by its first position
        self._fetching = False  # storage has not answered yet
        self._late = False  # storage is not waited for any longer
        self._over = False  # answered or cancelled: completions only give back slots
        self._timed = False

    def begin(self) -> list[Action]:
        """Pin the blocks on the host, look the rest up in storage, and start to copy."""
        message, memory, host = self._message, self._memory, self._memory.host
        requests, wanted = memory.requests, self._hashes[message.start :]
        if message.memory_generation != requests.generation:
            return [send(requests.peers.index, Loaded(message.op, 0, 0))]
        self._loads[message.op] = self
        host.touch(reversed(self._hashes))
        for block in host.readable_run(wanted):
            self._pin(block)
        actions: list[Action] = []
        missing = [
            block_hash
            for block_hash in wanted[len(self._sources) :]
            if host.readable(block_hash) is None
        ]
        if missing and message.fetch and (seconds := message.deadline - requests.clock()) > 0:
            if requests.may_read:
                self._fetching = self._timed = True
                actions.append(StartTimer(self, seconds, FetchDeadline(message.op)))
                actions.append(requests.probe(self, missing, message.deadline))
            elif requests.peers.device_store is not None:
                self._fetching = True
                actions += self._fetch_from_device_store()
        actions += self._copy_from(0)
        return actions + self._answer_if_complete()

    def set_targets(self, device_blocks: tuple[int, ...]) -> list[Action]:
        """The device blocks of a load that began without."""
        self._device_blocks = device_blocks
        arriving = (i for i, block in enumerate(self._sources) if block.arriving)
        ready = next(arriving, len(self._sources))
        actions = self._copy_from(0, ready)
        actions += self._fetch_from_device_store()
        return actions + self._answer_if_complete()

    def cancel(self) -> list[Action]:
        """The load is cancelled before it has targets."""
        return self._end() + self._release_from(0)

    def on_deadline(self) -> list[Action]:
        """Blocks that have not come from storage are misses."""
        self._late = True
        return self._answer_if_complete()

    def on_copies_unavailable(self) -> list[Action]:
        """Copies cannot be made for now: storage is not waited for. With anything in flight into
        the device blocks the load is stalled, not over: they may still be written."""
        self._late = self._late or self._fetching
        if self._copies and self._device_blocks is not None:
            return [send(self._memory.requests.peers.index, LoadStalled(self._message.op))]
        return self._answer_if_complete()

    # -- storage

    def on_probed(self, found: int) -> list[Action]:
        """See `ProbeJob.on_probed`: read the first `found` missing blocks into slots. Blocks beyond
        an inclusive tier's capacity only pass through."""
        if self._late or self._over:
            return []
        message, memory, host = self._message, self._memory, self._memory.host
        if found < memory.storage.min_fetch_blocks:
            found = 0  # not worth a read
        first, reading = len(self._sources), self._reading
        actions: list[Action] = []
        if not memory.exclusive:
            staying = found - memory.surplus(message.salt, found)
            salts = {message.salt: staying}
            actions += memory.make_space(staying, found, self._hashes, salts)
        for position in range(message.start + first, len(self._hashes)):
            block_hash = self._hashes[position]
            block = host.readable(block_hash)
            if block is not None:
                self._pin(block)
                continue
            if found == 0 or not host.free or block_hash in host.blocks:
                break
            stays = not memory.exclusive and host.resident < host.capacity
            found -= 1
            parent = self._hashes[position - 1] if position else message.root
            block = host.add(
                block_hash,
                parent,
                SlotState.RESIDENT if stays else SlotState.TRANSIT,
                lineage(message.lineages, position, len(self._hashes), parent),
                (message.salt, 0, inf),
            )
            host.pin(block)
            self._sources.append(block)
            self._from_host.append(False)
            reading.append(block)
        host.touch(reversed(self._hashes))
        if reading:
            return [*actions, memory.requests.read(self, first, reading, message.deadline)]
        self._fetching = False
        actions += self._copy_from(first)
        return actions + self._answer_if_complete()

    def on_read(self, first: int, outcomes: bytes) -> list[Action]:
        """See `ReadJob.on_read`: copy the blocks read to the device."""
        memory, host, reading = self._memory, self._memory.host, self._reading
        self._fetching = False
        failed = frozenset(i for i, outcome in enumerate(outcomes) if outcome != Outcome.OK)
        landed = host.land(reading, failed)
        memory.counts.fetched += len(landed)
        actions = memory.announce_fetched(
            [block for block in landed if block.state is SlotState.RESIDENT]
        )
        if self._over:
            for block in landed:
                if block.state is SlotState.TRANSIT:
                    host.drop(block)
            return actions
        missing = {reading[i] for i in failed}
        run = next((i for i, block in enumerate(self._sources) if block in missing), None)
        if run is not None:
            actions += self._release_from(run)
        actions += self._copy_from(first)
        return actions + self._answer_if_complete()

    def _fetch_from_device_store(self) -> list[Action]:
        """Read the blocks that the host lacks straight into the device blocks, as soon as they are
        known. The load is not answered before the store has ended: the index would hand out blocks
        that the store still writes."""
        requests, message, blocks = self._memory.requests, self._message, self._device_blocks
        if requests.peers.device_store is None or blocks is None or not self._fetching:
            return []
        first = len(self._sources)
        start = message.start + first
        self._copies += 1
        return [
            requests.fetch(
                self, message.tokens, start, blocks[first:], message.deadline, first=first
            )
        ]

    def on_fetched(self, first: int, fetched: int) -> list[Action]:
        """See `FetchJob.on_fetched`."""
        self._fetching = False
        self._copies -= 1
        self._arrived.update(range(first, first + fetched))
        self._memory.counts.fetched += fetched
        return self._answer_if_complete()

    # -- copies

    def _pin(self, block: HostBlock) -> None:
        memory, host = self._memory, self._memory.host
        host.pin(block)
        if memory.exclusive and block.state is SlotState.RESIDENT:
            host.move(block, SlotState.LEAVING)
        self._sources.append(block)
        self._from_host.append(True)

    def _copy_from(self, first: int, stop: int | None = None) -> list[Action]:
        """Copy sources to the device, from position `first` on, once it has blocks for them."""
        sources, targets = self._sources[first:stop], self._device_blocks
        if targets is None or self._late or not sources:
            return []
        if any(block.arriving for block in sources):
            return []
        self._copies += 1
        if self._layerwise:
            self._layers[first] = 0
        copy = self._memory.requests.copy(
            self,
            Direction.TO_DEVICE,
            targets[first : first + len(sources)],
            sources,
            first=first,
            layerwise=self._layerwise,
        )
        return [copy]

    def on_layers(self, first: int, layers: int) -> list[Action]:
        """The first `layers` layers of the copy from position `first` on have arrived."""
        if first not in self._layers:
            return []
        before = min(self._layers.values())
        self._layers[first] = layers
        reached = min(self._layers.values())
        if reached <= before or self._fetching or self._over:
            return []
        progress = LayersLoaded(self._message.op, reached, len(self._sources))
        return [send(self._memory.requests.peers.index, progress)]

    def on_copied(self, first: int, size: int, failed: frozenset[int]) -> list[Action]:
        """See `CopyJob.on_copied`."""
        self._copies -= 1
        self._arrived.update(first + i for i in range(size) if i not in failed)
        return self._answer_if_complete()

    # -- the end

    def _answer_if_complete(self) -> list[Action]:
        waiting = self._copies or (self._fetching and not self._late)
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
        actions += self._release_from(arrived)
        for block in self._sources:
            if block.state is SlotState.TRANSIT and block.pins == 1:  # no write needs it
                actions += memory.remove([block])
            elif block.state is SlotState.LEAVING:
                host.mark_on_device(block)
            host.unpin(block)
        self._sources = []
        loaded = Loaded(op, arrived, sum(self._from_host[:arrived]))
        actions.append(send(memory.requests.peers.index, loaded))
        return actions

    def _end(self) -> list[Action]:
        self._over = True
        self._loads.pop(self._message.op, None)
        return [StopTimer(self)] if self._timed else []

    def _release_from(self, first: int) -> list[Action]:
        """Unpin the sources from position `first` on. Those that were leaving stay as far as the
        capacity allows. Staged ones are dropped."""
        memory = self._memory
        released, self._sources = self._sources[first:], self._sources[:first]
        released.reverse()
        only = [block for block in released if block.pins == 1 and not block.arriving]
        staged = [block for block in only if block.state is SlotState.TRANSIT]
        actions = memory.keep_if_space(
            [b for b in only if b.state is SlotState.LEAVING and not b.on_device]
        )
        actions += memory.remove(staged)
        for block in released:
            memory.host.unpin(block)
        return actions
