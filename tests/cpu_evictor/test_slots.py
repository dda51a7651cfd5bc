"""Host slots against a plain model: any order of calls, with checks after each."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvactors.cpu_evictor.slots import HostBlock, HostTier, SlotState
from tests.cpu_evictor.helpers import hash_of, is_resident

CAPACITY, SLOTS = 4, 7
HASHES = [hash_of(number) for number in range(10)]


class SlotsMachine(RuleBasedStateMachine):
    """`order`: hashes of residents, least recently used first. `blocks`: all that are not dropped.
    `pinned`: blocks with pins, dropped or not."""

    def __init__(self) -> None:
        super().__init__()
        self.in_use = {5, 6}
        self.tier = HostTier(CAPACITY, SLOTS, self.in_use)
        self.order: list[bytes] = []
        self.blocks: dict[bytes, HostBlock] = {}
        self.pins: dict[HostBlock, int] = {}

    def free(self) -> int:
        held = {block.slot for block in [*self.blocks.values(), *self.pins]}
        return SLOTS - len(held | self.in_use)

    def some(self, data: st.DataObject) -> HostBlock:
        return self.blocks[data.draw(st.sampled_from(sorted(self.blocks)))]

    @precondition(lambda self: self.free() > 0 and len(self.blocks) < len(HASHES))
    @rule(data=st.data(), state=st.sampled_from(SlotState))
    def add(self, data, state):
        block_hash = data.draw(st.sampled_from([h for h in HASHES if h not in self.blocks]))
        parent = data.draw(st.sampled_from([bytes(32), *HASHES]))
        if state is SlotState.RESIDENT and len(self.order) == CAPACITY:
            state = SlotState.TRANSIT
        taken = {block.slot for block in [*self.blocks.values(), *self.pins]} | self.in_use
        block = self.tier.add(block_hash, parent, state)
        assert block.slot not in taken, "a slot in use is handed out"
        assert block.arriving
        self.blocks[block_hash] = block
        self.pins[block] = 1
        if state is SlotState.RESIDENT:
            self.order.append(block_hash)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def a_block_has_one_slot(self, data):
        with pytest.raises(RuntimeError):
            self.tier.add(self.some(data).hash, bytes(32), SlotState.TRANSIT)

    @rule(data=st.data())
    def land(self, data):
        arriving = [block for block in self.pins if block.arriving]
        chosen = data.draw(st.lists(st.sampled_from(arriving), unique=True)) if arriving else []
        failed = frozenset(
            i for i in range(len(chosen)) if data.draw(st.booleans(), label=f"{i} failed")
        )
        expected = [
            block for i, block in enumerate(chosen) if not block.dropped and i not in failed
        ]
        assert self.tier.land(chosen, failed) == expected
        for i, block in enumerate(chosen):
            assert not block.arriving
            if i in failed and self.blocks.get(block.hash) is block:
                self.forget(block)
            self.unpinned(block)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def pin(self, data):
        block = self.some(data)
        self.tier.pin(block)
        self.pins[block] = self.pins.get(block, 0) + 1

    @rule(data=st.data())
    def unpin(self, data):
        pinned = [block for block in self.pins if not block.arriving or self.pins[block] > 1]
        if pinned:
            block = data.draw(st.sampled_from(pinned))
            self.tier.unpin(block)
            self.unpinned(block)

    @rule(data=st.data())
    def unused_slots_cannot_be_given_back(self, data):
        unused = [block for block in self.blocks.values() if block not in self.pins]
        if unused:
            with pytest.raises(RuntimeError):
                self.tier.unpin(data.draw(st.sampled_from(unused)))

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), state=st.sampled_from(SlotState))
    def move(self, data, state):
        block = self.some(data)
        was = block.state
        if state is SlotState.RESIDENT and was is not state and len(self.order) == CAPACITY:
            return
        self.tier.move(block, state)
        if was is SlotState.RESIDENT and state is not was:
            self.order.remove(block.hash)
        elif state is SlotState.RESIDENT and state is not was:
            self.order.append(block.hash)
            assert not block.on_device

    @rule(hashes=st.lists(st.sampled_from(HASHES)))
    def touch(self, hashes):
        self.tier.touch(hashes)
        for block_hash in hashes:
            if block_hash in self.order:
                self.order.remove(block_hash)
                self.order.append(block_hash)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def mark_on_device(self, data):
        block = self.some(data)
        if block.state is SlotState.PROMOTING:
            self.tier.mark_on_device(block)
            assert block.on_device

    @precondition(lambda self: len(self.blocks) > 2)
    @rule(data=st.data())
    def drop(self, data):
        block = self.some(data)
        self.tier.drop(block)
        self.forget(block)
        self.tier.drop(block)  # the second time nothing happens

    @precondition(lambda self: len(self.blocks) > 4)
    @rule()
    def clear(self):
        self.tier.clear()
        for block in list(self.blocks.values()):
            self.forget(block)

    @precondition(lambda self: self.in_use)
    @rule(data=st.data())
    def a_call_of_an_earlier_incarnation_ends(self, data):
        self.in_use.remove(data.draw(st.sampled_from(sorted(self.in_use))))

    @rule(count=st.integers(-1, 6), protected=st.lists(st.sampled_from(HASHES), max_size=3))
    def victims(self, count, protected):
        expected: list[bytes] = []
        passed: set[bytes] = set()  # blocks that are older than their children
        for candidate in self.order:
            one = candidate
            while self.blocks[one] not in self.pins and one not in (*protected, *expected):
                children = {h for h in self.order if self.blocks[h].parent == one}
                if children - {*expected}:
                    passed.add(one)
                    break
                expected.append(one)
                parent = self.blocks[one].parent
                one = parent if parent in passed else one
        chosen = self.tier.victims(count, protected)
        assert [block.hash for block in chosen] == expected[: max(0, count)]

    def forget(self, block: HostBlock) -> None:
        del self.blocks[block.hash]
        if block.hash in self.order:
            self.order.remove(block.hash)
        assert block.dropped

    def unpinned(self, block: HostBlock) -> None:
        self.pins[block] -= 1
        if not self.pins[block]:
            del self.pins[block]

    @invariant()
    def agrees_with_the_model(self):
        tier = self.tier
        tier.check()
        assert tier.free == self.free()
        assert tier.resident == len(self.order)
        assert tier.pinned == len(self.pins)
        assert [block.hash for block in tier.candidates()] == self.order
        waiting = sum(block.on_device for block in self.blocks.values())
        assert tier.on_device == waiting
        assert tier.in_transit == len(self.blocks) - len(self.order) - waiting
        for block_hash in HASHES:
            block = self.blocks.get(block_hash)
            readable = block if block is not None and not block.arriving else None
            assert tier.readable(block_hash) is readable
            assert is_resident(tier, block_hash) == (block_hash in self.order)
        for start in range(0, len(HASHES), 3):
            blocks = [tier.readable(block_hash) for block_hash in HASHES[start:]]
            run = blocks[: blocks.index(None)] if None in blocks else blocks
            assert tier.readable_run(HASHES[start:]) == run
        landed = {h for h in self.order if not self.blocks[h].arriving}
        assert set(tier.hashes()) == landed


TestSlots = SlotsMachine.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(("capacity", "num_slots"), [(-1, 4), (5, 4)])
def test_a_capacity_has_to_fit_the_slots(capacity, num_slots):
    with pytest.raises(ValueError, match=f"{capacity} blocks in {num_slots} slots"):
        HostTier(capacity, num_slots)


def test_blocks_in_transit_count_as_resident_until_they_are_reported_gone():
    tier = HostTier(1, 2)
    block = tier.add(HASHES[0], bytes(32), SlotState.TRANSIT)
    assert tier.hashes() == []
    tier.land([block], frozenset())
    assert tier.hashes() == []
    block.announced = True
    assert tier.hashes() == [HASHES[0]]


def test_a_parent_is_a_victim_only_after_its_children():
    tier = HostTier(3, 3)
    parent, child, grandchild = (
        tier.add(HASHES[i], HASHES[i - 1] if i else bytes(32), SlotState.RESIDENT) for i in range(3)
    )
    tier.land([parent, child, grandchild], frozenset())
    assert tier.victims(2) == [grandchild, child], "older parents keep their slots without end"
    assert tier.victims(3, [HASHES[1]]) == [grandchild]
    tier.touch([HASHES[2], HASHES[1], HASHES[0]])
    assert tier.victims(3) == [grandchild, child, parent]
    assert tier.victims(3, [HASHES[2]]) == []
