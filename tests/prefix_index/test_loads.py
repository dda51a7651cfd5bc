"""LoadTable: begin, join, place, cancel, finish, overdue."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvactors.actor import Message
from kvactors.actor.sliced import finish
from kvactors.cpu_evictor.messages import Cancel, DropHostCopies, KeepHostCopies, LayersLoaded, Load
from kvactors.flush_notifier.messages import BlocksAdded
from kvactors.native import Path
from kvactors.prefix_index.actor import PrefixIndex
from kvactors.prefix_index.leases import LeaseState
from kvactors.prefix_index.loads import LATE_LOAD_S
from kvactors.prefix_index.messages import Ack, Extend, LayerReady, LoadDeadline, Truncate
from kvactors.prefix_index.tree import Segment
from kvactors.types import HASH_BYTES, split_hashes
from tests.prefix_index.objects import (
    BLOCK,
    Request,
    StartTimer,
    answers,
    core,
    effects_of,
    messages,
    new_lease,
    path,
)


def segments(*lengths: int) -> list[Segment]:
    """Consecutive segments that are not being loaded."""
    found, start = [], 0
    for length in lengths:
        found.append(Segment(start, start + length, None))
        start += length
    return found


def begun(state: PrefixIndex, *lengths: int) -> tuple[LeaseState, list[int]]:
    """A granted lease that loads segments of these lengths, and their operations."""
    lease = new_lease(state.index, 1, sum(lengths))
    actions = effects_of(state.loads.begin, lease, segments(*lengths), placed=True)
    state.leases.grant(lease)
    return lease, [one.op for one in messages(actions) if isinstance(one, Load)]


def test_a_load_has_a_timer_and_every_hash_from_the_root_on():
    state = core(fetch=True)
    lease = new_lease(state.index, 1, 3)
    actions = effects_of(state.loads.begin, lease, segments(1, 2), placed=True)
    [first, load1, second, load2] = actions
    assert isinstance(first, StartTimer)
    assert isinstance(second, StartTimer)
    assert (first.deadline, first.grace) == (lease.deadline, LATE_LOAD_S)
    assert isinstance(second.message, LoadDeadline)
    assert second.message.op == load2.op
    assert [(load.start, load.blocks) for load in (load1, load2)] == [
        (0, tuple(lease.path.blocks(0, 1))),
        (1, tuple(lease.path.blocks(1, 3))),
    ]
    assert load2.hashes == lease.path.hashes(0, 3)
    assert set(state.index.loading) == set(lease.path.blocks())


@pytest.mark.parametrize("direct", [True, False])
def test_a_load_that_a_store_writes_to_the_device_has_no_time_past_the_deadline(direct):
    """Its answer is the return of the store's call, which comes late or not at all."""
    root = new_lease(core().index, 1, 1).path.root if direct else b"other".ljust(HASH_BYTES)
    state = core(fetch=True, token_root=root)
    timer, _ = effects_of(state.loads.begin, new_lease(state.index, 1, 2), segments(2), placed=True)
    assert isinstance(timer, StartTimer)
    assert timer.grace == (0.0 if direct else LATE_LOAD_S)


def test_a_result_waits_for_those_of_the_loads_above():
    state = core()
    lease, (first, second) = begun(state, 1, 1)
    assert effects_of(state.loads.finish, second, 1, 1) == []
    assert lease.path.num_committed == 0
    actions = effects_of(state.loads.finish, first, 1, 1)
    assert lease.path.num_committed == 2
    kinds = [type(one) for one in messages(actions)]
    assert kinds == [BlocksAdded, DropHostCopies] * 2, (
        "announced before the host tier may drop its copy"
    )
    assert not state.loads
    assert not state.index.loading


