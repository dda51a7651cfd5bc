"""No turn makes, evicts or announces more blocks than a part, for a request of many parts."""

from __future__ import annotations

from typing import Any

import pytest

from kvactors.actor import PeerRestarted
from kvactors.cpu_evictor.messages import HostBlocksAdded, Loaded, Save, Saved
from kvactors.flush_notifier.messages import BlocksAdded, BlocksRemoved, PathCached
from kvactors.identity import PLAIN, RequestScope
from kvactors.native import Path
from kvactors.prefix_index.leases import LeaseState, LoadState
from kvactors.prefix_index.messages import Abandon, Acquire, AcquireResult, Commit, Finish, Preempt
from kvactors.prefix_index.tree import BlockIndex
from kvactors.types import HASH_BYTES
from tests.prefix_index.index_machine import BLOCK, IndexMachine

PART = 8
MANY = 10 * PART + 3


class Counted(IndexMachine):
    """Notes for each turn the most blocks of anything that it changed or sent."""

    def begin(self, *, host: bool = False, save: str = "none") -> None:
        self.handled: list[int] = []
        self.start(2 * MANY, False, host, bool(save != "none"), False, save, 0, PART)

    def turn(self, message: Any, deadline: float | None = None) -> Any:
        before = self.counts()
        effects = super().turn(message, deadline)
        changed = [abs(new - old) for new, old in zip(self.counts(), before, strict=True)]
        sent = 0
        for told in effects.told:
            if isinstance(told.message, (PathCached, BlocksRemoved, Save)):
                sent += len(told.message.hashes) // HASH_BYTES
        self.handled.append(max(*changed, sent))
        return effects

    def counts(self) -> list[int]:
        state = self.index.tree.statistics()
        return [state[name] for name in ("nodes", "device", "host")]

    def whole(self, message: Any, deadline: float | None = None) -> Any:
        """The answer of an ask whose work may take many turns."""
        effects = self.turn(message, deadline)
        while self.works:
            effects = effects.then(self.turn(self.works.pop(0)))
        return effects

    def request(self, blocks: int, first: int = 0, scope: RequestScope = PLAIN) -> int:
        self.number += 1
        path = Path(BLOCK, bytes(32))
        path.extend(range(first, first + blocks * BLOCK))
        self.open[self.number] = blocks * BLOCK
        effects = self.whole(
            Acquire(self.number, f"r{self.number}", path, self.stepper.now + 5.0, scope=scope),
            self.stepper.now + 5.0,
        )
        assert isinstance(effects.answered[0].value, AcquireResult), effects.answered
        for op in list(self.loads):  # storage has nothing
            del self.loads[op]
            self.whole(Loaded(op, 0, 0))
        return self.number

    def commit_all(self, lease: int, blocks: int) -> None:
        for upto in (*range(PART, blocks, PART), blocks):
            assert self.whole(Commit(lease, upto * BLOCK)).answered[0].value.count == upto

    def over(self) -> None:
        """Every turn since the last call was short."""
        assert max(self.handled) <= PART, self.handled
        self.handled.clear()


@pytest.fixture
def machine():
    made = Counted()
    yield made
    made.leases.clear()
    made.teardown()


@pytest.mark.parametrize("end", [Finish, Preempt, Abandon])
@pytest.mark.parametrize("save", ["none", "write_through"])
def test_no_turn_handles_more_blocks_than_a_part(machine, end, save):
    machine.begin(host=save != "none", save=save)
    lease = machine.request(MANY)
    machine.handled.clear()
    machine.commit_all(lease, MANY)
    machine.over()
    effects = machine.whole(
        Abandon(lease) if end is Abandon else end(lease, 0 if end is Preempt else None)
    )
    if end is not Abandon:
        assert effects.answered[0].value.count == MANY
    for op in list(machine.admits):
        admit = machine.admits.pop(op)
        machine.whole(Saved(op, b"\1" * len(admit.blocks)))
    machine.over()
    state = machine.index.tree.statistics()
    assert (state["referenced"], state["device"], state["evictable"]) == (0, MANY, MANY)
    assert machine.index.pool.free == machine.index.pool.total - MANY


