"""Reports of PrefixIndex: residency for the notifier, lineages for stores, statistics."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kvactors.actor import Count
from kvactors.flush_notifier.messages import (
    BlocksAdded,
    BlocksRemoved,
    PathCached,
    Report,
    TierCleared,
)
from kvactors.identity import PLAIN, Lineages, RequestScope
from kvactors.native import DEVICE, BlockTree, Path, TreeWalk
from kvactors.prefix_index.settings import IndexSettings, Roots
from kvactors.prefix_index.tree import BlockIndex, Eviction
from kvactors.prefix_index.work import IndexEffects, Work, slices
from kvactors.types import HASH_BYTES, Reason, Tier, split_hashes

REMEMBERED_SCOPES = 65_536
"""Root hashes whose scope is remembered."""

Stretch = tuple[bytes, bytes, int, bytes, bytes, bytes, tuple[tuple[int, bytes], ...]]
"""Consecutive blocks of a path: root, parent, position, tokens, hashes, states, extra keys."""

WALK_NODES = 512
"""Nodes of the tree that a turn announces to a restarted notifier: each may be a message."""


class Announcements:
    """Reports to the notifier about blocks that became resident on the device or left it.

    A restarted notifier is sent the whole tree by a walk in slices. Changes during the walk are
    sent after it, so that every block follows its parent.
    """

    def __init__(
        self, index: BlockIndex, out: IndexEffects, roots: Roots, settings: IndexSettings
    ) -> None:
        self.enabled = settings.announce
        self.scopes: dict[bytes, RequestScope] = {}  # by root hash, the last one used last
        self.latest = b""  # the last of these roots
        self._whole = settings.announce_whole
        self._keep_lineages = settings.keep_lineages
        self._index, self._out, self._roots = index, out, roots
        self._walk: TreeWalk | None = None
        self._delayed: deque[Report] = deque()  # changes since the walk began

    def remember(self, root: bytes, scope: RequestScope) -> None:
        """Record the inputs of a root hash. The number of an adapter is the last one given. Blocks
        below a root that was dropped are reported by their hashes only: an index that has such a
        block keeps it, and is not sent new ones."""
        if root == self.latest and self.scopes.get(root) is scope:
            return
        self.latest = root
        before = self.scopes.pop(root, scope)
        self.scopes[root] = before if scope.lora_id is None else scope
        if len(self.scopes) > REMEMBERED_SCOPES:
            del self.scopes[next(iter(self.scopes))]

    def cached(self, path: Path, start: int, stop: int, reason: Reason) -> None:
        """Blocks [start, stop) of a path are on the device. Those above were announced before."""
        if not self.enabled:
            return
        for first, last in slices(start, stop, 1 if path.flat else self._index.turn_blocks):
            hashes, scope = path.hashes(first, last), self.scopes.get(path.root)
            if scope is None:
                self.report(BlocksAdded(hashes, Tier.DEVICE, reason))
                continue
            tokens, extras = path.tokens(first, last), path.extra_keys(first, last)
            place = 0 if path.flat else first
            added = (tokens, hashes, place, last - first, Tier.DEVICE, reason, path.parent(first))
            self.report(PathCached(path.root, *added, scope, extras))

    def finished(self, tree: BlockTree, path: Path, start: int, stop: int) -> None:
        """Committed blocks [start, stop) of a request that has ended stay cached: announced again
        for sinks that follow finished requests."""
        first = tree.mark_announced(path, start, stop)
        self.cached(path, start if self._whole else first, stop, Reason.REQUEST_FINISH)

    def removed(self, hashes: bytes, reason: Reason) -> None:
        if hashes:
            self.report(BlocksRemoved(hashes, Tier.DEVICE, reason))

    def cleared(self, reason: Reason) -> None:
        """No block is on the device any more."""
        self.report(TierCleared(Tier.DEVICE, reason))

    def announce_all(self) -> None:
        """Begin to announce every block to a notifier that has restarted."""
        if self.enabled:
            self._delayed.clear()  # the tree has these changes already
            self._walk = walk = TreeWalk(self._index.tree)
            self._out.begin(self._announce_tree(self._index.tree, walk))

    def report(self, report: Report) -> None:
        if self._walk is not None:
            self._delayed.append(report)
        elif self.enabled:
            self._out.to_notifier(report)

    def _announce_tree(self, tree: BlockTree, walk: TreeWalk) -> Work:
        over = False
        while self._walk is walk:  # else the notifier has restarted again
            if not (over or tree.retired):
                over, stretches = walk.step(min(self._index.turn_blocks, WALK_NODES))
                for stretch in stretches:
                    self._out.to_notifier(self._stretch(stretch))
            elif self._delayed:
                for _ in range(min(WALK_NODES, len(self._delayed))):
                    self._out.to_notifier(self._delayed.popleft())
            else:
                self._walk = None
                return
            yield

    def _stretch(self, stretch: Stretch) -> Report:
        """Announce consecutive blocks of a path, as the walk finds them, as far as they are on the
        device."""
        root, parent, start, tokens, hashes, states, extras = stretch
        resident = next((j for j, state in enumerate(states) if not state & DEVICE), len(states))
        scope, kind = self.scopes.get(root), (Tier.DEVICE, Reason.REQUEST_FINISH)
        if scope is None:
            return BlocksAdded(hashes[: resident * HASH_BYTES], *kind)
        return PathCached(root, tokens, hashes, start, resident, *kind, parent, scope, extras)

    # -- lineages: the inputs of block hashes, for stores that keep them beside the blocks

    def lineages_of_path(self, path: Path, start: int, stop: int) -> Lineages | None:
        """Lineages of blocks [start, stop) of a path. None if the store keeps none, or the path is
        under a salt."""
        if not self._keep_lineages or (scope := self._kept_scope(path.root)) is None:
            return None
        extra_keys = {position - start: key for position, key in path.extra_keys(start, stop)}
        return Lineages(path.tokens(start, stop), (scope,), extra_keys)

    def lineages_of_eviction(self, op: Eviction) -> Lineages | None:
        if not self._keep_lineages:
            return None
        roots, tokens, extra_keys = op.tree.contents(op.nodes)
        each = split_hashes(roots)
        scopes = {root: self._kept_scope(root) for root in set(each)}
        if not any(scopes.values()):
            return None
        return Lineages(tokens, tuple(scopes[root] for root in each), dict(extra_keys))

    def _kept_scope(self, root: bytes) -> RequestScope | None:
        """The scope of a root hash, None under a salt and of an earlier namespace: those lineages
        are not kept. The scope of a forgotten root counts as plain only if it hashes to that
        root."""
        scope = self.scopes.get(root, PLAIN)
        return scope if scope.salt is None and self._roots.root(scope) == root else None


class IndexStatistics(NamedTuple):
    """A snapshot of PrefixIndex. Hits are counted in blocks, by the tier that held each when it was
    requested.

    Attributes:
        requests: requests that got their device blocks, each counted once.
        blocks_looked_up: full blocks of their prompts, counted with their hits when the loads have
            ended.
        device_hits, host_hits, storage_hits: blocks found, by tier.
        no_room: acquires refused with NoRoom.
        refused_size: refused acquires that need more blocks than the device has.
        refused_pins: refused acquires that pinned blocks kept out.
        preempted: preempted requests.
        abandoned: leases whose holder had gone: cancelled, garbage-collected or left by an
            exception.
        leases: leases in use.
        waiting: requests waiting for device blocks.
        blocks_total: device blocks.
        blocks_free: device blocks without a block of a request.
        nodes: blocks in the block tree.
        nodes_referenced: tree blocks in a lease or a transfer.
        evictable: cached device blocks in no request.
        evicted: blocks that left the device for others.
        rescued: blocks matched again while they were offloaded.
        loads_in_flight, offloads_in_flight, saves_in_flight: operations that have not ended.
        overdue_loads: loads that missed their deadline.
        resumed: preempted requests acquired again, in none of the counts above.
        forks: leases made by `Lease.fork`, in none of the counts above except `leases`.
        tails_copied: device blocks copied for them, since they were not full.
        blocks_shared: device blocks with several owners: full blocks not committed by every fork,
            and blocks being copied.
        pinned: pinned device blocks.
        pins_refused: pins beyond the share of pinned blocks.
        pins_expired: pins ended by their time to live.
        quota_evictions: blocks evicted because their salt was above its quota.
        prefill_tokens_per_s: prompt tokens that the engine computes in a second, as set or
            measured. 0.0 if unknown or unused.
    """

    requests: Count
    blocks_looked_up: Count
    device_hits: Count
    host_hits: Count
    storage_hits: Count
    no_room: Count
    refused_size: Count
    refused_pins: Count
    preempted: Count
    abandoned: Count
    leases: int
    waiting: int
    blocks_total: int
    blocks_free: int
    nodes: int
    nodes_referenced: int
    evictable: int
    evicted: Count
    rescued: Count
    loads_in_flight: int
    offloads_in_flight: int
    saves_in_flight: int
    overdue_loads: Count
    resumed: Count
    forks: Count = 0
    tails_copied: Count = 0
    blocks_shared: int = 0
    pinned: int = 0
    pins_refused: Count = 0
    pins_expired: Count = 0
    quota_evictions: Count = 0
    prefill_tokens_per_s: float = 0.0

    @property
    def blocks_used(self) -> int:
        """Device blocks that are not free."""
        return self.blocks_total - self.blocks_free
