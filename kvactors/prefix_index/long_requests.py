"""Requests of more blocks than a turn handles: they are matched and granted in parts."""

from __future__ import annotations

from kvactors.actor import Envelope
from kvactors.errors import LeaseEnded
from kvactors.native import HOST, LOADING, BlockTree
from kvactors.prefix_index.actions import Action, Refusal, Work
from kvactors.prefix_index.admission import Admission, Waiter
from kvactors.prefix_index.grants import Grants
from kvactors.prefix_index.index import BlockIndex, is_past
from kvactors.prefix_index.messages import Acquire, AcquireResult
from kvactors.prefix_index.parts import next_part
from kvactors.prefix_index.records import LeaseState
from kvactors.prefix_index.roots import Roots
from kvactors.prefix_index.settings import IndexSettings


class LongRequests:
    """Admits long requests, a part of their blocks a turn.

    Blocks that are pinned stay on the device, and blocks that are reserved are not given to others,
    so requests between two parts take nothing from this one. After a clear, a loss of device memory
    or a change of the namespace between two parts the request begins again.

    A request that hits blocks which must be loaded is admitted in one turn.
    """

    def __init__(
        self,
        index: BlockIndex,
        admission: Admission,
        grants: Grants,
        roots: Roots,
        settings: IndexSettings,
    ) -> None:
        self._index = index
        self._admission = admission
        self._grants = grants
        self._roots = roots
        self._settings = settings

    def admit(
        self, message: Acquire, needed: int, envelope: Envelope[AcquireResult]
    ) -> list[Action]:
        """Begin to admit a request of `needed` blocks."""
        if self._settings.fetchable(message.path, message.stored):
            return self._admit_in_one_turn(message, needed, envelope)
        return next_part(self._match(message, needed, envelope))

    def _match(self, message: Acquire, needed: int, envelope: Envelope[AcquireResult]) -> Work:
        path, index, tree = message.path, self._index, self._index.tree
        limit, states = index.match_limit(path), b""
        index.policy.advance(tree)
        while not states and path.num_held < limit:
            upto = min(limit, path.num_held + index.part)
            _, states = tree.pin(path, upto)
            if path.num_held < upto:
                break
            yield []
            if not self._is_current(message, tree, envelope):
                return (yield from self._begin_again(message, needed, tree, envelope))
        if states and states[0] & (LOADING | HOST):
            again = self._begin_again(message, needed, tree, envelope, in_one_turn=True)
            return (yield from again)
        run = index.before_media(path.num_committed, message.media)
        while path.num_held > run:
            index.pool.give(tree.retreat(path, max(run, path.num_held - index.part)))
            yield []
            if not self._is_current(message, tree, envelope):
                return (yield from self._begin_again(message, needed, tree, envelope))
        lease = LeaseState(message.lease, message.request_id, path, tree, message.deadline)
        lease.media, lease.device_hits, lease.expected_blocks = message.media, run, run
        lease.hints = message.hints
        needed = max(path.num_blocks, index.chunk_blocks(path, run, message.chunk_tokens))
        waiter = LongWaiter(self, lease, message, needed, envelope)
        # Without an offload no copy has to be waited for.
        wait = message.wait or message.wait_for_room or not self._settings.offload
        accepted, actions = self._admission.request(waiter, wait=wait, deadline=message.deadline)
        actions += self._admission.end_retry(message.lease)
        if not accepted:
            actions += self._admission.release(tree, path)
            actions.append(self._admission.no_room_refusal(envelope, waiter.needed))
            actions += self._admission.serve_waiting()
        return actions

    def _admit_in_one_turn(
        self, message: Acquire, needed: int, envelope: Envelope[AcquireResult]
    ) -> list[Action]:
        actions = self._grants.admit(message, needed, envelope)
        return actions + self._admission.end_retry(message.lease)

    def fill(
        self, lease: LeaseState, needed: int, message: Acquire, envelope: Envelope[AcquireResult]
    ) -> Work:
        """Every block of the request is on the device or reserved: enter them into its table."""
        path, tree, run, index = lease.path, lease.tree, lease.device_hits, self._index
        table: list[int] = []
        while len(table) < needed:
            if not self._is_current(message, tree, envelope):
                index.reserved -= needed - max(run, len(table))
                actions = self._admission.serve_waiting()
                again = self._begin_again(message, needed, tree, envelope, actions=actions)
                return (yield from again)
            if len(table) < run:
                table += path.blocks(len(table), min(run, len(table) + index.part))
            else:
                blocks = index.take_reserved(min(index.part, needed - len(table)))
                path.assign(len(table), blocks)
                table += blocks
            if len(table) < needed:
                yield []
        return self._grants.granted(lease, envelope, table)

    def give_up(self, lease: LeaseState) -> list[Action]:
        """The request gets no blocks."""
        return self._admission.release(lease.tree, lease.path)

    def _is_current(
        self, message: Acquire, tree: BlockTree, envelope: Envelope[AcquireResult]
    ) -> bool:
        """Whether the caller still waits, the blocks that the request holds were not cleared, and
        the namespace is the same."""
        return (
            not envelope.abandoned
            and not is_past(tree, message.path)
            and message.path.root == self._roots.root(message.scope)
        )

    def _begin_again(
        self,
        message: Acquire,
        needed: int,
        tree: BlockTree,
        envelope: Envelope[AcquireResult],
        *,
        actions: list[Action] | None = None,
        in_one_turn: bool = False,
    ) -> Work:
        """Release the request's blocks, then admit it again. actions: of this turn so far."""
        actions = actions or []
        self._admission.closing += 1
        for _ in self._index.release_parts(tree, message.path):
            yield actions
            actions = self._admission.serve_waiting()
        self._admission.closing -= 1
        if envelope.abandoned:
            actions += self._admission.end_retry(message.lease)
            actions.append(Refusal(envelope, LeaseEnded("this request was given up")))
        else:
            self._grants.set_root(message.path, message.scope)
            admit = self._admit_in_one_turn if in_one_turn else self.admit
            actions += admit(message, needed, envelope)
        return actions + self._admission.serve_waiting()


class LongWaiter(Waiter):
    """A long request whose blocks are reserved and taken in parts."""

    __slots__ = ("_long", "_message", "_state", "_total")

    reserves = True

    def __init__(
        self,
        long: LongRequests,
        lease: LeaseState,
        message: Acquire,
        total: int,
        envelope: Envelope[AcquireResult],
    ) -> None:
        super().__init__(lease.id, envelope, total - lease.device_hits, lease.path.salt)
        self._long = long
        self._state = lease
        self._message = message
        self._total = total

    def complete(self, blocks: list[int]) -> list[Action]:
        """See `Waiter.complete`."""
        return next_part(self._long.fill(self._state, self._total, self._message, self.envelope))

    def give_up(self) -> list[Action]:
        """See `Waiter.give_up`."""
        return self._long.give_up(self._state)