def test_a_long_request_evicts_in_parts(machine):
    machine.begin()
    first = machine.request(MANY)
    machine.commit_all(first, MANY)
    machine.whole(Finish(first))
    machine.handled.clear()
    other = machine.request(2 * MANY - 2, first=100_000)
    machine.over()
    assert machine.index.tree.statistics()["device"] == 2
    machine.whole(Finish(other))


def test_restarts_of_the_neighbours_are_handled_in_parts(machine):
    machine.begin(host=True)
    lease = machine.request(MANY)
    machine.commit_all(lease, MANY)
    machine.whole(Finish(lease))
    for admit in list(machine.admits):
        machine.whole(Saved(admit, bytes(len(machine.admits.pop(admit).blocks))))
    keys = machine.index.tree.device_hashes()
    for start in range(0, MANY, PART):
        machine.turn(
            HostBlocksAdded(
                keys[start * HASH_BYTES : (start + PART) * HASH_BYTES],
                machine.actor.clears.sent,
                machine.index.memory_generation,
            )
        )
    while machine.index.evictable():
        machine.actor.evictions.drop(PART)
    machine.stepper._effects()
    machine.sent.clear()
    machine.handled.clear()
    machine.turn(PeerRestarted("cpu_evictor", 1))
    assert machine.index.tree.statistics()["host"] == 0
    machine.handled.clear()  # the count is reset in this turn, the nodes go in parts
    machine.finish_works()
    machine.over()
    assert machine.index.tree.statistics()["nodes"] == 0
    lease = machine.request(MANY)
    machine.commit_all(lease, MANY)
    machine.handled.clear()
    machine.sent.clear()
    machine.whole(PeerRestarted("flush_notifier", 1))
    machine.over()
    assert len(machine.sent) == MANY
    machine.whole(Finish(lease))


def test_a_block_that_comes_back_is_reported_although_its_scope_was_forgotten(machine):
    """Without tokens: an index that has the block from another tier keeps it, under the scope that
    it was announced with."""
    machine.begin()
    lease = machine.request(PART)
    machine.actor.announcements.scopes.clear()
    effects = machine.turn(Commit(lease, PART * BLOCK))
    (report,) = effects.to("flush_notifier")
    assert (type(report), report.hashes) == (
        BlocksAdded,
        machine.lease_state(lease).path.hashes(0, PART),
    )
    machine.whole(Finish(lease))


def test_changes_during_a_full_announcement_are_sent_after_it(machine):
    machine.begin()
    lease = machine.request(MANY)
    machine.commit_all(lease, MANY - 1)
    machine.sent.clear()
    machine.turn(PeerRestarted("flush_notifier", 1))
    assert 0 < len(machine.sent) < MANY - 1
    machine.turn(Commit(lease, MANY * BLOCK))  # below blocks that have not been announced again
    machine.finish_works()
    assert len(machine.sent) == MANY
    machine.whole(Finish(lease))


class Searched(list[int]):
    """Counts the elements that searches for a value look at, at most."""

    looked = 0

    def __contains__(self, value: object) -> bool:
        self.looked += len(self)
        return super().__contains__(value)


def test_joining_a_long_load_takes_a_look_at_each_block():
    index = BlockIndex(BLOCK, MANY, MANY, recompute_last_token=False)
    paths = [Path(BLOCK, bytes(32)) for _ in range(2)]
    for path in paths:
        path.extend(range(MANY * BLOCK))
    match = index.match(paths[0], fetch=MANY)
    index.fill_table(paths[0], match, index.take(MANY))
    lease = LeaseState(1, "first", paths[0], index.tree, 0.0)
    load = LoadState(1, lease, 0, MANY, None, index.tree, paths[0])
    load.nodes = index.tree.begin_load(paths[0], 0, MANY)
    load.blocks = Searched(paths[0].blocks(0, MANY))
    index.loading.update(dict.fromkeys(load.blocks, load))
    (joined,) = index.match(paths[1], fetch=0).segments
    assert (joined.start, joined.stop, joined.joined) == (0, MANY, load)
    assert load.blocks.looked <= MANY
