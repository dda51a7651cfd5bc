"""One decode step of many leases in one turn."""

from __future__ import annotations

from kvactors.actor import Envelope
from kvactors.prefix_index.actions import Action, Reply
from kvactors.prefix_index.admission import Admission, Waiter
from kvactors.prefix_index.commits import Commits
from kvactors.prefix_index.index import BlockIndex
from kvactors.prefix_index.leases import LeaseTable
from kvactors.prefix_index.messages import StepEntry, StepLeases, StepOutcome, StepResult
from kvactors.prefix_index.records import LeaseState
from kvactors.prefix_index.tables import BlockTables, append


class Steps:
    """Extends and commits many leases. An entry that must wait for device blocks is left to its
    caller, so that the others need not wait for it."""

    def __init__(
        self,
        index: BlockIndex,
        leases: LeaseTable,
        tables: BlockTables,
        commits: Commits,
        admission: Admission,
    ) -> None:
        self._index = index
        self._leases = leases
        self._tables = tables
        self._commits = commits
        self._admission = admission

    def step(self, message: StepLeases, envelope: Envelope[StepResult]) -> list[Action]:
        """Extend, then commit each lease of a batch. Each entry happens or leaves its lease as it
        was."""
        actions: list[Action] = []
        outcomes = tuple([self._step(entry, envelope, actions) for entry in message.entries])
        actions.append(Reply(envelope, StepResult(outcomes)))
        return actions + self._admission.look_again()

    def _step(
        self, entry: StepEntry, envelope: Envelope[StepResult], actions: list[Action]
    ) -> StepOutcome:
        """Handle one entry, and add what is to be done for it to `actions`."""
        lease = self._leases.get(entry.lease)
        if lease is None:
            return self._leases.refusal(envelope).error
        begun, error = self._tables.begin(lease, entry.position)
        actions += begun
        path, computed = lease.path, entry.computed_tokens
        if error is None and computed is not None:
            error = self._commits.refusal(lease, min(computed, path.num_tokens))
        if error is not None:
            return error
        blocks: list[int] = []
        if entry.added is not None:
            total = self._index.blocks_for(entry.position + entry.added.num_tokens)
            if total > path.num_blocks:
                waiter = StepWaiter(lease, envelope, total - path.num_blocks)
                accepted, more = self._admission.request(waiter, wait=False, deadline=0.0)
                actions += more
                if not accepted:
                    return None
                blocks = waiter.blocks
            append(path, entry.added, entry.extras)
            if blocks:
                path.assign(path.num_blocks, blocks)
        if computed is not None:
            entered = self._commits.enter(lease, computed)
            if isinstance(entered, Exception):
                return entered
            actions += entered
        return blocks, path.num_committed


class StepWaiter(Waiter):
    """A lease that takes blocks at once or not at all."""

    __slots__ = ("blocks",)

    def __init__(self, lease: LeaseState, envelope: Envelope[StepResult], needed: int) -> None:
        super().__init__(lease.id, envelope, needed, lease.path.salt)
        self.blocks: list[int] = []

    def complete(self, blocks: list[int]) -> list[Action]:
        """See `Waiter.complete`."""
        self.blocks = blocks
        return []

    def give_up(self) -> list[Action]:
        """See `Waiter.give_up`."""
        return []
