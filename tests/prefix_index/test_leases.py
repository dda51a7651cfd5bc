"""LeaseTable: granted, pending, failed, ended."""

from __future__ import annotations

from functools import partial

from kvactors.errors import LeaseEnded, NoRoom, RankLost
from kvactors.prefix_index import leases as module
from kvactors.prefix_index.leases import LeaseState, LeaseTable, LoadState
from kvactors.prefix_index.messages import LayerReady, Ready
from tests.prefix_index.objects import (
    Request,
    answers,
    block_index,
    effects_of,
    lease_table,
    new_lease,
    path,
)


def loading(blocks: int = 8, *, sharers: int = 0) -> tuple[LeaseTable, list[LeaseState], LoadState]:
    """Leases of two blocks that wait for one load, which the first owns."""
    index = block_index(blocks)
    table = lease_table(index)
    owner = new_lease(index, 1, 2)
    load = LoadState(1, owner, 0, 2, None, owner.tree, owner.path)
    load.nodes = index.tree.begin_load(owner.path, 0, 2)
    load.blocks = owner.path.blocks()
    leases = [owner]
    for number in range(2, 2 + sharers):
        joined = path(2)
        index.tree.pin(joined)
        sharer = LeaseState(number, f"r{number}", joined, index.tree, 10.0)
        load.sharers.append(sharer)
        leases.append(sharer)
    for lease in leases:
        lease.loads.append(load)
        lease.expected_blocks = 2
        assert effects_of(table.grant, lease) == []
    return table, leases, load


def test_a_sharer_that_gets_no_blocks_fails_and_keeps_no_block_of_the_load():
    table, [_, sharer], load = loading(2, sharers=1)
    load.tree.finish_load(load.nodes, 0)
    assert effects_of(table.wait, Ready(2), Request()) == []
    [error] = answers(effects_of(table.load_ended, sharer, load, 0, 0, owner=False))
    assert isinstance(error, NoRoom)
    assert sharer.path.blocks() == [-1, -1]
    assert isinstance(answers(effects_of(table.wait, Ready(2), Request()))[0], NoRoom)


def test_an_ended_lease_refuses_its_waiting_asks_and_leaves_its_load():
    table, [owner, sharer], load = loading(sharers=1)
    table.wait(Ready(2), Request())
    table.wait(LayerReady(2, 0), Request())
    errors = answers(effects_of(table.remove, sharer))
    assert [type(error) for error in errors] == [LeaseEnded] * 2
    assert load.sharers == []
    table.remove(owner)
    assert load.owner is None
    assert len(table) == 0
    [error] = answers(effects_of(table.wait, Ready(1), Request()))
    assert "finished, preempted or given back" in str(error)


def test_every_waiting_request_of_a_failed_lease_gets_a_separate_exception():
    table, [lease], _ = loading()
    for _ in range(2):
        table.wait(Ready(1), Request())
    table.wait(LayerReady(1, 0), Request())
    errors = answers(effects_of(table.fail_all, RankLost, "a rank was lost"))
    assert [type(error) for error in errors] == [RankLost] * 3
    assert len({id(error) for error in errors}) == 3
    assert lease.waits == []
    lease.fault = partial(NoRoom, 1, 0)
    table.fail_all(RankLost, "again")
    assert lease.fault.func is NoRoom, "the first fault stays"


def test_only_so_many_preempted_requests_are_remembered(monkeypatch):
    monkeypatch.setattr(module, "PREEMPTED_REQUESTS", 2)
    index = block_index()
    table = lease_table(index)
    for number in range(3):
        table.remember_preempted(f"r{number}")
    for number in range(3):
        table.grant(new_lease(index, number, 1, first=100 * number))
    assert (table.requests, table.resumed) == (1, 2)
