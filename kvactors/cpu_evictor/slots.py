"""Host slots: the block in each slot, the slots in use, and the choice of blocks to evict.

Nothing here needs an event loop: the thread that owns a `HostTier` calls it directly."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import count
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

import msgspec

from kvactors.errors import ensure
from kvactors.redact import redacted_repr
from kvactors.types import MAX_PRIORITY, MIN_PRIORITY, split_hashes

if TYPE_CHECKING:
    from kvactors.identity import Lineage


BlockTraits = tuple[int, int, float]
"""Salt, priority and expiry of a block: see `kvactors.hints.BlockHints`."""

PLAIN_BLOCK: BlockTraits = (0, 0, inf)
NOTHING: Mapping[int, int] = {}

CHECKED_BLOCKS = 128
"""Blocks that one step of a check covers."""


class SlotState(Enum):
    """The use of a block's slot."""

    RESIDENT = "resident"  # counts against the capacity
    # Going back to the device (exclusive tiers): does not count, the slot is still in use.
    PROMOTING = "promoting"
    TRANSIT = "transit"  # being written to storage, or staged between storage and device


class HostBlock(msgspec.Struct, eq=False, gc=False):
    """A block in a host slot. It refers to nothing that could refer to it, and the cyclic garbage
    collector does not visit it: there is one for each slot.

    Attributes:
        pins: copies, reads and writes that use the slot now.
        arriving: its bytes are not in the slot yet.
        announced: the notifier was sent that it is resident, and not that it is gone.
        prefetched: it came from storage without a request that waits for it.
        on_device: it was copied to the device: a `DropHostCopies` or `KeepHostCopies` for it is on
            its way.
        dropped: removed from the tier. The slot is free as soon as it has no pins.
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

    __repr__ = redacted_repr

    @property
    def is_resident(self) -> bool:
        """Whether it counts against the capacity, and `HostShares` has it."""
        return self.state is SlotState.RESIDENT and not self.dropped


ALONE = ("lru",)
"""Policies of a host tier that has no index."""


# -- Quotas, hints and pins in the host tier: which blocks leave before the policy's choice.


Order = OrderedDict[bytes, "HostBlock"]
"""Blocks in the order of their last use."""

COUNTED_SALTS = 4096
"""Salts without a named quota whose victims are counted."""


class HostShares:
    """Resident blocks by salt, priority and time to live, and the pinned ones. Blocks are followed
    by salt only while there is a quota.

    Args:
        default: the quota of salts that are not named, None for no limit.
    """

    def __init__(
        self,
        default: int | None = None,
        named: Mapping[int, int | None] | None = None,
        pin_limit: int = 0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.quota_evictions = self.pins_refused = 0
        self.evicted: dict[int, int] = {}  # because of a quota, by salt, of COUNTED_SALTS
        self._default = default
        self._named = dict(named or {})
        self._clock = clock
        self.limited = default is not None or bool(self._named)
        self._salts: dict[int, dict[int, Order]] = {}  # by salt and priority
        self._counts: Counter[int] = Counter()  # blocks of each salt
        self._above: set[int] = set()  # salts above their quota
        self._levels: dict[int, Order] = {}  # of priorities other than 0
        self._expiring: list[tuple[float, int, HostBlock]] = []  # a heap, with stale entries
        self._expires = 0  # resident blocks that expire
        self._serial = count()
        self._pin_limit = pin_limit
        self._pins: Counter[bytes] = Counter()  # runs of blocks, by the last of them
        self._pinned: Counter[bytes] = Counter()

    @property
    def in_use(self) -> bool:
        return self.limited or bool(self._levels)

    def check(self, resident: int) -> None:
        """AssertionError if the counts by salt disagree with the number of resident blocks."""
        if self.limited:
            ensure(sum(self._counts.values()) == resident, "blocks by salt disagree")
            for salt, levels in self._salts.items():
                ensure(sum(map(len, levels.values())) == self._counts[salt], "blocks of a salt")
            above = {salt for salt, held in self._counts.items() if held > self.quota(salt)}
            ensure(above == self._above, "salts above their quotas")

    # -- quotas

    def quota(self, salt: int) -> float:
        quota = self._named.get(salt, self._default)
        return inf if quota is None else quota

    def resident(self, salt: int) -> int | None:
        """Resident blocks of a salt, None if they are not followed by salt."""
        return self._counts.get(salt, 0) if self.limited else None

    def set_quota(
        self, salt: int, blocks: int | None, residents: Iterable[HostBlock], *, named: bool
    ) -> None:
        """Change the quota of a salt. residents: all of the tier, in the order of last use."""
        if named:
            self._named[salt] = blocks
        else:
            self._named.pop(salt, None)
        if not self.limited:
            self.limited = True
            for block in residents:
                self._enter_salt(block)
        self._settle(salt)

    def over_quota(self, salt: int, incoming: int, over: int) -> int:
        """Incoming blocks of a salt that do not stay: those beyond its quota, if `over` blocks must
        be evicted for all incoming ones."""
        if over <= 0 or not self.limited:
            return 0
        return int(min(over, max(0, incoming - self.quota(salt))))

    def _settle(self, salt: int) -> None:
        if self._counts[salt] > self.quota(salt):
            self._above.add(salt)
        else:
            self._above.discard(salt)

    # -- pins

    @property
    def pinned(self) -> int:
        return len(self._pinned)

    def is_pinned(self, block_hash: bytes) -> bool:
        return block_hash in self._pinned

    def pin(self, hashes: bytes) -> None:
        """Pin a run of blocks of a path, all or none. Runs with the same last block are equal."""
        each = split_hashes(hashes)
        fresh = sum(one not in self._pinned for one in each)
        if self.pinned + fresh > self._pin_limit:
            self.pins_refused += 1
            return
        self._pins[each[-1]] += 1
        self._pinned.update(each)

    def unpin(self, hashes: bytes) -> None:
        """Unpin a run of blocks that was pinned, all of them without hashes."""
        each = split_hashes(hashes)
        if not each:
            self._pins.clear()
            self._pinned.clear()
        elif each[-1] in self._pins:
            _decrement(self._pins, each[-1])
            for one in each:
                _decrement(self._pinned, one)

    # -- resident blocks

    def add(self, block: HostBlock) -> None:
        """A block has become resident, as the most recently used."""
        if self.limited:
            self._enter_salt(block)
        if block.priority:
            self._levels.setdefault(block.priority, OrderedDict())[block.hash] = block
        if block.expiry != inf:
            self._expires += 1
            heapq.heappush(self._expiring, (block.expiry, next(self._serial), block))
            if len(self._expiring) > 64 + 2 * self._expires:
                self._expiring = [one for one in self._expiring if self._expires_at(one)]
                heapq.heapify(self._expiring)

    def remove(self, block: HostBlock) -> None:
        if self.limited:
            levels = self._salts[block.salt]
            del levels[block.priority][block.hash]
            if not levels[block.priority]:
                del levels[block.priority]
            self._counts[block.salt] -= 1
            self._settle(block.salt)
            if not self._counts[block.salt]:
                del self._counts[block.salt], self._salts[block.salt]
        if block.priority:
            del self._levels[block.priority][block.hash]
        self._expires -= block.expiry != inf

    def touch(self, block: HostBlock) -> None:
        if self.limited:
            self._salts[block.salt][block.priority].move_to_end(block.hash)
        if block.priority:
            self._levels[block.priority].move_to_end(block.hash)

    def _enter_salt(self, block: HostBlock) -> None:
        levels = self._salts.setdefault(block.salt, {})
        levels.setdefault(block.priority, OrderedDict())[block.hash] = block
        self._counts[block.salt] += 1
        self._settle(block.salt)

    def _expires_at(self, entry: tuple[float, int, HostBlock]) -> bool:
        expiry, _, block = entry
        return block.is_resident and block.expiry == expiry

    # -- the choice

    def candidates(
        self, policy: Iterable[HostBlock], incoming: Mapping[int, int], taken: Mapping[int, int]
    ) -> Iterator[tuple[HostBlock, float]]:
        """Resident blocks, the first to evict first, some of them twice, each with the most blocks
        to evict by it. taken: blocks chosen so far, by salt, changed by the caller between two
        candidates."""
        yield from ((block, inf) for block in self._expired())
        for salt in [*incoming, *(self._above - incoming.keys())]:
            if salt not in self._salts:
                continue
            size = self._counts[salt] + incoming.get(salt, 0) - self.quota(salt)
            for _, order in sorted(self._salts[salt].items()):
                for block in order.values():
                    if taken[salt] >= size:
                        break
                    before = taken[salt]
                    try:
                        yield block, size - before
                    finally:  # also of the last one, after which the caller has enough
                        self._count_victims(salt, taken[salt] - before)
        for priority in range(MIN_PRIORITY, 0):
            yield from self._level(priority)
        for block in policy:
            if block.priority == 0:
                yield block, inf
        for priority in range(1, MAX_PRIORITY + 1):
            yield from self._level(priority)

    def _count_victims(self, salt: int, blocks: int) -> None:
        self.quota_evictions += blocks
        if not blocks:
            return
        if salt in self.evicted or len(self.evicted) < COUNTED_SALTS or salt in self._named:
            self.evicted[salt] = self.evicted.get(salt, 0) + blocks

    def _level(self, priority: int) -> Iterator[tuple[HostBlock, float]]:
        return ((block, inf) for block in self._levels.get(priority, {}).values())

    def _expired(self) -> Iterator[HostBlock]:
        heap, found = self._expiring, list[tuple[float, int, "HostBlock"]]()
        while heap and heap[0][0] <= self._clock():
            entry = heapq.heappop(heap)
            if self._expires_at(entry):
                found.append(entry)
        for entry in found:
            heapq.heappush(heap, entry)
        return (block for _, _, block in found)


# -- The table.


def _decrement(counts: Counter[bytes], key: bytes) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


class HostTier:
    """The table of host slots: at most `capacity` resident blocks in `num_slots` slots.

    The slots beyond the capacity are for blocks in transit. Callers add or touch the blocks of a
    path deepest first, so a parent is always younger than its children and the oldest block is a
    leaf. A block with resident children is never a victim in any policy's order.

    Args:
        in_use: slots that a call of an earlier incarnation may still access (`Arena.in_use`). They
            are handed out once they have left it.
    """

    def __init__(
        self,
        capacity: int,
        num_slots: int,
        in_use: Container[int] = (),
        shares: HostShares | None = None,
    ) -> None:
        if not 0 <= capacity <= num_slots:
            raise ValueError(f"a capacity of {capacity} blocks in {num_slots} slots")
        self.capacity, self.num_slots = capacity, num_slots
        self.resident = 0  # blocks that count against the capacity
        self.pinned = 0  # slots in use by a copy, a read or a write
        self.on_device = 0  # slots whose blocks the device holds, until the index discards them
        self.blocks: dict[bytes, HostBlock] = {}
        # Resident blocks by their last use, and those that the index has chosen under RETAIN and
        # sent ahead of need. `victims` skips blocks that are pinned or have resident children.
        self._order: Order = OrderedDict()
        self._chosen: Order = OrderedDict()
        self.shares = HostShares() if shares is None else shares
        self.generation = 0  # calls of `clear`
        self.changes = 0  # calls that changed something
        self._in_use = in_use
        self._free = [slot for slot in range(num_slots - 1, -1, -1) if slot not in in_use]
        self._withheld = [slot for slot in range(num_slots) if slot in in_use]
        self._children: Counter[bytes] = Counter()  # resident ones, by parent
        self._dropped: set[HostBlock] = set()  # still pinned

    @property
    def free(self) -> int:
        if self._withheld:
            ended = [slot for slot in self._withheld if slot not in self._in_use]
            self._withheld = [slot for slot in self._withheld if slot in self._in_use]
            self._free += ended
            self.changes += bool(ended)
        return len(self._free)

    def _give(self, slot: int) -> None:
        (self._withheld if slot in self._in_use else self._free).append(slot)

    @property
    def in_transit(self) -> int:
        """Slots whose blocks are on their way to the device or to storage, without those that wait
        for a `DropHostCopies` or `KeepHostCopies`."""
        return len(self.blocks) - self.resident - self.on_device

    def readable(self, block_hash: bytes) -> HostBlock | None:
        """The block, if its bytes are in its slot."""
        block = self.blocks.get(block_hash)
        return block if block is not None and not block.arriving else None

    def readable_run(self, hashes: Iterable[bytes]) -> list[HostBlock]:
        """The leading blocks whose bytes are in their slots."""
        run = []
        for block_hash in hashes:
            if (block := self.readable(block_hash)) is None:
                break
            run.append(block)
        return run

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
        """Put a new block into a free slot, as most recently used, arriving and pinned. The caller
        has checked `free`, and that the block has no slot."""
        if block_hash in self.blocks:
            raise RuntimeError("a block is given a second slot")
        self.changes += 1
        self.pinned += 1
        slot = self._free.pop()
        block = HostBlock(block_hash, parent, slot, state, lineage, pins=1, arriving=True)
        block.salt, block.priority, block.expiry = traits
        self.blocks[block_hash] = block
        if state is SlotState.RESIDENT:
            self._enter(block)
        return block

    def land(self, blocks: Sequence[HostBlock], failed: frozenset[int]) -> list[HostBlock]:
        """A copy or read into slots has ended: unpin its blocks and drop the failed ones, given by
        their indices. Returns the blocks that arrived and were not dropped since."""
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
        self, count: int, protected: Container[bytes] = (), incoming: Mapping[int, int] = NOTHING
    ) -> list[HostBlock]:
        """Choose up to `count` blocks to evict: not in use, not protected, not pinned, without
        resident children that stay. First those whose time is over, then those of salts above their
        quota, then by priority, and among these blocks in the policy's order. No block changes."""
        if count <= 0:
            return []
        shares, taken = self.shares, Counter[int]()
        chosen: list[HostBlock] = []
        chosen_hashes: set[bytes] = set()
        gone: Counter[bytes] = Counter()
        passed: dict[bytes, float] = {}  # limits of blocks that come before their children
        for candidate, most in shares.candidates(self.candidates(), incoming, taken):
            block: HostBlock | None = candidate
            end = len(chosen) + most
            while block is not None and not (
                block.pins
                or block.hash in protected
                or block.hash in chosen_hashes
                or shares.is_pinned(block.hash)
            ):
                if self._children[block.hash] > gone[block.hash]:
                    passed.setdefault(block.hash, most)
                    break
                chosen.append(block)
                chosen_hashes.add(block.hash)
                taken[block.salt] += 1
                gone[block.parent] += 1
                if len(chosen) == count:
                    return chosen
                # A quota evicts no more than the blocks beyond it: its limit may be used up.
                follows = len(chosen) < end or passed.get(block.parent) == inf
                block = self.blocks[block.parent] if follows and block.parent in passed else None
        return chosen

    def set_traits(self, block: HostBlock, traits: BlockTraits) -> None:
        if traits == (block.salt, block.priority, block.expiry):
            return
        self.changes += 1
        if block.is_resident:
            self.shares.remove(block)
        block.salt, block.priority, block.expiry = traits
        if block.is_resident:
            self.shares.add(block)

    def touch(self, hashes: Iterable[bytes]) -> None:
        """Blocks were used, in this order. Blocks that are not resident are ignored."""
        if self.shares.in_use:
            hashes = list(hashes)
            for block_hash in hashes:
                block = self.blocks.get(block_hash)
                if block is not None and block.is_resident:
                    self.shares.touch(block)
        order, chosen = self._order, self._chosen
        for block_hash in hashes:
            if block_hash in order:
                order.move_to_end(block_hash)
                chosen.pop(block_hash, None)

    def evict_first(self, hashes: Iterable[bytes]) -> None:
        """The index has chosen the next victims. Hashes of other blocks are ignored."""
        for block_hash in hashes:
            if (block := self._order.get(block_hash)) is not None:
                self._chosen[block_hash] = block

    def candidates(self) -> Iterator[HostBlock]:
        """Resident blocks, the first to evict first, below what `HostShares` puts first. The order
        must not change during the iteration. A victim of the index that cannot be evicted now comes
        again in the order of last use only."""
        chosen, tried = self._chosen, set[bytes]()
        while chosen:
            block_hash, block = chosen.popitem(last=False)
            tried.add(block_hash)
            yield block
        for block in self._order.values():
            if block.hash not in tried:
                yield block

    def move(self, block: HostBlock, state: SlotState) -> None:
        """Change a block's state. One that becomes resident is the most recently used."""
        before, block.state = block.state, state
        if before is SlotState.RESIDENT and state is not SlotState.RESIDENT:
            self._exit(block)
        elif state is SlotState.RESIDENT and before is not SlotState.RESIDENT:
            self._enter(block)
            self.mark_not_on_device(block)
        self.changes += 1

    def pin(self, block: HostBlock) -> None:
        self.changes += 1
        self.pinned += not block.pins
        block.pins += 1

    def unpin(self, block: HostBlock) -> None:
        """One less uses the slot. The slot of a dropped block is free with its last use."""
        if not block.pins:
            raise RuntimeError("an unused slot is released")
        self.changes += 1
        block.pins -= 1
        self.pinned -= not block.pins
        if block.dropped and not block.pins:
            self._dropped.discard(block)
            self._give(block.slot)

    def drop(self, block: HostBlock) -> None:
        """Remove a block. Its slot is free now, or with its last use."""
        if block.dropped:
            return
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
        self.generation += 1
        for block in list(self.blocks.values()):
            self.drop(block)

    def clear_salt(self, salt: int) -> list[HostBlock]:
        """Drop every block of a salt. Returns them."""
        self.generation += 1
        found = [block for block in self.blocks.values() if block.salt == salt]
        for block in found:
            self.drop(block)
        return found

    def mark_on_device(self, block: HostBlock) -> None:
        """The device holds this block, so the index is about to discard it here."""
        if not (block.dropped or block.on_device):
            self.on_device += 1
            block.on_device = True

    def mark_not_on_device(self, block: HostBlock) -> None:
        """The device did not take this block, so the index does not discard it here."""
        self.on_device -= block.on_device
        block.on_device = False

    def check(self) -> None:
        deque(self.check_steps(), maxlen=0)

    def check_steps(self) -> Iterator[None]:
        """AssertionError if slots, order and counts disagree. In steps of about a millisecond,
        between which the tier may change. Facts about one block are always checked, sums only if
        nothing has changed since the check began."""
        changes, used, pinned, on_device = self.changes, bytearray(self.num_slots), 0, 0
        children: Counter[bytes] = Counter()
        blocks = [*self.blocks.values(), *self._dropped]
        for start in range(0, len(blocks), CHECKED_BLOCKS):
            for block in blocks[start : start + CHECKED_BLOCKS]:
                current = not block.dropped
                found = self.blocks.get(block.hash) is block
                ensure(found or not current, "a block is not found by its hash")
                resident = current and block.state is SlotState.RESIDENT
                ensure(
                    (self._order.get(block.hash) is block) == resident, "order and blocks disagree"
                )
                used_or_changed = block.pins > 0 or changes != self.changes
                ensure(current or used_or_changed, "a dropped block keeps its slot without a use")
                used[block.slot] += used[block.slot] < 2
                pinned += block.pins > 0
                on_device += block.on_device
                if resident:
                    children[block.parent] += 1
            yield
        ensure(len(self._order) == self.resident, "order and blocks disagree")
        ensure(self.resident <= self.capacity, "more residents than capacity")
        self.shares.check(self.resident)
        unused, parents = self._free + self._withheld, list(children)
        for start in range(0, max(len(unused), len(parents)), CHECKED_BLOCKS):
            if changes != self.changes:
                return
            for slot in unused[start : start + CHECKED_BLOCKS]:
                used[slot] += used[slot] < 2
            some = parents[start : start + CHECKED_BLOCKS]
            same = all(children[parent] == self._children[parent] for parent in some)
            ensure(same, "child counts disagree")
            yield
        if changes != self.changes:
            return
        ensure(used.count(1) == self.num_slots, "slots lost or given twice")
        same = (pinned, on_device) == (self.pinned, self.on_device)
        ensure(same, "counts of slots in use disagree")
        ensure(len(children) == len(self._children), "child counts disagree")

    def _enter(self, block: HostBlock) -> None:
        self.resident += 1
        self._order[block.hash] = block
        self.shares.add(block)
        self._children[block.parent] += 1

    def _exit(self, block: HostBlock) -> None:
        self.resident -= 1
        del self._order[block.hash]
        self._chosen.pop(block.hash, None)
        self.shares.remove(block)
        _decrement(self._children, block.parent)
