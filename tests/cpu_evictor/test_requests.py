"""The table of requests in flight against a plain model, and what peers that fail leave open."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvactors.cpu_evictor.requests import CLEAR, COPY, READ, READ_PROBE, WRITE, WRITE_PROBE, Kind
from kvactors.cpu_evictor.slots import SlotState
from kvactors.data_plane.base import Direction
from kvactors.storage.messages import ClearStore, DeviceFetched, DeviceSaved, StoreCleared
from tests.cpu_evictor.helpers import ROOT, Host, hash_of, names, path, sent


def ignored(_report: object) -> None:
    """The job of a request that needs none."""


class RequestsMachine(RuleBasedStateMachine):
    """`open`: number -> (kind, peer, size)."""

    def __init__(self) -> None:
        super().__init__()
        self.host = Host(0, 8, readers=3, writers=2)
        self.requests = self.host.requests
        self.blocks = [self.host.tier.add(hash_of(i), ROOT, SlotState.TRANSIT) for i in range(4)]
        self.open: dict[int, tuple[Kind, str, int]] = {}
        self.last = 0

    def load(self, peer: str) -> int:
        return sum(
            size + 1
            for kind, name, size in self.open.values()
            if name == peer and kind in {READ_PROBE, READ, WRITE}
        )

    def entered(self, kind, size, pool=None):
        (message,) = self.host.out.take()
        op, peer = message.op, self.host.out.receivers[-1]
        assert op > self.last, "numbers rise"
        if pool is not None:
            assert self.load(peer) == min(self.load(one.name) for one in pool)
        self.last = op
        self.open[op] = (kind, peer, size)

    @rule(size=st.integers(1, 4))
    def copy(self, size):
        self.requests.copy(Direction.TO_HOST, range(size), self.blocks[:size], ignored)
        self.entered(COPY, size)

    @rule(size=st.integers(1, 4), kind=st.sampled_from([READ_PROBE, WRITE_PROBE]))
    def probe(self, size, kind):
        op = self.requests.probe(path(size), 1.0, ignored, kind)
        self.entered(kind, size, self.host.peers.readers)
        assert op == self.last

    @rule(size=st.integers(1, 4))
    def read(self, size):
        self.requests.read(self.blocks[:size], 1.0, ignored)
        self.entered(READ, size, self.host.peers.readers)

    @rule(size=st.integers(1, 4))
    def write(self, size):
        self.requests.write(self.blocks[:size], ignored)
        self.entered(WRITE, size, self.host.peers.writers)

    @rule()
    def clear(self):
        self.requests.clear_store(None, ignored)
        self.entered(CLEAR, 0)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def take(self, data):
        op = data.draw(st.sampled_from(sorted(self.open)))
        kind, peer, size = self.open.pop(op)
        assert self.requests.take(op, DeviceSaved) is None, "another kind"
        request = self.requests.take(op, kind.answer)
        assert request.kind is kind
        assert (request.peer.name, request.size) == (peer, size)
        assert self.requests.take(op, kind.answer) is None, "it was taken"

    @invariant()
    def agrees_with_the_model(self):
        kinds = [kind for kind, _, _ in self.open.values()]
        assert self.requests.holding == kinds.count(READ_PROBE)
        assert self.requests.may_read == (CLEAR not in kinds)
        assert self.requests.holds_slots == any(kind is not CLEAR for kind in kinds)
        for peer in (*self.host.peers.readers, *self.host.peers.writers):
            found = self.requests.open_at(peer.name)
            mine = {op: one for op, one in self.open.items() if one[1] == peer.name}
            assert {op: (one.kind, peer.name, one.size) for op, one in found} == mine


TestRequests = RequestsMachine.TestCase
TestRequests.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


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
