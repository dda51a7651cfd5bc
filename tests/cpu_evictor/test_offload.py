"""One offload, without a loop: which evicted device blocks the host keeps."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvactors.cpu_evictor.messages import Offload, Offloaded
from kvactors.cpu_evictor.offload import OffloadJob
from kvactors.cpu_evictor.slots import SlotState
from kvactors.data_plane.base import Direction
from kvactors.flush_notifier.messages import BlocksAdded
from kvactors.gpu_swapper.messages import Copied, Copy
from kvactors.types import join_hashes, split_hashes
from tests.cpu_evictor.helpers import ROOT, Host, Movements, is_resident, names, path, sent


def offload(host: Host, hashes: list[bytes], **fields) -> OffloadJob:
    """Device blocks 100, 101, .. of a path, evicted from its last block on."""
    order = list(reversed(range(len(hashes))))
    message = Offload(
        3,
        join_hashes(hashes[i] for i in order),
        join_hashes(hashes[i - 1] if i else ROOT for i in order),
        tuple(100 + i for i in order),
        **fields,
    )
    return OffloadJob(host.memory, message)


def test_evicted_blocks_are_copied_and_announced():
    host, keys = Host(), path(3)
    (copy,) = sent(host.run(offload(host, keys).begin))
    assert (copy.direction, copy.blocks) == (Direction.TO_HOST, (102, 101, 100))
    actions = host.end(Copied(copy.op, ()))
    assert names(actions) == ["BlocksAdded", "Offloaded"]
    (answer,) = sent(actions, Offloaded)
    assert (answer.op, answer.kept_mask) == (3, bytes([1, 1, 1]))
    assert host.memory.counts["offloaded"] == 3
    host.idle()


def test_blocks_that_the_host_has_are_not_copied_again():
    host, keys = Host(mode="inclusive"), path(2)
    host.fill(keys)
    assert names(host.run(offload(host, keys).begin)) == ["Offloaded"]
    host.idle()


def test_blocks_of_another_memory_generation_are_not_kept():
    host = Host()
    (answer,) = sent(host.run(offload(host, path(2), memory_generation=1).begin))
    assert answer.kept_mask == bytes(2)
    host.idle()


def test_of_more_blocks_than_fit_the_last_used_are_kept():
    host, keys = Host(slots=2, policy="none"), path(3)
    (copy,) = sent(host.run(offload(host, keys).begin))
    assert copy.blocks == (101, 100)
    (answer,) = sent(host.end(Copied(copy.op, ())), Offloaded)
    assert answer.kept_mask == bytes([0, 1, 1])


def test_with_write_back_the_others_pass_through_to_storage_and_are_announced():
    host, keys = Host(slots=2, policy="write_back"), path(3)
    (copy,) = sent(host.run(offload(host, keys).begin))
    assert copy.blocks == (102, 101, 100)
    actions = host.end(Copied(copy.op, ()))
    assert names(actions) == ["BlocksAdded", "Write", "Offloaded"]
    gained, write, answer = sent(actions)
    assert set(split_hashes(gained.hashes)) == set(keys), "otherwise the first would be nowhere"
    assert (write.keys, answer.kept_mask) == (keys[2], bytes([0, 1, 1]))


def test_with_write_back_blocks_that_find_no_slot_are_shed_if_that_is_the_setting():
    host, keys = Host(slots=2, transit=1, policy="write_back", on_full="shed"), path(5)
    (copy,) = sent(host.run(offload(host, keys).begin))
    assert copy.blocks == (102, 101, 100)
    assert host.memory.counts["shed"] == 2


def test_with_write_back_blocks_wait_for_the_slots_of_earlier_writes():
    host, keys = Host(slots=2, transit=1, policy="write_back"), path(7)
    moves = Movements(host)
    moves.device.update({100 + i: key for i, key in enumerate(keys)})
    moves.run(offload(host, keys).begin)
    assert [len(copy.blocks) for copy in moves.of(Copy)] == [3]
    assert not moves.of(Offloaded)
    moves.complete_all()
    (answer,) = moves.of(Offloaded)
    assert moves.store == set(keys[2:]), "the oldest five pass through"
    assert answer.kept_mask == bytes([0, 0, 0, 0, 0, 1, 1])
    assert host.memory.counts["shed"] == 0
    assert not host.timers
    host.idle()


def test_an_eviction_waits_for_slots_as_long_as_is_set_and_the_next_ones_not_at_all():
    host = Host(slots=0, transit=4, policy="write_back", on_full_wait_s=0.5)
    moves, keys = Movements(host), path(6)
    moves.device.update({100 + i: key for i, key in enumerate(keys)})
    moves.run(offload(host, keys).begin)
    moves.complete()  # the copy: its write holds all slots
    (timer,) = host.timers
    assert timer.delay == 0.5
    moves.run(host.memory.timed[timer.message.number].on_deadline)
    assert host.memory.counts["shed"] == 2
    assert len(moves.of(Offloaded)) == 1
    moves.run(offload(host, path(2, family=1)).begin)
    assert host.memory.counts["shed"] == 4
    assert len(moves.of(Offloaded)) == 2, "the store is behind"
    moves.complete_all()
    moves.device.update({100 + i: key for i, key in enumerate(path(5, family=2))})
    moves.run(offload(host, path(5, family=2)).begin)
    moves.complete_all()
    assert host.memory.counts["shed"] == 4, "the store has caught up"
    host.idle()


def test_blocks_of_before_a_clear_take_no_slots_after_it():
    host, keys = Host(slots=0, transit=2, policy="write_back"), path(4)
    moves = Movements(host)
    moves.device.update({100 + i: key for i, key in enumerate(keys)})
    moves.run(offload(host, keys).begin)
    moves.run(host.memory.clear)
    moves.complete_all()
    assert len(moves.of(Copy)) == 1
    assert len(moves.of(Offloaded)) == 1
    host.idle()


def test_a_block_that_is_being_written_back_becomes_resident_and_is_announced_again():
    host, keys = Host(slots=2, policy="write_back"), path(1)
    host.fill(keys)
    host.run(host.memory.evict, host.tier.victims(1))
    host.tier.blocks[keys[0]].announced = False
    actions = host.run(offload(host, keys).begin)
    assert names(actions) == ["BlocksAdded", "Offloaded"]
    assert is_resident(host.tier, keys[0])


def test_a_block_evicted_during_the_copy_is_not_kept():
    host, old, new = Host(slots=2, policy="none"), path(1, family=1), path(1)
    host.fill(old)
    job = offload(host, old + new)
    (copy,) = sent(host.run(job.begin))
    host.run(host.memory.evict, [host.tier.blocks[old[0]]])
    (answer,) = sent(host.end(Copied(copy.op, ())), Offloaded)
    assert answer.kept_mask == bytes([1, 0])


@settings(max_examples=200, deadline=None)
@given(
    evictions=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 5), st.lists(st.integers(0, 4), max_size=2)),
        min_size=1,
        max_size=6,
    ),
    mode=st.sampled_from(["exclusive", "inclusive"]),
    policy=st.sampled_from(["none", "write_back"]),
    slots=st.integers(0, 4),
    transit=st.integers(1, 3),
    at_once=st.booleans(),
)
def test_any_order_of_offloads(evictions, mode, policy, slots, transit, at_once):
    """Blocks that are called kept are resident, slots hold the right bytes, none stays in use.
    Under write_back every block is on the host or stored at the end, or counted."""
    host = Host(slots, transit, mode=mode, policy=policy)
    moves = Movements(host)
    for begun, (family, length, failed) in enumerate(evictions, 1):
        keys = path(length, family)
        moves.device.update({100 + i: key for i, key in enumerate(keys)})
        moves.run(offload(host, keys).begin)
        while moves.open and not (at_once and len(moves.of(Offloaded)) == begun):
            kinds = [isinstance(one, Copy) for one in moves.open]
            number = kinds.index(True) if any(kinds) else 0
            moves.complete(number, failed)
            moves.host.tier.check()
        answer = moves.of(Offloaded)[-1]
        kept = [key for key, keep in zip(reversed(keys), answer.kept_mask, strict=True) if keep]
        if not at_once:
            assert {key for key in keys if is_resident(host.tier, key)} >= set(kept)
    moves.complete_all()
    assert len(moves.of(Offloaded)) == len(evictions)
    if policy == "write_back":
        counts = host.memory.counts
        given = {key for family, length, _ in evictions for key in path(length, family)}
        lost = given - set(host.tier.blocks) - moves.store
        assert len(lost) <= counts["shed"] + counts["write_failures"] + counts["copy_failures"]
    for block in host.tier.blocks.values():
        assert moves.slots[block.slot] == block.hash
        assert block.announced == (block.state is SlotState.RESIDENT)
    announced = {key for message in moves.of(BlocksAdded) for key in split_hashes(message.hashes)}
    assert set(host.tier.hashes()) <= announced
    host.idle()
