"""The table of requests in flight, and what peers that fail leave open."""

from __future__ import annotations

import pytest

from kvactors.cpu_evictor.requests import WRITE_PROBE
from kvactors.cpu_evictor.slots import SlotState
from kvactors.data_plane.base import Direction
from kvactors.storage.messages import ClearStore, DeviceFetched, Probed, ReadDone, StoreCleared
from tests.cpu_evictor.helpers import ROOT, Host, hash_of, names, path, sent


def ignored(_report: object) -> None:
    """The job of a request that needs none."""


def test_the_reader_with_the_fewest_blocks_in_flight_is_asked():
    host = Host(0, 8, readers=3)
    blocks = [host.tier.add(hash_of(i), ROOT, SlotState.TRANSIT) for i in range(4)]
    ops = [host.requests.probe(path(length), 1.0, ignored) for length in (4, 2, 3)]
    host.requests.read(blocks[:3], 1.0, ignored)  # beside the probe of two blocks
    assert host.requests.holding == 3
    assert host.requests.take(ops[0], ReadDone) is None, "another kind of answer"
    assert host.requests.take(ops[0], Probed).size == 4
    assert host.requests.take(ops[0], Probed) is None, "it was taken"
    for _ in range(2):
        host.requests.read(blocks, 1.0, ignored)
    numbers = [name[-1] for name in host.out.receivers]
    assert numbers == ["0", "1", "2", "1", "0", "2"]
    assert (host.requests.holding, host.requests.holds_slots) == (2, True)


def test_during_a_clear_nothing_is_read():
    host = Host()
    host.requests.clear_store(None, ignored)
    (clear,) = host.out.take()
    assert (host.requests.may_read, host.requests.holds_slots) == (False, False)
    host.requests.take(clear.op, StoreCleared)
    assert host.requests.may_read


def test_a_reader_that_is_switched_off_is_asked_only_if_all_are():
    host = Host(readers=2)
    first, second = host.peers.readers
    first.switched_off = True
    for _ in range(3):
        host.requests.probe(path(4), 1.0, ignored)
    second.switched_off = True
    host.requests.probe(path(1), 1.0, ignored)
    assert host.out.receivers == [second.name] * 3 + [first.name], "it has less to do"


def test_without_a_device_store_nothing_can_be_asked_of_it():
    with pytest.raises(RuntimeError):
        Host().requests.fetch(b"", 0, (1,), 1.0, ignored)


def test_a_reader_that_fails_ends_its_probes_and_reads():
    host, reports = Host(readers=1), []
    blocks = [host.tier.add(hash_of(i), ROOT, SlotState.TRANSIT) for i in range(2)]
    host.requests.read(blocks, 1.0, reports.append)
    host.requests.probe(path(2), 1.0, reports.append, WRITE_PROBE)
    host.requests.probe(path(2), 1.0, reports.append)
    assert host.run(host.memory.peer_failed, "storage_reader-0") == []
    assert reports == [b"\5\5", 0, 0]
    assert host.requests.open_at("storage_reader-0") == []


def test_a_writer_that_fails_ends_its_writes_and_is_sent_clears_again():
    host, keys = Host(writers=2), path(2)
    host.fill(keys, SlotState.TRANSIT)
    host.run(host.memory.write, [host.tier.blocks[key] for key in keys])
    (clear,) = host.run(host.memory.clear_store, 9, 7)
    assert host.out.receivers[-2:] == ["storage_writer-0"] * 2
    actions = host.run(host.memory.peer_failed, "storage_writer-0")
    assert names(actions) == ["BlocksRemoved", "ClearStore"]
    again = sent(actions, ClearStore)[0]
    assert again.op != clear.op
    assert again.salt == clear.salt == 7
    (answer,) = host.end(StoreCleared(again.op, ""))
    assert answer.op == 9
    assert host.memory.counts["write_failures"] == 2
    host.idle()


def test_a_device_store_that_fails_ends_its_moves():
    host, calls = Host(slots=0, device_store=True), []
    host.requests.save(b"", 0, (1, 2), lambda saved: calls.append(("saved", saved)))
    host.requests.fetch(b"", 0, (3,), 1.0, lambda fetched: calls.append(("fetched", fetched)))
    host.run(host.memory.peer_failed, "storage_direct")
    assert calls == [("saved", 0), ("fetched", 0)]
    assert (host.memory.counts["written"], host.memory.counts["write_failures"]) == (0, 2)
    assert host.requests.take(2, DeviceFetched) is None


def test_requests_are_stamped_with_the_memory_generation():
    host = Host()
    host.requests.generation = 6
    blocks = [host.tier.add(hash_of(1), ROOT, SlotState.TRANSIT)]
    host.requests.copy(Direction.TO_DEVICE, [1], blocks, ignored)
    host.requests.read(blocks, 1.0, ignored)
    host.requests.write(blocks, ignored)
    assert [message.memory_generation for message in host.out.take()] == [6, 6, 6]
