"""One finished request, without a loop: copies that the host keeps and blocks that are written."""

from __future__ import annotations

import pytest

from kvactors.cpu_evictor.messages import Save, Saved
from kvactors.cpu_evictor.save import SaveJob
from kvactors.data_plane.base import Direction
from kvactors.gpu_swapper.messages import Copied, Copy
from kvactors.storage.messages import DeviceSaved, Probed, Write
from kvactors.types import join_hashes
from tests.cpu_evictor.helpers import ROOT, Host, Movements, names, path, sent
from tests.support.effects import Started


def save(host: Host, hashes: list[bytes], positions: range | None = None, **fields) -> SaveJob:
    """A finished request in device blocks 100, 101, .. of which some positions are to be saved."""
    given = {"keep": not host.memory.exclusive, **fields}
    message = Save(
        5,
        ROOT,
        join_hashes(hashes),
        tuple(range(100, 100 + len(hashes))),
        save=tuple(range(len(hashes)) if positions is None else positions),
        **given,
    )
    return SaveJob(host.memory, message)


def test_the_store_is_asked_and_the_rest_is_written():
    host, keys = Host(), path(3)
    probe, timer = host.run(save(host, keys).begin)
    assert probe.keys == join_hashes(keys)
    assert isinstance(timer, Started)
    assert timer.delay == 1.0
    actions = host.end(Probed(probe.op, 1))
    assert names(actions) == ["Copy"]
    (copy,) = sent(actions)
    assert (copy.direction, copy.blocks) == (Direction.TO_HOST, (102, 101))
    actions = host.end(Copied(copy.op, ()))
    assert names(actions) == ["Write", "Saved"]
    write, answer = sent(actions)
    assert write.keys == keys[2] + keys[1], "the end first, so that the beginning is used last"
    assert (answer.op, answer.kept_mask) == (5, bytes(3))


def test_stored_blocks_are_not_copied():
    host, keys = Host(), path(3)
    (probe,) = sent(host.run(save(host, keys).begin))
    assert names(host.end(Probed(probe.op, 3))) == ["Saved"]
    host.idle()


def test_the_store_is_asked_only_about_blocks_to_save():
    host, keys = Host(), path(4)
    (probe,) = sent(host.run(save(host, keys, range(1, 3)).begin))
    assert probe.keys == join_hashes(keys[:3])


def test_a_store_that_does_not_answer_in_time_is_not_waited_for():
    host = Host(timeout_s=0.25)
    probe, timer = host.run(save(host, path(2)).begin)
    assert timer.delay == 0.25
    actions = host.run(host.memory.timed[timer.message.number].on_deadline)
    assert names(actions) == ["Saved"]
    assert host.end(Probed(probe.op, 0)) == []
    host.idle()


@pytest.mark.parametrize("what", ["cleared", "lost"])
def test_blocks_of_before_a_clear_or_of_a_lost_memory_are_not_copied(what):
    host = Host(mode="inclusive")
    (probe,) = sent(host.run(save(host, path(2)).begin))
    if what == "cleared":
        host.run(host.memory.clear)
    else:
        host.requests.generation = 1
    (answer,) = sent(host.end(Probed(probe.op, 0)))
    assert answer.kept_mask == bytes(2)
    assert host.tier.free == 8
    host.idle()


def test_an_inclusive_host_keeps_a_copy_of_the_path():
    host, keys = Host(mode="inclusive", stored=False), path(3)
    host.fill(keys[:1])
    (copy,) = sent(host.run(save(host, keys, range(0)).begin))
    assert copy.blocks == (102, 101)
    actions = host.end(Copied(copy.op, (0,)))
    assert names(actions) == ["BlocksAdded", "Saved"]
    assert sent(actions, Saved)[0].kept_mask == bytes([1, 1, 0])
    order = [block.hash for block in host.tier.candidates()]
    assert order == [keys[1], keys[0]], "a parent is younger than its children"


