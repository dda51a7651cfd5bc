"""Commits, and the ends of leases: their blocks are announced, saved and released."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvactors.actor import Envelope
from kvactors.actor.log import get_logger
from kvactors.errors import LeaseEnded, NotReady, RankLost
from kvactors.native import Path
from kvactors.prefix_index.host import NO_HINT, SavedPath
from kvactors.prefix_index.leases import LeaseFault, LeaseState
from kvactors.prefix_index.messages import Abandon, Ack, Commit, Finish, Preempt
from kvactors.prefix_index.tree import pick_hashes, was_cleared
from kvactors.prefix_index.work import Work, hash_first, slices
from kvactors.types import Reason

if TYPE_CHECKING:
    from kvactors.prefix_index.actor import IndexCore


log = get_logger(actor="prefix_index")


class Endings:
    """Enters computed blocks into the tree, and ends leases.

    Attributes:
        preempted, abandoned: leases that ended so.
    """

    def __init__(self, core: IndexCore) -> None:
        self.preempted = self.abandoned = 0
        self._index, self._out = core.index, core.out
        self._leases = core.leases
        self._loads = core.loads
        self._saves = core.saves
        self._evictions = core.evictions
        self._announcements = core.announcements
        self._queue = core.queue
        self._pins = core.pins
        self._reports = core.announcements.enabled or core.saves.enabled

    # -- commits

    def commit(self, message: Commit, envelope: Envelope[Ack]) -> None:
        """Make the full blocks of computed tokens of a lease shareable. A waiting request that
        shares them may fit now."""
        lease = self._leases.get(message.lease) or self._leases.find(message.lease, envelope)
        if lease is None:
            return
        error = self.enter(lease, message.computed_tokens)
        if error is None:
            self._out.reply(envelope, Ack(lease.path.num_committed))
        else:
            self._out.refuse(envelope, error)
        if self._queue.contended:
            self._queue.look_again()

    def enter(self, lease: LeaseState, computed: int) -> Exception | None:
        """Enter the full blocks of the first `computed` tokens into the tree.

        Returns:
            The reason why nothing was changed: NotReady while loads of the lease are in flight,
            TypeError or ValueError if the lease has fewer tokens than `computed`, and the error of
            a lease that can no longer be used. A lease whose blocks the tree refuses fails.
        """
        path, tree = lease.path, lease.tree
        if lease.fault is None and not lease.loads and type(computed) is int:
            try:
                # New blocks that a sink is sent, or that the host may have, are entered below.
                if tree.commit_tokens(path, computed, self._announcements.enabled) >= 0:
                    return None
            except (ValueError, TypeError):  # refused below, with the reason
                pass
        error = self._refusal(lease, computed)
        if error is not None:
            return error
        try:
            start, stop, adopted = tree.commit(path, computed // self._index.block_size)
        except ValueError as refused:
            log.error("commit refused by the block tree", error=str(refused))
            lease.fault = LeaseFault(
                LeaseEnded,
                (f"lease of {lease.request_id!r} has ended: acquire again ({refused})",),
            )
            return lease.fault.error()
        if stop > start:
            self.entered(path, start, stop, adopted)
        return None

    def entered(self, path: Path, start: int, stop: int, adopted: list[int]) -> None:
        """Blocks [start, stop) of a path have entered the tree. adopted: see `BlockTree.commit`."""
        self._announcements.cached(path, start, stop, Reason.COMMIT)
        if adopted:
            self._evictions.drop_host_copies(pick_hashes(path.hashes(0, stop), adopted))

    def _refusal(self, lease: LeaseState, computed: int) -> Exception | None:
        """Why the first `computed` tokens of a lease cannot be committed."""
        if lease.fault is not None and lease.fault.kind is RankLost:
            return lease.fault.error()
        if lease.loads:
            return NotReady(
                f"lease of {lease.request_id!r} waits for loads: await wait_ready() before commit()"
            )
        if type(computed) is not int:
            return TypeError(f"computed_tokens must be an int, not {type(computed).__name__}")
        tokens = lease.path.num_tokens
        if not 0 <= computed <= tokens:
            return ValueError(f"computed_tokens is {computed}, the lease has {tokens} tokens")
        covered = lease.path.num_blocks * self._index.block_size
        if computed > covered:
            return ValueError(
                f"computed_tokens is {computed}, the lease has blocks for {covered} of its "
                f"{tokens} tokens: call next_chunk()"
            )
        return None if lease.fault is None else lease.fault.error()

    # -- ends

    def finish(self, message: Finish, envelope: Envelope[Ack]) -> None:
        """End a lease: commit its computed tokens, unless they were committed before, then
        close."""
        lease = self._leases.get(message.lease) or self._leases.find(message.lease, envelope)
        if lease is None:
            return
        hints = message.hints or lease.hints
        if hints is not None and hints.pin:
            path, turn_blocks = lease.path, self._index.turn_blocks
            if path.num_full_blocks - path.num_hashed > turn_blocks:
                then = partial(self.finish, message, envelope)
                self._out.begin(hash_first(path, turn_blocks, then))
                return
        if message.computed_tokens is not None:
            error = self.enter(lease, message.computed_tokens)
            if error is not None:
                self._out.refuse(envelope, error)
                return
        lease.output_tokens = message.output_tokens
        if message.hints is not None:
            lease.hints, lease.pin_prompt = message.hints, False
        pinned = 0
        if lease.hints is not None and lease.hints.pin:
            pinned = self._pins.pin(lease)
            if pinned:
                self._queue.refuse_unreachable()
        self._close(lease, envelope, pinned)

    def preempt(self, message: Preempt, envelope: Envelope[Ack]) -> None:
        """End a lease whose request will be acquired again."""
        lease = self._leases.find(message.lease, envelope)
        if lease is None:
            return
        error = self.enter(lease, message.computed_tokens) if message.computed_tokens else None
        if error is not None:
            self._out.refuse(envelope, error)
            return
        self.preempted += 1
        self._leases.remember_preempted(lease.request_id)
        self._close(lease, envelope)

    def abandon(self, message: Abandon) -> None:
        """The holder of a lease, or the caller of a request that waits, has gone."""
        lease = self._leases.get(message.lease)
        if lease is not None:
            self.abandoned += 1
            self._close(lease, None)
        self._queue.cancel(message.lease, "this request was given up")
        self._queue.serve()

    def detach(self, lease: LeaseState) -> None:
        """Remove a lease from everything that waits for it or with it. Its blocks stay as they
        are."""
        if self._queue.contended and lease.granted and self._queue.call_of(lease.id):
            self._queue.cancel(lease.id, "it has ended")  # an extend or a fork
        self._leases.remove(lease)

    def give_back(self, lease: LeaseState) -> None:
        """End a lease that was granted to a caller who no longer waits."""
        self.detach(lease)
        self._queue.release(lease.tree, lease.path)
        self._queue.serve()

    def forget(self, lease: LeaseState) -> None:
        """End a lease that never had its blocks."""
        self._loads.cancel(lease, 0)
        self.detach(lease)
        self._queue.release(lease.tree, lease.path)

    def _end_policy(self, lease: LeaseState) -> tuple[int, float]:
        """Returns priority and expiry of the lease's blocks."""
        policy = self._index.policy
        if policy.tables is not None:
            policy.end(lease.tree, lease.path, lease.output(), lease.hints)
        if lease.hints is None and not lease.tree.sharing:
            return NO_HINT
        return policy.hint(lease.tree, lease.path, lease.hints)

    def _close(self, lease: LeaseState, envelope: Envelope[Ack] | None, pinned: int = 0) -> None:
        """End a lease: announce, save, release. The envelope is answered with the blocks that stay
        cached. None if the caller has gone: then nothing is saved."""
        path, tree, index = lease.path, lease.tree, self._index
        if self._reports or path.num_blocks > index.turn_blocks:
            self._out.begin(self._close_in_slices(lease, envelope, pinned))
            return
        self.detach(lease)
        pool, policy, committed = index.pool, index.policy, path.num_committed
        if pool.ages is not None:
            pool.note_release(path)
        freed, output, now = None, -1, 0.0
        if policy.tables is not None:
            output, now = lease.output(), policy.now()
        if lease.hints is None:
            # None of a cleared tree, and of one with salts or hints.
            freed = tree.end(path, index.turn_blocks, output, now)
        if freed is None:
            if was_cleared(tree, path):
                committed = 0
            self._end_policy(lease)
            freed = tree.release(path)
        pool.give(freed)
        if envelope is not None:
            self._out.reply(envelope, Ack(committed, pinned))
        self._queue.serve()

    def _close_in_slices(
        self, lease: LeaseState, envelope: Envelope[Ack] | None, pinned: int
    ) -> Work:
        """The same, some of the lease's blocks a turn."""
        path, tree, turn_blocks = lease.path, lease.tree, self._index.turn_blocks
        self.detach(lease)
        committed = 0 if was_cleared(tree, path) else path.num_committed
        self._index.room.closing += 1
        saved = SavedPath(tree, path, 1, *self._end_policy(lease))
        if self._announcements.enabled:
            for start, stop in slices(0, committed, turn_blocks):
                if start:
                    yield
                if not was_cleared(tree, path):
                    self._announcements.finished(tree, path, start, stop)
        if envelope is not None and self._saves.enabled:
            for start, stop in self._saves.ranges(committed):
                if committed > turn_blocks:
                    yield
                if saved.parts and not was_cleared(tree, path):
                    self._saves.start(saved, start, stop)
        if saved.answered():
            for _ in self._index.release_slices(tree, path):
                yield
                self._queue.serve()
        self._index.room.closing -= 1
        if envelope is not None:
            self._out.reply(envelope, Ack(committed, pinned))
        self._queue.serve()
