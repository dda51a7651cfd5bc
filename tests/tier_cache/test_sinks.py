"""Sinks under a `TierCache`: what an index is sent is a tree at every moment, and exact."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from kvactors import ConfigError, Tier, TierCache
from kvactors.actor import ActorRef
from kvactors.flush_notifier.deliver import SinkSet
from kvactors.flush_notifier.ledger import Ledger
from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.sinks.memory import MemorySink
from kvactors.settings.sinks import MemorySinkConfig
from kvactors.tier_cache import SlotMemory
from kvactors.tier_cache import sinks as sinks_module
from kvactors.tier_cache.settings import checked_config
from kvactors.tier_cache.sinks import block_name
from tests.support.tree_reader import TreeReader
from tests.tier_cache.helpers import BLOCK, KEYS, LIMIT, elsewhere, settle, store

SIZE = 4  # tokens of a block
TREE = KEYS[:24]
PARENT = {i: (i - 1) // 2 if i else None for i in range(len(TREE))}


class TreeSink(MemorySink):
    """Checks that what was sent is a tree after every block of every task."""

    def __init__(self, tiers: Sequence[str] = ("host", "storage"), name: str = "tree") -> None:
        super().__init__(MemorySinkConfig(name=name, tiers=tuple(tiers)), SIZE)  # type: ignore[arg-type]
        self.reader = TreeReader()

    async def begin_epoch(self, epoch: int) -> None:
        self.reader.clear()
        await super().begin_epoch(epoch)

    async def deliver(self, tasks: Sequence[FlushTask]) -> None:
        self.reader.take(tasks)
        await super().deliver(tasks)

    @property
    def torn(self) -> list[str]:
        return self.reader.violations


def tokens_of(i: int) -> list[int]:
    return [1000 * i + j for j in range(SIZE)]


def open_with(sink: MemorySink, num_slots: int = 8, **settings: Any) -> TierCache:
    table = {
        "model": "m",
        "block_bytes": BLOCK,
        "num_slots": num_slots,
        "tokens_per_block": SIZE,
        **settings,
    }
    return TierCache(checked_config(table), SlotMemory(num_slots, BLOCK), sinks=[sink])


def describe(cache: TierCache, i: int) -> None:
    parent = PARENT[i]
    assert cache.sinks is not None
    cache.sinks.describe([TREE[i]], tokens_of(i), None if parent is None else TREE[parent])


def named(indices: Sequence[int]) -> set[bytes]:
    return {block_name(TREE[i]) for i in indices}


def flushed(cache: TierCache) -> None:
    settle(cache)
    assert cache.sinks.wait_flushed(LIMIT)


def test_blocks_are_announced_below_their_parents_and_removed_before_them():
    sink = TreeSink()
    cache = open_with(sink, 3)
    cache.sinks.describe(TREE[:2], [*tokens_of(0), *tokens_of(1)])
    store(cache, TREE[:2], [None, TREE[0]])
    flushed(cache)
    assert sink.view()[Tier.HOST] == named([0, 1])
    assert sink.view()[Tier.DEVICE] == set()
    store(cache, KEYS[100:103])
    flushed(cache)
    assert sink.view()[Tier.HOST] == set()
    assert not sink.reader.held
    assert sink.torn == []
    assert cache.health().status == "ok"
    cache.shutdown()


@pytest.mark.parametrize("waiter", ["owner", "other thread"])
@pytest.mark.parametrize("where", ["wait", "apply"])
@pytest.mark.parametrize("limit", ["roomy", "overflow"])
def test_a_wait_ends_only_when_the_state_was_sent_after_a_restart(
    monkeypatch, waiter, where, limit
):
    """A new incarnation of FlushNotifier has nothing that could be due, so it answers at once."""
    sink = TreeSink()
    cache = open_with(sink)
    describe(cache, 0)
    store(cache, [TREE[0]], [None])
    flushed(cache)
    assert sink.view()[Tier.HOST] == named([0])
    fail_once(monkeypatch, *((SinkSet, "wait") if where == "wait" else (Ledger, "apply")))
    if limit == "overflow":
        monkeypatch.setattr(sinks_module, "OUTBOX", 1)
    describe(cache, 1)
    store(cache, [TREE[1]], [TREE[0]])
    if waiter == "owner":
        assert cache.sinks.wait_flushed(LIMIT)
        seen = set(sink.view()[Tier.HOST])
    else:
        views: list[set[bytes]] = []

        def wait() -> None:
            if cache.sinks.wait_flushed(LIMIT):
                views.append(set(sink.view()[Tier.HOST]))

        thread = threading.Thread(target=wait)
        thread.start()
        while thread.is_alive():
            cache.end_step()
            thread.join(0.001)
        (seen,) = views
    assert seen == named([0, 1])
    assert sink.torn == []
    cache.shutdown()


def test_a_wait_of_another_thread_ends_unflushed_while_the_owner_does_nothing(monkeypatch):
    sink = TreeSink()
    cache = open_with(sink)
    describe(cache, 0)
    store(cache, [TREE[0]], [None])
    flushed(cache)
    fail_once(monkeypatch, SinkSet, "wait")
    assert elsewhere(cache.sinks.wait_flushed, 0.3) is False
    flushed(cache)
    assert sink.view()[Tier.HOST] == named([0])
    cache.shutdown()


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """The next call of a method of FlushNotifier's fails, and with it the incarnation."""
    whole, left = getattr(owner, name), [1]

    def failing(self: Any, *arguments: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise RuntimeError("a planted fault of the notifier")
        return whole(self, *arguments)

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize("num_slots", [1, 3, 16])
@pytest.mark.parametrize("capacity", [0, 2, 8])
@pytest.mark.parametrize("trouble", ["none", "overflow", "restarts"])
def test_what_sinks_are_sent_is_a_tree_and_exact(monkeypatch, num_slots, capacity, trouble):
    if trouble == "overflow":
        monkeypatch.setattr(sinks_module, "OUTBOX", 2)
    noise = random.Random(num_slots * 100 + capacity)
    if trouble == "restarts":
        whole, left = Ledger.apply, [3]

        def failing(self, fact):
            if noise.random() < 0.05 and left[0]:
                left[0] -= 1
                raise RuntimeError("a planted fault of the ledger")
            return whole(self, fact)

        monkeypatch.setattr(Ledger, "apply", failing)
    sink = TreeSink()
    storage = {"backend": "memory", "capacity_blocks": capacity} if capacity else {}
    cache = open_with(sink, num_slots, storage=storage)
    described = set()
    for _ in range(150):
        action, i = noise.random(), noise.randrange(len(TREE))
        if action < 0.4:
            describe(cache, i)
            described.add(i)
        elif action < 0.8:
            parent = PARENT[i]
            store(cache, [TREE[i]], [None if parent is None else TREE[parent]])
        elif action < 0.95:
            cache.end_step()
        else:
            cache.reset(storage=noise.random() < 0.5)
    for i in range(len(TREE)):
        describe(cache, i)
    store(cache, [TREE[0]], [None])
    deadline = 2000
    while deadline:
        deadline -= 1
        flushed(cache)
        feed = cache._feed
        assert feed is not None
        on = {tier: {n for n, on in feed._held.items() if tier in on} for tier in feed.tiers}
        held = set().union(*on.values())
        due = set()
        for i in range(len(TREE)):  # parents before children
            parent = PARENT[i]
            above = parent is None or block_name(TREE[parent]) in due
            if block_name(TREE[i]) in held and above:
                due.add(block_name(TREE[i]))
        want = {tier: on[tier] & due for tier in on}
        if {tier: sink.view()[tier] for tier in want} == want:
            break
        threading.Event().wait(0.01)  # until the restart of the notifier is noticed
    assert {tier: sink.view()[tier] for tier in want} == want
    assert on[Tier.HOST] == {block_name(key) for key in cache._tier.iter_hashes()}
    assert sink.torn == []
    cache.check()
    cache.shutdown()


def test_no_state_goes_into_the_channel_of_a_failed_notifier_before_it_is_emptied(monkeypatch):
    """The owner may flush at any moment, and what it sends before that moment is dropped."""
    purge, offered = ActorRef.purge, []

    def recording(ref, error):
        offered.append(cache._feed.incarnation())
        purge(ref, error)

    fail_once(monkeypatch, Ledger, "apply")
    monkeypatch.setattr(ActorRef, "purge", recording)
    sink = TreeSink()
    cache = open_with(sink)
    describe(cache, 0)
    store(cache, [TREE[0]], [None])
    flushed(cache)
    assert offered == [0]
    assert cache._feed.incarnation() == 1
    assert sink.view()[Tier.HOST] == {block_name(TREE[0])}
    cache.shutdown()


def test_a_tier_goes_to_the_engine_or_to_sinks():
    with pytest.raises(ConfigError, match="'host' is in events and in sink 'tree'"):
        open_with(TreeSink(), events=["host"])
    cache = open_with(TreeSink(["storage"]), events=["host"], storage={"backend": "memory"})
    describe(cache, 0)
    store(cache, TREE[:1])
    flushed(cache)
    assert [event.tier for event in cache.take_events()] == [Tier.HOST]
    cache.shutdown()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"sinks": [{"kind": "attention_store"}]}, "the engine computes the hashes"),
        ({"sinks": [{"kind": "memory", "tiers": ["device", "host"]}]}, "the engine reports tier"),
        ({"sinks": [{"kind": "memory", "granularity": "node"}]}, "per_tier"),
        ({"sinks": [{"kind": "memory", "report_gains_at": "request_finish"}]}, "commit"),
        ({"sinks": [{"kind": "memory", "colour": "red"}]}, "colour"),
        ({"sinks": [{"kind": "memory"}, {"kind": "memory"}]}, "different names"),
        ({"sinks": [{"kind": "memory"}], "tokens_per_block": 0}, "tokens_per_block"),
        ({"sinks": [{"kind": "memory"}], "events": ["storage"]}, "'storage' is in events"),
    ],
)
def test_sinks_that_do_not_fit_are_refused_by_name(settings, text):
    table = {"model": "m", "block_bytes": BLOCK, "num_slots": 2, "tokens_per_block": SIZE}
    with pytest.raises(ConfigError, match=text):
        TierCache(checked_config({**table, **settings}), SlotMemory(2, BLOCK))


