"""The end of leases: their blocks are announced, saved and released."""

from __future__ import annotations

from functools import partial

from kvactors.actor import Envelope
from kvactors.prefix_index.actions import Action, Refusal, Reply, Work
from kvactors.prefix_index.admission import Admission
from kvactors.prefix_index.announcements import Announcements
from kvactors.prefix_index.commits import Commits
from kvactors.prefix_index.index import BlockIndex, is_past
from kvactors.prefix_index.leases import LeaseTable
from kvactors.prefix_index.loads import LoadTable
from kvactors.prefix_index.messages import Ack, Finish
from kvactors.prefix_index.parts import hash_first, next_part, parts
from kvactors.prefix_index.pins import Pins
from kvactors.prefix_index.records import LeaseState
from kvactors.prefix_index.saves import NO_HINT, SavedPath, SaveTable


class Endings:
    """Ends leases.

    Attributes:
        preempted, abandoned: leases that ended so.
    """

    def __init__(
        self,
        index: BlockIndex,
        leases: LeaseTable,
        loads: LoadTable,
        saves: SaveTable,
        announcements: Announcements,
        commits: Commits,
        admission: Admission,
        pins: Pins,
    ) -> None:
        self.preempted = self.abandoned = 0
        self._index = index
        self._leases = leases
        self._loads = loads
        self._saves = saves
        self._announcements = announcements
        self._commits = commits
        self._admission = admission
        self._pins = pins
        self._reports = announcements.enabled or saves.enabled

    def finish(self, message: Finish, envelope: Envelope[Ack]) -> list[Action]:
        """End a lease: commit its computed tokens, unless they were committed before, then
        close."""
        lease = self._leases.get(message.lease)
        if lease is None:
            return [self._leases.refusal(envelope)]
        hints = message.hints or lease.hints
        if hints is None or not hints.pin:
            return self._finish(message, envelope)
        return hash_first(lease.path, self._index.part, partial(self._finish, message, envelope))

    def _finish(self, message: Finish, envelope: Envelope[Ack]) -> list[Action]:
        lease, computed = self._leases.get(message.lease), message.computed_tokens
        if lease is None:
            return [self._leases.refusal(envelope)]
        committed = [] if computed is None else self._commits.enter(lease, computed)
        if isinstance(committed, Exception):
            return [Refusal(envelope, committed)]
        lease.output_tokens = message.output_tokens
        if message.hints is not None:
            lease.hints, lease.pin_prompt = message.hints, False
        pinned = 0
        if lease.hints is not None and lease.hints.pin:
            pinned, pins = self._pins.pin(lease)
            committed += pins + self._admission.refuse_unreachable() if pinned else pins
        return committed + self._close(lease, envelope, pinned)

    def preempt(self, number: int, computed: int, envelope: Envelope[Ack]) -> list[Action]:
        """End a lease whose request will be acquired again."""
        lease = self._leases.get(number)
        if lease is None:
            return [self._leases.refusal(envelope)]
        committed = self._commits.enter(lease, computed) if computed else []
        if isinstance(committed, Exception):
            return [Refusal(envelope, committed)]
        self.preempted += 1
        self._leases.remember_preempted(lease.request_id)
        return committed + self._close(lease, envelope)

    def abandon(self, number: int) -> list[Action]:
        """End a lease whose holder has gone."""
        lease = self._leases.get(number)
        if lease is None:
            return []
        self.abandoned += 1
        return self._close(lease, None)

    def detach(self, lease: LeaseState) -> list[Action]:
        """Remove a lease from everything that waits for it or with it. Its blocks stay as they
        are."""
        ended, admission = self._leases.remove(lease), self._admission
        if not (admission.waiting or admission.forking.requests):
            return ended
        if lease.granted and admission.call_of(lease.id):  # an extend or a fork
            return admission.cancel(lease.id, "it has ended") + ended
        return ended

    def give_back(self, lease: LeaseState) -> list[Action]:
        """End a lease that was granted to a caller who no longer waits."""
        actions = self.detach(lease)
        actions += self._admission.release(lease.tree, lease.path)
        return actions + self._admission.serve_waiting()

    def forget(self, lease: LeaseState) -> list[Action]:
        """End a lease that never had its blocks."""
        actions = self._loads.cancel(lease, 0)
        actions += self.detach(lease)
        return actions + self._admission.release(lease.tree, lease.path)

    def _tell_policy(self, lease: LeaseState) -> tuple[int, float]:
        """Returns priority and expiry of the lease's blocks."""
        policy = self._index.policy
        if policy.tables is not None:
            policy.end(lease.tree, lease.path, lease.output(), lease.hints)
        if lease.hints is None and not lease.tree.sharing:
            return NO_HINT
        return policy.hint(lease.tree, lease.path, lease.hints)

    def _close(
        self, lease: LeaseState, envelope: Envelope[Ack] | None, pinned: int = 0
    ) -> list[Action]:
        """End a lease: announce, save, release.

        Args:
            lease: the lease.
            envelope: answered with the blocks that stay cached. None if the caller has gone: then
                nothing is saved.
            pinned: blocks that the end of the request has pinned.
        """
        path, tree, pool = lease.path, lease.tree, self._index.pool
        if self._reports or path.num_blocks > self._index.part:
            return next_part(self._close_in_parts(lease, envelope, pinned))
        actions = self.detach(lease)
        committed = 0 if is_past(tree, path) else path.num_committed
        self._tell_policy(lease)
        pool.note_release(path)
        pool.give(tree.release(path))
        if envelope is not None:
            actions.append(Reply(envelope, Ack(committed, pinned)))
        return actions + self._admission.serve_waiting()

    def _close_in_parts(
        self, lease: LeaseState, envelope: Envelope[Ack] | None, pinned: int
    ) -> Work:
        """The same, a part of the lease's blocks a turn."""
        path, tree, part = lease.path, lease.tree, self._index.part
        actions = self.detach(lease)
        committed = 0 if is_past(tree, path) else path.num_committed
        self._admission.closing += 1
        saved = SavedPath(tree, path, 1, *self._tell_policy(lease))
        if self._announcements.enabled:
            for start, stop in parts(0, committed, part):
                if start:
                    yield actions
                    actions = []
                if not is_past(tree, path):
                    actions += self._announcements.finished(tree, path, start, stop)
        if envelope is not None and self._saves.enabled:
            for start, stop in self._saves.ranges(committed):
                if committed > part:
                    yield actions
                    actions = []
                if saved.parts and not is_past(tree, path):
                    actions += self._saves.start(saved, start, stop)
        if saved.answered():
            for _ in self._index.release_parts(tree, path):
                yield actions
                actions = self._admission.serve_waiting()
        self._admission.closing -= 1
        if envelope is not None:
            actions.append(Reply(envelope, Ack(committed, pinned)))
        return actions + self._admission.serve_waiting()
