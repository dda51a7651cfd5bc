"""The eviction policies of device and host: the order of last use, or RETAIN, which learns from the
requests."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from kvactors.actor.clock import now
from kvactors.cpu_evictor.messages import SetHostQuota
from kvactors.hints import Hints
from kvactors.native import BlockTree, LifeTables, Path
from kvactors.quotas import Quota, Quotas, salt_id

Clock = Callable[[], float]
"""Seconds, never running backwards."""

FIRST = 32
"""Requests after a start that RETAIN only observes. Until then the least recently used block is the
victim."""


class TierPolicies:
    """Makes the trees of an index, and passes requests and the time on to them.

    Both tiers share the statistics. The index chooses the victims of the host tier too, see
    `HostVictims`.

    Args:
        tables: the statistics of RETAIN, which outlast a clear. None: both tiers are LRU.
        clock: of the ages of blocks.
        device, host: whether RETAIN is the policy of this tier.
        quotas: of salts.
    """

    def __init__(
        self,
        tables: LifeTables | None = None,
        clock: Clock = now,
        *,
        device: bool = True,
        host: bool = False,
        quotas: Quotas | None = None,
    ) -> None:
        self.tables = tables
        self.quotas = Quotas() if quotas is None else quotas
        self.quota_evictions = 0  # of cleared trees
        self.host = host and tables is not None
        self._device = device
        self.now = clock

    def tree(
        self, block_size: int, capacity: int, *, hashes: bool, touch: bool = True
    ) -> BlockTree:
        """An empty tree. hashes: blocks are hashed when they enter it. touch: bring its memory in
        now."""
        tree = BlockTree(
            block_size,
            capacity,
            touch,
            self.tables if self._device else None,
            eager_hashes=hashes,
            retain_host=self.tables if self.host else None,
        )
        if self.quotas:
            tree.set_default_quota(blocks_of(self.quotas.default))
            for salt, quota in self.quotas:
                tree.set_quota(salt_id(salt), blocks_of(quota))
        return tree

    def retire(self, tree: BlockTree) -> None:
        """A tree is cleared: keep its counts."""
        self.quota_evictions += tree.quota_evictions
        self.keep_counts(tree)

    def keep_counts(self, tree: BlockTree) -> None:
        """A tree counts no longer: keep its counts by salt."""
        if tree.quota_evictions:
            self.quotas.counts.device_ended(lambda salt: tree.owner(salt)[2])

    def set_quota(self, tree: BlockTree, salt: str, quota: Quota | None) -> SetHostQuota:
        """Change the quota of a salt, None for the default. One without limits beside a default
        without limits is none. Returns the host tier's message."""
        if quota == self.quotas.default == Quota():
            quota = None
        number, named = salt_id(salt), quota is not None
        self.quotas.set(salt, quota)
        tree.set_quota(number, -1 if quota is None else blocks_of(quota), named)
        return SetHostQuota(number, None if quota is None else quota.host, named)

    def hint(self, tree: BlockTree, path: Path, hints: Hints | None) -> tuple[int, float]:
        """A request ends: its hints are those of its blocks, until their next use. Returns their
        priority and the time when they expire."""
        priority, expiry = 0, inf
        if hints is not None:
            priority = hints.priority
            expiry = inf if hints.ttl is None else self.now() + hints.ttl
        tree.hint(path, priority, expiry)
        return priority, expiry

    def advance(self, tree: BlockTree) -> None:
        """A request is about to be matched."""
        if self.tables is not None:
            tree.advance(self.now())

    def end(
        self, tree: BlockTree, path: Path, output_tokens: int, hints: Hints | None = None
    ) -> None:
        """A request has ended, and still references its blocks. output_tokens: -1 if not known."""
        if self.tables is None:
            return
        tree.advance(self.now())
        if hints is None:
            tree.touch(path, output_tokens)
        else:
            later = -1.0 if hints.returns_in is None else hints.returns_in
            tree.touch(path, output_tokens, hints.session_ends, later)


def blocks_of(quota: Quota) -> int:
    """The device blocks of a quota, as a tree takes it."""
    return -1 if quota.device is None else quota.device


def policies_of(
    device: str, host: str = "lru", clock: Clock | None = None, quotas: Quotas | None = None
) -> TierPolicies:
    """The policies of the names in `device.policy` and `host.policy`. clock: the running loop's if
    None."""
    retained = [name == "retain" for name in (device, host)]
    tables = LifeTables(first=FIRST) if any(retained) else None
    clock = now if clock is None else clock
    return TierPolicies(tables, clock, device=retained[0], host=retained[1], quotas=quotas)
