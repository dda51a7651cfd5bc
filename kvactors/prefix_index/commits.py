"""Commits: computed blocks become shareable."""

from __future__ import annotations

from kvactors.actor import Envelope
from kvactors.actor.log import get_logger
from kvactors.errors import LeaseEnded, NotReady, RankLost
from kvactors.native import Path
from kvactors.prefix_index.actions import Action, Refusal, Reply
from kvactors.prefix_index.announcements import Announcements
from kvactors.prefix_index.evictions import Evictions
from kvactors.prefix_index.index import BlockIndex, pick_hashes
from kvactors.prefix_index.leases import LeaseTable
from kvactors.prefix_index.messages import Ack
from kvactors.prefix_index.records import LeaseFault, LeaseState
from kvactors.types import Reason

log = get_logger(actor="prefix_index")


class Commits:
    """Enters the computed blocks of leases into the tree."""

    def __init__(
        self,
        index: BlockIndex,
        leases: LeaseTable,
        announcements: Announcements,
        evictions: Evictions,
    ) -> None:
        self._index = index
        self._leases = leases
        self._announcements = announcements
        self._evictions = evictions

    def commit(self, number: int, computed: int, envelope: Envelope[Ack]) -> list[Action]:
        """Make the full blocks of the first `computed` tokens of a lease shareable."""
        lease = self._leases.get(number)
        if lease is None:
            return [self._leases.refusal(envelope)]
        done = self.enter(lease, computed)
        if isinstance(done, Exception):
            return [Refusal(envelope, done)]
        done.append(Reply(envelope, Ack(lease.path.num_committed)))
        return done

    def enter(self, lease: LeaseState, computed: int) -> list[Action] | Exception:
        """Enter the full blocks of the first `computed` tokens into the tree.

        Returns:
            The actions, or the reason why nothing was changed: NotReady while loads of the lease
            are in flight, TypeError or ValueError if `computed` is no number of tokens of the
            lease, and the error of a lease that can no longer be used. A lease whose blocks the
            tree refuses fails.
        """
        error = self.refusal(lease, computed)
        if error is not None:
            return error
        path = lease.path
        try:
            start, stop, adopted = lease.tree.commit(path, computed // self._index.block_size)
        except ValueError as refused:
            log.error("commit refused by the block tree", error=str(refused))
            lease.fault = LeaseFault(
                LeaseEnded,
                (f"lease of {lease.request_id!r} has ended: acquire again ({refused})",),
            )
            return lease.fault.error()
        return self.entered(path, start, stop, adopted) if stop > start else []

    def entered(self, path: Path, start: int, stop: int, adopted: list[int]) -> list[Action]:
        """Blocks [start, stop) of a path have entered the tree. adopted: see `BlockTree.commit`."""
        actions = self._announcements.cached(path, start, stop, Reason.COMMIT)
        if adopted:
            on_host = pick_hashes(path.hashes(0, stop), adopted)
            actions += self._evictions.drop_host_copies(on_host)
        return actions

    def refusal(self, lease: LeaseState, computed: int) -> Exception | None:
        """Why the first `computed` tokens of a lease cannot be committed."""
        if lease.fault is not None and lease.fault.kind is RankLost:
            return lease.fault.error()
        if lease.loads:
            return NotReady(
                f"lease of {lease.request_id!r} waits for loads: await wait_ready() before commit()"
            )
        if type(computed) is not int:
            return TypeError(f"computed_tokens must be an int, not {type(computed).__name__}")
        if not 0 <= computed <= lease.path.num_tokens:
            return ValueError(
                f"computed_tokens is {computed}, the lease has {lease.path.num_tokens} tokens"
            )
        covered = lease.path.num_blocks * self._index.block_size
        if computed > covered:
            return ValueError(
                f"computed_tokens is {computed}, the lease has blocks for {covered} of its "
                f"{lease.path.num_tokens} tokens: call next_chunk()"
            )
        return None if lease.fault is None else lease.fault.error()
