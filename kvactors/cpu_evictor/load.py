"""One load: blocks of a path on their way to the device, from host slots and from storage."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from kvactors.cpu_evictor.memory import HostJob, HostMemory, Placed
from kvactors.cpu_evictor.messages import LayersLoaded, Load, Loaded, LoadStalled
from kvactors.cpu_evictor.slots import HostBlock, SlotState
from kvactors.data_plane.base import Direction
from kvactors.storage.messages import Outcome

NOT_READ = dict.fromkeys(Outcome, "failed") | {
    Outcome.OK: "cleared",  # the host tier was cleared during the read
    Outcome.MISS: "gone",
    Outcome.CORRUPT: "gone",
    Outcome.LATE: "late",
}
"""Why a read with this outcome brought no block, see `HostStatistics`."""

DEVICE_STORE = 0
"""The copy that stands for a device store's read."""


class LoadJob(HostJob):
    """Loads the leading run of the wanted blocks that host and storage have, and answers with
    `Loaded`.

    Blocks that are to stay on the host are pinned until the load ends. Stored blocks stream: each
    turn of the job takes a window of slots, reads into it, and copies it to the device, while later
    windows are read. Copies begin as soon as there are device blocks to copy into (a `Load` without
    blocks gets them with `SetTargets`). Before that it leaves half of the slots for transit alone:
    the eviction that frees the device blocks may need them. Positions count from the first wanted
    block. Those that wait for a slot are to be read.
    """

    URGENT: ClassVar[bool] = True
    message: Load
    _stop = 0  # the blocks before this position are sources, or stored
    _reason = "failed"  # why the stored blocks from `_stop` on do not come
    _reached = 0  # layers that the index was sent
    _probing = False  # storage has not answered which blocks it has
    _late = False  # storage is not waited for any longer
    _trial = False  # a fetch that seems too slow, to measure the store
    _over = False  # answered or cancelled: completions only give back slots

    def __init__(self, memory: HostMemory, message: Load, *, layerwise: bool) -> None:
        super().__init__(memory, message)
        self._layerwise = layerwise
        self._wanted = self.hashes[message.start :]  # by position
        self._protected = frozenset(self.hashes)  # not evicted for the load
        self._device_blocks = message.blocks or None  # None: not placed yet
        self._sources: dict[int, HostBlock] = {}  # pinned blocks that stay there, by position
        self._stored: list[int] = []  # positions that storage has
        self._staged = Placed()  # pinned until there are targets
        self._copies: dict[int, Placed] = {}  # `moving` has the reads
        self._arrived: set[int] = set()  # positions whose bytes are on the device
        self._layers: dict[int, int] = {}  # arrived layers of each copy
        self._until = message.deadline  # of the wait for storage

    def begin(self) -> None:
        """Pin the blocks on the host, look the rest up in storage, and start to copy."""
        message, host, requests = self.message, self.host, self.requests
        if message.memory_generation != requests.generation:
            self.out.send(self.memory.index, Loaded(message.op, 0, 0))
            return
        self.memory.loads[message.op] = self
        host.touch(reversed(self.hashes))
        found = list(enumerate(host.readable_run(self._wanted)))
        self._stop = len(found)
        missing = [one for one in self._wanted[self._stop :] if host.readable(one) is None]
        if missing and message.fetch and message.deadline > requests.clock():
            if requests.may_read:
                if not self._computes(len(missing), asked=False):
                    self._probing = True
                    self._wait_for(len(missing))
                    requests.probe(missing, self._until, self._on_probed)
            elif requests.peers.device_store is not None:
                self._probing = True
                self._fetch_from_device_store()
        self._bring(found)
        self._answer_if_complete()

    def set_targets(self, device_blocks: tuple[int, ...]) -> None:
        self._device_blocks = device_blocks
        if self.requests.may_read and self._is_fetching():
            self._wait_for(len(self._stored) or len(self._wanted))
        staged, self._staged = self._staged, []
        found = [*self._sources.items(), *staged]
        self._copy([one for one in found if one[0] < self._stop])
        self._release([block for at, block in staged if at >= self._stop])
        self._fetch_from_device_store()
        self._stream()
        self._answer_if_complete()

    def cancel(self) -> None:
        self._end()
        self._release([block for _, block in self._staged])
        self._release_from(0)

    def let_go(self) -> None:
        """Other jobs need slots: those of a load that cannot copy yet come back, and are read again
        when it can."""
        staged, self._staged = self._staged, []
        again = [at for at, _ in staged if at < self._stop]
        self._stored = sorted({*self._stored, *again})
        self.waiting = sorted({*self.waiting, *again}, reverse=True)
        self._release([block for _, block in staged])

    def give_up(self) -> None:
        self.stop("no_slot")

    def on_deadline(self) -> None:
        self.stop("late")

    def stop(self, reason: str) -> None:
        """Storage is not waited for any longer: blocks that have not come are misses. reason: of
        `not_fetched_`."""
        self._stop_fetching(reason)
        self._answer_if_complete()

    def on_copies_unavailable(self) -> None:
        """Copies cannot be made for now: storage is not waited for. With anything in flight into
        the device blocks the load is stalled, not over: they may still be written."""
        self._stop_fetching("failed")
        if self._copies and self._device_blocks is not None:
            self.out.send(self.memory.index, LoadStalled(self.message.op))
        else:
            self._answer_if_complete()

    # -- storage

    def _on_probed(self, found: int) -> None:
        """Read the first `found` missing blocks, in windows."""
        self._probing = False
        if self._late or self._over:
            return
        counts, most = self.memory.counts, self.memory.storage.max_fetch_blocks
        if most is not None and found > most:
            counts["not_fetched_many"] += found - most
            found = most
        if found and self._computes(found, asked=True):
            found = 0
        if found:
            self._wait_for(found)
        on_host = Placed()
        for position in range(self._stop, len(self._wanted)):
            block = self.host.readable(self._wanted[position])
            if block is not None:
                on_host.append((position, block))
            elif not found:
                break
            else:
                found -= 1
                self._stored.append(position)
            self._stop = position + 1
        self.waiting = self._stored[::-1]
        self._bring(on_host)
        self._stream()
        self._answer_if_complete()

    def _computes(self, blocks: int, *, asked: bool) -> bool:
        """Whether stored blocks are computed because that takes less time. Counts them."""
        memory, cost, seconds = self.memory, self.requests.cost, blocks * self.message.block_s
        if self._trial or not seconds:
            return False
        why = cost.refusal(blocks, seconds, memory.unread, asked=asked)
        if why == "slow" and cost.is_trial():
            self._trial, why = True, ""
        if why:
            memory.counts[f"not_fetched_{why}"] += blocks
        return bool(why)

    def _wait_for(self, blocks: int) -> None:
        """Wait for storage until the deadline. A request that has its device blocks waits no
        longer than computing these blocks takes: the prediction may be wrong."""
        now, until = self.requests.clock(), self.message.deadline
        if self._device_blocks is not None and (seconds := blocks * self.message.block_s):
            until = min(until, now + seconds)
        if self.timer is None or until != self._until:
            self.stop_timer()
            self.start_timer(max(0.0, until - now))
            self._until = until

    def _stream(self) -> None:
        """Take windows of slots, and wait for more once there are device blocks to copy into."""
        host = self.host
        if self.waiting and self._device_blocks is not None:
            self.memory.movements.enter(self)
        elif self.waiting:
            spare = host.free - (host.num_slots - host.capacity) // 2
            if spare > 0:
                self.take(spare)

    def take(self, most: int) -> None:
        """Read the next blocks into slots. Blocks beyond an inclusive tier's capacity only pass
        through."""
        message, memory, host, waiting = self.message, self.memory, self.host, self.waiting
        if self.generation != host.generation or not self.requests.may_read:
            # Blocks from before a clear may not enter the host tier.
            self.stop("cleared")
            return
        most = min(most, len(waiting))
        if not memory.exclusive:
            staying = most - memory.over_quota(message.salt, most)
            memory.make_space(staying, 0, self._protected, {message.salt: staying})
        found, reads = Placed(), Placed()
        while waiting and len(reads) < most:
            position = waiting[-1]
            if (block := host.blocks.get(self._wanted[position])) is not None:
                if block.arriving:
                    break  # another job brings it: this one goes on from the host then
                found.append((position, block))
                waiting.pop()
                continue
            if not host.free:
                break
            waiting.pop()
            stays = not memory.exclusive and host.resident < host.capacity
            reads.append((position, self.add(message.start + position, stays=stays)))
        if not waiting:
            host.touch(reversed(self.hashes))
        if reads:
            blocks = [block for _, block in reads]
            self.requests.read(blocks, self._until, self.window(reads, self._on_read))
        self._bring(found)
        self._answer_if_complete()

    def _on_read(self, reads: Placed, outcomes: bytes) -> None:
        memory, host = self.memory, self.host
        landed = self.land(reads, outcomes)
        memory.counts["fetched"] += len(landed)
        memory.announce_fetched([block for block in landed if block.state is SlotState.RESIDENT])
        lost = next((i for i, (_, block) in enumerate(reads) if block.dropped), None)
        if lost is not None and not (self._late or self._over):
            self._cut(reads[lost][0], NOT_READ[Outcome(outcomes[lost])])
        stop = 0 if self._late or self._over else self._stop
        useful = [one for one in reads if one[0] < stop and not one[1].dropped]
        for position, block in reads:
            if block.state is SlotState.TRANSIT and position >= stop:
                host.drop(block)
        for _, block in useful:
            host.pin(block)
        if self._device_blocks is None:
            self._staged += useful
        else:
            self._copy(useful)
            self._answer_if_complete()

    def _is_fetching(self) -> bool:
        return not self._late and bool(self._probing or self.waiting or self.moving)

    def _stop_fetching(self, reason: str) -> None:
        if self._is_fetching():
            reading = [position for reads in self.moving.values() for position, _ in reads]
            self._cut(min([*self.waiting[-1:], *reading], default=self._stop), reason)
            self._late = True

    def _cut(self, position: int, reason: str) -> None:
        if position < self._stop:
            is_slow = reason == "late" and self._until < self.message.deadline
            self._stop, self._reason = position, "slow" if is_slow else reason
        self.waiting = [one for one in self.waiting if one < position]
        if not self.waiting:
            self.memory.movements.leave(self)

    def _fetch_from_device_store(self) -> None:
        """Read the blocks that the host lacks straight into the device blocks, as soon as they are
        known. The load is not answered before the store has ended: the index would hand out blocks
        that the store still writes."""
        blocks, first = self._device_blocks, self._stop
        if self.requests.peers.device_store is None or blocks is None or not self._probing:
            return
        self._copies[DEVICE_STORE] = []
        start, deadline = self.message.start + first, self.message.deadline
        then = partial(self._on_fetched, first)
        self.requests.fetch(self.message.tokens, start, blocks[first:], deadline, then)

    def _on_fetched(self, first: int, fetched: int) -> None:
        self._probing = False
        del self._copies[DEVICE_STORE]
        positions = range(first, first + fetched)
        self._arrived.update(positions)
        self._stored += positions
        self.memory.counts["fetched"] += fetched
        self._answer_if_complete()

    # -- copies

    def _bring(self, found: Placed) -> None:
        """Pin host blocks, and copy them once there are device blocks. Blocks in transit leave
        with their copy, as blocks do that this load has read."""
        host, exclusive = self.host, self.memory.exclusive
        for position, block in found:
            host.pin(block)
            if block.state is SlotState.TRANSIT:
                if self._device_blocks is None:
                    self._staged.append((position, block))
                continue
            if exclusive and block.state is SlotState.RESIDENT:
                host.move(block, SlotState.PROMOTING)
            self._sources[position] = block
        self._copy(found)

    def _copy(self, blocks: Placed) -> None:
        targets = self._device_blocks
        if not blocks or targets is None:
            return
        self.windows += 1
        number, progress = self.windows, None
        self._copies[number] = blocks
        if self._layerwise:
            self._layers[number] = 0
            progress = partial(self._on_layers, number)
        self.requests.copy(
            Direction.TO_DEVICE,
            [targets[position] for position, _ in blocks],
            [block for _, block in blocks],
            partial(self._on_copied, number),
            progress,
        )

    def _on_layers(self, number: int, layers: int) -> None:
        self._layers[number] = layers
        self._report_layers()

    def _report_layers(self) -> None:
        """Report the layers that every copy has."""
        reached = min(self._layers.values(), default=0)
        if reached <= self._reached or self._is_fetching() or self._over:
            return
        self._reached = reached
        self.out.send(self.memory.index, LayersLoaded(self.message.op, reached, self._stop))

    def _on_copied(self, number: int, failed: frozenset[int]) -> None:
        blocks = self._copies.pop(number)
        self._arrived.update(at for i, (at, _) in enumerate(blocks) if i not in failed)
        self._layers.pop(number, None)
        self._release([block for at, block in blocks if at not in self._sources])
        self._answer_if_complete()
        self._report_layers()

    def _release(self, blocks: Sequence[HostBlock]) -> None:
        """Unpin blocks that were read. Those that only pass through leave."""
        self.memory.remove([b for b in blocks if b.state is SlotState.TRANSIT and b.pins == 1])
        for block in blocks:
            self.host.unpin(block)

    # -- the end

    def _answer_if_complete(self) -> None:
        waiting = self._copies or self._is_fetching()
        if not (self._over or waiting or self._device_blocks is None):
            self._answer()

    def _answer(self) -> None:
        """Report how many blocks arrived. Sources that did leave an exclusive tier when the index
        discards them. The others stay."""
        memory, host = self.memory, self.host
        self._end()
        arrived = 0
        while arrived in self._arrived:
            arrived += 1
        memory.counts["loaded"] += arrived
        from_storage = bisect_left(self._stored, arrived)
        if lost := len(self._stored) - from_storage:
            memory.counts[f"not_fetched_{self._reason}"] += lost
        self._release_from(arrived)
        for block in self._sources.values():
            if block.state is SlotState.PROMOTING:
                host.mark_on_device(block)
            host.unpin(block)
        self._sources = {}
        self.out.send(memory.index, Loaded(self.message.op, arrived, arrived - from_storage))

    def _end(self) -> None:
        self._over = True
        self.memory.loads.pop(self.message.op, None)
        self.memory.movements.leave(self)
        self.stop_timer()

    def _release_from(self, first: int) -> None:
        """Unpin the sources from position `first` on. Those that were leaving stay as far as the
        capacity allows."""
        released = [self._sources.pop(p) for p in sorted(self._sources, reverse=True) if p >= first]
        leaving = [b for b in released if b.state is SlotState.PROMOTING and not b.on_device]
        self.memory.keep_if_space([block for block in leaving if block.pins == 1])
        for block in released:
            self.host.unpin(block)
