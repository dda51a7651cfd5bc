"""Calls of requests that take one step: they wait for nothing, and need no other actor.

Each method does what the handler of its message would do, or changes nothing and returns None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvactors.actor import Message
from kvactors.identity import PLAIN
from kvactors.prefix_index.admission import Admission
from kvactors.prefix_index.grants import Grants
from kvactors.prefix_index.held import HeldRequests
from kvactors.prefix_index.index import BlockIndex
from kvactors.prefix_index.leases import LeaseTable
from kvactors.prefix_index.messages import (
    Ack,
    Acquire,
    AcquireResult,
    Commit,
    Extend,
    Finish,
    Reserve,
)
from kvactors.prefix_index.records import LeaseState
from kvactors.prefix_index.roots import Roots
from kvactors.prefix_index.settings import IndexSettings
from kvactors.prefix_index.tables import BlockTables


class AtOnce:
    """Answers to a request whose cached blocks are all on the device, and whose others are free.

    New blocks are committed here without a sink and a host tier. A request ends here without a sink
    and without copies of its blocks, to the store or to an inclusive host tier.

    Attributes:
        calm: no request waits, and the end of one has no consequences. False if that is not known:
            each turn of a handler may change it.
        answerers: the methods by their messages.
    """

    def __init__(
        self,
        index: BlockIndex,
        held: HeldRequests,
        leases: LeaseTable,
        grants: Grants,
        admission: Admission,
        roots: Roots,
        settings: IndexSettings,
        tables: BlockTables,
    ) -> None:
        self.calm = False
        self._index = index
        self._held = held
        self._leases = leases
        self._grants = grants
        self._admission = admission
        self._roots = roots
        self._settings = settings
        self._only_known = settings.announce or settings.host_tier
        self._ends = not (settings.announce or settings.save_after) and settings.exclusive
        self._root = b""  # of the last request, if no other scope was used since
        self.answerers: dict[type[Message], Callable[[Any], Any]] = {
            Acquire: self.acquire,
            Commit: self.commit,
            Finish: self.finish,
            Extend: tables.grow_at_once,
            Reserve: tables.grow_at_once,
        }

    def acquire(self, message: Acquire) -> AcquireResult | None:
        """Grant a request that finds every cached block on the device, and its others free."""
        index, pool, path, scope = self._index, self._index.pool, message.path, message.scope
        if (
            not (self.calm or self._is_calm())
            or message.chunk_tokens
            or message.media
            or pool.ages is not None
        ):
            return None
        tokens, size, policy, fetch = path.num_tokens, index.block_size, index.policy, 0
        needed = -(-tokens // size)
        if not 0 < needed <= index.part or needed > pool.total:
            return None
        root = self._roots.plain if scope is PLAIN else self._roots.root(scope)
        if root is not self._root:
            self._grants.set_root(path, scope)
            self._root = root if scope is PLAIN else b""
        limit = (tokens - index.kept_back) // size  # as `BlockIndex.limit_of`
        if self._settings.fetch:
            fetch = min(limit, self._settings.fetchable(path, message.stored))
        free = pool.free - index.reserved - self._admission.free_low
        clock, tree = policy.now, index.tree
        now = 0.0 if policy.tables is None else clock()
        run = tree.pin_resident(path, root, limit, fetch, needed, free, now)
        if run < 0:
            return None
        lease = LeaseState(
            message.lease, message.request_id, path, tree, message.deadline, (), run, run
        )
        if message.hints is not None:
            lease.hints = message.hints
        self._leases.begin(lease, tokens)
        return AcquireResult(path.complete(run, pool.take(needed - run)), run * size, False, run)

    def commit(self, message: Commit) -> Ack | None:
        """Commit tokens of a lease that waits for no load."""
        if self._admission.space.requests:
            return None  # they may share the blocks
        find = self._leases.get  # a call of an attribute that is no method takes longer
        lease = find(message.lease)
        committed = -1 if lease is None else self._enter(lease, message.computed_tokens)
        return None if committed < 0 else Ack(committed)

    def finish(self, message: Finish) -> Ack | None:
        """End a lease, none of whose blocks is announced or saved."""
        find, index = self._leases.get, self._index
        lease = find(message.lease)
        if (
            lease is None
            or not self._ends
            or not (self.calm or self._is_calm())
            or lease.tree is not index.tree
            or lease.hints is not None
            or message.hints is not None
            or lease.loads
            or lease.ready
            or lease.layers
            or index.pool.ages is not None
        ):
            return None
        path, policy, computed = lease.path, index.policy, message.computed_tokens
        if computed is not None and self._enter(lease, computed) < 0:
            return None
        committed, output = path.num_committed, message.output_tokens
        if output is None:
            output = lease.output()
        clock = policy.now
        now = 0.0 if policy.tables is None else clock()
        freed = lease.tree.end(path, index.part, output, now)
        if freed is None:
            return None  # at most its tokens are committed, as its handler will find
        self._leases.end(lease)
        index.pool.give(freed)
        return Ack(committed)

    def _enter(self, lease: LeaseState, computed: int) -> int:
        """See `Commits.enter`.

        Returns:
            Committed blocks of the lease. -1, and nothing has changed, for what only that handles.
        """
        if lease.fault is not None or lease.loads or type(computed) is not int:
            return -1
        try:
            return lease.tree.commit_tokens(lease.path, computed, self._only_known)
        except (ValueError, TypeError):  # the tree refuses it, or it has more than 64 bits
            return -1

    def _is_calm(self) -> bool:
        admission = self._admission
        self.calm = not (
            self._held.is_closed
            or admission.waiting
            or admission.heads()
            or admission.pausing
            or admission.on_idle
            or self._index.retired
        )
        self._root = b""
        return self.calm
