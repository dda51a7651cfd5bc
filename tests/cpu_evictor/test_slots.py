"""Host slots: which are free, and which blocks are victims. Orders of calls are drawn in test_load and
test_offload, which check the table after them, and in test_share_order against a model."""

from __future__ import annotations

import pytest

from kvactors.cpu_evictor.slots import HostTier, SlotState
from tests.cpu_evictor.helpers import ROOT, path

HASHES = path(4)


@pytest.mark.parametrize(("capacity", "num_slots"), [(-1, 4), (5, 4)])
def test_a_capacity_has_to_fit_the_slots(capacity, num_slots):
    with pytest.raises(ValueError, match=f"{capacity} blocks in {num_slots} slots"):
        HostTier(capacity, num_slots)


def test_blocks_in_transit_count_as_resident_until_they_are_reported_gone():
    tier = HostTier(1, 2)
    block = tier.add(HASHES[0], ROOT, SlotState.TRANSIT)
    assert tier.hashes() == []
    tier.land([block], frozenset())
    assert tier.hashes() == []
    block.announced = True
    assert tier.hashes() == [HASHES[0]]


def test_a_parent_is_a_victim_only_after_its_children():
    tier = HostTier(3, 3)
    parent, child, grandchild = (
        tier.add(HASHES[i], HASHES[i - 1] if i else ROOT, SlotState.RESIDENT) for i in range(3)
    )
    tier.land([parent, child, grandchild], frozenset())
    assert tier.victims(2) == [grandchild, child], "older parents keep their slots without end"
    assert tier.victims(3, [HASHES[1]]) == [grandchild]
    tier.touch([HASHES[2], HASHES[1], HASHES[0]])
    assert tier.victims(3) == [grandchild, child, parent]
    assert tier.victims(3, [HASHES[2]]) == []


@pytest.mark.parametrize("state", SlotState)
def test_a_slot_is_free_once_no_call_uses_it(state):
    """A call of an earlier incarnation, or the last pin of a block that was dropped."""
    in_use = {1, 2}
    tier = HostTier(2, 3, in_use)
    assert tier.free == 1
    block = tier.add(HASHES[0], ROOT, state)
    tier.pin(block)
    tier.drop(block)
    tier.unpin(block)
    assert (tier.free, tier.pinned, tier.blocks) == (0, 1, {})
    in_use.add(block.slot)
    tier.unpin(block)
    assert (tier.free, tier.pinned, tier.resident) == (0, 0, 0)
    in_use.clear()
    assert tier.free == 3
    tier.check()


def test_slots_are_neither_given_nor_taken_back_twice():
    tier = HostTier(2, 2)
    block = tier.add(HASHES[0], ROOT, SlotState.RESIDENT)
    with pytest.raises(RuntimeError, match="second slot"):
        tier.add(HASHES[0], ROOT, SlotState.RESIDENT)
    tier.land([block], frozenset())
    with pytest.raises(RuntimeError, match="unused slot"):
        tier.unpin(block)
    tier.check()


def test_a_failed_copy_leaves_no_block_and_others_are_readable_as_a_run():
    tier = HostTier(4, 4)
    blocks = [tier.add(one, ROOT, SlotState.RESIDENT) for one in HASHES]
    assert (tier.readable_run(HASHES), tier.hashes()) == ([], [])
    assert tier.land(blocks[:3], frozenset([1])) == [blocks[0], blocks[2]]
    assert tier.readable_run(HASHES) == blocks[:1]
    assert tier.readable_run(HASHES[2:]) == blocks[2:3], "the last is on its way"
    assert [one.hash for one in tier.candidates()] == [HASHES[0], *HASHES[2:]]
    assert tier.victims(4) == [blocks[0], blocks[2]]
    tier.check()


def test_a_block_on_the_device_waits_until_it_is_dropped_or_stays():
    tier = HostTier(1, 2)
    blocks = [tier.add(one, ROOT, SlotState.PROMOTING) for one in HASHES[:2]]
    tier.land(blocks, frozenset())
    for block in (*blocks, *blocks):
        tier.mark_on_device(block)
    assert (tier.on_device, tier.in_transit) == (2, 0)
    tier.move(blocks[0], SlotState.RESIDENT)
    tier.drop(blocks[1])
    tier.mark_on_device(blocks[1])
    assert (tier.on_device, tier.in_transit) == (0, 0)
    tier.check()
