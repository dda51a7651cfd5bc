"""Settings of PrefixIndex."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import inf
from secrets import token_hex
from typing import NamedTuple

from kvactors.actor.clock import now
from kvactors.cpu_evictor.messages import SetHostQuota
from kvactors.hints import Hints
from kvactors.identity import PLAIN, CacheScope, RequestScope
from kvactors.native import BlockTree, LifeTables, Path
from kvactors.prefix_index.messages import Stored
from kvactors.quotas import Quota, Quotas, salt_id
from kvactors.settings.check import WritePolicy


class IndexSettings(NamedTuple):
    """Settings that follow from the tiers, the store and the sinks."""

    exclusive: bool  # a block has one copy among device and host
    host_tier: bool
    fetch: bool = False  # the store may hold blocks that the tree does not
    announce: bool = False  # there is a sink
    announce_whole: bool = False  # a finish announces blocks again that were announced before
    free_low: int = 0  # with fewer free device blocks after a grant, evict until `free_high` are
    free_high: int = 0
    save: WritePolicy = "none"
    min_hits: int = 1  # of a block before `write_through_selective` saves it
    host_blocks: tuple[int, int] = (0, 0)  # of the host tier, before and after an eviction ahead
    token_root: bytes | None = None  # that a store addressed by tokens alone was opened with
    keep_lineages: bool = False
    asleep: bool = False
    pin_share: float = 0.25  # of the device blocks
    prefill_tokens_per_s: float | None = 0.0  # of the engine, see `PrefillRate`

    @property
    def offload(self) -> bool:
        """Whether evicted blocks are copied to the host before they are free."""
        return self.host_tier and self.exclusive

    @property
    def save_after(self) -> int:
        return {"write_through": 1, "write_through_selective": self.min_hits}.get(self.save, 0)

    def storable(self, path: Path) -> int:
        """Leading blocks that the store can tell from all others. One addressed by tokens alone can
        in the scope it was opened with, up to the first block whose path has extra keys."""
        if self.token_root is None:
            return path.num_full_blocks
        return path.num_plain_blocks if path.root == self.token_root else 0

    def fetchable(self, path: Path, stored: Stored | None = None) -> int:
        """Leading blocks that may be looked for in the store. `stored`, of `Acquire`, is ignored if
        it was counted under another namespace."""
        storable = self.storable(path) if self.fetch else 0
        if stored is None or stored.root != path.root:
            return storable
        return min(storable, stored.blocks)


# -- The root hashes that chains of block hashes start from, under the present namespace.


REMEMBERED_ROOTS = 1024
"""Roots kept, the least recently used dropped first."""


class Roots:
    """Root hashes by adapter and salt. Owned by the system, so that a restarted PrefixIndex
    continues with the last namespace."""

    def __init__(self, model: str, namespace: str, fingerprint: bytes) -> None:
        self.model, self.fingerprint = model, fingerprint
        self._root = lru_cache(REMEMBERED_ROOTS)(self._hash)
        self._versions: dict[str, str] = {}  # of adapters that were cleared
        self.use(namespace)

    def use(self, namespace: str) -> None:
        self.namespace, self.plain = namespace, self.of(namespace, PLAIN)

    def renew(self, lora: str) -> None:
        """Let requests with an adapter start from another root hash, which no process has used."""
        self._versions[lora] = token_hex(16)

    def root(self, scope: RequestScope) -> bytes:
        return self.plain if scope is PLAIN else self.of(self.namespace, scope)

    def of(self, namespace: str, scope: RequestScope) -> bytes:
        version = None if scope.lora is None else self._versions.get(scope.lora)
        return self._root(namespace, scope.lora, scope.salt, version)

    def _hash(
        self, namespace: str, lora: str | None, salt: str | None, version: str | None
    ) -> bytes:
        return CacheScope(self.model, namespace, lora, salt, version).root(self.fingerprint)


# -- eviction policies of device and host: LRU, or RETAIN, which learns from the requests


Clock = Callable[[], float]
"""Seconds, never running backwards."""

OBSERVED_REQUESTS = 32
"""Requests after a start that RETAIN only observes. Until then the least recently used block is the
victim."""


class TierPolicies:
    """Makes the trees of an index, and passes requests and the time on to them.

    Both tiers share the statistics. The index chooses the victims of the host tier too.

    Args:
        device, host: names as in `device.policy` and `host.policy`.
        clock: of the ages of blocks, the running loop's if None.

    Attributes:
        tables: the statistics of RETAIN, which outlast a clear. None: both tiers are LRU.
        host: whether RETAIN is the policy of the host tier.
        quota_evictions: of cleared trees.
    """

    def __init__(
        self,
        device: str = "lru",
        host: str = "lru",
        clock: Clock | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        self._device, self.host = device == "retain", host == "retain"
        self.tables = LifeTables(first=OBSERVED_REQUESTS) if self._device or self.host else None
        self.now = now if clock is None else clock
        self.quotas = Quotas() if quotas is None else quotas
        self.quota_evictions = 0

    def tree(
        self, block_size: int, capacity: int, *, hashes: bool, touch: bool = True
    ) -> BlockTree:
        """An empty tree. hashes: blocks are hashed when they enter it. touch: bring its memory in
        now."""
        device = self.tables if self._device else None
        host = self.tables if self.host else None
        tree = BlockTree(block_size, capacity, touch, device, eager_hashes=hashes, retain_host=host)
        if self.quotas:
            tree.set_default_quota(blocks_of(self.quotas.default))
            for salt, quota in self.quotas:
                tree.set_quota(salt_id(salt), blocks_of(quota))
        return tree

    def retire(self, tree: BlockTree) -> None:
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
        tree.set_quota(number, blocks_of(quota), named)
        return SetHostQuota(number, None if quota is None else quota.host, named)

    def advance(self, tree: BlockTree) -> None:
        if self.tables is not None:
            tree.advance(self.now())

    def end(
        self, tree: BlockTree, path: Path, output_tokens: int, hints: Hints | None
    ) -> tuple[int, float]:
        """A request has ended, and still references its blocks: its hints are those of its blocks,
        until their next use. Returns their priority and the time when they expire. output_tokens:
        -1 if not known."""
        ends, later, priority, expiry = False, -1.0, 0, inf
        if hints is not None:
            ends, priority = hints.session_ends, hints.priority
            later = -1.0 if hints.returns_in is None else hints.returns_in
            expiry = inf if hints.ttl is None else self.now() + hints.ttl
        if self.tables is not None:
            tree.advance(self.now())
            tree.touch(path, output_tokens, ends, later)
        if hints is not None or tree.sharing:
            tree.hint(path, priority, expiry)
        return priority, expiry


def blocks_of(quota: Quota | None) -> int:
    """The device blocks of a quota, as a tree takes it: -1 for no limit."""
    return -1 if quota is None or quota.device is None else quota.device
