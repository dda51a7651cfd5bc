"""Host slots: the block in each slot, the slots in use, and the choice of blocks to evict.

Nothing here needs an event loop: the thread that owns a `HostTier` calls it directly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from math import inf
from typing import TYPE_CHECKING

import msgspec

from kvactors.cpu_evictor.policy.lru import Lru
from kvactors.cpu_evictor.shares import HostShares
from kvactors.cpu_evictor.victims import choose_victims
from kvactors.discreet import discreet
from kvactors.invariant import ensure

if TYPE_CHECKING:
    from kvactors.cpu_evictor.policy import EvictionPolicy
    from kvactors.lineage import Lineage

BlockTraits = tuple[int, int, float]
"""Salt, priority and expiry of a block: see `kvactors.hints.Traits`."""

PLAIN_BLOCK: BlockTraits = (0, 0, inf)
NOTHING: Mapping[int, int] = {}

STEP = 128
"""Blocks that one step of a check covers."""


class SlotState(Enum):
    """The use of a block's slot."""

    RESIDENT = "resident"  # counts against the capacity
    # Going back to the device (exclusive tiers): does not count, the slot is still in use.
    LEAVING = "leaving"
    TRANSIT = "transit"  # being written to storage, or staged between storage and device


class HostBlock(msgspec.Struct, eq=False, gc=False):
    """A block in a host slot. It refers to nothing that could refer to it, and the cyclic garbage
    collector does not visit it: there is one for each slot.

    Attributes:
        hash: block hash.
        parent: hash of the block before it on its path.
        slot: index of its slot in the arena.
        state: see `SlotState`.
        lineage: for stores that keep lineages.
        pins: copies, reads and writes that use the slot now.
        arriving: its bytes are not in the slot yet.
        announced: the notifier was sent that it is resident, and not that it is gone.
        prefetched: it came from storage without a request that waits for it.
        on_device: it was copied to the device: a `DropHostCopies` or `KeepHostCopies` for it is on
            its way.
        dropped: removed from the tier. The slot is free as soon as it has no pins.
        salt: see `kvactors.quotas.salt_id`.
        priority, expiry: see `kvactors.hints.Traits`.
        listed: it is resident, and `HostShares` has it.
    """

    hash: bytes
    parent: bytes
    slot: int
    state: SlotState
    lineage: Lineage | None = None
    pins: int = 0
    arriving: bool = False
    announced: bool = False
    prefetched: bool = False
    on_device: bool = False
    dropped: bool = False
    salt: int = 0
    priority: int = 0
    expiry: float = inf
    listed: bool = False

    __repr__ = discreet


