"""Host memory: who gets the next slots, blocks that enter and leave the host tier, and the reports
to indexes about them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from kvactors.actor import Count, Timer
from kvactors.cpu_evictor.messages import (
    ClearHost,
    HostBlocksAdded,
    HostBlocksRemoved,
    HostCleared,
    JobDeadline,
)
from kvactors.cpu_evictor.requests import COPY, READ, READ_PROBE, SAVE, Request, RequestTable
from kvactors.cpu_evictor.slots import NOTHING, BlockTraits, HostBlock, HostTier, SlotState
from kvactors.flush_notifier.messages import BlocksAdded, BlocksRemoved, TierCleared
from kvactors.gpu_swapper.messages import Copied, CopyProgress
from kvactors.identity import lineage
from kvactors.settings import HostConfig, StorageConfig
from kvactors.storage.messages import (
    DeviceFetched,
    DeviceSaved,
    Outcome,
    Probed,
    ReadDone,
    StoreCleared,
    Written,
)
from kvactors.types import Reason, Tier, join_hashes, split_hashes

if TYPE_CHECKING:
    from kvactors.cpu_evictor.load import LoadJob


class HostStatistics(NamedTuple):
    """The host tier at one moment. The fields from `evicted` on count blocks.

    Attributes:
        slots: slots, those for blocks in transit included.
        resident: blocks that count against the capacity.
        free_slots: slots without a block.
        pinned: slots that a transfer uses.
        capacity: resident blocks at most.
        small_pages: why slots are in pages of 4 KiB, which slows direct I/O and the device's
            copies. Empty: they are in huge pages.
        read_block_s: predicted seconds of a read of a block from storage, 0.0 before the first.
        read_window_s: predicted seconds of a read of 64 blocks.
        evicted: blocks that left the tier for others. The fields below count blocks as well.
        offloaded: arrived from the device.
        loaded: copied to the device.
        fetched: read from storage.
        written: written to storage.
        shed: due and not written to storage, for lack of slots.
        not_stored_refused: of `write_failures`: refused by a quota or the capacity of the store.
        not_stored_no_space: likewise, found no space.
        not_stored_unavailable: likewise, the write failed, or was not made during a pause.
        not_stored_late: likewise, the write did not begin before its deadline or a clear.
        not_fetched_late: in storage when a request asked for them, and did not come before its
            deadline.
        not_fetched_gone: likewise, evicted by the store since, or damaged.
        not_fetched_failed: likewise, the read or copy failed.
        not_fetched_many: likewise, beyond `storage.max_fetch_blocks`.
        not_fetched_slow: likewise, or storage was not asked: fetching takes longer than computing,
            or took as long already.
        not_fetched_backlog: likewise, fetching takes longer because of the reads before it.
        not_fetched_cleared: likewise, of a cache that was cleared.
        not_fetched_no_slot: likewise, every slot was in use and none about to come back.
        copy_failures: the copy between device and host failed.
        write_failures: not taken by the store.
        quota_evictions: evicted because their salt was above its quota.
        pins_refused: pinned paths beyond the share of pinned blocks.
        pinned_blocks: pinned, resident or not.
    """

    slots: int
    resident: int
    free_slots: int
    pinned: int
    capacity: int
    small_pages: str
    read_block_s: float
    read_window_s: float
    evicted: Count = 0
    offloaded: Count = 0
    loaded: Count = 0
    fetched: Count = 0
    written: Count = 0
    shed: Count = 0
    copy_failures: Count = 0
    write_failures: Count = 0
    not_stored_refused: Count = 0
    not_stored_no_space: Count = 0
    not_stored_unavailable: Count = 0
    not_stored_late: Count = 0
    not_fetched_late: Count = 0
    not_fetched_gone: Count = 0
    not_fetched_failed: Count = 0
    not_fetched_many: Count = 0
    not_fetched_slow: Count = 0
    not_fetched_backlog: Count = 0
    not_fetched_cleared: Count = 0
    not_fetched_no_slot: Count = 0
    quota_evictions: Count = 0
    pins_refused: Count = 0
    pinned_blocks: int = 0


NOT_STORED = tuple(name for name in HostStatistics._fields if name.startswith("not_stored_"))
"""Counts of blocks that the store did not take, by reason. Blocks for which no slot was free are
`shed`."""

NOT_FETCHED = tuple(name for name in HostStatistics._fields if name.startswith("not_fetched_"))
"""Counts of stored blocks that requests did not get, by reason."""

NOT_STORED_BY_OUTCOME = dict.fromkeys(Outcome, "not_stored_unavailable") | {
    Outcome.REFUSED: "not_stored_refused",
    Outcome.NO_SPACE: "not_stored_no_space",
    Outcome.LATE: "not_stored_late",
}


# -- Movements through host memory, and who gets the next slots.


WINDOW = 64
"""Blocks that a job takes in its turn, at most: one read, copy or write. Several windows of a job
can be in flight."""

URGENT_TURNS = 4
"""Of so many turns one is for the jobs that no request waits for."""

Placed = list[tuple[int, HostBlock]]
"""Blocks of a job with their positions in its message."""


class HostJob(ABC):
    """One movement of blocks through host memory, from its message to its answer. It takes slots in
    turns and makes requests, which continue it when they end.

    Attributes:
        generation: of the host tier at the start.
        waiting: positions that have no slot yet, the next one last.
        passing: positions of blocks that only pass through, on their way to storage.
        to_write: positions of blocks that take a slot although they do not stay.
        windows: copies and reads so far.
        moving: blocks of those in flight, by their number.
    """

    URGENT: ClassVar[bool] = False  # whether a request waits for it
    message: Any
    windows = 0
    passing: frozenset[int] = frozenset()
    to_write: frozenset[int] = frozenset()
    timer: Timer | None = None
    _timer_number = 0

    def __init__(self, memory: HostMemory, message: Any) -> None:
        self.memory = memory
        self.host, self.requests, self.out = memory.host, memory.requests, memory.out
        self.message = message
        self.hashes = split_hashes(message.hashes)
        self.generation = memory.host.generation
        self.waiting: list[int] = []
        self.moving: dict[int, Placed] = {}

    def start_timer(self, seconds: float) -> None:
        number = self._timer_number = next(self.memory.timer_numbers)
        self.memory.timed[number] = self
        self.timer = self.out.after(seconds, JobDeadline(number))

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.memory.timed.pop(self._timer_number, None)

    def on_deadline(self) -> None:
        """The time of `start_timer` is over."""

    def window(self, blocks: Placed, then: Callable[[Placed, Any], None]) -> Callable[[Any], None]:
        """What a request for these blocks continues with: `then`, with the blocks and the report,
        once they are not `moving` any longer."""
        self.windows += 1
        number = self.windows
        self.moving[number] = blocks
        return lambda report: then(self.moving.pop(number), report)

    @abstractmethod
    def take(self, most: int) -> None:
        """Take up to `most` slots, as far as there are free ones, and fill them."""

    def give_up(self) -> None:
        """No slot will come: end without the blocks that lack one."""
        self.waiting.clear()

    def fill(self, most: int) -> Placed:
        """Put up to `most` waiting blocks into free slots. A block that has entered the tier
        since is skipped."""
        host, blocks = self.host, Placed()
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

    def land(self, blocks: Placed, outcomes: bytes) -> list[HostBlock]:
        """A read has ended. Returns the blocks that came and were not dropped since."""
        failed = frozenset(i for i, outcome in enumerate(outcomes) if outcome != Outcome.OK)
        return self.host.land([block for _, block in blocks], failed)

    def parent(self, position: int) -> bytes:
        root: bytes = self.message.root
        return self.hashes[position - 1] if position and not self.memory.flat else root

    def traits(self, position: int) -> BlockTraits:
        return self.message.salt, 0, inf


class Movements:
    """Shares slots among jobs. Each takes a window in its turn, and waits for its next turn at the
    end of its queue, so a long one does not stop short ones. Those that requests wait for come
    first, in most turns.

    Jobs wait only while slots are to come back (`HostMemory.slots_come_back`). Otherwise the tier
    evicts for them, and loads without device blocks let go of slots. If none is found, they end.

    Attributes:
        behind: a job has waited in vain for slots that the store's writes hold. Until half of the
            slots that are not for residents are free, jobs that write to the store do not wait.
    """

    def __init__(self, memory: HostMemory) -> None:
        self.behind = False
        self._memory = memory
        self._urgent: deque[HostJob] = deque()
        self._others: deque[HostJob] = deque()
        self._turns = 0

    def __len__(self) -> int:
        return len(self._urgent) + len(self._others)

    def enter(self, job: HostJob) -> None:
        """The job takes the slots that are free, and waits for more."""
        self._queue_of(job).append(job)
        self.serve()

    def leave(self, job: HostJob) -> None:
        queue = self._queue_of(job)
        if job in queue:
            queue.remove(job)

    def serve(self) -> bool:
        """Hand out free slots. Returns whether something has changed: there may be more then."""
        memory, before = self._memory, self._state()
        self._hand_out()
        for find_slots in (self._evict, memory.let_go, self._give_up):
            if len(self) and not memory.slots_come_back():
                find_slots()
                self._hand_out()
        return self._state() != before

    def _state(self) -> tuple[int, int]:
        lacking = sum(len(job.waiting) for job in (*self._urgent, *self._others))
        return self._memory.host.changes, lacking

    def _evict(self) -> None:
        self._memory.evict(self._memory.host.victims(WINDOW))

    def _give_up(self) -> None:
        for job in (*self._urgent, *self._others):
            self.leave(job)
            job.give_up()

    def _hand_out(self) -> None:
        failed = 0  # turns since slots were taken
        while len(self) > failed:
            others_turn = not self._urgent or not (self._turns + 1) % URGENT_TURNS
            queue = self._others if self._others and others_turn else self._urgent
            job = queue[0]
            before = len(job.waiting)
            job.take(WINDOW)
            if len(job.waiting) < before:
                failed = 0
            elif not self._memory.host.free:
                return  # the turn stays with this one
            else:
                failed += 1  # it waits for blocks that another job brings
            self._turns += 1
            if queue and queue[0] is job:
                queue.popleft()
                if job.waiting:
                    queue.append(job)

    def _queue_of(self, job: HostJob) -> deque[HostJob]:
        return self._urgent if job.URGENT else self._others


# -- The host tier's blocks, for all jobs.


WRITE_BATCH = WINDOW
"""Blocks of one write message, at most: their slots come back together."""

Completion = (
    Copied | CopyProgress | Probed | ReadDone | Written | StoreCleared | DeviceFetched | DeviceSaved
)
"""The end of a request to another actor, or its progress."""


class HostMemory:
    """Eviction, write-back and reports, for all jobs of the host tier.

    Attributes:
        loads: in flight, by operation.
        timed: jobs with a timer that runs, by the number of the timer.
        counts: by field of `HostStatistics`.
        exclusive: whether a block leaves the host tier when the device has it.
        flat: whether every block is a child of its root (see `Path`).
        clears: `ClearHost` messages handled. Sent with hints, so that the index can tell those from
            before a clear.
    """

    def __init__(
        self,
        host: HostTier,
        requests: RequestTable,
        config: HostConfig,
        storage: StorageConfig,
        *,
        flat: bool,
    ) -> None:
        self.host, self.requests, self.out = host, requests, requests.out
        self.flat = flat
        self.config, self.storage = config, storage
        self.index, self._notifier = requests.peers.index, requests.peers.notifier
        self.movements = Movements(self)
        self.loads: dict[int, LoadJob] = {}
        self.timed: dict[int, HostJob] = {}
        self.timer_numbers = count(1)
        self.counts: dict[str, int] = dict(HostStatistics._field_defaults)
        self.exclusive = config.mode == "exclusive" or not config.slots
        self.write_back = storage.saves == "write_back" and bool(requests.peers.writers)
        self.clears = 0
        self._held: list[HostBlock] = []  # evicted, and pinned, while no write may begin

    @property
    def unread(self) -> int:
        """Blocks of loads whose reads are due and have not begun."""
        return sum(len(load.waiting) for load in self.loads.values())

    def slots_come_back(self) -> bool:
        """Whether an event is to come that returns slots: requests to the swapper and to storage
        end, each within a deadline, and the index discards blocks that the device has."""
        return bool(self._held) or self.requests.holds_slots or self.host.on_device > 0

    def let_go(self) -> None:
        """The slots that loads without device blocks have taken ahead come back."""
        for load in self.loads.values():
            load.let_go()

    # -- requests that have ended

    def completed(self, message: Completion) -> None:
        """A request has ended, or made progress: continue its job. The message of one that is not
        in the table changes nothing."""
        if isinstance(message, CopyProgress):
            copy = self.requests.get(message.op, Copied)
            if copy is not None and copy.progress is not None:
                copy.progress(message.layers)
            return
        request = self.requests.take(message.op, type(message))
        if request is not None:
            self._ended(request, request.kind.report(message))

    def _ended(self, request: Request, report: Any) -> None:
        kind, size = request.kind, request.size
        if kind is COPY:
            self.counts["copy_failures"] += len(report)
        elif kind is SAVE:
            self.counts["written"] += report
            self.counts["write_failures"] += size - report
            self.counts["not_stored_unavailable"] += size - report
        elif kind is READ_PROBE:
            self._probed(request, report)
            return
        request.then(report)
        if kind is READ:
            self.write_held()

    def peer_failed(self, peer: str) -> None:
        """An actor failed. Requests to it will not be answered: a clear is sent again, the others
        end without success."""
        if peer == "prefix_index":
            self.host.shares.unpin(b"")  # pins end with its state
        for op, request in self.requests.open_at(peer):
            if request.kind is not COPY:
                self.requests.take(op, request.kind.answer)
                self._ended(request, request.kind.unanswered(request.size))

    def _probed(self, probe: Request, found: int) -> None:
        """Reads that follow from a probe are sent before the writes that were held back for it, and
        before those of the eviction that makes space for them."""
        requests = self.requests
        requests.holding += 1
        # During a clear, blocks from before it may have been found.
        probe.then(found if requests.may_read else 0)
        requests.holding -= 1
        self.write_held()

    def _written(self, batch: Sequence[HostBlock], outcomes: bytes) -> None:
        self.remove([block for block in batch if block.state is SlotState.TRANSIT])
        for block, outcome in zip(batch, outcomes, strict=True):
            if outcome in (Outcome.OK, Outcome.EXISTS):
                self.counts["written"] += 1
            else:
                self.counts["write_failures"] += 1
                self.counts[NOT_STORED_BY_OUTCOME[Outcome(outcome)]] += 1
            self.host.unpin(block)
            if block.state is SlotState.PROMOTING and not (block.pins or block.on_device):
                self.keep_if_space([block])

    # -- eviction

    def make_space(
        self,
        incoming: int,
        slots: int,
        protected: Container[bytes] = (),
        salts: Mapping[int, int] = NOTHING,
    ) -> None:
        """Evict until `incoming` more residents fit the capacity. Victims are not written back as
        far as fewer than `slots` slots are free. salts: the incoming ones by salt."""
        over = self.host.resident + incoming - self.host.capacity
        self.evict(self.host.victims(over, protected, salts), slots)

    @property
    def may_wait(self) -> bool:
        """Whether a job that writes to the store waits for slots. If not, blocks are shed."""
        host, movements = self.host, self.movements
        if movements.behind:
            movements.behind = host.free * 2 < host.num_slots - host.capacity
        return self.storage.on_full == "wait" and not movements.behind

    def over_quota(self, salt: int, incoming: int) -> int:
        host = self.host
        over = host.resident + incoming - host.capacity
        return host.shares.over_quota(salt, incoming, over)

    def keep_watermarks(self) -> None:
        """Above the high watermark evict down to the low one."""
        host, config = self.host, self.config
        high = config.high_watermark * host.capacity
        if high and host.resident > high:
            low = int(config.low_watermark * host.capacity)
            self.evict(host.victims(host.resident - low))

    def evict(self, victims: Sequence[HostBlock], slots: int = 0) -> None:
        """Evict blocks, least recently used first: written back if that is the policy and there are
        slots to spare, else dropped. Indexes are sent that a block left the host when its write is
        over: until then a load finds it in its slot."""
        if not victims:
            return
        host = self.host
        self.counts["evicted"] += len(victims)
        shed = len(victims)
        if self.write_back:
            shed = max(0, min(len(victims), slots - host.free))
            self.counts["shed"] += shed
        hashes = join_hashes(block.hash for block in victims)
        self.out.send(self.index, HostBlocksRemoved(hashes))
        self.remove(victims[:shed])
        for block in victims[shed:]:
            host.move(block, SlotState.TRANSIT)
            host.pin(block)
        self._held += victims[shed:]
        self.write_held()

    # -- writes to storage

    def write_held(self) -> None:
        """Write evicted blocks that were held back, unless a request in flight holds writes."""
        if not self._held or self.requests.holding:
            return
        held, self._held = self._held, []
        for block in held:
            self.host.unpin(block)
        self.write([block for block in held if not block.dropped])

    def write(self, blocks: Sequence[HostBlock]) -> None:
        """Write blocks to storage, least recently used first. Each is pinned until its batch has
        ended."""
        for start in range(0, len(blocks), WRITE_BATCH):
            batch = blocks[start : start + WRITE_BATCH]
            for block in batch:
                self.host.pin(block)
            self.requests.write(batch, partial(self._written, batch))

    # -- blocks that leave

    def keep_if_space(self, blocks: Sequence[HostBlock]) -> None:
        """Blocks were leaving for the device and did not arrive there: they stay as far as the
        capacity allows, and the others are evicted."""
        host = self.host
        found = [block for block in blocks if not block.dropped]
        space = max(0, host.capacity - host.resident)
        for block in found[:space]:
            host.move(block, SlotState.RESIDENT)
        self.evict(found[space:])

    def remove(self, blocks: Sequence[HostBlock]) -> None:
        """Drop blocks, and report those gone that were announced."""
        self._report_gone([block for block in blocks if not block.dropped], Reason.CPU_EVICTION)
        for block in blocks:
            self.host.drop(block)

    def drop_host_copies(self, hashes: bytes) -> None:
        """The device holds these blocks: an exclusive tier drops them."""
        if not self.exclusive:
            return
        found = self._found(split_hashes(hashes))
        self._report_gone(found, Reason.PROMOTION)
        dropped = [
            block for block in found if block.state is not SlotState.TRANSIT and not block.arriving
        ]
        for block in dropped:
            self.host.drop(block)
        # A HostBlocksAdded or Offloaded with such a block may have been sent after the
        # DropHostCopies was.
        if dropped:
            removed = join_hashes(block.hash for block in dropped)
            self.out.send(self.index, HostBlocksRemoved(removed))

    def keep_host_copies(self, hashes: bytes) -> None:
        """The device did not take these blocks, deepest last: those that were leaving stay as far
        as the capacity allows, and the others are evicted."""
        found = [one for one in self._found(reversed(split_hashes(hashes))) if one.on_device]
        for block in found:
            self.host.mark_not_on_device(block)
        self.keep_if_space([block for block in found if not block.pins])

    def _found(self, hashes: Iterable[bytes]) -> list[HostBlock]:
        blocks = self.host.blocks
        return [blocks[block_hash] for block_hash in hashes if block_hash in blocks]

    def on_clear(self, message: ClearHost) -> None:
        """Drop every block, or those of a salt, on request those in storage too. Copies in flight
        end on blocks that are not found any longer."""
        if message.salt is None:
            self.clear()
        else:
            self._report_gone(self.host.clear_salt(message.salt), Reason.CLEAR)
            self.clears += 1
        if message.storage:
            self.clear_store(message.op, message.salt)

    def clear(self) -> None:
        self.host.clear()
        self.host.shares.unpin(b"")
        self.clears += 1
        self.out.send(self._notifier, TierCleared(Tier.HOST, Reason.CLEAR))

    def lose(self) -> None:
        self.host.clear()
        self.announce_restart()

    def announce_restart(self) -> None:
        self.out.send(self._notifier, TierCleared(Tier.HOST, Reason.RESTART))

    def clear_store(self, op: int, salt: int | None) -> None:
        """Clear the store, or remove the objects of a salt. `HostCleared` with this op is sent when
        that is done."""

        def ended(message: StoreCleared | None) -> None:
            if message is None:  # the writer has failed
                self.clear_store(op, salt)
            else:
                self.out.send(self.index, HostCleared(op, message.error, message.unknown))

        if self.requests.peers.writers:
            self.requests.clear_store(salt, ended)
        else:
            self.out.send(self.index, HostCleared(op, ""))

    def _report_gone(self, blocks: Sequence[HostBlock], reason: Reason) -> None:
        announced = [block for block in blocks if block.announced]
        for block in announced:
            block.announced = False
        if announced:
            hashes = join_hashes(block.hash for block in announced)
            self.out.send(self._notifier, BlocksRemoved(hashes, Tier.HOST, reason))

    # -- blocks that enter

    def announce(self, hashes: Sequence[bytes]) -> None:
        if not hashes:
            return
        for block_hash in hashes:
            self.host.blocks[block_hash].announced = True
        added = BlocksAdded(join_hashes(hashes), Tier.HOST, Reason.OFFLOAD)
        self.out.send(self._notifier, added)

    def announce_fetched(self, blocks: Sequence[HostBlock]) -> None:
        """The same for blocks from storage, with a hint for the prefix index."""
        if not blocks:
            return
        hashes = [block.hash for block in blocks]
        self.announce(hashes)
        hint = HostBlocksAdded(join_hashes(hashes), self.clears, self.requests.generation)
        self.out.send(self.index, hint)
