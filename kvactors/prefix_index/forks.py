"""Forks of leases: they share the full blocks, and copy a last block that is not full."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvactors.actor import Envelope
from kvactors.errors import DeviceError, RankLost
from kvactors.gpu_swapper.messages import CopyWithin
from kvactors.native import Path
from kvactors.prefix_index.actions import Action, Refusal, Reply
from kvactors.prefix_index.admission import Admission, Waiter
from kvactors.prefix_index.endings import Endings
from kvactors.prefix_index.index import BlockIndex
from kvactors.prefix_index.leases import LeaseTable
from kvactors.prefix_index.messages import Fork, ForkedLease, ForkResult, ReadyResult
from kvactors.prefix_index.records import LeaseState
from kvactors.prefix_index.tables import BlockTables


class TailCopy(msgspec.Struct, eq=False):
    """The copies of one last block that is not full. They own their blocks until they end.

    Attributes:
        source, targets: device blocks.
        forks: the leases that the targets are for.
        envelope: answered when the copies have ended.
    """

    source: int
    targets: tuple[int, ...]
    forks: list[LeaseState]
    envelope: Envelope[ForkResult]


class Forks:
    """Makes further leases of a lease's tokens.

    A fork references the same nodes of the tree and waits for the same loads. Full blocks that are
    not committed get a further owner in the pool: the tokens of a full block do not change, so
    every lease that computes it writes the same bytes. The last block is written by both leases if
    it is not full, so the fork gets a copy of it before either of them can continue.

    Attributes:
        forks: leases made.
        tails: blocks copied for them.
    """

    def __init__(
        self,
        index: BlockIndex,
        leases: LeaseTable,
        tables: BlockTables,
        admission: Admission,
        endings: Endings,
        ops: Iterator[int],
    ) -> None:
        self.forks = self.tails = 0
        self._index = index
        self._leases = leases
        self._tables = tables
        self._admission = admission
        self._endings = endings
        self._ops = ops
        self._copies: dict[int, TailCopy] = {}

    def __len__(self) -> int:
        """Copies in flight."""
        return len(self._copies)

    def fork(self, message: Fork, envelope: Envelope[ForkResult]) -> list[Action]:
        """Make the leases once there are blocks for their copies of the last block."""
        lease = self._leases.get(message.lease)
        if lease is None:
            return [self._leases.refusal(envelope)]
        actions, error = self._tables.begin(lease, message.position)
        if error is None and lease.fault is not None:
            error = lease.fault.error()
        if error is not None:
            return [*actions, Refusal(envelope, error)]
        needed = len(message.leases) if tail_of(lease.path) >= 0 else 0
        admission, claim = self._admission, lease.path.num_blocks + needed
        error = admission.unreachable(lease.path, claim, message.deadline) if needed else None
        if error is not None:
            return [*actions, admission.count_refusal(envelope, error)]
        first = admission.forking.first
        if needed and first is not None and first.message.lease != lease.id:
            claims = admission.forking.claims + claim
            if claims > admission.spare([first]) or admission.available() < needed:
                return [*actions, admission.no_room_refusal(envelope, needed)]
            admission.overtakings += 1
        waiter = ForkWaiter(self, lease, message, envelope, needed)
        wait = message.wait or message.wait_for_room
        return actions + self._tables.take(waiter, lease.deadline, wait=wait)

    def make(
        self,
        lease: LeaseState,
        message: Fork,
        envelope: Envelope[ForkResult],
        blocks: list[int],
    ) -> list[Action]:
        """The blocks for the copies are there."""
        if lease.fault is not None:  # since it began to wait
            self._index.pool.give(blocks)
            return [Refusal(envelope, lease.fault.error())]
        self._index.policy.advance(lease.tree)
        forks = [
            self._make(lease, number, request_id)
            for number, request_id in zip(message.leases, message.request_ids, strict=True)
        ]
        self.forks += len(forks)
        if not blocks:
            return self._answer(forks, envelope)
        for fork, block in zip(forks, blocks, strict=True):
            fork.path.assign(fork.path.num_blocks, [block])
        copy = TailCopy(tail_of(lease.path), tuple(blocks), forks, envelope)
        self._index.pool.share((copy.source, *copy.targets))
        self.tails += len(blocks)
        self._admission.copies += 1
        op = next(self._ops)
        self._copies[op] = copy
        sources = (copy.source,) * len(blocks)
        return [CopyWithin(op, sources, copy.targets, self._index.memory_generation)]

    def copied(self, op: int, failed: tuple[int, ...]) -> list[Action]:
        """Copies have ended. failed: indices of those whose bytes did not arrive."""
        copy = self._copies.pop(op, None)
        if copy is None:
            return []
        self._admission.copies -= 1
        self._index.pool.give((copy.source, *copy.targets))
        if not failed:
            return self._answer(copy.forks, copy.envelope) + self._admission.serve_waiting()
        error = DeviceError("the last block could not be copied for the fork: nothing was changed")
        return self._refuse(copy.forks, copy.envelope, error)

    def swapper_lost(self) -> list[Action]:
        """The swapper has restarted: no copy is in flight. The notice of the host tier's restart
        comes first, and a copy that is sent between the two is dropped like those before."""
        actions: list[Action] = []
        for op, copy in list(self._copies.items()):
            actions += self.copied(op, tuple(range(len(copy.targets))))
        return actions

    def _make(self, lease: LeaseState, number: int, request_id: str) -> LeaseState:
        """A lease of the same tokens, without a block for a last one that is not full."""
        path = Path(lease.path.block_size, lease.path.root)
        self._index.pool.share(lease.tree.fork(lease.path, path))
        fork = msgspec.structs.replace(
            lease,
            id=number,
            request_id=request_id,
            path=path,
            loads=list(lease.loads),
            ready=[],
            layers=[],
            counted=False,
        )
        self._leases.add_fork(fork)
        return fork

    def _answer(self, forks: list[LeaseState], envelope: Envelope[ForkResult]) -> list[Action]:
        """The leases can be used, unless the caller has gone or device memory was lost."""
        lost = next((fork.fault for fork in forks if fork.fault is not None), None)
        if lost is not None and lost.kind is RankLost:
            return self._refuse(forks, envelope, lost.error())
        reply = Reply(envelope, ForkResult(tuple(self._describe(fork) for fork in forks)))
        return [reply, *self._give_back(forks)] if envelope.abandoned else [reply]

    def _refuse(
        self, forks: list[LeaseState], envelope: Envelope[ForkResult], error: Exception
    ) -> list[Action]:
        return [*self._give_back(forks), Refusal(envelope, error)]

    def _give_back(self, forks: list[LeaseState]) -> list[Action]:
        """End the leases, without those that have ended."""
        actions: list[Action] = []
        for fork in forks:
            if self._leases.get(fork.id) is fork:
                actions += self._endings.give_back(fork)
        return actions + self._admission.serve_waiting()

    def _describe(self, fork: LeaseState) -> ForkedLease:
        hits = (fork.device_hits, fork.host_hits, fork.storage_hits)
        cached = sum(hits)
        if fork.loads:
            cached = self._index.before_media(fork.expected_blocks, fork.media)
        blocks = tuple(fork.path.blocks())
        ready = ReadyResult(blocks, cached * self._index.block_size, *hits)
        return ForkedLease(fork.path, ready, bool(fork.loads))


class ForkWaiter(Waiter):
    """A lease that is forked once there are blocks for the copies of its last block."""

    __slots__ = ("_forks", "_message", "_state")

    def __init__(
        self,
        forks: Forks,
        lease: LeaseState,
        message: Fork,
        envelope: Envelope[ForkResult],
        needed: int,
    ) -> None:
        super().__init__(lease.id, envelope, needed, lease.path.salt)
        self._forks = forks
        self._state = lease
        self._message = message

    def complete(self, blocks: list[int]) -> list[Action]:
        """See `Waiter.complete`."""
        return self._forks.make(self._state, self._message, self.envelope, blocks)

    def give_up(self) -> list[Action]:
        """See `Waiter.give_up`."""
        return []


def tail_of(path: Path) -> int:
    """The device block of a last block that is not full, -1 if there is none."""
    full = path.num_full_blocks
    if path.num_tokens == full * path.block_size or path.num_blocks <= full:
        return -1
    return path.blocks(full, full + 1)[0]