def test_sinks_of_the_config_write_the_events(tmp_path):
    path = tmp_path / "events.jsonl"
    table = {
        "model": "m",
        "block_bytes": BLOCK,
        "num_slots": 2,
        "tokens_per_block": SIZE,
        "sinks": [{"kind": "jsonl", "path": str(path)}],
    }
    cache = TierCache(checked_config(table), SlotMemory(2, BLOCK))
    describe(cache, 0)
    store(cache, TREE[:1])
    cache.shutdown()
    assert block_name(TREE[0]).hex() in path.read_text("utf-8")


@pytest.mark.parametrize(
    "arguments",
    [
        ([b""], tokens_of(0)),
        (["key"], tokens_of(0)),
        (TREE[:1], tokens_of(0)[:-1]),
        (TREE[:1], [-1] * SIZE),
        (TREE[:1], [1 << 32] * SIZE),
        (TREE[:1], None),
        (TREE[:1], ["a"] * SIZE),
        (TREE[:1], tokens_of(0), 7),
        (TREE[:1], tokens_of(0), b""),
    ],
    ids=repr,
)
def test_wrong_paths_are_refused_in_the_thread_that_calls(arguments):
    cache = open_with(TreeSink())
    cache.start()
    with pytest.raises(ValueError):
        cache.sinks.describe(*arguments)
    with pytest.raises(ValueError):
        elsewhere(cache.sinks.describe, *arguments)
    cache.end_step()
    cache.shutdown()


