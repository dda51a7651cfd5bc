"""One load, without a loop: sources from host and storage, copies, deadlines, and the answer."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvactors.cpu_evictor.load import LoadJob
from kvactors.cpu_evictor.messages import (
    LayersLoaded,
    Load,
    Loaded,
    LoadStalled,
    Offload,
    Offloaded,
    PrefetchToHost,
)
from kvactors.cpu_evictor.offload import OffloadJob
from kvactors.cpu_evictor.save import PrefetchJob
from kvactors.data_plane.base import Direction
from kvactors.fetch_cost import TRIAL
from kvactors.flush_notifier.messages import BlocksAdded
from kvactors.gpu_swapper.messages import Copied, Copy, CopyProgress
from kvactors.storage.messages import (
    DeviceFetched,
    FetchDevice,
    Outcome,
    Probed,
    Read,
    ReadDone,
    Write,
    Written,
)
from kvactors.types import join_hashes
from tests.cpu_evictor.helpers import ROOT, Host, Movements, names, path, sent
from tests.cpu_evictor.test_offload import offload
from tests.support.effects import Started


def test_blocks_of_the_host_are_copied_and_leave_an_exclusive_tier():
    host, keys = Host(), path(3)
    host.fill(keys)
    actions = host.run(host.load(keys).begin)
    (copy,) = sent(actions)
    assert (copy.direction, copy.blocks) == (Direction.TO_DEVICE, (100, 101, 102))
    assert copy.slots == tuple(host.tier.blocks[key].slot for key in keys)
    assert host.tier.resident == 0
    actions = host.end(Copied(copy.op, ()))
    (loaded,) = sent(actions)
    assert (loaded.op, loaded.num_loaded, loaded.from_host) == (7, 3, 3)
    assert (host.tier.on_device, host.tier.in_transit) == (3, 0), "they wait for the index alone"
    assert names(host.run(host.memory.drop_host_copies, join_hashes(keys))) == [
        "BlocksRemoved",
        "HostBlocksRemoved",
    ]
    assert host.tier.free == 8
    host.idle()


def test_blocks_of_an_inclusive_host_stay():
    host, keys = Host(mode="inclusive"), path(3)
    host.fill(keys)
    (copy,) = sent(host.run(host.load(keys, start=1).begin))
    assert copy.blocks == (100, 101)
    (loaded,) = sent(host.end(Copied(copy.op, ())))
    assert loaded.num_loaded == 2
    assert host.tier.resident == 3
    assert host.run(host.memory.drop_host_copies, join_hashes(keys)) == []
    host.idle()


@pytest.mark.parametrize("cancelled", [True, False])
def test_blocks_evicted_for_lack_of_capacity_are_written_back(cancelled):
    """A load took them out of the capacity, and its end without them is an eviction."""
    host, keys = Host(slots=2, policy="write_back"), path(2)
    host.fill(keys)
    job = host.load(keys, blocks=() if cancelled else (100, 101), fetch=False)
    copies = sent(host.run(job.begin), Copy)
    host.fill(path(2, family=1))
    actions = host.run(job.cancel) if cancelled else host.end(Copied(copies[0].op, (0, 1)))
    assert names(actions)[:2] == ["HostBlocksRemoved", "Write"]
    (write,) = sent(actions, Write)
    assert write.keys == keys[1] + keys[0], "one message, the deepest block first"
    assert host.memory.counts["evicted"] == 2
    assert names(host.end(Written(write.op, bytes(2)))) == ["BlocksRemoved"]
    host.idle()


def test_a_load_of_another_memory_generation_is_a_miss():
    host = Host()
    host.fill(path(2))
    actions = host.run(host.load(path(2), memory_generation=1).begin)
    assert [(one.op, one.num_loaded) for one in sent(actions)] == [(7, 0)]
    host.idle()


@pytest.mark.parametrize("mode", ["exclusive", "inclusive"])
def test_blocks_missing_on_the_host_are_read_from_storage(mode):
    host, keys = Host(mode=mode), path(4)
    host.fill(keys[:2])
    actions = host.run(host.load(keys).begin)
    assert names(actions) == ["Started", "ProbeStore", "Copy"]
    probe, first = sent(actions)
    assert probe.keys == join_hashes(keys[2:])
    (read,) = sent(host.end(Probed(probe.op, 2)))
    assert read.keys == join_hashes(keys[2:])
    assert sent(host.end(Copied(first.op, ()))) == []
    actions = host.end(ReadDone(read.op, bytes(2)))
    reports = [] if mode == "exclusive" else ["BlocksAdded", "HostBlocksAdded"]
    assert names(actions) == [*reports, "Copy"]
    (second,) = sent(actions, Copy)
    assert second.blocks == (102, 103)
    actions = host.end(Copied(second.op, ()))
    assert not host.timers
    (loaded,) = sent(actions, Loaded)
    assert (loaded.num_loaded, loaded.from_host) == (4, 2)
    host.run(host.memory.drop_host_copies, join_hashes(keys))
    host.idle()


def test_a_read_that_fails_ends_the_run_there():
    host, keys = Host(mode="inclusive"), path(3)
    (probe,) = sent(host.run(host.load(keys).begin))
    (read,) = sent(host.end(Probed(probe.op, 3)))
    outcomes = bytes([Outcome.OK, Outcome.CORRUPT, Outcome.OK])
    actions = host.end(ReadDone(read.op, outcomes))
    (gained,) = sent(actions, BlocksAdded)
    assert gained.hashes == keys[0] + keys[2]
    (copy,) = sent(actions, Copy)
    assert copy.blocks == (100,)
    (loaded,) = sent(host.end(Copied(copy.op, ())))
    assert (loaded.num_loaded, loaded.from_host) == (1, 0)
    host.idle()


def test_a_request_fetches_no_more_blocks_than_is_set():
    host, keys = Host(max_fetch_blocks=2), path(4)
    host.fill(keys[1:2])
    (probe,) = sent(host.run(host.load(keys).begin))
    (read,) = sent(host.end(Probed(probe.op, 3)), Read)
    assert read.keys == keys[0] + keys[2]
    assert host.memory.counts["not_fetched_many"] == 1


# -- a fetch takes longer than computing


def measured(seconds: float, blocks: int = 2, host: Host | None = None) -> Host:
    """A host tier whose store has taken so long for a read of some blocks."""
    host = host or Host(slots=8, transit=8, mode="inclusive")
    job = host.load(path(blocks, family=10 + blocks), deadline=99.0)
    (probe,) = sent(host.run(job.begin))
    (read,) = sent(host.end(Probed(probe.op, blocks)))
    host.now += seconds
    (copy,) = sent(host.end(ReadDone(read.op, bytes(blocks))), Copy)
    host.end(Copied(copy.op, ()))
    assert not host.memory.loads
    return host


@pytest.mark.parametrize(("block_s", "begun"), [(0.0, True), (0.4, False), (0.6, True)])
def test_a_fetch_is_begun_if_it_takes_less_than_computing_its_blocks(block_s, begun):
    host = measured(1.0)
    actions = host.run(host.load(path(2), deadline=99.0, block_s=block_s).begin)
    assert names(actions) == (["Started", "ProbeStore"] if begun else ["Loaded"])
    assert host.memory.counts["not_fetched_slow"] == (0 if begun else 2)


def test_blocks_that_the_store_turns_out_to_have_are_too_few():
    """A look-up of many blocks is worth it, a read of those found is not."""
    host = measured(1.0, blocks=1)
    (probe,) = sent(host.run(host.load(path(8), deadline=99.0, block_s=0.2).begin))
    (loaded,) = sent(host.end(Probed(probe.op, 1)))
    assert loaded.num_loaded == 0
    assert host.memory.counts["not_fetched_slow"] == 1
    host.idle()


def test_reads_that_wait_make_a_fetch_slow():
    host = measured(0.5, blocks=1)
    measured(1.0, host=host)
    (probe,) = sent(host.run(host.load(path(4), deadline=99.0, block_s=0.6).begin))
    host.end(Probed(probe.op, 4))
    other = host.load(path(2, family=1), deadline=99.0, block_s=0.6)
    assert names(host.run(other.begin)) == ["Loaded"]
    assert host.memory.counts["not_fetched_backlog"] == 2


def test_a_request_waits_for_storage_no_longer_than_it_would_compute():
    host = Host(mode="inclusive")
    (timer, probe) = host.run(host.load(path(4), deadline=99.0, block_s=0.5).begin)
    assert (timer.delay, probe.deadline) == (2.0, 2.0)
    host.now = 0.5
    timer, read = host.end(Probed(probe.op, 2))
    assert (timer.delay, read.deadline) == (1.0, 1.5)
    host.now = 1.5
    (loaded,) = sent(host.run(host.memory.timed[timer.message.number].on_deadline))
    assert loaded.num_loaded == 0
    assert host.memory.counts["not_fetched_slow"] == 2
    assert host.memory.counts["not_fetched_late"] == 0
    host.end(ReadDone(read.op, bytes([Outcome.LATE] * 2)))
    host.idle()


def test_a_request_without_device_blocks_fetches_until_its_deadline():
    """Only when it has them it could compute."""
    host = Host(mode="inclusive")
    job = host.load(path(2), blocks=(), deadline=99.0, block_s=0.5)
    timer, probe = host.run(job.begin)
    assert (timer.delay, probe.deadline) == (99.0, 99.0)
    host.end(Probed(probe.op, 2))
    host.now = 50.0
    (timer,) = host.run(job.set_targets, (100, 101))
    assert timer.delay == 1.0
    (loaded,) = sent(host.run(host.memory.timed[timer.message.number].on_deadline))
    assert loaded.num_loaded == 0


def test_one_of_some_slow_fetches_measures_the_store_again():
    host, refused = measured(1.0), 0
    while names(host.run(host.load(path(2), deadline=99.0, block_s=0.4).begin)) == ["Loaded"]:
        refused += 1
    assert refused == TRIAL - 1
    assert host.memory.counts["not_fetched_slow"] == 2 * refused


def test_a_trial_reads_what_is_found():
    host = measured(1.0)
    for _ in range(TRIAL):
        actions = host.run(host.load(path(2), deadline=99.0, block_s=0.4).begin)
    (probe,) = sent(actions)
    assert names(host.end(Probed(probe.op, 2))) == ["Read"]


def test_a_prefetch_is_always_begun():
    host = measured(1.0)
    message = PrefetchToHost(ROOT, join_hashes(path(2)), 0, 99.0)
    (probe,) = sent(host.run(PrefetchJob(host.memory, message).begin))
    assert names(host.end(Probed(probe.op, 2))) == ["Read"]


@pytest.mark.parametrize("fields", [{"fetch": False}, {"deadline": -1.0}, {"deadline": 0.0}])
def test_storage_is_not_asked(fields):
    host = Host()
    assert names(host.run(host.load(path(2), **fields).begin)) == ["Loaded"]
    host.idle()


def test_blocks_that_come_after_the_deadline_are_misses():
    host, keys = Host(), path(3)
    host.fill(keys[:1])
    job = host.load(keys)
    timer, probe, copy = host.run(job.begin)
    assert isinstance(timer, Started)
    assert timer.delay == 10.0
    (read,) = sent(host.end(Probed(probe.op, 2)))
    host.end(Copied(copy.op, ()))
    (loaded,) = sent(host.run(host.memory.timed[timer.message.number].on_deadline))
    assert (loaded.num_loaded, loaded.from_host) == (1, 1)
    assert host.memory.loads == {}
    assert host.end(ReadDone(read.op, bytes(2))) == []
    host.run(host.memory.drop_host_copies, keys[0])
    host.idle()
    assert host.tier.free == 8


def test_a_load_without_blocks_leaves_slots_to_the_eviction_for_it():
    host, keys = Host(slots=0, transit=4, policy="write_back"), path(6)
    moves = Movements(host, store=keys)
    job = host.load(keys, blocks=())
    moves.run(job.begin)
    moves.complete()
    moves.complete()
    assert host.tier.free == 2
    moves.device.update({100 + i: key for i, key in enumerate(path(5, family=1))})
    moves.run(offload(host, path(5, family=1)).begin)
    moves.complete_all()
    assert len(moves.of(Offloaded)) == 1
    moves.run(job.set_targets, tuple(range(200, 206)))
    moves.complete_all()
    (loaded,) = moves.of(Loaded)
    assert loaded.num_loaded == 6
    host.idle()


@pytest.mark.parametrize(
    ("mode", "slots", "transit"),
    [
        ("exclusive", 0, 1),
        ("exclusive", 2, 3),
        ("inclusive", 2, 1),
        ("inclusive", 3, 0),
        ("exclusive", 3, 0),
    ],
)
def test_a_path_streams_through_a_few_slots(mode, slots, transit):
    """Whole, whether the tier is empty, full or absent."""
    for full in (False, True):
        host, keys = Host(slots, transit, mode=mode, policy="write_back"), path(20)
        if full:
            host.fill(path(slots, family=1))
        moves = Movements(host, store=keys)
        moves.holds()
        moves.run(host.load(keys).begin)
        moves.complete_all()
        (loaded,) = moves.of(Loaded)
        assert (loaded.num_loaded, loaded.from_host) == (20, 0)
        assert moves.device == {100 + i: key for i, key in enumerate(keys)}
        assert not host.timers
        host.idle()


def test_a_block_that_is_being_written_gives_its_slot_to_the_blocks_below_it():
    host, keys = Host(slots=0, transit=1, policy="write_back"), path(3)
    moves = Movements(host, store=keys[1:])
    moves.run(offloaded(host, moves, keys[:1]).begin)
    moves.complete()
    moves.run(host.load(keys).begin)
    moves.complete_all()
    (loaded,) = moves.of(Loaded)
    assert (loaded.num_loaded, loaded.from_host) == (3, 1)
    host.idle()


def test_a_load_without_blocks_lets_go_of_slots_for_another():
    host, waiting, keys = Host(slots=0, transit=1), path(2), path(3, family=1)
    moves = Movements(host, store=waiting + keys)
    job = host.load(waiting, blocks=())
    moves.run(job.begin)
    moves.complete()
    moves.complete()
    assert host.tier.free == 0
    message = Load(8, ROOT, join_hashes(keys), 0, tuple(range(900, 903)), 10.0, fetch=True)
    moves.run(LoadJob(host.memory, message, layerwise=False).begin)
    moves.complete_all()
    moves.run(job.set_targets, (200, 201))
    moves.complete_all()
    assert [(one.op, one.num_loaded) for one in moves.of(Loaded)] == [(8, 3), (7, 2)]
    host.idle()


def test_loads_take_turns():
    """A short load ends long before a long one that began before it."""
    host, long, short = Host(slots=0, transit=32), path(400), path(20, family=1)
    moves = Movements(host, store=long + short)
    moves.run(host.load(long).begin)
    moves.complete()
    message = Load(8, ROOT, join_hashes(short), 0, tuple(range(900, 920)), 10.0, fetch=True)
    moves.run(LoadJob(host.memory, message, layerwise=False).begin)
    moves.complete_all()
    first, second = moves.of(Loaded)
    assert (first.op, first.num_loaded) == (8, 20)
    assert (second.op, second.num_loaded) == (7, 400)
    copied = sum(len(copy.blocks) for copy in moves.sent_before(first, Copy))
    assert copied < 200
    host.idle()


def test_a_load_goes_on_where_another_movement_brings_its_blocks():
    host, keys = Host(slots=8, transit=4, mode="inclusive"), path(4)
    moves = Movements(host, store=keys)
    moves.run(PrefetchJob(host.memory, PrefetchToHost(ROOT, join_hashes(keys), 0, 10.0)).begin)
    moves.complete()
    moves.run(host.load(keys).begin)
    moves.complete_all()
    (loaded,) = moves.of(Loaded)
    assert loaded.num_loaded == 4
    assert len(moves.of(Read)) == 1
    host.idle()


def test_stored_blocks_that_do_not_come_are_counted_with_the_reason():
    cases = {
        "late": lambda moves, job: moves.run(job.stop, "late"),
        "gone": lambda moves, job: moves.complete(0, failed=[1]),
        "cleared": lambda moves, job: moves.run(moves.host.memory.clear),
    }
    for reason, end in cases.items():
        host, keys = Host(slots=0, transit=2), path(6)
        moves, job = Movements(host, store=keys), host.load(keys)
        moves.run(job.begin)
        moves.complete()
        end(moves, job)
        moves.complete_all()
        (loaded,) = moves.of(Loaded)
        counts = host.memory.counts
        assert loaded.num_loaded < 6
        assert counts[f"not_fetched_{reason}"] == 6 - loaded.num_loaded, reason
        host.idle()


def test_progress_by_layers_is_that_of_the_slowest_copy():
    host, keys = Host(mode="inclusive"), path(2)
    host.fill(keys[:1])
    probe, first = sent(host.run(host.load(keys, layerwise=True).begin))
    assert first.layerwise
    assert host.end(CopyProgress(first.op, 2)) == [], "storage has not answered"
    (read,) = sent(host.end(Probed(probe.op, 1)))
    (second,) = sent(host.end(ReadDone(read.op, bytes(1))), Copy)
    assert host.end(CopyProgress(first.op, 4)) == []
    (layers,) = sent(host.end(CopyProgress(second.op, 1)))
    assert isinstance(layers, LayersLoaded)
    assert (layers.op, layers.layers, layers.blocks) == (7, 1, 2)
    assert host.end(CopyProgress(second.op, 1)) == []
    assert len(host.end(CopyProgress(second.op, 3))) == 1


def test_a_load_whose_copies_do_not_end_is_reported_stalled_once_they_may_not():
    host = Host()
    host.fill(path(2))
    job = host.load(path(2))
    (copy,) = sent(host.run(job.begin))
    (stalled,) = sent(host.run(job.on_copies_unavailable))
    assert isinstance(stalled, LoadStalled)
    assert [one.num_loaded for one in sent(host.end(Copied(copy.op, (0, 1))))] == [0]
    host.idle()


def test_a_load_that_waits_for_storage_ends_when_copies_are_unavailable():
    host = Host()
    job = host.load(path(2))
    host.run(job.begin)
    assert names(host.run(job.on_copies_unavailable)) == ["Loaded"]


def test_a_load_that_a_device_store_still_writes_is_stalled_when_copies_are_unavailable():
    host = Host(device_store=True)
    job = host.load(path(2), tokens=b"tokens")
    (fetch,) = sent(host.run(job.begin))
    assert isinstance(fetch, FetchDevice)
    (stalled,) = sent(host.run(job.on_copies_unavailable))
    assert isinstance(stalled, LoadStalled)
    (loaded,) = sent(host.end(DeviceFetched(fetch.op, 2)))
    assert loaded.num_loaded == 2
    host.idle()


def test_a_device_store_reads_into_the_device_blocks():
    host, keys = Host(device_store=True), path(4)
    host.fill(keys[:1])
    copy, fetch = None, None
    for message in sent(host.run(host.load(keys, tokens=b"tokens").begin)):
        copy = message if isinstance(message, Copy) else copy
        fetch = message if isinstance(message, FetchDevice) else fetch
    assert (fetch.start, fetch.blocks, fetch.tokens) == (1, (101, 102, 103), b"tokens")
    assert sent(host.end(DeviceFetched(fetch.op, 2))) == []
    (loaded,) = sent(host.end(Copied(copy.op, ())))
    assert (loaded.num_loaded, loaded.from_host) == (3, 1)


def test_a_device_store_waits_for_the_device_blocks():
    host = Host(device_store=True)
    job = host.load(path(2), blocks=())
    assert host.run(job.begin) == []
    (fetch,) = sent(host.run(job.set_targets, (8, 9)))
    assert fetch.blocks == (8, 9)
    (loaded,) = sent(host.end(DeviceFetched(fetch.op, 1)))
    assert loaded.num_loaded == 1


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["complete", "complete", "place", "cancel", "late", "stalled", "offload"]),
        st.integers(0, 3),
        st.lists(st.integers(0, 5), max_size=2),
    ),
    max_size=10,
)


def offloaded(host: Host, moves: Movements, hashes: list[bytes]) -> OffloadJob:
    """An eviction of these blocks from the device, deepest first."""
    evicted, first = hashes[::-1], 200 + len(moves.device)
    blocks = tuple(range(first, first + len(evicted)))
    moves.device.update(zip(blocks, evicted, strict=True))
    parents = join_hashes([*evicted[1:], ROOT])
    return OffloadJob(host.memory, Offload(8, join_hashes(evicted), parents, blocks))


@settings(max_examples=300, deadline=None)
@example(
    steps=[("offload", 3, []), ("cancel", 0, [])],
    mode="exclusive",
    policy="write_back",
    on_host=4,
    stored=0,
    placed=False,
    transit=4,
)
@given(
    steps=STEPS,
    mode=st.sampled_from(["exclusive", "inclusive"]),
    policy=st.sampled_from(["write_through", "write_back"]),
    on_host=st.integers(0, 4),
    stored=st.integers(0, 6),
    placed=st.booleans(),
    transit=st.integers(1, 4),
)
def test_any_order_of_completions(steps, mode, policy, on_host, stored, placed, transit):
    """The answer is the run whose bytes are on the device, and no slot stays in use. Under
    write_back every block of the host is on a tier at the end, or counted."""
    host, keys = Host(transit=transit, mode=mode, policy=policy), path(6)
    host.fill(keys[:on_host])
    moves = Movements(host, keys[:stored])
    moves.holds()
    blocks = (100, 101, 102, 103, 104, 105)
    job = host.load(keys, blocks=blocks if placed else ())
    moves.run(job.begin)
    offloads = 0
    for step, number, failed in [*steps, ("place", 0, [])]:
        if step == "complete" and moves.open:
            moves.complete(number % len(moves.open), failed)
        elif step == "offload":
            offloads += 1
            moves.run(offloaded(host, moves, path(number + 1, family=offloads)).begin)
        elif 7 not in host.memory.loads:
            continue
        elif step == "place" and not placed:
            placed = True
            moves.run(job.set_targets, blocks)
        elif step == "cancel" and not placed:
            moves.run(job.cancel)
        elif step == "late":
            moves.run(job.stop, "late")
        elif step == "stalled":
            moves.run(job.on_copies_unavailable)
    moves.complete_all()
    answers = moves.of(Loaded)
    if policy == "write_back":
        safe = {*host.tier.blocks, *moves.store, *keys[: answers[0].num_loaded if answers else 0]}
        counts = host.memory.counts
        assert len(set(keys[:on_host]) - safe) <= counts["shed"] + counts["write_failures"]
    assert len(answers) <= 1
    for answer in answers:
        for position in range(answer.num_loaded):
            assert moves.device[100 + position] == keys[position]
        moves.run(host.memory.drop_host_copies, join_hashes(keys[: answer.num_loaded]))
        assert answer.from_host <= answer.num_loaded
    moves.complete_all()
    assert not host.timers
    for block in host.tier.blocks.values():
        assert moves.slots[block.slot] == block.hash, "a slot holds another block's bytes"
    host.idle()
    assert host.tier.free + host.tier.resident == host.tier.num_slots


def test_completions_of_requests_that_are_not_in_flight_change_nothing():
    host = Host()
    for message in (Copied(1, ()), Probed(1, 3), ReadDone(1, b""), DeviceFetched(1, 3)):
        assert host.end(message) == []


def test_of_an_inclusive_tier_blocks_beyond_the_capacity_pass_through():
    """A path that is longer than the tier: its first blocks are resident and protected."""
    host, keys = Host(slots=3, transit=4, mode="inclusive"), path(6)
    host.fill(keys[:2])
    (probe,) = sent(host.run(host.load(keys, start=2).begin))
    (read,) = sent(host.end(Probed(probe.op, 4)))
    assert read.keys == join_hashes(keys[2:])
    gained, hint, copy = sent(host.end(ReadDone(read.op, bytes(4))))
    assert gained.hashes == hint.hashes == keys[2], "the others do not stay"
    assert copy.blocks == (100, 101, 102, 103)
    (loaded,) = sent(host.end(Copied(copy.op, ())))
    assert (loaded.num_loaded, loaded.from_host) == (4, 0)
    assert (host.tier.resident, host.tier.free) == (3, 4)
    host.idle()
