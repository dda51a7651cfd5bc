"""Quotas, hints and pins in the host tier: which blocks leave before the policy's choice."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

from kvactors.invariant import ensure
from kvactors.types import MAX_PRIORITY, MIN_PRIORITY, split_hashes

if TYPE_CHECKING:
    from kvactors.cpu_evictor.slots import HostBlock

Order = OrderedDict[bytes, "HostBlock"]
"""Blocks in the order of their last use."""

COUNTED_SALTS = 4096
"""Salts without a named quota whose victims are counted."""


class HostShares:
    """Resident blocks by salt, priority and time to live, and the pinned ones.

    Blocks are followed by salt only while there is a quota.

    Args:
        default: the quota of salts that are not named, None for no limit.
        named: quotas by salt.
        pin_limit: blocks that may be pinned.
        clock: of times to live.

    Attributes:
        quota_evictions: victims chosen because of a quota.
        pins_refused: pinned paths beyond the limit.
        evicted: victims chosen because of a quota, by salt, of the first COUNTED_SALTS salts and of
            those that are named.
    """

    def __init__(
        self,
        default: int | None = None,
        named: Mapping[int, int | None] | None = None,
        pin_limit: int = 0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.quota_evictions = self.pins_refused = 0
        self.evicted: dict[int, int] = {}
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
        """Whether `touch` has something to do."""
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
        """The most resident blocks of a salt."""
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

    def surplus(self, salt: int, incoming: int, over: int) -> int:
        """Incoming blocks of a salt that do not stay: those beyond its quota, if blocks must be
        evicted for them.

        Args:
            salt: of the blocks.
            incoming: their number.
            over: blocks that must be evicted for all incoming ones.
        """
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
        """Blocks that are pinned, resident or not."""
        return len(self._pinned)

    def is_pinned(self, block_hash: bytes) -> bool:
        """Whether a block may not be evicted."""
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
        if not hashes:
            self._pins.clear()
            self._pinned.clear()
        elif hashes[-32:] in self._pins:
            last = hashes[-32:]
            self._pins[last] -= 1
            if not self._pins[last]:
                del self._pins[last]
            for one in split_hashes(hashes):
                self._pinned[one] -= 1
                if not self._pinned[one]:
                    del self._pinned[one]

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
        """A block is not resident any longer."""
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
        """A resident block was used."""
        if self.limited:
            self._salts[block.salt][block.priority].move_to_end(block.hash)
        if block.priority:
            self._levels[block.priority].move_to_end(block.hash)

    def touch_all(self, blocks: Mapping[bytes, HostBlock], hashes: Iterable[bytes]) -> None:
        """Blocks were used, in this order. Those that are not resident are ignored."""
        for block_hash in hashes:
            block = blocks.get(block_hash)
            if block is not None and block.listed:
                self.touch(block)

    def _enter_salt(self, block: HostBlock) -> None:
        levels = self._salts.setdefault(block.salt, {})
        levels.setdefault(block.priority, OrderedDict())[block.hash] = block
        self._counts[block.salt] += 1
        self._settle(block.salt)

    def _expires_at(self, entry: tuple[float, int, HostBlock]) -> bool:
        expiry, _, block = entry
        return block.listed and block.expiry == expiry

    # -- the choice

    def candidates(
        self,
        policy: Iterable[HostBlock],
        incoming: Mapping[int, int],
        taken: Mapping[int, int],
    ) -> Iterator[tuple[HostBlock, float]]:
        """Resident blocks, the first to evict first, some of them twice, each with the most blocks
        to evict by it.

        Args:
            policy: all of them, in its order.
            incoming: blocks that are about to become resident, by salt.
            taken: blocks chosen so far, by salt. Changed by the caller between two candidates.
        """
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
