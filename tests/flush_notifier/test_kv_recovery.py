"""Readers of KV events after a restart, a gap, or a late start: models of the real consumers end
equal to what the node holds."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import structlog
import zmq
import zmq.asyncio

import kvactors
from kvactors.flush_notifier.blocks import HeldBlock
from kvactors.flush_notifier.ledger import Ledger
from kvactors.flush_notifier.messages import BlocksRemoved, PathCached, TierCleared
from kvactors.flush_notifier.sinks import kv_events
from kvactors.flush_notifier.sinks.kv_events import Window
from kvactors.identity import RequestScope
from kvactors.settings import Config
from kvactors.types import Reason, Tier
from tests.flush_notifier.helpers import Wired, announced, names
from tests.flush_notifier.kv_consumers import Dynamo, LlmD, VllmRouter
from tests.flush_notifier.test_kv_events import (
    BLOCK,
    CLEAR,
    KEYS,
    ROOT,
    TOKENS,
    answers,
    gone,
    hash_of,
    number,
    opened,
    receive,
    socket,
    task,
)
from tests.support.kv_events import AllBlocksCleared, decode_batch
from tests.support.mirror import Mirror

pytestmark = pytest.mark.full

MEDIUM = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.STORAGE: "STORAGE"}


class Node(Wired):
    """A notifier with one sink, and random changes of a tree of blocks."""

    def __init__(self, sink: Any, seed: int) -> None:
        super().__init__(sink, timeout_s=60.0)
        self.random = random.Random(seed)
        self.first = 10 * seed  # processes have different blocks

    def change(self) -> PathCached | BlocksRemoved:
        draw, tier = self.random.randrange, self.random.choice([Tier.DEVICE, Tier.HOST])
        branch = (self.first + draw(3), *(draw(3) for _ in range(draw(4))))
        if self.random.random() < 0.55:
            return announced(*branch, tier=tier)
        return BlocksRemoved(names(*branch)[-1], tier, Reason.CPU_EVICTION)

    async def work(self, rounds: int) -> None:
        for _ in range(rounds):
            await self.tell(*(self.change() for _ in range(self.random.randint(1, 6))))
            await self.settle(60.0)

    async def clear(self) -> None:
        await self.tell(*(TierCleared(tier, Reason.CLEAR) for tier in Tier))
        await self.settle(60.0)

    def held(self) -> dict[str, set[int]]:
        return due(self.actor.ledger)


@asynccontextmanager
async def running(sink: Any, seed: int):
    node = Node(sink, seed)
    async with node.running():
        yield node


def due(ledger: Ledger) -> dict[str, set[int]]:
    """The blocks due for the first sink, by medium, at rest."""
    tree, due_of = ledger.tree, ledger.sinks[0].due
    found = {
        MEDIUM[t]: {hash_of(tree.rows.hash(block)) for block in tree.scan() if due_of[block] & t}
        for t in MEDIUM
    }
    return {medium: blocks for medium, blocks in found.items() if blocks}


class Link:
    """A model connected to a publisher over sockets. lose: share of live messages that are lost."""

    def __init__(
        self, model: Any, subscriber: Any, dealer: Any, lose: float = 0.0, seed: int = 0
    ) -> None:
        self.model = model
        self.subscriber = subscriber
        self.dealer = dealer
        self.lose = lose
        self.random = random.Random(seed)
        self.answered: list[list[int]] = []

    async def connected(self) -> None:
        start = self.model.connected() if isinstance(self.model, LlmD) else None
        if start is not None:
            await self.ask(start)

    async def ask(self, start: int) -> None:
        await self.dealer.send_multipart([b"", start.to_bytes(8, "big")])
        *got, _ = await answers(self.dealer)
        self.answered.append([number(frames[-2]) for frames in got])
        self.model.replayed(start, [(number(frames[-2]), frames[-1]) for frames in got])

    async def take(self, frames: list[bytes]) -> None:
        _, sequence, payload = frames
        if self.random.random() < self.lose:
            return
        start = self.model.wants(number(sequence))
        if start is not None:
            await self.ask(start)
        self.model.live(number(sequence), payload)

    async def drain(self, wait: int = 0) -> None:
        while await self.subscriber.poll(wait):
            await self.take(await self.subscriber.recv_multipart())

    async def reach(self, sink: Any, seconds: float = 30.0) -> None:
        """Read until everything published is known. A gap shows at the next batch, here an empty
        one."""
        until = asyncio.get_running_loop().time() + seconds
        self.lose = 0.0
        while self.model.next != sink.events.sequence:
            assert asyncio.get_running_loop().time() < until, (
                f"at {self.model.next} of {sink.events.sequence}"
            )
            sink.events.publish([])
            await self.drain(100)


@asynccontextmanager
async def linked(sink: Any, model: Any, **options):
    async with (
        socket(zmq.SUB, sink.endpoint) as subscriber,
        socket(zmq.DEALER, sink.replay_endpoint) as dealer,
    ):
        link = Link(model, subscriber, dealer, **options)
        await link.connected()
        yield link


# -- numbers


async def test_numbers_of_a_new_process_go_on_above_those_of_the_one_before(tmp_path):
    last = 1_700_000_000_000_000
    for _ in range(3):
        async with opened(tmp_path, numbers="rising") as sink:
            assert sink.events.sequence == sink.events.first > last
            await sink.begin_epoch(7)
            for i in range(50):
                await sink.deliver([task(i % 8, 1)])
            assert sink.events.sequence - sink.events.first == 51
            assert sink.events.sequence < 1 << 63, "a reader may take it for a signed number"
            last = sink.events.sequence


def test_a_clock_that_is_not_set_is_logged(monkeypatch):
    monkeypatch.setattr("time.time", lambda: 86_400.0)
    with structlog.testing.capture_logs() as logs:
        assert kv_events.first_number("rising", "x") == 86_400_000_000
        assert kv_events.first_number("from_zero", "x") == 0
    assert [(log["log_level"], log["seconds_since_1970"]) for log in logs] == [("warning", 86_400)]


async def test_an_incarnation_of_the_notifier_goes_on_with_the_numbers_and_clears_first(tmp_path):
    for numbers in ("rising", "from_zero"):
        async with opened(tmp_path, numbers=numbers) as sink, linked(sink, Dynamo()) as link:
            for incarnation in range(3):
                before = sink.events.sequence
                async with running(sink, incarnation + 1) as node:
                    await node.work(20)
                    assert decode_batch(sink.events.window.since(before)[0][1])[1] == [CLEARED]
                    await link.reach(sink)
                    assert link.model.index.view() == node.held()


@pytest.mark.parametrize("window", [10_000, 3])
@pytest.mark.parametrize(
    ("numbers", "consumer"),
    [("rising", Dynamo), ("from_zero", VllmRouter), ("from_zero", LlmD), ("rising", "newer llm-d")],
)
async def test_after_a_kill_nothing_stale_stays(tmp_path, numbers, consumer, window):
    """The old process publishes more, then less, than the new one has when the reader is back."""
    model = LlmD(insists=False) if consumer == "newer llm-d" else consumer()
    options = {"numbers": numbers, "replay_window": window}
    async with AsyncExitStack() as stack:
        link = None
        for process, calls in enumerate((60, 20, 5)):
            async with opened(tmp_path, **options) as sink:
                if link is None:
                    link = await stack.enter_async_context(linked(sink, model))
                async with running(sink, process + 1) as node:
                    await node.work(calls)
                    await link.reach(sink)
                    assert model.index.view() == node.held()
                    assert (model.index.doubles, model.index.orphans) == (0, 0)


# -- a replay that is whole


@pytest.mark.parametrize("form", ["five_frames", "four_frames"])
async def test_a_request_for_more_than_is_kept_begins_where_it_asks_and_is_the_state(
    tmp_path, form
):
    async with (
        opened(tmp_path, replay_window=4, replay=form) as sink,
        running(sink, 3) as node,
        socket(zmq.DEALER, sink.replay_endpoint) as dealer,
    ):
        await node.work(30)
        for start in (0, 1, sink.events.sequence - 7, sink.events.window.first - 1):
            await dealer.send_multipart([b"", start.to_bytes(8, "big")])
            *got, end = await answers(dealer)
            assert end[-1] == b""
            assert [number(frames[-2]) for frames in got] == list(
                range(start, sink.events.sequence)
            )
            assert [len(frames) for frames in got[:1]] == [4 if form == "five_frames" else 3]
            model = LlmD()
            model.replayed(start, [(number(frames[-2]), frames[-1]) for frames in got])
            assert model.index.view() == node.held()
            assert (model.index.doubles, model.index.orphans, model.refused) == (0, 0, 0)


async def test_numbers_that_rise_are_not_filled_up(tmp_path):
    """Readers of rising numbers ask from 0, or from what the process before had: nothing is sent
    for those numbers."""
    async with (
        opened(tmp_path, numbers="rising", replay_window=4) as sink,
        running(sink, 3) as node,
        socket(zmq.DEALER, sink.replay_endpoint) as dealer,
    ):
        await node.work(30)
        for start in (
            0,
            sink.events.first - 1_000_000,
            sink.events.first + 1,
            sink.events.sequence - 6,
        ):
            await dealer.send_multipart([b"", start.to_bytes(8, "big")])
            *got, _ = await answers(dealer)
            numbers = [number(frames[-2]) for frames in got]
            assert numbers == list(range(numbers[0], sink.events.sequence))
            assert start <= numbers[0]
            assert len(numbers) <= 4 + 3
            index = Dynamo().index
            for frames in got:
                index.batch(frames[-1])
            assert index.view() == node.held()
            assert index.empty == 0


async def test_more_empty_batches_than_the_bound_are_not_sent(tmp_path, monkeypatch):
    monkeypatch.setattr(kv_events, "MAX_FILL_BATCHES", 10)
    async with (
        opened(tmp_path, replay_window=4) as sink,
        socket(zmq.DEALER, sink.replay_endpoint) as dealer,
    ):
        await sink.begin_epoch(7)
        for i in range(40):
            await sink.deliver([task(i % 8, 1)])
        await dealer.send_multipart([b"", bytes(8)])
        *got, _ = await answers(dealer)
        assert len(got) < 10


@pytest.mark.parametrize("consumer", [Dynamo, VllmRouter, LlmD])
@pytest.mark.parametrize("seed", range(3))
async def test_readers_that_lose_messages_and_start_late_end_equal_to_the_node(
    tmp_path, consumer, seed
):
    """Replays and states are made while deliveries go on, and are never taken twice: llm-d counts
    the stores of a block."""
    async with (
        opened(tmp_path, replay_window=3 + seed, max_blocks=1 + seed % 3) as sink,
        running(sink, seed + 1) as node,
        AsyncExitStack() as stack,
    ):
        links = [await stack.enter_async_context(linked(sink, consumer(), lose=0.4, seed=seed))]
        for _ in range(5):
            work = asyncio.create_task(node.work(40))
            while not work.done():
                for link in links:
                    await link.drain()
                await asyncio.sleep(0)
            await work
            links.append(
                await stack.enter_async_context(linked(sink, consumer(), lose=0.4, seed=seed))
            )
        for link in links:
            await link.reach(sink)
            index = link.model.index
            assert index.view() == node.held()
            assert (index.doubles, index.orphans) == (0, 0)
        assert sink.events.states_made >= 2


async def test_a_clear_while_a_state_is_made(tmp_path):
    async with (
        opened(tmp_path, replay_window=2) as sink,
        running(sink, 5) as node,
        linked(sink, LlmD()) as link,
    ):
        await node.work(60)
        for _ in range(5):
            asking = asyncio.create_task(link.ask(0))
            link.model.index.clear()
            await asyncio.sleep(0)
            await node.clear()
            await node.work(20)
            await asking
            await link.reach(sink)
            assert link.model.index.view() == node.held()
            link.model.last = None


async def test_a_state_after_a_clear_is_empty_until_the_ledger_is_updated(tmp_path):
    async with opened(tmp_path, replay_window=1) as sink:
        sink.set_snapshot_source(
            lambda: iter([HeldBlock(KEYS[0], ROOT, 0, TOKENS[:16], Tier.DEVICE, RequestScope())])
        )
        await sink.begin_epoch(7)
        await sink.deliver([task(0, 1)])
        await sink.deliver([CLEAR])
        sink.events.hold()
        state = await sink.events.state()
        assert (state.number, len(state.parts)) == (sink.events.sequence, 1)
        sink.events.release()


async def test_the_state_has_the_last_published_batch_before_the_ledger_counts_it(tmp_path):
    """The answer of a call reaches the ledger some time after its end."""
    async with opened(tmp_path) as sink:
        known = [
            HeldBlock(
                KEYS[i],
                KEYS[i - 1] if i else ROOT,
                i,
                TOKENS[16 * i : 16 * i + 16],
                tiers,
                RequestScope(),
            )
            for i, tiers in enumerate([Tier.DEVICE, Tier(0), Tier.DEVICE | Tier.HOST])
        ]
        sink.set_snapshot_source(lambda: iter(known))
        await sink.begin_epoch(7)
        await sink.deliver([gone(2, 1), task(1, 1)])
        sink.events.hold()
        state = await sink.events.state()
        mirror = Mirror()
        for events in state.batches(100):
            mirror.apply(decode_batch(sink.events.payload(events))[1])
        assert mirror.view == {
            "GPU": {hash_of(KEYS[0]), hash_of(KEYS[1])},
            "CPU": {hash_of(KEYS[2])},
        }
        sink.events.release()


async def test_a_cancelled_call_counts_its_published_events(tmp_path):
    """Each task that was published is taken for certain, so that it is not published again."""
    async with opened(tmp_path, max_blocks=1) as sink:
        await sink.begin_epoch(7)
        call = asyncio.create_task(sink.deliver([task(0, 2), task(2, 2), task(4, 2)]))
        while sink.events.sequence < 4:
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert sink.num_acknowledged == (sink.events.sequence - 1) // 2
        assert 0 < sink.num_acknowledged < 3


async def test_a_window_keeps_the_events_after_a_state_within_bounds():
    window = Window(2, 100)
    window.needed = 5
    for i in range(10):
        window.add(i, bytes(10))
    assert window.first == 5
    for i in range(10, 5_000):
        window.add(i, bytes(10))
    assert len(window.since(0)) <= 2 * 2 + kv_events.EXTRA_BATCHES + 1
    window.needed = kv_events.END
    window.add(5_000, bytes(10))
    assert [n for n, _ in window.since(0)] == [4_999, 5_000]


CLEARED = AllBlocksCleared()


# -- the wired system, read strictly

WIRED = {
    "cache": {"model": "m", "block_size": BLOCK},
    "device": {"num_blocks": 16},
    "layout": {"num_layers": 1, "num_kv_heads": 1, "head_dim": 2},
    "storage": {"backend": "memory", "write_policy": "write_back", "capacity_blocks": 20},
}


@pytest.mark.parametrize("max_blocks", [1, 256])
@pytest.mark.parametrize(
    "host",
    [{"slots": 12, "transit_slots": 16}, {"slots": 12, "transit_slots": 16, "mode": "inclusive"}],
)
async def test_strict_readers_over_the_messages_of_a_cache(tmp_path, host, max_blocks):
    """Every message from the first on, one that begins in the middle, and the state at the end: no
    orphan, nothing twice, equal to the node."""
    sink = {
        "kind": "kv_events",
        "endpoint": f"ipc://{tmp_path}/e",
        "replay_endpoint": f"ipc://{tmp_path}/r",
        "heartbeat_s": 0,
    }
    tables = {
        **WIRED,
        "host": host,
        "flush": {"sinks": [{**sink, "numbers": "from_zero", "max_blocks": max_blocks}]},
    }
    async with kvactors.open(Config.from_mapping(tables)) as cache:
        publisher: Any = cache.sinks["kv_events"]
        states = []
        for seed in range(60):
            async with await cache.acquire(
                f"r{seed}", [seed % 3] * BLOCK + [seed % 20] * 3 * BLOCK
            ) as lease:
                await lease.wait_ready()
                await lease.commit(4 * BLOCK)
            if seed % 13 == 5:
                publisher.events.hold()
                states.append(await publisher.events.state())
                publisher.events.release()
            if seed == 40:
                await cache.clear()
        await cache.wait_flushed(20.0)
        recorded = publisher.events.window.since(0)
        assert recorded[0][0] == 0
        for model in (Dynamo(), LlmD()):
            for sequence, payload in recorded:
                model.live(sequence, payload)
            assert model.index.view() == due(cache.system.notifier_actor.ledger)
            assert (model.index.orphans, model.index.doubles) == (0, 0)
        for state in states:
            for index in (Dynamo().index, LlmD().index):
                for events in state.batches(1_000):
                    index.batch(publisher.events.payload(events))
                for sequence, payload in recorded:
                    if sequence >= state.number:
                        index.batch(payload)
                assert index.view() == due(cache.system.notifier_actor.ledger)
                assert (index.orphans, index.doubles) == (0, 0)


# -- many readers


async def test_any_number_of_readers_at_once_and_readers_that_take_nothing(tmp_path):
    """12 readers ask for everything while twice as many as can be served take nothing."""
    async with opened(tmp_path, replay_window=400) as sink, AsyncExitStack() as stack:
        await sink.begin_epoch(7)
        for i in range(600):
            await sink.deliver([task(i % 8, 8 - i % 8), gone(i % 8, 8 - i % 8)])
        idle = zmq.asyncio.Context.instance()
        for _ in range(2 * kv_events.READERS):
            reader = idle.socket(zmq.DEALER)
            reader.setsockopt(zmq.RCVHWM, 1)
            reader.setsockopt(zmq.RCVBUF, 1024)
            reader.connect(sink.replay_endpoint)
            stack.callback(reader.close, 0)
            await reader.send_multipart([b"", bytes(8)])
        readers = [
            await stack.enter_async_context(socket(zmq.DEALER, sink.replay_endpoint))
            for _ in range(12)
        ]
        for reader in readers:
            await reader.send_multipart([b"", (1).to_bytes(8, "big")])
        got = await asyncio.gather(*(patient_answers(reader) for reader in readers))
        assert {(number(one[0][-2]), number(one[-2][-2]), one[-1][-1]) for one in got} == {
            (1, sink.events.sequence - 1, b"")
        }
        assert sink.events.states_made < 12, "readers share a state"


async def patient_answers(reader: Any) -> list[list[bytes]]:
    got = []
    while not got or got[-1][-1]:
        got.append(await receive(reader, 100.0))
    return got


async def test_a_state_is_dropped_when_no_reader_needs_it(tmp_path):
    async with (
        opened(tmp_path, replay_window=2) as sink,
        running(sink, 8) as node,
        socket(zmq.DEALER, sink.replay_endpoint) as dealer,
    ):
        await node.work(30)
        await dealer.send_multipart([b"", bytes(8)])
        await answers(dealer)
        while sink.events._readers:
            await asyncio.sleep(0.01)
        assert sink.events._state is None
        await node.work(3)
        assert len(sink.events.window.since(0)) == 2


# -- an empty batch when idle


async def test_an_idle_publisher_sends_heartbeats(tmp_path):
    """Without traffic a late reader and one that lost the last batch learn of the gap."""
    async with opened(tmp_path, heartbeat_s=0.05) as sink:
        await asyncio.sleep(0.2)
        assert sink.events.sequence == 0, "nothing is published before the beginning"
        async with running(sink, 2) as node:
            await node.work(20)
            for model in (Dynamo(), VllmRouter(), LlmD()):
                async with linked(sink, model) as link:
                    while not model.index.empty:
                        await link.take(await receive(link.subscriber))
                    assert model.index.view() == node.held()
