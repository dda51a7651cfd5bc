"""One decode step of many leases in one turn."""

from __future__ import annotations

from kvactors.actor import Envelope
from kvactors.prefix_index.actions import Action, Reply
from kvactors.prefix_index.admission import Admission
from kvactors.prefix_index.commits import Commits
from kvactors.prefix_index.evictions import Evictions
from kvactors.prefix_index.index import BlockIndex
from kvactors.prefix_index.leases import LeaseTable
from kvactors.prefix_index.messages import StepLeases, StepResult


class Steps:
    """Extends and commits many leases, as far as blocks are free or can be evicted at once. A lease
    that needs more is left to a separate commit and extend, so that a step waits for nothing.
    Quotas are by lease: with them, blocks are evicted for such an extend alone."""

    def __init__(
        self,
        index: BlockIndex,
        leases: LeaseTable,
        commits: Commits,
        admission: Admission,
        evictions: Evictions,
    ) -> None:
        self._index = index
        self._leases = leases
        self._commits = commits
        self._admission = admission
        self._evictions = evictions

    def step(self, message: StepLeases, envelope: Envelope[StepResult]) -> list[Action]:
        """Carry out the rows of a step that need nothing else."""
        index, admission, find = self._index, self._admission, self._leases.get
        leases = list(map(find, message.leases))
        if admission.waiting or admission.forking.requests:
            leases = [
                None if lease is None or admission.call_of(lease.id) else lease for lease in leases
            ]
        paths = [
            None if lease is None or lease.fault is not None or lease.loads else lease.path
            for lease in leases
        ]
        trees = [None if lease is None else lease.tree for lease in leases]
        actions: list[Action] = []

        def take(count: int) -> list[int]:
            lacking = count - index.free - admission.unpromised()
            if lacking > 0:
                actions.extend(self._evictions.evict(lacking)[1])
            return index.take(min(count, index.free))

        free = 0 if admission.waiting else index.free  # the requests that wait get them first
        if free < len(paths) and not (admission.waiting or index.tree.sharing):
            free += index.evictable()
        committed, grown, commits, unused = message.tokens.step(
            message.first,
            paths,
            trees,
            message.positions,
            message.computed,
            free,
            index.part,
            take,
        )
        if unused:
            index.pool.give(unused)
        for path, start, stop, adopted in commits:
            actions += self._commits.entered(path, start, stop, adopted)
        actions.append(Reply(envelope, StepResult(committed, grown)))
        return actions + admission.look_again()
