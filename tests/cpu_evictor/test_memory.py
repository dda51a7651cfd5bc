"""Making space, writing back, and the reports to the index and the notifier, without a loop."""

from __future__ import annotations

import pytest

from kvactors.cpu_evictor import memory as memory_module
from kvactors.cpu_evictor.memory import NOT_STORED
from kvactors.cpu_evictor.messages import HostBlocksAdded, PrefetchToHost
from kvactors.cpu_evictor.save import PrefetchJob
from kvactors.cpu_evictor.slots import SlotState
from kvactors.flush_notifier.messages import BlocksAdded, BlocksRemoved, TierCleared
from kvactors.gpu_swapper.messages import Copied
from kvactors.storage.messages import Outcome, Probed, ProbeStore, Read, ReadDone, Write, Written
from kvactors.types import Reason, Tier, join_hashes, split_hashes
from tests.cpu_evictor.helpers import ROOT, Host, hash_of, is_resident, names, path, sent


def test_victims_are_dropped_and_reported():
    host, keys = Host(policy="none"), path(3)
    host.fill(keys)
    actions = host.run(host.memory.make_space, 3, 3)
    assert names(actions) == ["HostBlocksRemoved", "BlocksRemoved"]
    gone, reported = sent(actions)
    assert gone.hashes == reported.hashes == keys[2] + keys[1]
    assert reported.reason is Reason.CPU_EVICTION
    assert host.run(host.memory.make_space, 3, 3) == []
    assert host.memory.counts["evicted"] == 2


def test_each_block_that_is_not_stored_has_a_reason():
    host = Host()
    host.fill([hash_of(outcome) for outcome in Outcome], SlotState.TRANSIT)
    (write,) = host.run(host.memory.write, list(host.tier.blocks.values()))
    host.end(Written(write.op, bytes(Outcome)))
    counts = host.memory.counts
    assert (counts["written"], counts["write_failures"]) == (2, 6)
    assert {name: counts[name] for name in NOT_STORED} == {
        "not_stored_refused": 1,
        "not_stored_no_space": 1,
        "not_stored_unavailable": 3,
        "not_stored_late": 1,
    }


def test_victims_are_written_back_and_reported_gone_when_they_are_stored():
    host, keys = Host(policy="write_back"), path(2)
    host.fill(keys)
    actions = host.run(host.memory.make_space, 4, 0)
    assert names(actions) == ["HostBlocksRemoved", "Write"]
    write = sent(actions, Write)[0]
    assert write.keys == keys[1] + keys[0]
    assert host.tier.readable(keys[0]) is not None, "a load finds it in its slot until then"
    assert set(host.tier.hashes()) == set(keys)
    outcomes = bytes([Outcome.OK, Outcome.NO_SPACE])
    actions = host.end(Written(write.op, outcomes))
    assert names(actions) == ["BlocksRemoved"]
    assert (host.memory.counts["written"], host.memory.counts["write_failures"]) == (1, 1)
    assert host.memory.counts["not_stored_no_space"] == 1
    assert host.tier.free == 8
    host.idle()


def test_without_slots_to_spare_victims_are_not_written_back():
    host, keys = Host(slots=2, transit=1, policy="write_back"), path(2)
    host.fill(keys)
    actions = host.run(host.memory.make_space, 2, 2)
    assert names(actions) == ["HostBlocksRemoved", "BlocksRemoved", "Write"]
    assert sent(actions, BlocksRemoved)[0].hashes == keys[1]
    assert sent(actions, Write)[0].keys == keys[0]
    assert host.memory.counts["shed"] == 1


def test_writes_wait_for_a_probe_and_come_after_its_reads():
    host, keys = Host(policy="write_back", mode="inclusive"), path(2)
    host.fill(keys)
    (probe,) = sent(
        host.run(
            PrefetchJob(host.memory, PrefetchToHost(ROOT, join_hashes(path(2, 1)), 0, 5.0)).begin
        )
    )
    assert names(host.run(host.memory.make_space, 4, 0)) == ["HostBlocksRemoved"]
    assert host.tier.pinned == 2
    actions = host.end(Probed(probe.op, 2))
    assert names(actions) == ["Read", "Write"]


@pytest.mark.parametrize("prefetch", [True, False])
def test_writes_of_the_eviction_for_a_read_come_after_it(prefetch):
    """The probe makes space for its own read. A small store may evict for a write what the probe
    found."""
    host, keys = Host(policy="write_back", mode="inclusive", slots=2), path(2, family=1)
    host.fill(path(2))
    actions = prefetched(host, keys) if prefetch else host.run(host.load(keys).begin)
    (probe,) = sent(actions, ProbeStore)
    host.run(host.memory.make_space, 1, 0)
    actions = host.end(Probed(probe.op, 2))
    assert [type(one) for one in sent(actions, Read, Write)] == [Read, Write]
    assert not host.requests.holding


def test_a_held_block_that_was_dropped_is_not_written():
    host, keys = Host(policy="write_back"), path(1)
    host.fill(keys)
    host.requests.probe(path(1), 5.0, lambda found: None)
    host.run(host.memory.make_space, 4, 0)
    host.run(host.memory.clear)
    (_, request) = host.requests.open_at("storage_reader-0")[0]
    assert names(host.run(host.memory.peer_failed, request.peer.name)) == []
    assert host.tier.free == 8
    host.idle()


