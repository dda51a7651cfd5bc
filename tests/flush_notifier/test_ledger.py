"""The ledger against a naive model, the shape of its tasks, and the notifier with sinks that misbehave."""

from __future__ import annotations

import asyncio
import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvactors.actor import Activity, ActorSpec, Group, Supervisor
from kvactors.actor.clock import deadline_after
from kvactors.config import FlushConfig, SinkConfig
from kvactors.flush_notifier.actor import FlushNotifier
from kvactors.flush_notifier.ledger import Ledger, SinkView
from kvactors.flush_notifier.messages import Announced, Gained, Gone, Settle
from kvactors.flush_notifier.sinks.jsonl import JsonLinesSink, replay
from kvactors.flush_notifier.sinks.memory import MemorySink
from kvactors.units import Reason, Residency, Tier, join_keys, split_keys

BLOCK = 2
ROOT = bytes(32)


def path(*branch: int) -> tuple[bytes, bytes]:
    """Tokens and names of the path that takes these branches, one block each."""
    tokens, keys, key = b"", [], ROOT
    for step in branch:
        block = np.array([step, step], "<u4").tobytes()
        tokens += block
        key = hashlib.sha256(key + block).digest()
        keys.append(key)
    return tokens, join_keys(keys)


def announced(*branch: int, start=0, count=None, tier=Tier.DEVICE, reason=Reason.COMMIT) -> Announced:
    tokens, keys = path(*branch)
    return Announced(ROOT, tokens, keys, start, len(branch) - start if count is None else count, tier, reason)


def ledger(*views) -> Ledger:
    return Ledger(BLOCK, list(views) or [SinkView(int(Tier.DEVICE | Tier.HOST), node=False, at_finish=False)])


def settle(book: Ledger, sink: int = 0):
    tasks, changes = book.take(sink, 10**6, 1)
    book.delivered(sink, changes)
    return tasks


def test_request_finish_gives_the_whole_path_from_block_0():
    book = ledger(SinkView(int(Tier.DEVICE), node=False, at_finish=True))
    book.announce(announced(1, 2, 3))
    assert settle(book) == []
    book.announce(announced(1, 2, 3, reason=Reason.REQUEST_FINISH))
    (task,) = settle(book)
    assert (task.residency, task.start_block_idx, task.count, task.reason) == (Residency.RESIDENT, 0, 3, Reason.REQUEST_FINISH)
    assert (task.tokens, task.keys, task.parent) == (*path(1, 2, 3), ROOT)


def test_eviction_gives_one_task_a_run_with_the_complete_path_and_depth_minus_one():
    book = ledger()
    book.announce(announced(1, 2, 3, 4))
    book.announce(announced(1, 2, 9, start=2))
    settle(book)
    keys = split_keys(path(1, 2, 3, 4)[1])
    book.lose(join_keys([keys[3], keys[2]]), Tier.DEVICE, Reason.CPU_EVICTION)
    (task,) = settle(book)
    assert (task.residency, task.start_block_idx, task.count) == (Residency.GONE, 2, 2)
    assert task.tokens == path(1, 2, 3, 4)[0]
    assert task.keys == join_keys(keys[2:])
    book.lose(path(1, 2, 9)[1][64:], Tier.DEVICE, Reason.CPU_EVICTION)
    (other,) = settle(book)
    assert other.tokens == path(1, 2, 9)[0]
    book.check()


def test_a_branch_point_splits_runs_and_shared_blocks_stay():
    book = ledger()
    book.announce(announced(1, 2, 3))
    book.announce(announced(1, 2, 4, start=2))
    settle(book)
    book.clear(Tier.DEVICE, Reason.CLEAR)
    tasks = settle(book)
    assert sorted((t.start_block_idx, t.count) for t in tasks) == [(0, 2), (2, 1), (2, 1)]
    assert tasks[-1].start_block_idx == 0, "children go before parents"
    assert not book.entries


