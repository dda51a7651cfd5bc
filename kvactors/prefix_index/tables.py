"""Block tables of granted leases: they grow by tokens and reserved blocks, and shrink when tokens
are rejected."""

from __future__ import annotations

import numpy as np

from kvactors.actor import Envelope
from kvactors.errors import LeaseBusy, NotReady, RankLost, TokensCommitted
from kvactors.identity import leading_items
from kvactors.native import Path
from kvactors.prefix_index.actions import Action, Refusal, Reply, Work
from kvactors.prefix_index.admission import Admission, Waiter
from kvactors.prefix_index.index import BlockIndex
from kvactors.prefix_index.leases import LeaseTable
from kvactors.prefix_index.messages import Ack, AcquireResult, Extend, Reserve, Truncate
from kvactors.prefix_index.parts import next_part, parts
from kvactors.prefix_index.records import LeaseState


class BlockTables:
    """Changes the block tables of granted leases.

    A reserved block is a private one beyond those that the tokens of the lease need. The next
    tokens use it, and the end of the lease gives it back like any other private block.
    """

    def __init__(self, index: BlockIndex, leases: LeaseTable, admission: Admission) -> None:
        self._index = index
        self._leases = leases
        self._admission = admission

    def grow(self, message: Extend | Reserve, envelope: Envelope[AcquireResult]) -> list[Action]:
        """Append tokens to a lease, and blocks when a boundary is crossed, or give it blocks for
        tokens that it does not have yet."""
        granted = self.grow_at_once(message)
        if granted is not None:
            return [Reply(envelope, granted)]
        lease = self._leases.get(message.lease)
        if lease is None:
            return [self._leases.refusal(envelope)]
        actions, error = self.begin(lease, message.position)
        if error is not None:
            return [*actions, Refusal(envelope, error)]
        total = self._index.blocks_for(tokens_after(message))
        needed = max(0, total - lease.path.num_blocks)
        error = self._admission.unreachable(lease.path, total, lease.deadline) if needed else None
        if error is not None:
            return [*actions, self._admission.count_refusal(envelope, error)]
        waiter = GrowthWaiter(lease, envelope, needed, message)
        return actions + self.take(waiter, lease.deadline)

    def grow_at_once(self, message: Extend | Reserve) -> AcquireResult | None:
        """`grow` of a lease that needs free blocks alone. None, and nothing has changed, for
        another."""
        lease, index, admission = self._leases.get(message.lease), self._index, self._admission
        if lease is None or lease.fault is not None or admission.call_of(lease.id) is not None:
            return None
        path = lease.path
        if message.position != path.num_tokens:
            return None
        needed = -(-tokens_after(message) // index.block_size) - path.num_blocks
        if needed <= 0:
            return grown(path, message, [])
        if admission.waiting or needed > index.free:
            return None
        return grown(path, message, index.take(needed))

    def truncate(self, message: Truncate, envelope: Envelope[Ack]) -> list[Action]:
        """Drop the tokens of a lease beyond a number, and the blocks that the rest does not
        need."""
        lease, kept = self._leases.get(message.lease), message.num_tokens
        if lease is None:
            return [self._leases.refusal(envelope)]
        actions, error = self.begin(lease, message.position)
        error = error or self._refusal(lease, kept)
        if error is not None:
            return [*actions, Refusal(envelope, error)]
        path, (full, rest) = lease.path, divmod(kept, self._index.block_size)
        extra = leading_items(path.extra_key(full), rest) if rest else b""
        self._keep_paths_of_loads(path)
        freed = lease.tree.truncate(path, kept, extra)
        lease.media = tuple(item for item in lease.media if item[0] < kept)
        actions.append(Reply(envelope, Ack(path.num_blocks)))
        if len(freed) > self._index.part:
            return actions + next_part(self._give(freed))
        self._index.pool.give(freed)
        return actions + self._admission.serve_waiting() if freed else actions

    def begin(self, lease: LeaseState, position: int) -> tuple[list[Action], Exception | None]:
        """Whether the table of a lease can be changed now. position: tokens of the lease, as its
        holder counts them."""
        if lease.fault is not None and lease.fault.kind is RankLost:
            return [], lease.fault.error()
        actions: list[Action] = []
        call = self._admission.call_of(lease.id)
        if call is not None and call.abandoned:
            actions = self._admission.cancel(lease.id, "this call was cancelled")
            call = None
        if call is None and position == lease.path.num_tokens:
            return actions, None
        return actions, LeaseBusy(
            f"the lease of {lease.request_id!r} has {lease.path.num_tokens} tokens, or is being "
            "extended"
        )

    def _refusal(self, lease: LeaseState, kept: int) -> Exception | None:
        """Why a lease cannot be cut to so many tokens."""
        if lease.loads:
            return NotReady(
                f"lease of {lease.request_id!r} waits for loads: await wait_ready() before "
                "truncate()"
            )
        if lease.fault is not None:
            return lease.fault.error()
        committed = lease.path.num_committed * self._index.block_size
        if kept < committed:
            return TokensCommitted(
                f"num_tokens is {kept}, but the first {committed} tokens are committed: other "
                "requests may share their blocks"
            )
        full, rest = divmod(kept, self._index.block_size)
        if rest and full < min(lease.path.num_full_blocks, lease.path.num_blocks):
            block = lease.path.blocks(full, full + 1)[0]
            if self._index.pool.is_shared(block):
                return TokensCommitted(
                    f"num_tokens is {kept}, within a full block that {lease.request_id!r} shares "
                    f"with a fork: truncate to a multiple of {self._index.block_size}, or before "
                    "the fork"
                )
        return None

    def _keep_paths_of_loads(self, path: Path) -> None:
        """A late load, which the lease continues without, still reports its blocks by the tokens
        that they were loaded for."""
        for load in self._index.loading.values():
            if load.path is path:
                load.path = copy_of(path, load.stop)

    def take(self, waiter: Waiter, lease_deadline: float, *, wait: bool = True) -> list[Action]:
        """Give a waiter its blocks, or let it wait for them. wait: whether it waits for evictions
        and copies in flight."""
        if not waiter.needed:
            return waiter.complete([])
        envelope, admission = waiter.envelope, self._admission
        deadline = envelope.deadline if envelope.deadline is not None else lease_deadline
        accepted, actions = admission.request(waiter, wait=wait, deadline=deadline)
        if not accepted:
            actions.append(admission.no_room_refusal(envelope, waiter.needed))
        return actions

    def _give(self, freed: list[int]) -> Work:
        """Return very many blocks to the pool, a part a turn."""
        self._admission.closing += 1
        for start, stop in parts(0, len(freed), self._index.part):
            self._index.pool.give(freed[start:stop])
            yield self._admission.serve_waiting()
        self._admission.closing -= 1
        return self._admission.serve_waiting()


class GrowthWaiter(Waiter):
    """A lease whose table grows. It stays as it is until it has the blocks."""

    __slots__ = ("_message", "_path")

    def __init__(
        self,
        lease: LeaseState,
        envelope: Envelope[AcquireResult],
        needed: int,
        message: Extend | Reserve,
    ) -> None:
        super().__init__(lease.id, envelope, needed, lease.path.salt)
        self._path = lease.path
        self._message = message

    def complete(self, blocks: list[int]) -> list[Action]:
        """See `Waiter.complete`."""
        return [Reply(self.envelope, grown(self._path, self._message, blocks))]

    def give_up(self) -> list[Action]:
        """See `Waiter.give_up`."""
        return []


def copy_of(path: Path, blocks: int) -> Path:
    """The leading blocks of a path: tokens and extra keys, without nodes and device blocks."""
    copy = Path(path.block_size, path.root)
    copy.extend(np.frombuffer(path.tokens(0, blocks), "<u4"))
    for position, extra in path.extra_keys(0, blocks):
        copy.set_extra(position, extra)
    return copy


def tokens_after(message: Extend | Reserve) -> int:
    """Leading tokens that the block table covers after a message."""
    if isinstance(message, Extend):
        return message.position + message.added.num_tokens
    return message.num_tokens


def grown(path: Path, message: Extend | Reserve, blocks: list[int]) -> AcquireResult:
    """Enter the tokens and the new blocks of a message. Returns its answer."""
    if isinstance(message, Extend):
        path.append(message.added)
        for block, extra in message.extras:
            path.set_extra(block, path.extra_key(block) + extra)
    if blocks:
        path.assign(path.num_blocks, blocks)
    return AcquireResult(tuple(blocks), 0, False, 0)