@pytest.mark.parametrize(
    "more", [{"lora": 3}, {"salt": b"x"}, {"extra_keys": [(9, b"x")]}, {"extra_keys": 4}], ids=repr
)
def test_a_wrong_scope_or_extra_key_of_a_path_is_refused(more):
    cache = open_with(TreeSink())
    with pytest.raises(ValueError):
        cache.sinks.describe(TREE[:1], tokens_of(0), **more)
    cache.shutdown()


def test_a_sink_that_fails_degrades_the_health_and_nothing_else(monkeypatch):

    class Failing(TreeSink):
        ok = False

        async def deliver(self, tasks):
            if not self.ok:
                raise OSError("the index is gone")
            await super().deliver(tasks)

    sink = Failing()
    cache = open_with(sink)
    describe(cache, 0)
    store(cache, TREE[:1])
    cache.end_step()
    until = 3000
    while cache.health().status == "ok" and until:
        until -= 1
        threading.Event().wait(0.01)
    assert "sink tree" in cache.health().reasons[0]
    assert store(cache, TREE[1:3])
    sink.ok = True
    while sink.view()[Tier.HOST] != named([0]) and until:
        until -= 1
        threading.Event().wait(0.01)
    assert sink.view()[Tier.HOST] == named([0])
    cache.shutdown()
