"""Host memory: blocks that enter and leave the host tier, and the reports to indexes about them."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import msgspec

from kvactors.actor import Envelope
from kvactors.cpu_evictor.actions import Action, send
from kvactors.cpu_evictor.messages import (
    ClearHost,
    EmptyHost,
    HostBlocksAdded,
    HostBlocksRemoved,
    HostCleared,
)
from kvactors.cpu_evictor.requests import RequestTable
from kvactors.cpu_evictor.slots import NOTHING, HostBlock, HostTier, SlotState, clear_salt
from kvactors.device.arena import HostSlots
from kvactors.flush_notifier.messages import BlocksAdded, BlocksRemoved, TierCleared
from kvactors.settings import HostConfig, StorageConfig
from kvactors.storage.messages import Outcome
from kvactors.types import Reason, Tier, join_hashes, split_hashes

if TYPE_CHECKING:
    from kvactors.cpu_evictor.load import LoadJob


# -- Statistics of the host tier.


class Counts(msgspec.Struct, eq=False):
    """Blocks since this incarnation began."""

    evicted: int = 0
    offloaded: int = 0
    loaded: int = 0
    fetched: int = 0  # from storage
    written: int = 0
    shed: int = 0  # not written to storage although due, for lack of slots
    copy_failures: int = 0
    write_failures: int = 0
    not_stored_refused: int = 0  # the reasons of `write_failures`
    not_stored_no_space: int = 0
    not_stored_unavailable: int = 0
    not_stored_late: int = 0
    not_fetched_late: int = 0  # stored when a request asked for them, and it did not get them
    not_fetched_gone: int = 0
    not_fetched_failed: int = 0
    not_fetched_few: int = 0
    not_fetched_cleared: int = 0
    not_fetched_no_slot: int = 0

    def count_written(self, outcome: int) -> None:
        """The store answered for a block."""
        if outcome in (Outcome.OK, Outcome.EXISTS):
            self.written += 1
            return
        self.write_failures += 1
        if outcome == Outcome.REFUSED:
            self.not_stored_refused += 1
        elif outcome == Outcome.NO_SPACE:
            self.not_stored_no_space += 1
        elif outcome == Outcome.LATE:
            self.not_stored_late += 1
        else:
            self.not_stored_unavailable += 1

    def count_not_fetched(self, reason: str, blocks: int) -> None:
        """Stored blocks of a load did not come."""
        name = f"not_fetched_{reason}"
        setattr(self, name, getattr(self, name) + blocks)


class HostStatistics(NamedTuple):
    """The host tier at one moment. The fields from `evicted` on count blocks, see `Counts`.

    Attributes:
        slots: slots of the arena, those for blocks in transit included.
        resident: blocks that count against the capacity.
        free_slots: slots without a block.
        pinned: slots that a transfer uses.
        capacity: resident blocks at most.
        small_pages: why the slots are in pages of 4 KiB, which makes direct I/O and the device's
            copies slower. Empty if they are in huge pages.
        evicted: blocks that left the tier for others.
        offloaded: blocks that arrived from the device.
        loaded: blocks that were copied to the device.
        fetched: blocks that were read from storage.
        written: blocks that were written to storage.
        shed: blocks that were due and not written to storage, for lack of slots.
        not_stored_refused: blocks of `write_failures` that a quota or the capacity of the store
            refused.
        not_stored_no_space: such blocks that found no space.
        not_stored_unavailable: such blocks whose write failed, or was not made during a pause.
        not_stored_late: such blocks whose write did not begin before its deadline or a clear.
        not_fetched_late: blocks that storage had when a request asked for them, and that did not
            come before its deadline.
        not_fetched_gone: such blocks that the store had evicted since, or that were damaged.
        not_fetched_failed: such blocks whose read or copy failed.
        not_fetched_few: such blocks that were fewer than `storage.min_fetch_blocks`.
        not_fetched_cleared: such blocks of a cache that was cleared.
        not_fetched_no_slot: such blocks while every slot was in use and none about to come back.
        copy_failures: blocks whose copy between device and host failed.
        write_failures: blocks that the store did not take.
        quota_evictions: evicted blocks that were chosen because their salt was above its quota.
        pins_refused: pinned paths beyond the share of pinned blocks.
        pinned_blocks: blocks that are pinned, resident or not.
    """

    slots: int
    resident: int
    free_slots: int
    pinned: int
    capacity: int
    small_pages: str
    evicted: int
    offloaded: int
    loaded: int
    fetched: int
    written: int
    shed: int
    copy_failures: int
    write_failures: int
    not_stored_refused: int
    not_stored_no_space: int
    not_stored_unavailable: int
    not_stored_late: int
    not_fetched_late: int
    not_fetched_gone: int
    not_fetched_failed: int
    not_fetched_few: int
    not_fetched_cleared: int
    not_fetched_no_slot: int
    quota_evictions: int
    pins_refused: int
    pinned_blocks: int


NOT_STORED = tuple(name for name in HostStatistics._fields if name.startswith("not_stored_"))
"""Counts of blocks that the store did not take, by reason. Blocks for which no slot was free are
`shed`."""

NOT_FETCHED = tuple(name for name in HostStatistics._fields if name.startswith("not_fetched_"))
"""Counts of stored blocks that requests did not get, by reason."""


def host_statistics(host: HostTier, counts: Counts, arena: HostSlots) -> HostStatistics:
    """Statistics of a host tier, of the blocks moved through it, and of its memory."""
    return HostStatistics(
        slots=host.num_slots,
        resident=host.resident,
        free_slots=host.free,
        pinned=host.pinned,
        capacity=host.capacity,
        quota_evictions=host.shares.quota_evictions,
        pins_refused=host.shares.pins_refused,
        pinned_blocks=host.shares.pinned,
        small_pages=arena.small_pages,
        **msgspec.structs.asdict(counts),
    )


# -- Movements through host memory that wait for slots: who gets the next ones.


WINDOW = 64
"""Blocks that a movement takes in its turn, at most: one read, copy or write. Several windows of a
movement can be in flight."""

URGENT_TURNS = 4
"""Of so many turns one is for the movements that no request waits for."""


class Movement(Protocol):
    """A job that needs slots, and goes on with those that are free.

    Attributes:
        URGENT: whether a request waits for it.
    """

    URGENT: ClassVar[bool]

    @property
    def op(self) -> int:
        """Number in its `SlotDeadline`, 0 for a movement without one."""

    @property
    def lacking(self) -> int:
        """Blocks that still need a slot."""

    def take(self, most: int) -> list[Action]:
        """Take up to `most` slots, as far as there are free ones, and fill them."""

    def give_up(self) -> list[Action]:
        """No slot will come: end without the blocks that lack one."""


class Movements:
    """Shares slots among movements. Each takes a window in its turn, and waits for its next turn at
    the end of its queue, so a long one does not stop short ones. Those that requests wait for come
    first, in most turns.

    Movements wait only while slots are to come back (`HostMemory.slots_come_back`). Otherwise the
    tier evicts for them, and loads without device blocks let go of slots. If none is found, they
    end.

    Attributes:
        behind: a movement has waited in vain for slots that the store's writes hold. Until half of
            the slots that are not for residents are free, movements to the store do not wait.
    """

    def __init__(
        self,
        host: HostTier,
        *,
        evict: Callable[[Sequence[HostBlock]], list[Action]],
        slots_come_back: Callable[[], bool],
        let_go: Callable[[], list[Action]],
    ) -> None:
        """
        Args:
            host: the slots.
            evict: evicts blocks.
            slots_come_back: whether an event is to come that returns slots.
            let_go: takes back slots that were taken ahead of their use.
        """
        self.behind = False
        self._evict = evict
        self._slots_come_back = slots_come_back
        self._let_go = let_go
        self._host = host
        self._urgent: deque[Movement] = deque()
        self._others: deque[Movement] = deque()
        self._turns = 0

    def __len__(self) -> int:
        return len(self._urgent) + len(self._others)

    def enter(self, movement: Movement) -> list[Action]:
        """A movement takes the slots that are free, and waits for more."""
        self._queue_of(movement).append(movement)
        return self.serve()

    def leave(self, movement: Movement) -> None:
        """A movement needs no more slots."""
        queue = self._queue_of(movement)
        if movement in queue:
            queue.remove(movement)

    def overdue(self, op: int) -> list[Action]:
        """A movement to the store has waited long enough for slots."""
        for movement in (*self._urgent, *self._others):
            if movement.op == op:
                self.behind = True
                self.leave(movement)
                return movement.give_up()
        return []

    def serve(self) -> list[Action]:
        """Hand out free slots. Called at the end of each turn."""
        actions = self._hand_out()
        if len(self) and not self._slots_come_back():
            actions += self._evict(self._host.victims(WINDOW))
            actions += self._hand_out()
        if len(self) and not self._slots_come_back():
            actions += self._let_go()
            actions += self._hand_out()
        if len(self) and not self._slots_come_back():
            for movement in (*self._urgent, *self._others):
                self.leave(movement)
                actions += movement.give_up()
        return actions

    def _hand_out(self) -> list[Action]:
        actions: list[Action] = []
        failed = 0  # turns since slots were taken
        while len(self) > failed:
            others_turn = not self._urgent or not (self._turns + 1) % URGENT_TURNS
            queue = self._others if self._others and others_turn else self._urgent
            movement = queue[0]
            before = movement.lacking
            actions += movement.take(WINDOW)
            if movement.lacking < before:
                failed = 0
                self._turns += 1
            elif not self._host.free:
                return actions  # the turn stays with this one
            else:
                failed += 1  # it waits for blocks that another movement brings
                self._turns += 1
            if queue and queue[0] is movement:
                queue.popleft()
                if movement.lacking:
                    queue.append(movement)
        return actions

    def _queue_of(self, movement: Movement) -> deque[Movement]:
        return self._urgent if movement.URGENT else self._others


WRITE_BATCH = WINDOW
"""Blocks of one write message, at most: their slots come back together."""


class HostMemory:
    """Eviction, write-back and reports, for all jobs of the host tier.

    Attributes:
        host: the slots.
        requests: requests in flight.
        movements: those that wait for slots.
        loads: in flight, by operation.
        counts: see `Counts`.
        exclusive: whether a block leaves the host tier when the device has it.
        clears: `ClearHost` messages handled. Sent with hints, so that the index can tell those from
            before a clear.
    """

    def __init__(
        self, host: HostTier, requests: RequestTable, config: HostConfig, storage: StorageConfig
    ) -> None:
        self.host = host
        self.requests = requests
        self.movements = Movements(
            host, evict=self.evict, slots_come_back=self.slots_come_back, let_go=self.let_go
        )
        self.loads: dict[int, LoadJob] = {}
        self.config = config
        self.storage = storage
        self.counts = Counts()
        self.exclusive = config.mode == "exclusive" or not config.slots
        self.write_back = storage.saves == "write_back" and bool(requests.peers.writers)
        self.clears = 0
        self._index = requests.peers.index
        self._notifier = requests.peers.notifier
        self._held: list[HostBlock] = []  # evicted, and pinned, while no write may begin

    def slots_come_back(self) -> bool:
        """Whether an event is to come that returns slots: requests to the swapper and to storage
        end, each within a deadline, and the index discards blocks that the device has."""
        return bool(self._held) or self.requests.holds_slots or self.host.on_device > 0

    def let_go(self) -> list[Action]:
        """The slots that loads without device blocks have taken ahead come back."""
        actions: list[Action] = []
        for load in self.loads.values():
            actions += load.let_go()
        return actions

    # -- eviction

    def make_space(
        self,
        incoming: int,
        slots: int,
        protected: Container[bytes] = (),
        salts: Mapping[int, int] = NOTHING,
    ) -> list[Action]:
        """Evict until `incoming` more residents fit the capacity. Victims are not written back as
        far as fewer than `slots` slots are free. salts: the incoming ones by salt."""
        over = self.host.resident + incoming - self.host.capacity
        return self.evict(self.host.victims(over, protected, salts), slots)

    @property
    def may_wait(self) -> bool:
        """Whether a movement to the store waits for slots, or sheds what finds none now."""
        host, movements = self.host, self.movements
        if movements.behind:
            movements.behind = host.free * 2 < host.num_slots - host.capacity
        return self.storage.on_full == "wait" and not movements.behind

    def surplus(self, salt: int, incoming: int) -> int:
        """Incoming blocks of a salt that do not stay, see `HostShares.surplus`."""
        host = self.host
        over = host.resident + incoming - host.capacity
        return host.shares.surplus(salt, incoming, over)

    def keep_watermarks(self) -> list[Action]:
        """Above the high watermark evict down to the low one."""
        host, config = self.host, self.config
        high = config.high_watermark * host.capacity
        if not high or host.resident <= high:
            return []
        low = int(config.low_watermark * host.capacity)
        return self.evict(host.victims(host.resident - low))

    def evict(self, victims: Sequence[HostBlock], slots: int = 0) -> list[Action]:
        """Evict blocks, least recently used first: written back if that is the policy and there are
        slots to spare, else dropped.

        Indexes are sent that a block left the host when its write is over: until then a load finds
        it in its slot.
        """
        if not victims:
            return []
        host = self.host
        self.counts.evicted += len(victims)
        shed = len(victims)
        if self.write_back:
            shed = max(0, min(len(victims), slots - host.free))
            self.counts.shed += shed
        hashes = join_hashes(block.hash for block in victims)
        actions: list[Action] = [send(self._index, HostBlocksRemoved(hashes))]
        actions += self.remove(victims[:shed])
        for block in victims[shed:]:
            host.move(block, SlotState.TRANSIT)
            host.pin(block)
        self._held += victims[shed:]
        return actions + self.write_held()

    # -- writes to storage

    def write_held(self) -> list[Action]:
        """Write evicted blocks that were held back, unless a probe is in flight: a store of limited
        size must not evict for them what is about to be read."""
        if not self._held or self.requests.holds_writes:
            return []
        held, self._held = self._held, []
        for block in held:
            self.host.unpin(block)
        return self.write([block for block in held if not block.dropped])

    def write(self, blocks: Sequence[HostBlock]) -> list[Action]:
        """Write blocks to storage, least recently used first. Each is pinned until its batch has
        ended."""
        actions: list[Action] = []
        for start in range(0, len(blocks), WRITE_BATCH):
            batch = blocks[start : start + WRITE_BATCH]
            for block in batch:
                self.host.pin(block)
            actions.append(self.requests.write(batch))
        return actions

    def on_written(self, batch: Sequence[HostBlock], outcomes: bytes) -> list[Action]:
        """A batch has ended. The writer has reported the blocks that are stored now.

        Args:
            batch: the blocks of the write.
            outcomes: one `Outcome` for each.
        """
        actions = self.remove([block for block in batch if block.state is SlotState.TRANSIT])
        for block, outcome in zip(batch, outcomes, strict=True):
            self.counts.count_written(outcome)
            self.host.unpin(block)
            if block.state is SlotState.LEAVING and not (block.pins or block.on_device):
                actions += self.keep_if_space([block])
        return actions

    # -- blocks that leave

    def keep_if_space(self, blocks: Sequence[HostBlock]) -> list[Action]:
        """Blocks were leaving for the device and did not arrive there: they stay as far as the
        capacity allows, and the others are evicted."""
        host = self.host
        found = [block for block in blocks if not block.dropped]
        space = max(0, host.capacity - host.resident)
        for block in found[:space]:
            host.move(block, SlotState.RESIDENT)
        return self.evict(found[space:])

    def remove(self, blocks: Sequence[HostBlock]) -> list[Action]:
        """Drop blocks, and report those gone that were announced."""
        actions = self._report_gone(
            [block for block in blocks if not block.dropped], Reason.CPU_EVICTION
        )
        for block in blocks:
            self.host.drop(block)
        return actions

    def drop_host_copies(self, hashes: bytes) -> list[Action]:
        """The device holds these blocks: an exclusive tier drops them."""
        if not self.exclusive:
            return []
        found = [
            block
            for block_hash in split_hashes(hashes)
            if (block := self.host.blocks.get(block_hash)) is not None
        ]
        actions = self._report_gone(found, Reason.PROMOTION)
        dropped = [
            block for block in found if block.state is not SlotState.TRANSIT and not block.arriving
        ]
        for block in dropped:
            self.host.drop(block)
        # A HostBlocksAdded or Offloaded with such a block may have been sent after the
        # DropHostCopies was.
        if dropped:
            removed = join_hashes(block.hash for block in dropped)
            actions.append(send(self._index, HostBlocksRemoved(removed)))
        return actions

    def keep_host_copies(self, hashes: bytes) -> list[Action]:
        """The device did not take these blocks, deepest last: those that were leaving stay as far
        as the capacity allows, and the others are evicted."""
        found = [
            block
            for block_hash in reversed(split_hashes(hashes))
            if (block := self.host.blocks.get(block_hash)) is not None and block.on_device
        ]
        for block in found:
            self.host.mark_not_on_device(block)
        return self.keep_if_space([block for block in found if not block.pins])

    def on_clear(self, message: ClearHost) -> list[Action]:
        """Drop every block, or those of a salt, on request those in storage too."""
        salt = message.salt
        actions = self.clear() if salt is None else self.clear_salt(salt)
        return [*actions, self.clear_store(message.op, salt)] if message.storage else actions

    def clear(self) -> list[Action]:
        """Drop every block. Copies in flight end on blocks that are not found any longer."""
        self.host.clear()
        self.host.shares.unpin(b"")
        self.clears += 1
        return [send(self._notifier, TierCleared(Tier.HOST, Reason.CLEAR))]

    def clear_salt(self, salt: int) -> list[Action]:
        """Drop every block of a salt. Copies in flight end on blocks that are not found."""
        actions = self._report_gone(clear_salt(self.host, salt), Reason.CLEAR)
        self.clears += 1
        return actions

    def lose(self) -> list[Action]:
        """The bytes in the slots may be lost."""
        self.host.clear()
        return [self.announce_restart()]

    def announce_restart(self) -> Action:
        """No block of before is in the host tier."""
        return send(self._notifier, TierCleared(Tier.HOST, Reason.RESTART))

    def clear_store(self, op: int, salt: int | None) -> Action:
        """Clear the store, or remove the objects of a salt. `HostCleared` with this op is sent when
        that is done."""
        if not self.requests.peers.writers:
            return send(self._index, HostCleared(op, ""))
        return self.requests.clear_store(op, salt)

    def _report_gone(self, blocks: Sequence[HostBlock], reason: Reason) -> list[Action]:
        announced = [block for block in blocks if block.announced]
        for block in announced:
            block.announced = False
        if not announced:
            return []
        hashes = join_hashes(block.hash for block in announced)
        return [send(self._notifier, BlocksRemoved(hashes, Tier.HOST, reason))]

    # -- blocks that enter

    def announce(self, hashes: Sequence[bytes]) -> list[Action]:
        """Report blocks resident on the host."""
        if not hashes:
            return []
        for block_hash in hashes:
            self.host.blocks[block_hash].announced = True
        return [send(self._notifier, BlocksAdded(join_hashes(hashes), Tier.HOST, Reason.OFFLOAD))]

    def announce_fetched(self, blocks: Sequence[HostBlock]) -> list[Action]:
        """Report blocks that have come from storage to stay, to indexes and to the prefix index."""
        if not blocks:
            return []
        hashes = [block.hash for block in blocks]
        hint = HostBlocksAdded(join_hashes(hashes), self.clears, self.requests.generation)
        return [*self.announce(hashes), send(self._index, hint)]


# -- The host tier before a sleep: its blocks are evicted, a part a turn.


class Emptying:
    """Evicts for `EmptyHost`, and answers it once no request is in flight.

    Args:
        memory: of the host tier.
        answer: answers a request.

    Attributes:
        envelope: of the request that waits, None without one.
    """

    def __init__(self, memory: HostMemory, answer: Callable[[Envelope[Any], Any], object]) -> None:
        self.envelope: Envelope[int] | None = None
        self._memory = memory
        self._answer = answer

    def begin(self, message: EmptyHost, envelope: Envelope[int]) -> list[Action]:
        """Evict the next blocks, written back if that is the policy."""
        host, self.envelope = self._memory.host, envelope
        if message.count:
            return self._memory.evict(host.victims(message.count))
        return self._memory.remove([b for b in reversed(host.blocks.values()) if not b.pins])

    def answer(self) -> None:
        """Answer the request that waits, if nothing is in flight."""
        if self.envelope is not None and self._memory.requests.idle:
            envelope, self.envelope = self.envelope, None
            self._answer(envelope, len(self._memory.host.blocks))


# -- Checks of reports on a batch: a store or a copy engine supplied by the user may return invalid
# values.
#
# A report that does not fit its batch counts as a failure of all of it. So wrong lengths, types and
# values cost a miss or a write, never a wrong byte.


KNOWN = frozenset(int(outcome) for outcome in Outcome)


def outcomes_of(report: Any, keys: int) -> bytes:
    """One `Outcome` for each key: UNAVAILABLE for an unknown value, and for every key if the report
    has another type or length."""
    if not isinstance(report, bytes | bytearray | memoryview):
        return bytes([Outcome.UNAVAILABLE]) * keys
    outcomes = bytes(report)
    if len(outcomes) != keys:
        return bytes([Outcome.UNAVAILABLE]) * keys
    return bytes(value if value in KNOWN else Outcome.UNAVAILABLE for value in outcomes)


def count_of(report: Any, most: int) -> int:
    """A number of leading blocks, from 0 to `most`, or 0 for any other report."""
    try:
        count = operator.index(report)
    except TypeError:
        return 0
    return count if 0 <= count <= most else 0