def test_a_large_eviction_is_written_in_batches(monkeypatch):
    monkeypatch.setattr(memory_module, "WRITE_BATCH", 2)
    host, keys = Host(policy="write_back"), path(3)
    host.fill(keys)
    writes = sent(host.run(host.memory.evict, host.tier.victims(3)), Write)
    assert [split_hashes(write.keys) for write in writes] == [[keys[2], keys[1]], [keys[0]]]


def test_above_the_high_watermark_it_is_evicted_down_to_the_low_one():
    host, keys = Host(slots=10, policy="none"), path(9)
    host.memory.config = type(host.config)(slots=10, low_watermark=0.5, high_watermark=0.8)
    host.fill(keys[:8])
    assert host.run(host.memory.keep_watermarks) == []
    host.fill(path(1, family=1))
    host.run(host.memory.keep_watermarks)
    assert host.tier.resident == 5


def test_a_discard_is_for_exclusive_tiers():
    host, keys = Host(), path(3)
    host.fill(keys[:2])
    host.tier.add(keys[2], keys[1], SlotState.RESIDENT)
    gone, reply = sent(host.run(host.memory.drop_host_copies, join_hashes([*keys, *path(1, 1)])))
    assert (gone.reason, gone.hashes) == (Reason.PROMOTION, keys[0] + keys[1])
    assert reply.hashes == keys[0] + keys[1], "an offload of the third is in flight"
    host = Host(mode="inclusive")
    host.fill(keys)
    assert host.run(host.memory.drop_host_copies, keys[0]) == []


def test_loaded_blocks_that_the_device_did_not_take_stay():
    """With one place left in the capacity the deepest stays, and the other one is evicted."""
    host, keys = Host(slots=2, policy="write_back"), path(3)
    host.fill(keys[:2])
    (copy,) = sent(host.run(host.load(keys[:2], fetch=False).begin))
    host.end(Copied(copy.op, ()))
    host.fill(path(1, family=1))
    assert host.tier.on_device == 2
    actions = host.run(host.memory.keep_host_copies, join_hashes(keys))
    assert names(actions) == ["HostBlocksRemoved", "Write"]
    assert sent(actions, Write)[0].keys == keys[0]
    assert is_resident(host.tier, keys[1])
    assert host.tier.on_device == 0
    assert host.run(host.memory.keep_host_copies, join_hashes(keys[1:])) == [], "it is resident"
    host.end(Written(sent(actions, Write)[0].op, bytes(1)))
    host.idle()


def test_a_block_that_the_device_did_not_take_stays_when_its_other_use_ends():
    host, keys = Host(slots=2), path(1)
    host.fill(keys)
    (copy,) = sent(host.run(host.load(keys, fetch=False).begin))
    (write,) = sent(host.run(host.memory.write, [host.tier.blocks[keys[0]]]))
    host.end(Copied(copy.op, ()))
    assert host.run(host.memory.keep_host_copies, keys[0]) == []
    host.end(Written(write.op, bytes(1)))
    assert is_resident(host.tier, keys[0])
    host.idle()


def test_a_clear_is_counted_for_hints_of_before():
    host = Host(mode="inclusive")
    host.fill(path(2))
    (cleared,) = sent(host.run(host.memory.clear))
    assert (cleared.tier, cleared.reason) == (Tier.HOST, Reason.CLEAR)
    assert (host.tier.free, host.memory.clears) == (8, 1)
    (cleared,) = sent(host.run(host.memory.lose))
    assert cleared.reason is Reason.RESTART
    assert host.memory.clears == 1
    assert isinstance(cleared, TierCleared)


def test_without_a_store_a_clear_of_it_is_done():
    host = Host(stored=False)
    (answer,) = host.run(host.memory.clear_store, 4, None)
    assert (answer.op, answer.error) == (4, "")


def prefetched(host: Host, hashes, start=0, deadline=5.0):
    return host.run(
        PrefetchJob(host.memory, PrefetchToHost(ROOT, join_hashes(hashes), start, deadline)).begin
    )


def test_a_prefetch_fetches_the_blocks_missing_on_the_host():
    host, keys = Host(mode="inclusive"), path(4)
    host.fill(keys[:1])
    (probe,) = sent(prefetched(host, keys))
    assert probe.keys == join_hashes(keys[1:])
    (read,) = sent(host.end(Probed(probe.op, 2)))
    assert isinstance(read, Read)
    assert read.keys == join_hashes(keys[1:3])
    outcomes = bytes([Outcome.OK, Outcome.MISS])
    actions = host.end(ReadDone(read.op, outcomes))
    assert names(actions) == ["BlocksAdded", "HostBlocksAdded"]
    gained, hint = sent(actions, BlocksAdded, HostBlocksAdded)
    assert gained.hashes == hint.hashes == keys[1]
    assert host.tier.blocks[keys[1]].prefetched
    assert host.memory.counts["fetched"] == 1
    host.idle()


def test_a_prefetch_takes_no_more_than_fits():
    host, keys = Host(slots=2, mode="inclusive"), path(4)
    (probe,) = sent(prefetched(host, keys))
    (read,) = sent(host.end(Probed(probe.op, 4)))
    assert read.keys == join_hashes(keys[:2])


@pytest.mark.parametrize(
    "host", [Host(stored=False), Host(slots=0)], ids=["no store", "no host tier"]
)
def test_a_prefetch_without_a_use_asks_nothing(host):
    assert prefetched(host, path(2)) == []


def test_a_prefetch_that_is_late_or_has_nothing_to_bring_asks_nothing():
    host, keys = Host(), path(2)
    assert prefetched(host, keys, deadline=0.0) == []
    host.fill(keys)
    assert prefetched(host, keys) == []
    assert prefetched(host, path(3), start=3) == []
