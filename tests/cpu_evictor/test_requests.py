"""The table of requests in flight against a plain model, and what peers that fail leave open."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvactors.cpu_evictor.requests import (
    ClearRequest,
    CopyRequest,
    FetchRequest,
    ProbeRequest,
    ReadRequest,
    Request,
    SaveRequest,
    StoredRequest,
    WriteRequest,
)
from kvactors.cpu_evictor.slots import SlotState
from kvactors.data_plane.base import Direction
from kvactors.storage.messages import ClearStore
from tests.cpu_evictor.helpers import ROOT, Host, hash_of, names, path, sent


class Job:
    """Records what it is continued with."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def __getattr__(self, name):
        if not name.startswith("on_"):
            raise AttributeError(name)

        def called(*values):
            self.calls.append((name, *values))
            return []

        return called


class RequestsMachine(RuleBasedStateMachine):
    """`open`: number -> (kind, peer, size)."""

    def __init__(self) -> None:
        super().__init__()
        self.host = Host(0, 8, readers=3, writers=2)
        self.requests = self.host.requests
        self.blocks = [self.host.tier.add(hash_of(i), ROOT, SlotState.TRANSIT) for i in range(4)]
        self.open: dict[int, tuple[type[Request], str, int]] = {}
        self.last = 0

    def load(self, peer: str) -> int:
        return sum(
            size + 1
            for kind, name, size in self.open.values()
            if name == peer and kind in {ProbeRequest, ReadRequest, WriteRequest}
        )

    def entered(self, send, kind, size, pool=None):
        op, peer = send.message.op, send.to.name
        assert op > self.last, "numbers rise"
        if pool is not None:
            assert self.load(peer) == min(self.load(one.name) for one in pool)
        self.last = op
        self.open[op] = (kind, peer, size)

    @rule(size=st.integers(1, 4))
    def copy(self, size):
        send = self.requests.copy(Job(), Direction.TO_HOST, range(size), self.blocks[:size])
        self.entered(send, CopyRequest, size)

    @rule(size=st.integers(1, 4))
    def probe(self, size):
        send = self.requests.probe(Job(), path(size), 1.0)
        self.entered(send, ProbeRequest, size, self.host.peers.readers)

    @rule(size=st.integers(1, 4))
    def ask_stored(self, size):
        send = self.requests.ask_stored(Job(), path(size), 1.0)
        self.entered(send, StoredRequest, size, self.host.peers.readers)

    @rule(size=st.integers(1, 4))
    def read(self, size):
        send = self.requests.read(Job(), 0, self.blocks[:size], 1.0)
        self.entered(send, ReadRequest, size, self.host.peers.readers)

    @rule(size=st.integers(1, 4))
    def write(self, size):
        send = self.requests.write(self.blocks[:size])
        self.entered(send, WriteRequest, size, self.host.peers.writers)

    @rule()
    def clear(self):
        self.entered(self.requests.clear_store(1, None), ClearRequest, 0)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def take(self, data):
        op = data.draw(st.sampled_from(sorted(self.open)))
        kind, peer, size = self.open.pop(op)
        assert self.requests.take(op, SaveRequest) is None, "another kind"
        request = self.requests.take(op, kind)
        assert type(request) is kind
        assert (request.peer.name, request.size) == (peer, size)
        assert self.requests.take(op, kind) is None, "it was taken"

    @invariant()
    def agrees_with_the_model(self):
        kinds = [kind for kind, _, _ in self.open.values()]
        assert self.requests.holds_writes == (ProbeRequest in kinds)
        assert self.requests.may_read == (ClearRequest not in kinds)
        assert self.requests.holds_slots == any(kind is not ClearRequest for kind in kinds)
        for peer in (*self.host.peers.readers, *self.host.peers.writers):
            found = self.requests.open_at(peer.name)
            mine = {op: one for op, one in self.open.items() if one[1] == peer.name}
            assert {op: (type(one), peer.name, one.size) for op, one in found} == mine
            order = [(one.ORDER, op) for op, one in found]
            assert order == sorted(order)


TestRequests = RequestsMachine.TestCase
TestRequests.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_a_reader_that_is_switched_off_is_asked_only_if_all_are():
    host = Host(readers=2)
    first, second = host.peers.readers
    first.switched_off = True
    asked = [host.requests.probe(Job(), path(4), 1.0).to for _ in range(3)]
    assert asked == [second] * 3
    second.switched_off = True
    assert host.requests.probe(Job(), path(1), 1.0).to is first, "it has less to do"


def test_without_a_device_store_nothing_can_be_asked_of_it():
    with pytest.raises(RuntimeError):
        Host().requests.fetch(Job(), b"", 0, (1,), 1.0, first=0)


def test_a_reader_that_fails_ends_its_probes_and_reads():
    host, job = Host(readers=1), Job()
    blocks = [host.tier.add(hash_of(i), ROOT, SlotState.TRANSIT) for i in range(2)]
    host.requests.read(job, 3, blocks, 1.0)
    host.requests.ask_stored(job, path(2), 1.0)
    host.requests.probe(job, path(2), 1.0)
    assert host.completions.peer_failed("storage_reader-0") == []
    assert job.calls == [("on_probed", 0), ("on_probed", 0), ("on_read", 3, b"\5\5")]
    assert host.requests.open_at("storage_reader-0") == []


def test_a_writer_that_fails_ends_its_writes_and_is_sent_clears_again():
    host, keys = Host(writers=2), path(2)
    host.fill(keys, SlotState.TRANSIT)
    (write,) = host.memory.write([host.tier.blocks[key] for key in keys])
    clear = host.memory.clear_store(9, 7)
    assert (write.to.name, clear.to.name) == ("storage_writer-0", "storage_writer-0")
    actions = host.completions.peer_failed("storage_writer-0")
    assert names(actions) == ["ClearStore", "BlocksRemoved"]
    again = sent(actions, ClearStore)[0]
    assert again.op != clear.message.op
    assert again.salt == clear.message.salt == 7
    assert host.requests.take(again.op, ClearRequest).op == 9
    assert host.memory.counts.write_failures == 2
    host.idle()


def test_a_device_store_that_fails_ends_its_moves():
    host, job = Host(slots=0, device_store=True), Job()
    host.requests.save(job, b"", 0, (1, 2))
    host.requests.fetch(job, b"", 0, (3,), 1.0, first=4)
    host.completions.peer_failed("storage_direct")
    assert job.calls == [("on_fetched", 4, 0), ("on_saved",)]
    assert (host.memory.counts.written, host.memory.counts.write_failures) == (0, 2)
    assert host.requests.take(1, FetchRequest) is None


def test_requests_are_stamped_with_the_memory_generation():
    host = Host()
    host.requests.generation = 6
    blocks = [host.tier.add(hash_of(1), ROOT, SlotState.TRANSIT)]
    stamped = [
        host.requests.copy(Job(), Direction.TO_DEVICE, [1], blocks),
        host.requests.read(Job(), 0, blocks, 1.0),
        host.requests.write(blocks),
    ]
    assert [one.message.memory_generation for one in stamped] == [6, 6, 6]