@pytest.mark.parametrize("kept", [0, BLOCK, BLOCK + 1])
def test_a_late_load_is_announced_by_the_tokens_that_it_was_loaded_for(kept):
    """Its lease has continued in other blocks, and was truncated and extended since."""
    state = core(6)
    lease, (op,) = begun(state, 2)
    loaded = lease.path.hashes(0, 2)
    state.loads.overdue(op)
    actions = effects_of(state.truncate, Truncate(1, 2 * BLOCK, kept), Request())
    assert [type(one) for one in answers(actions)] == [Ack]
    added = path(2, first=7)
    answers(effects_of(state.grow, Extend(1, kept, added), Request()))
    actions = effects_of(state.loads.finish, op, 2, 2)
    [announced] = [one for one in messages(actions) if isinstance(one, BlocksAdded)]
    [dropped] = [one for one in messages(actions) if isinstance(one, DropHostCopies)]
    assert announced.hashes == dropped.hashes == loaded
    assert lease.path.num_tokens == kept + 2 * BLOCK


def test_a_load_that_stalls_again_and_is_then_late_is_overdue_once():
    state = core(4)
    _, (op,) = begun(state, 2)
    assert state.loads.overdue(op)
    assert not state.loads.overdue(op)
    assert not state.loads.overdue(op)
    assert state.loads.overdue_loads == 1


@pytest.mark.parametrize("overdue", [True, False])
def test_the_host_keeps_blocks_that_the_device_did_not_take(overdue):
    """Blocks below a load that did not complete arrive: they are nowhere if the host drops them."""
    state = core()
    lease, (first, second) = begun(state, 2, 2)
    if overdue:
        state.loads.overdue(first)
        actions = effects_of(state.loads.finish, second, 2, 2)
        actions += effects_of(state.loads.finish, first, 0, 0)
    else:
        state.loads.finish(second, 2, 2)
        actions = effects_of(state.loads.finish, first, 1, 1)
    discarded = [one.hashes for one in messages(actions) if isinstance(one, DropHostCopies)]
    kept = [one.hashes for one in messages(actions) if isinstance(one, KeepHostCopies)]
    assert discarded == ([] if overdue else [lease.path.hashes(0, 1)])
    assert kept == [lease.path.hashes(2, 4)]


def test_the_host_keeps_the_loaded_blocks_of_a_path_that_was_cleared():
    """The host may have them by another request, computed since. They would wait for an answer."""
    state = core()
    lease, (op,) = begun(state, 2)
    state.index.retire()
    actions = effects_of(state.loads.finish, op, 2, 2)
    assert not [one for one in messages(actions) if isinstance(one, DropHostCopies)]
    kept = [one.hashes for one in messages(actions) if isinstance(one, KeepHostCopies)]
    assert kept == [lease.path.hashes(0, 2)]


def test_loads_sent_ahead_are_cancelled_where_another_request_was_faster():
    state = core()
    lease = new_lease(state.index, 1, 2)
    state.loads.begin(lease, segments(1, 1), placed=False)
    lease.expected_blocks = 2
    other = new_lease(state.index, 2, 1)
    state.index.tree.commit(other.path, 1)
    actions = effects_of(state.loads.place, lease)
    assert [type(one) for one in actions] == [Cancel, Cancel]
    assert (len(state.loads), lease.loads, lease.expected_blocks) == (0, [], 0)


def parted(state, shared: int) -> tuple[LeaseState, LeaseState]:
    """A lease that loads 4 blocks, and one that joins it for `shared` of them and loads 2 others
    that follow these on its path."""
    owner, _ = begun(state, 4)
    tokens = [*range(shared * BLOCK), *range(900, 900 + 2 * BLOCK)]
    joined = Path(BLOCK, bytes(32))
    joined.extend(tokens)
    state.index.tree.pin(joined)
    assert len(joined.blocks()) == shared
    joined.assign(shared, state.index.take(2))
    sharer = LeaseState(2, "r2", joined, state.index.tree, 10.0, expected_blocks=shared + 2)
    [load] = owner.loads
    parts = [Segment(0, shared, load), Segment(shared, shared + 2, None)]
    state.loads.begin(sharer, parts, placed=True)
    state.leases.grant(sharer)
    return owner, sharer