class HostTier:
    """The table of host slots: at most `capacity` resident blocks in `num_slots` slots.

    The slots beyond the capacity are for blocks in transit. Callers add or touch the blocks of a
    path deepest first, so a parent is always younger than its children and the oldest block is a
    leaf. A block with resident children is never a victim in any policy's order.

    Args:
        capacity: resident blocks at most.
        num_slots: slots of the arena.
        in_use: slots that a call of an earlier incarnation may still access (`Arena.in_use`). They
            are handed out once they have left it.
        policy: the order of eviction.
        shares: what comes before the policy's order, quotas and pins.

    Raises:
        ValueError: the capacity is negative or larger than the number of slots.
    """

    def __init__(
        self,
        capacity: int,
        num_slots: int,
        in_use: Container[int] = (),
        policy: EvictionPolicy | None = None,
        shares: HostShares | None = None,
    ) -> None:
        if not 0 <= capacity <= num_slots:
            raise ValueError(f"a capacity of {capacity} blocks in {num_slots} slots")
        self.capacity = capacity
        self.num_slots = num_slots
        self.resident = 0  # blocks that count against the capacity
        self.blocks: dict[bytes, HostBlock] = {}
        self.policy: EvictionPolicy = Lru() if policy is None else policy
        self.shares = HostShares() if shares is None else shares
        self.generation = 0  # calls of `clear`
        self.changes = 0  # calls that changed something
        # Called before a block changes its state (None: it is dropped), for tests.
        self.on_state: Callable[[HostBlock, SlotState | None], None] | None = None
        self._in_use = in_use
        self._free = [slot for slot in range(num_slots - 1, -1, -1) if slot not in in_use]
        self._withheld = [slot for slot in range(num_slots) if slot in in_use]
        self._children: Counter[bytes] = Counter()  # resident ones, by parent
        self._dropped: set[HostBlock] = set()  # still pinned
        self._pinned = self._on_device = 0

    @property
    def free(self) -> int:
        """Slots that can be handed out."""
        if self._withheld:
            ended = [slot for slot in self._withheld if slot not in self._in_use]
            self._withheld = [slot for slot in self._withheld if slot in self._in_use]
            self._free += ended
            self.changes += bool(ended)
        return len(self._free)

    def _give(self, slot: int) -> None:
        (self._withheld if slot in self._in_use else self._free).append(slot)

    @property
    def pinned(self) -> int:
        """Slots in use by a copy, a read or a write."""
        return self._pinned

    @property
    def on_device(self) -> int:
        """Slots whose blocks the device holds, and which the index has not discarded yet."""
        return self._on_device

    @property
    def in_transit(self) -> int:
        """Slots whose blocks are on their way to the device or to storage, without those that wait
        for a `DropHostCopies` or `KeepHostCopies`."""
        return len(self.blocks) - self.resident - self._on_device

    def readable(self, block_hash: bytes) -> HostBlock | None:
        """The block, if its bytes are in its slot."""
        block = self.blocks.get(block_hash)
        return block if block is not None and not block.arriving else None

    def readable_run(self, hashes: Iterable[bytes]) -> list[HostBlock]:
        """The leading blocks whose bytes are in their slots."""
        blocks, run = self.blocks, []
        for block_hash in hashes:
            block = blocks.get(block_hash)
            if block is None or block.arriving:
                break
            run.append(block)
        return run

    def is_resident(self, block_hash: bytes) -> bool:
        """Whether a block counts against the capacity. Its bytes may be arriving."""
        block = self.blocks.get(block_hash)
        return block is not None and block.state is SlotState.RESIDENT

    def hashes(self) -> list[bytes]:
        """Hashes of the blocks that indexes count as resident: residents whose bytes are here, and
        blocks in transit that were announced and not reported gone."""
        return list(self.iter_hashes())

    def iter_hashes(self) -> Iterator[bytes]:
        """`hashes` one by one. RuntimeError if a block came or went since the first was taken."""
        return (
            block_hash
            for block_hash, block in self.blocks.items()
            if not block.arriving and (block.announced or block.state is SlotState.RESIDENT)
        )

    def add(
        self,
        block_hash: bytes,
        parent: bytes,
        state: SlotState,
        lineage: Lineage | None = None,
        traits: BlockTraits = PLAIN_BLOCK,
    ) -> HostBlock:
        """Put a new block into a free slot, as most recently used, arriving and pinned.

        The caller has checked `free`, and that the block has no slot.

        Raises:
            RuntimeError: the block has a slot already. Nothing changed.
        """
        if block_hash in self.blocks:
            raise RuntimeError("a block is given a second slot")
        self.changes += 1
        self._pinned += 1
        block = HostBlock(block_hash, parent, self._free.pop(), state, lineage)
        block.arriving = True
        block.salt, block.priority, block.expiry = traits
        block.pins = 1
        self.blocks[block_hash] = block
        if state is SlotState.RESIDENT:
            self._enter(block)
        return block

    def land(self, blocks: Sequence[HostBlock], failed: frozenset[int]) -> list[HostBlock]:
        """A copy or read into slots has ended: unpin its blocks and drop the failed ones.

        Args:
            blocks: the blocks, in the order of the copy.
            failed: indices of those whose bytes did not arrive.

        Returns:
            The blocks that arrived and were not dropped since.
        """
        landed = []
        for i, block in enumerate(blocks):
            block.arriving = False
            if i in failed:
                self.drop(block)
            elif not block.dropped:
                landed.append(block)
            self.unpin(block)
        return landed

    def victims(
        self,
        count: int,
        protected: Container[bytes] = (),
        incoming: Mapping[int, int] = NOTHING,
    ) -> list[HostBlock]:
        """Choose up to `count` blocks to evict, see `choose_victims`. incoming: blocks that are
        about to become resident, by salt."""
        return choose_victims(self, count, protected, incoming)

    def touch(self, hashes: Iterable[bytes]) -> None:
        """Blocks were used, in this order. Blocks that are not resident are ignored."""
        if self.shares.in_use:
            hashes = list(hashes)
            self.shares.touch_all(self.blocks, hashes)
        self.policy.touch(hashes)

    def move(self, block: HostBlock, state: SlotState) -> None:
        """Change a block's state. One that becomes resident is the most recently used."""
        if self.on_state is not None:
            self.on_state(block, state)
        if block.state is SlotState.RESIDENT and state is not SlotState.RESIDENT:
            self._exit(block)
        elif state is SlotState.RESIDENT and block.state is not SlotState.RESIDENT:
            self._enter(block)
            self.mark_not_on_device(block)
        self.changes += 1
        block.state = state

    def pin(self, block: HostBlock) -> None:
        """One more copy or write uses the slot."""
        self.changes += 1
        self._pinned += not block.pins
        block.pins += 1

    def unpin(self, block: HostBlock) -> None:
        """One less uses the slot. The slot of a dropped block is free with its last use.

        Raises:
            RuntimeError: the block has no pins. Nothing changed.
        """
        if not block.pins:
            raise RuntimeError("an unused slot is released")
        self.changes += 1
        block.pins -= 1
        self._pinned -= not block.pins
        if block.dropped and not block.pins:
            self._dropped.discard(block)
            self._give(block.slot)

    def drop(self, block: HostBlock) -> None:
        """Remove a block. Its slot is free now, or with its last use."""
        if block.dropped:
            return
        if self.on_state is not None:
            self.on_state(block, None)
        self.changes += 1
        self.mark_not_on_device(block)
        block.dropped = True
        if block.state is SlotState.RESIDENT:
            self._exit(block)
        del self.blocks[block.hash]
        if block.pins:
            self._dropped.add(block)
        else:
            self._give(block.slot)

    def clear(self) -> None:
        """Drop every block."""
        self.generation += 1
        for block in list(self.blocks.values()):
            self.drop(block)

    def mark_on_device(self, block: HostBlock) -> None:
        """The device holds this block, so the index is about to discard it here."""
        if not (block.dropped or block.on_device):
            self._on_device += 1
            block.on_device = True

    def mark_not_on_device(self, block: HostBlock) -> None:
        """The device did not take this block, so the index does not discard it here."""
        self._on_device -= block.on_device
        block.on_device = False

    def check(self) -> None:
        """AssertionError if slots, order and counts disagree."""
        for _ in self.check_steps():
            pass

    def check_steps(self) -> Iterator[None]:
        """`check` in steps of about a millisecond, between which the tier may change. Facts about
        one block are always checked, sums only if nothing has changed since the check began."""
        changes, used, pinned, on_device = self.changes, bytearray(self.num_slots), 0, 0
        children: Counter[bytes] = Counter()
        blocks = [*self.blocks.values(), *self._dropped]
        for start in range(0, len(blocks), STEP):
            for block in blocks[start : start + STEP]:
                current = not block.dropped
                found = self.blocks.get(block.hash) is block
                ensure(found or not current, "a block is not found by its hash")
                resident = current and block.state is SlotState.RESIDENT
                ensure((block in self.policy) == resident, "order and blocks disagree")
                used_or_changed = block.pins > 0 or changes != self.changes
                ensure(current or used_or_changed, "a dropped block keeps its slot without a use")
                used[block.slot] += used[block.slot] < 2
                pinned += block.pins > 0
                on_device += block.on_device
                if current and block.state is SlotState.RESIDENT:
                    children[block.parent] += 1
            yield
        ensure(len(self.policy) == self.resident, "order and blocks disagree")
        ensure(self.resident <= self.capacity, "more residents than capacity")
        self.shares.check(self.resident)
        if changes != self.changes:
            return
        unused = self._free + self._withheld
        for start in range(0, len(unused), STEP):
            for slot in unused[start : start + STEP]:
                used[slot] += used[slot] < 2
            yield
            if changes != self.changes:
                return
        ensure(used.count(1) == self.num_slots, "slots lost or given twice")
        counts = (self._pinned, self._on_device)
        ensure((pinned, on_device) == counts, "counts of slots in use disagree")
        ensure(len(children) == len(self._children), "child counts disagree")
        yield from _check_counts(children, self._children, lambda: changes == self.changes)

    def _enter(self, block: HostBlock) -> None:
        self.resident += 1
        self.policy.add(block)
        block.listed = True
        self.shares.add(block)
        self._children[block.parent] += 1

    def _exit(self, block: HostBlock) -> None:
        self.resident -= 1
        self.policy.remove(block)
        block.listed = False
        self.shares.remove(block)
        self._children[block.parent] -= 1
        if not self._children[block.parent]:
            del self._children[block.parent]


def _check_counts(
    found: Counter[bytes], kept: Counter[bytes], unchanged: Callable[[], bool]
) -> Iterator[None]:
    parents = list(found)
    for start in range(0, len(parents), STEP):
        if not unchanged():
            return
        same = all(found[parent] == kept[parent] for parent in parents[start : start + STEP])
        ensure(same, "child counts disagree")
        yield
