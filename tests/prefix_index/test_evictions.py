"""Evictions: copies to the host tier, drops, and blocks that are matched again."""

from __future__ import annotations

from kvactors.cpu_evictor.messages import DropHostCopies, Offload
from kvactors.flush_notifier.messages import BlocksRemoved
from kvactors.identity import PLAIN
from kvactors.prefix_index.actor import PrefixIndex
from kvactors.types import Reason, split_hashes
from tests.prefix_index.objects import cache, core, effects_of, messages


def gone(actions) -> list[tuple[int, Reason]]:
    return [
        (len(split_hashes(one.hashes)), one.reason)
        for one in actions
        if isinstance(one, BlocksRemoved)
    ]


def started(state: PrefixIndex, wanted: int) -> Offload:
    [offload] = effects_of(state.evictions.evict, wanted)
    assert isinstance(offload, Offload)
    return offload


def test_blocks_are_free_after_their_copies_only():
    state = core(4)
    cache(state, 4)
    offload = started(state, 3)
    assert (state.index.free, state.index.coming, len(state.evictions)) == (0, 3, 1)
    actions = effects_of(state.evictions.finish, offload.op, b"\1\1\0")
    assert gone(actions) == [(2, Reason.DEVICE_EVICTION), (1, Reason.DEVICE_DROP)]
    assert (state.index.free, state.index.coming, len(state.evictions)) == (3, 0, 0)
    assert not state.evictions.finish(offload.op, b"\1\1\0")


def test_without_an_exclusive_host_tier_blocks_are_free_at_once():
    state = core(4, exclusive=False)
    made = cache(state, 4)
    state.index.tree.host_blocks_added(made.hashes(3, 4))
    actions = effects_of(state.evictions.evict, 2)
    assert (state.index.free, len(state.evictions)) == (2, 0)
    assert gone(actions) == [(1, Reason.DEVICE_EVICTION), (1, Reason.DEVICE_DROP)]


def test_a_block_that_is_matched_again_stays_and_the_host_drops_its_copy():
    state = core(4)
    made = cache(state, 4)
    offload = started(state, 2)
    state.set_root(made, PLAIN)
    assert state.index.tree.pin(made, 3)[0] == 3
    actions = effects_of(state.evictions.finish, offload.op, b"\1\1")
    assert gone(actions) == [(1, Reason.DEVICE_EVICTION)]
    [discard] = [one for one in messages(actions) if isinstance(one, DropHostCopies)]
    assert discard.hashes == made.hashes(2, 3)
    assert (state.evictions.evicted, state.evictions.rescued) == (2, 1)


def test_a_drop_frees_more_than_a_part_in_one_turn():
    state = core(8, part=2)
    cache(state, 8)
    assert gone(effects_of(state.evictions.drop, 5)) == [(5, Reason.DEVICE_DROP)]
    assert state.index.free == 5