@pytest.mark.parametrize("n", [500, 1000, 2000, 4000])
def test_an_evicted_run_costs_bytes_in_proportion_to_its_length(n):
    book = ledger()
    book.announce(announced(*range(n)))
    settle(book)
    keys = split_keys(path(*range(n))[1])
    book.lose(join_keys(reversed(keys)), Tier.DEVICE, Reason.CPU_EVICTION)
    (task,) = settle(book)
    assert len(task.tokens) + len(task.keys) == n * (4 * BLOCK + 32)


def test_resident_then_gone_cancels():
    book = ledger()
    book.announce(announced(1, 2))
    book.lose(path(1, 2)[1], Tier.DEVICE, Reason.DEVICE_DROP)
    assert settle(book) == []
    assert not book.entries


def test_a_node_view_is_gone_only_when_every_tier_is():
    book = ledger(SinkView(int(Tier.DEVICE | Tier.HOST), node=True, at_finish=False))
    book.announce(announced(1))
    settle(book)
    book.gain(path(1)[1], Tier.HOST, Reason.OFFLOAD)
    book.lose(path(1)[1], Tier.DEVICE, Reason.DEVICE_EVICTION)
    assert settle(book) == []
    book.lose(path(1)[1], Tier.HOST, Reason.CPU_EVICTION)
    (task,) = settle(book)
    assert task.residency is Residency.GONE


branches = st.lists(st.integers(0, 2), min_size=1, max_size=4)
tiers = st.sampled_from(list(Tier))
facts = st.one_of(
    st.tuples(st.just("announce"), branches, tiers),
    st.tuples(st.just("gain"), branches, tiers),
    st.tuples(st.just("lose"), branches, tiers),
    st.tuples(st.just("clear"), st.just([0]), tiers),
    st.tuples(st.sampled_from(["take", "ok", "fail"]), st.just([0]), tiers),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(facts, max_size=40))
def test_the_mirror_equals_the_truth_whatever_happens(history):
    """Announcements, gains, losses and deliveries that fail or succeed in any order; at rest every sink believes what is true."""
    book = ledger(SinkView(7, node=False, at_finish=False), SinkView(3, node=True, at_finish=False))
    truth: dict[bytes, int] = {}
    named: set[bytes] = set()
    mirrors: list[set[tuple[bytes, Tier]]] = [set(), set()]
    flying: list = [None, None]

    def deliver(sink):
        tasks, changes = flying[sink]
        for task in tasks:
            pairs = {(key, task.tier) for key in split_keys(task.keys)}
            assert len(task.tokens) == 4 * BLOCK * (task.start_block_idx + task.count)
            mirrors[sink] = mirrors[sink] | pairs if task.residency is Residency.RESIDENT else mirrors[sink] - pairs
        book.delivered(sink, changes)
        flying[sink] = None

    for what, branch, tier in history:
        keys = split_keys(path(*branch)[1])
        if what == "announce":
            book.announce(announced(*branch, tier=tier))
            named.update(keys)
            truth.update({key: truth.get(key, 0) | tier for key in keys})
        elif what == "gain":
            book.gain(keys[-1], tier, Reason.STORED)
            truth[keys[-1]] = truth.get(keys[-1], 0) | tier
        elif what == "lose":
            book.lose(keys[-1], tier, Reason.CPU_EVICTION)
            truth[keys[-1]] = truth.get(keys[-1], 0) & ~tier
        elif what == "clear":
            book.clear(tier, Reason.CLEAR)
            truth = {key: mask & ~tier for key, mask in truth.items()}
        for sink in (0, 1):
            if what == "take" and flying[sink] is None:
                flying[sink] = book.take(sink, 3, 1)
            elif what == "ok" and flying[sink] is not None:
                deliver(sink)
            elif what == "fail" and flying[sink] is not None:
                book.refused(flying[sink][1])
                flying[sink] = None
        book.check()
    for sink in (0, 1):
        while flying[sink] is not None or book.pending(sink):
            if flying[sink] is None:
                flying[sink] = book.take(sink, 1000, 1)
            deliver(sink)
    known = set(book.entries)
    assert mirrors[0] == {(key, t) for key, mask in truth.items() if key in known for t in Tier if mask & t}
    assert {key for key, _ in mirrors[1]} == {key for key, mask in truth.items() if key in known and mask & 3}
    assert all(key in named for key in known)


