"""LeaseTable: granted, pending, failed, ended."""

from __future__ import annotations

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from kvactors.errors import LeaseEnded, NoRoom, RankLost
from kvactors.prefix_index import leases as module
from kvactors.prefix_index.leases import LeaseState, LeaseTable, LoadState
from kvactors.prefix_index.messages import LayerReady, Ready, ReadyResult
from tests.prefix_index.objects import (
    BLOCK,
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


def test_a_lease_without_loads_is_ready_at_once():
    index = block_index()
    table = lease_table(index)
    lease = new_lease(index, 1, 3)
    lease.device_hits = 1
    assert effects_of(table.grant, lease) == []
    assert table.get(1) is lease
    request = Request()
    [landed] = answers(effects_of(table.wait, Ready(1), request))
    assert landed.cached_tokens == BLOCK
    assert landed.blocks == tuple(lease.path.blocks())
    assert (table.requests, table.looked_up, table.device_hits) == (1, 3, 1)


def test_a_pending_lease_is_answered_after_its_load():
    table, [lease], load = loading()
    request = Request()
    assert effects_of(table.wait, Ready(1), request) == []
    assert (table.requests, table.looked_up) == (1, 0), "look-ups count with the hits"
    load.tree.finish_load(load.nodes, 1)
    actions = effects_of(table.load_ended, lease, load, 1, 1, owner=True)
    [landed] = answers(actions)
    assert isinstance(landed, ReadyResult)
    assert (landed.host_hits, landed.storage_hits, landed.cached_tokens) == (1, 0, BLOCK)
    assert (table.looked_up, table.host_hits) == (2, 1)


def test_hits_beyond_the_host_tier_are_of_the_store():
    table, [lease], load = loading()
    load.tree.finish_load(load.nodes, 2)
    table.load_ended(lease, load, 2, 1, owner=True)
    assert (lease.host_hits, lease.storage_hits) == (1, 1)


def test_a_sharer_gets_new_blocks_in_place_of_targets_that_were_not_loaded():
    table, [owner, sharer], load = loading(sharers=1)
    load.tree.finish_load(load.nodes, 1)
    table.load_ended(owner, load, 1, 0, owner=True)
    table.load_ended(sharer, load, 1, 0, owner=False)
    shared, own = sharer.path.blocks()
    assert shared == load.blocks[0]
    assert own not in load.blocks
    assert own >= 0


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


def test_a_restarted_index_refuses_earlier_leases_as_lost():
    index = block_index()
    table = lease_table(index, restarted=True)
    [error] = answers(effects_of(table.find, 1, Request()))
    assert "lost when prefix_index was restarted" in str(error)


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


def test_layers_are_answered_as_they_arrive():
    table, [lease], load = loading()
    first, second = Request(), Request()
    assert effects_of(table.wait, LayerReady(1, 0), first) == []
    assert effects_of(table.wait, LayerReady(1, 1), second) == []
    load.layers, load.arriving = 1, 1
    [answer] = effects_of(table.answer_layers, lease)
    assert (answer.envelope, answer.value.cached_tokens) == (first, BLOCK)
    load.tree.finish_load(load.nodes, 2)
    [answer] = effects_of(table.load_ended, lease, load, 2, 2, owner=True)
    assert (answer.envelope, answer.value.cached_tokens) == (second, 2 * BLOCK)
    assert answer.value.blocks is None


def test_only_so_many_preempted_requests_are_remembered(monkeypatch):
    monkeypatch.setattr(module, "PREEMPTED_REQUESTS", 2)
    index = block_index()
    table = lease_table(index)
    for number in range(3):
        table.remember_preempted(f"r{number}")
    for number in range(3):
        table.grant(new_lease(index, number, 1, first=100 * number))
    assert (table.requests, table.resumed) == (1, 2)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["grant", "end", "preempt"]))))
def test_the_counters_agree_with_a_model(steps):
    index = block_index(64)
    table = lease_table(index)
    granted: dict[int, LeaseState] = {}
    preempted: set[int] = set()
    requests = resumed = 0
    for number, step in steps:
        if step == "grant" and number not in granted:
            granted[number] = new_lease(index, number, 2, first=10 * number)
            table.grant(granted[number])
            resumed += number in preempted
            requests += number not in preempted
            preempted.discard(number)
        elif step != "grant" and number in granted:
            lease = granted.pop(number)
            assert effects_of(table.remove, lease) == []
            index.pool.give(index.tree.release(lease.path))
            if step == "preempt":
                table.remember_preempted(lease.request_id)
                preempted.add(number)
        assert {lease.id for lease in table} == set(granted)
        assert (table.requests, table.resumed) == (requests, resumed)
        assert table.looked_up == 2 * requests