def test_with_copies_of_the_whole_path_all_of_it_is_offered():
    host, keys = Host(mode="inclusive"), path(3)
    (probe,) = sent(host.run(save(host, keys).begin))
    (copy,) = sent(host.end(Probed(probe.op, 2)))
    write = sent(host.end(Copied(copy.op, ())), Write)[0]
    assert write.keys == join_hashes(reversed(keys))


def test_more_blocks_than_fit_are_kept_from_the_first_on():
    host, keys = Host(slots=2, mode="inclusive", stored=False), path(4)
    (copy,) = sent(host.run(save(host, keys, range(0)).begin))
    assert copy.blocks == (101, 100)
    assert sent(host.end(Copied(copy.op, ())), Saved)[0].kept_mask == bytes([1, 1, 0, 0])


def test_blocks_without_a_slot_are_shed_if_that_is_the_setting():
    for mode, slots, transit, copied, shed in (
        ("exclusive", 0, 2, 2, 1),
        ("inclusive", 1, 1, 2, 2),
    ):
        host, keys = Host(slots, transit, mode=mode, on_full="shed"), path(5)
        (probe,) = sent(host.run(save(host, keys, range(1, 5)).begin))
        actions = host.end(Probed(probe.op, 2))
        # Positions 2 to 4 are to be written. An inclusive tier begins with position 0.
        assert host.memory.counts["shed"] == shed
        assert len(sent(actions, Copy)[0].blocks) == copied


@pytest.mark.parametrize(
    ("mode", "slots", "transit"), [("exclusive", 0, 2), ("inclusive", 1, 1), ("inclusive", 2, 0)]
)
def test_a_finish_stores_its_whole_path_through_any_number_of_slots(mode, slots, transit):
    host, keys = Host(slots, transit, mode=mode), path(9)
    moves = Movements(host)
    moves.device.update({100 + i: key for i, key in enumerate(keys)})
    moves.run(save(host, keys).begin)
    moves.complete_all()
    assert moves.store == set(keys)
    assert len(moves.of(Saved)) == 1
    assert host.memory.counts["shed"] == 0
    assert not host.timers
    host.idle()


def test_a_save_that_waits_too_long_is_answered_without_the_rest():
    host, keys = Host(slots=0, transit=2, timeout_s=0.25), path(5)
    moves = Movements(host)
    moves.device.update({100 + i: key for i, key in enumerate(keys)})
    moves.run(save(host, keys).begin)
    moves.complete()
    moves.complete()
    (timer,) = host.timers
    assert timer.delay == 0.25
    moves.run(host.memory.timed[timer.message.number].on_deadline)
    assert (host.memory.counts["shed"], len(moves.of(Saved))) == (3, 1)
    moves.complete_all()
    assert moves.store == set(keys[3:]), "the deepest blocks are written first"
    host.idle()


def test_blocks_not_written_by_this_cache_are_not_counted_as_shed():
    host, keys = Host(2, 0, mode="inclusive", device_store=True), path(4)
    host.run(save(host, keys).begin)
    assert host.memory.counts["shed"] == 0


def test_device_blocks_are_held_until_a_device_store_has_read_them():
    host, keys = Host(slots=0, device_store=True), path(3)
    actions = host.run(save(host, keys, range(1, 3), tokens=b"tokens").begin)
    (write,) = sent(actions)
    assert (write.tokens, write.start, write.blocks) == (b"tokens", 1, (101, 102))
    actions = host.end(DeviceSaved(write.op, 1))
    assert names(actions) == ["Saved"]
    assert (host.memory.counts["written"], host.memory.counts["write_failures"]) == (1, 1)


def test_a_copy_evicted_during_a_save_to_a_device_store_is_not_called_kept():
    host, keys = Host(mode="inclusive", device_store=True), path(2)
    (copy,) = sent(host.run(save(host, keys).begin))
    (write,) = sent(host.end(Copied(copy.op, ())))[1:]
    host.run(host.memory.evict, host.tier.victims(1))
    (answer,) = sent(host.end(DeviceSaved(write.op, 2)))
    assert answer.kept_mask == bytes([1, 0])