class Wired:
    """A notifier with two sinks, one of which may misbehave."""

    def __init__(self, **config):
        self.activity = Activity()
        self.supervisor = Supervisor(self.activity)
        self.ref = self.supervisor.make_ref(FlushNotifier, 64)
        self.good, self.bad = (
            MemorySink(SinkConfig("memory", name=name, tiers=("device", "host")), BLOCK) for name in ("good", "bad")
        )
        self.config = FlushConfig(retry_min=0.01, retry_max=0.05, timeout=0.05, **config)
        self.spec = ActorSpec(FlushNotifier, self.make, self.ref)

    def make(self, ref):
        return FlushNotifier(ref, block_size=BLOCK, sinks=[self.good, self.bad], config=self.config, epoch=100)

    def running(self):
        return self.supervisor.running(Group("notifier", (self.spec,)), drain=1.0)

    async def settle(self, seconds=5.0):
        return await self.ref.ask(Settle(), deadline=deadline_after(seconds))


@pytest.mark.parametrize("fault", ["failing", "hang", "fail_every"])
async def test_a_misbehaving_sink_neither_delays_the_other_nor_loses_anything(fault):
    wired = Wired(batch=2)
    setattr(wired.bad, fault, {"failing": True, "hang": 10.0, "fail_every": 2}[fault])
    async with wired.running():
        for i in range(20):
            await wired.ref.tell(announced(i, i + 1, i + 2))
        await asyncio.sleep(0.1)
        assert len(wired.good.view()[Tier.DEVICE]) == 60
        if fault != "fail_every":
            assert len(wired.bad.view()[Tier.DEVICE]) == 0
        await wired.ref.tell(Gone(path(0, 1, 2)[1], Tier.DEVICE, Reason.DEVICE_DROP))
        wired.bad.failing, wired.bad.hang = False, 0.0
        assert await wired.settle() is True
        assert wired.bad.view() == wired.good.view()
        assert len(wired.good.view()[Tier.DEVICE]) == 57
        statistics = wired.supervisor.actor("flush_notifier").flush_statistics()
        assert statistics[1].retried >= 1
        assert [s.pending for s in statistics] == [0, 0]


async def test_a_new_life_begins_a_new_epoch_first():
    wired = Wired()
    async with wired.running():
        await wired.ref.tell(announced(1, 2))
        await wired.settle()
        await wired.ref.tell(Announced(ROOT, b"x", b"short", 0, 1, Tier.DEVICE, Reason.COMMIT))  # a fault: it dies
        await asyncio.sleep(0.05)
        assert wired.ref.life == 1
        await wired.settle()
        assert wired.good.epochs == [100, 101]
        assert wired.good.view()[Tier.DEVICE] == set()
        await wired.ref.tell(announced(1, 2))
        await wired.settle()
        assert len(wired.good.view()[Tier.DEVICE]) == 2


async def test_json_lines_stand_for_the_same_view(tmp_path):
    wired = Wired()
    wired.bad = JsonLinesSink(SinkConfig("jsonl", path=str(tmp_path / "x.jsonl"), tiers=("device", "host")), BLOCK)
    async with wired.running():
        await wired.ref.tell(announced(1, 2, 3))
        await wired.ref.tell(Gained(path(1, 2)[1], Tier.HOST, Reason.OFFLOAD))
        await wired.settle()
        await wired.ref.tell(Gone(path(1, 2, 3)[1][64:], Tier.DEVICE, Reason.DEVICE_DROP))
        await wired.settle()
    assert replay(tmp_path / "x.jsonl") == wired.good.view()