@pytest.mark.parametrize("shared", [1, 3])
@pytest.mark.parametrize("own", [0, 1, 2])
def test_a_layer_counts_no_block_of_a_joined_load_beyond_the_common_path(shared, own):
    """All 4 blocks of the joined load have arrived, and `own` of the sharer's."""
    state = core()
    _, sharer = parted(state, shared)
    joined, load = sharer.loads
    state.loads.layers_loaded(LayersLoaded(joined.op, 1, 4))
    state.loads.layers_loaded(LayersLoaded(load.op, 1, own))
    [arrived] = answers(effects_of(state.leases.wait, LayerReady(2, 0), Request()))
    assert (arrived.cached_tokens, arrived.blocks) == ((shared + own) * BLOCK, None)


def test_a_layer_counts_no_block_of_a_load_that_was_given_up():
    state = core()
    _, sharer = parted(state, 1)
    joined, load = sharer.loads
    state.loads.layers_loaded(LayersLoaded(joined.op, 1, 4))
    state.loads.overdue(load.op)
    assert sharer.loads == [joined]
    [arrived] = answers(effects_of(state.leases.wait, LayerReady(2, 0), Request()))
    assert arrived.cached_tokens == BLOCK
    assert list(arrived.blocks) == sharer.path.blocks()


def test_layers_of_an_answered_load_are_ignored():
    state = core()
    lease, (first, second) = begun(state, 1, 1)
    state.loads.finish(second, 1, 0)
    assert effects_of(state.loads.layers_loaded, LayersLoaded(second, 1, 1)) == []
    assert lease.loads[1].layers == 0
    state.leases.wait(LayerReady(1, 0), Request())
    lease.loads[1].layers = 2
    lease.expected_blocks = 1
    [arrived] = answers(effects_of(state.loads.layers_loaded, LayersLoaded(first, 1, 1)))
    assert arrived.cached_tokens == BLOCK


@st.composite
def runs(draw):
    """Lengths of the loads of a lease, how much of each arrives, and in which order."""
    lengths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    good = [draw(st.integers(0, length)) for length in lengths]
    order = draw(st.permutations(range(len(lengths))))
    return lengths, good, order, draw(st.integers(0, len(lengths)))


@given(runs())
def test_results_in_any_order_agree_with_a_model(run):
    """The cached blocks are the leading ones that arrived without a gap, in any order of the
    results, and a restart of the host tier ends what is left with nothing."""
    lengths, good, order, until = run
    state = core(2 * sum(lengths))
    lease, ops = begun(state, *lengths)
    known: dict[int, int] = {}
    sent: list[Message] = []
    for which in order[:until]:
        sent += messages(effects_of(state.loads.finish, ops[which], good[which], 0))
        known[which] = good[which]
        expected = 0
        for number, length in enumerate(lengths):
            if number not in known:
                break
            expected += known[number]
            if known[number] < length:
                break
        assert lease.path.num_committed == expected
    if until < len(ops):
        sent += messages(effects_of(state.loads.host_lost))
        good = [known.get(number, 0) for number in range(len(ops))]
    expected = 0
    for number, length in enumerate(lengths):
        expected += good[number]
        if good[number] < length:
            break
    assert lease.path.num_committed == expected
    discarded = {
        key for one in sent if isinstance(one, DropHostCopies) for key in split_hashes(one.hashes)
    }
    assert discarded == set(split_hashes(lease.path.hashes(0, expected)))
    kept = [
        key for one in sent if isinstance(one, KeepHostCopies) for key in split_hashes(one.hashes)
    ]
    assert len(set(kept)) == sum(good) - expected, "the device did not take what arrived below"
    assert not discarded & set(kept)
    assert not lease.loads
    assert not state.loads
    assert not state.index.loading
    assert len(set(lease.path.blocks())) == sum(lengths)
    finish(state.index.check_steps())
