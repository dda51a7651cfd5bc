"""An index that has lost its state is sent everything again: when asked for, and at an interval,
without a resident block reported absent where the index keeps sets."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from typing import Any

import pytest

import kvactors
from kvactors.errors import ConfigError, DeadlineExceeded, SinkError
from kvactors.flush_notifier.ledger import Ledger
from kvactors.flush_notifier.messages import BlocksRemoved, FlushTask, Resync
from kvactors.flush_notifier.sinks import Sink
from kvactors.settings import Config
from kvactors.settings.sinks import SinkConfig
from kvactors.types import Reason, Residency, Tier, split_hashes
from tests.flush_notifier.helpers import (
    BLOCK,
    NODE,
    PER_TIER,
    Wired,
    announced,
    delivered,
    do,
    finished,
    memory,
    names,
    path,
    refused,
    take,
)
from tests.support import attentionstore_sdk as stand_in
from tests.support.deadline import deadline_after

CACHE = {
    "cache": {"model": "m", "block_size": 4},
    "device": {"num_blocks": 16},
    "host": {"slots": 12, "transit_slots": 16},
    "layout": {"num_layers": 1, "num_kv_heads": 1, "head_dim": 2},
}


@pytest.fixture(autouse=True)
def fresh_services():
    stand_in.reset()


class Book(Sink):
    """Keeps blocks by tier, and every call."""

    def __init__(self, *, repeats: bool, resync_interval: float = 0.0) -> None:
        super().__init__(SinkConfig(name="book", resync_interval_s=resync_interval))
        self.repeats = repeats
        self.held: dict[Tier, set[bytes]] = defaultdict(set)
        self.calls: list[str] = []
        self.down = False
        self.gate: asyncio.Event | None = None
        self.slow: asyncio.Event | None = None

    async def begin_epoch(self, epoch: int) -> None:
        await self._reach()
        self.calls.append("begin")
        self.held.clear()

    async def deliver(self, tasks) -> None:
        await self._reach()
        for task in tasks:
            self.calls.append(task.residency.value)
            change = (
                self.held[task.tier].update
                if task.residency is Residency.RESIDENT
                else self.held[task.tier].difference_update
            )
            change(split_hashes(task.hashes))
        if self.slow is not None:
            await self.slow.wait()

    async def _reach(self) -> None:
        if self.gate is not None:
            await self.gate.wait()
        if self.down:
            raise SinkError("down")

    def lose(self) -> None:
        """The index loses its state, unnoticed."""
        self.held.clear()
        self.calls.clear()

    def view(self) -> dict[Tier, set[bytes]]:
        return {tier: set(keys) for tier, keys in self.held.items()}


def truth(actor: Any) -> dict[Tier, set[bytes]]:
    """The resident blocks by tier, according to the ledger."""
    tiers = (Tier.DEVICE, Tier.HOST)
    tree = actor.ledger.tree
    return {
        tier: {tree.rows.hash(block) for block in tree.scan() if tree.tiers[block] & tier}
        for tier in tiers
    }


def equal(book: Book, actor: Any) -> bool:
    return {tier: keys for tier, keys in book.view().items() if keys} == {
        t: k for t, k in truth(actor).items() if k
    }


async def resync(wired: Wired, name: str = "book", seconds: float = 10.0) -> None:
    assert await wired.ref.ask(Resync(name), deadline=deadline_after(seconds)) is True
    wired.actor.check()


# -- the notifier


@pytest.mark.parametrize("repeats", [True, False])
async def test_an_index_that_lost_its_state_has_everything_after_a_resync(repeats):
    book = Book(repeats=repeats)
    wired = Wired(book, timeout_s=5.0)
    async with wired.running():
        await wired.tell(
            announced(1, 2, 3), announced(1, 4), announced(1, 2, tier=Tier.HOST), announced(5)
        )
        await wired.settle()
        book.lose()
        await wired.tell(finished(1, 2, 3))
        await wired.settle()
        assert not equal(book, wired.actor), "nothing has changed for the ledger"
        await resync(wired)
        assert equal(book, wired.actor)
        assert ("begin" in book.calls) is not repeats
        assert "gone" not in book.calls
        assert wired.actor.sinks.statistics()[0].resyncs == 1


async def test_a_sink_whose_index_keeps_sets_is_never_sent_gone_of_a_resident_block():
    book = Book(repeats=True)
    wired = Wired(book, timeout_s=5.0, batch=1)
    async with wired.running():
        await wired.tell(*(announced(i, i + 1, i + 2) for i in range(1, 20)))
        await wired.settle()
        book.calls.clear()
        before = book.view()
        asking = asyncio.create_task(resync(wired))
        while not asking.done():
            assert book.view() == before
            await asyncio.sleep(0)
        await asking
        assert set(book.calls) == {"resident"}


@pytest.mark.parametrize("repeats", [True, False])
async def test_a_resync_during_a_call_counts_the_delivered_batch(repeats):
    """The batch in flight is in the index's past when the index forgets: it must be sent again."""
    book = Book(repeats=repeats)
    wired = Wired(book, timeout_s=5.0)
    async with wired.running():
        await wired.tell(announced(1, 2))
        await wired.settle()
        book.gate = asyncio.Event()
        await wired.tell(
            announced(3, 4), BlocksRemoved(path(2)[1], Tier.DEVICE, Reason.CPU_EVICTION)
        )
        while not wired.actor.sinks.deliveries[0].in_flight:
            await asyncio.sleep(0.001)
        asking = [asyncio.create_task(resync(wired)) for _ in range(3)]
        await asyncio.sleep(0.02)
        book.gate.set()
        await asyncio.gather(*asking)
        assert equal(book, wired.actor)
        assert ("begin" in book.calls[1:]) is not repeats
        assert book.calls[-1] == "resident"


@pytest.mark.parametrize("interval", [0.0, 0.1])
@pytest.mark.parametrize("repeats", [True, False])
async def test_a_delivered_batch_may_be_lost_before_its_call_returns(repeats, interval):
    """The index takes a batch, loses its state, and a resync is asked for before the notifier has
    the answer to the batch."""
    book = Book(repeats=repeats, resync_interval=interval)
    wired = Wired(book, timeout_s=60.0)
    async with wired.running():
        await wired.settle()
        book.slow = asyncio.Event()
        await wired.tell(announced(1, 2), announced(3, 4))
        while not book.held[Tier.DEVICE]:
            await asyncio.sleep(0.001)
        book.lose()
        if interval:
            seen = wired.actor.sinks.deliveries[0]
            while not seen.resync_due:
                await asyncio.sleep(0.01)
            book.slow.set()
            while not equal(book, wired.actor):
                await asyncio.sleep(0.01)
            return
        asking = asyncio.create_task(resync(wired))
        await asyncio.sleep(0.02)
        book.slow.set()
        await asking
        assert equal(book, wired.actor)


@pytest.mark.parametrize("repeats", [True, False])
async def test_a_resync_of_a_failing_sink_continues_after_its_deadline(repeats):
    book = Book(repeats=repeats)
    wired = Wired(book, memory("other"), timeout_s=5.0)
    async with wired.running():
        await wired.tell(announced(1, 2, 3))
        await wired.settle()
        book.lose()
        book.down = True
        for _ in range(5):
            with pytest.raises(DeadlineExceeded):
                await wired.ref.ask(Resync("book"), deadline=deadline_after(0.05))
        assert len(wired.actor.sinks.waiters) <= 2, "those who wait no longer are forgotten"
        assert await wired.ref.ask(Resync("other"), deadline=deadline_after(5.0))
        book.down = False
        await wired.settle()
        assert equal(book, wired.actor)


@pytest.mark.parametrize("repeats", [True, False])
async def test_an_interval_brings_everything_back_without_being_asked(repeats):
    book = Book(repeats=repeats, resync_interval=0.1)
    wired = Wired(book, timeout_s=5.0)
    async with wired.running():
        await wired.tell(*(announced(i, i + 1) for i in range(1, 30)))
        await wired.settle()
        for _ in range(2):
            book.lose()
            while not equal(book, wired.actor):
                await asyncio.sleep(0.01)
        assert wired.actor.sinks.statistics()[0].resyncs >= 2
        wired.actor.check()


async def test_a_repetition_waits_until_the_sink_has_taken_a_batch():
    """While the sink takes nothing, no more than a batch is pending."""
    book = Book(repeats=True, resync_interval=0.1)
    wired = Wired(book, timeout_s=60.0, batch=2)
    async with wired.running():
        await wired.tell(*(announced(i, i + 1) for i in range(1, 30)))
        await wired.settle()
        book.down = True
        book.lose()
        while not (failing := wired.actor.sinks.statistics()[0]).failures:
            await asyncio.sleep(0.01)
        assert failing.pending == 2
        await wired.tell(announced(50))
        book.down = False
        while not equal(book, wired.actor):
            await asyncio.sleep(0.01)


# -- the ledger


@pytest.mark.parametrize("seed", range(30))
def test_an_index_ends_equal_after_any_history(seed):
    """Facts, deliveries that succeed or fail, indexes that lose what they have, and both ways to
    send it again."""
    rng = random.Random(seed)
    views = [PER_TIER, NODE]
    book = Ledger(BLOCK, views, idle_limit=rng.choice([1, 5, 100]))
    mirrors: list[dict[Tier, set[bytes]]] = [defaultdict(set) for _ in views]

    def arrive(i: int, tasks: list[FlushTask]) -> None:
        for task in tasks:
            held = mirrors[i][task.tier]
            (held.update if task.residency is Residency.RESIDENT else held.difference_update)(
                split_hashes(task.hashes)
            )

    for _ in range(400):
        i, tier = rng.randrange(2), rng.choice([Tier.DEVICE, Tier.HOST])
        branch = tuple(rng.randint(1, 3) for _ in range(rng.randint(1, 4)))
        match rng.randint(0, 6):
            case 0 | 1:
                do(book.announce(announced(*branch, tier=tier)))
            case 2:
                do(
                    book.lose(
                        b"".join(names(*branch)[rng.randrange(len(branch)) :]),
                        tier,
                        Reason.CPU_EVICTION,
                    )
                )
            case 3 | 4:
                batch = take(book, i, rng.choice([1, 100]), 1)
                if rng.random() < 0.7:
                    arrive(i, batch.tasks)
                    delivered(book, i, batch)
                else:
                    arrive(i, batch.tasks[: rng.randint(0, len(batch.tasks))])
                    refused(book, i, batch)
            case 5:
                mirrors[i].clear()
                book.sinks[i].repeat()
            case 6:
                mirrors[i].clear()
                do(book.sinks[i].reset())
        book.check()
    for i in range(len(views)):
        mirrors[i].clear()
        book.sinks[i].repeat()
        for _ in range(1000):
            if not (book.sinks[i].pending or book.sinks[i].repeated):
                break
            batch = take(book, i, 1000, 1)
            arrive(i, batch.tasks)
            delivered(book, i, batch)
        expected: dict[Tier, set[bytes]] = defaultdict(set)
        for block in book.tree.scan():
            for one in Tier:
                if book.sinks[i].due[block] & one:
                    expected[one].add(book.tree.rows.hash(block))
        assert {t: k for t, k in mirrors[i].items() if k} == {
            t: k for t, k in expected.items() if k
        }


# -- the cache


def config(*sinks, **tables) -> Config:
    return Config.from_mapping({**CACHE, **tables, "flush": {"sinks": list(sinks)}})


async def serve(cache, seeds) -> None:
    for seed in seeds:
        async with await cache.acquire(f"r{seed}", [seed % 3] * 4 + [seed] * 12) as lease:
            await lease.wait_ready()
            await lease.commit(16)


async def test_arguments_are_checked_in_the_caller():
    async with kvactors.open(config({"kind": "memory"})) as cache:
        for wrong, error in (
            (None, TypeError),
            (1, TypeError),
            (["memory"], TypeError),
            ("", ValueError),
            ("other", ValueError),
        ):
            with pytest.raises(error, match="sink"):
                await cache.resync(wrong)
        with pytest.raises(ValueError, match="deadline"):
            await cache.resync("memory", deadline=-1)
        await cache.resync("memory", deadline=5)
        assert cache.statistics().flush[0].resyncs == 1
    with pytest.raises(kvactors.CacheClosed):
        await cache.resync("memory")


@pytest.mark.parametrize("interval", [-1, 0.01, float("inf"), float("nan")])
def test_an_interval_that_cannot_be(interval):
    with pytest.raises(ConfigError, match="resync_interval_s must be"):
        config({"kind": "memory", "resync_interval_s": interval})


async def test_attention_store_is_never_short_of_a_resident_block(tmp_path):
    sdk = {"sdk": "tests.support.attentionstore_sdk", "ready_interval_s": 0.01}
    sink = {"kind": "attention_store", "journal": str(tmp_path / "journal")}
    async with kvactors.open(config(sink, attention_store=sdk)) as cache:
        await serve(cache, range(6))
        await cache.wait_flushed()
        service = stand_in.service()
        everything = set(service.resident)
        assert everything
        service.calls.clear()
        await cache.resync("attention_store")
        assert service.resident == everything
        flushed = [call.arguments for call in service.calls if call.name == "flush_token_index"]
        assert flushed
        assert all(source is None for _, _, _, source, _ in flushed), "only that blocks have come"
        service.resident.clear()
        await serve(cache, [5])
        await cache.wait_flushed()
        assert service.resident != everything
        await cache.resync("attention_store")
        assert service.resident == everything
    assert not service.resident or (tmp_path / "journal").exists()


async def test_without_a_notifier_it_is_an_error():
    tables = {"actors": {"max_restarts_per_minute": 0}}
    async with kvactors.open(config({"kind": "memory"}, **tables)) as cache:
        cache.system.notifier_actor.ledger.announce = None
        await serve(cache, [1])
        while type(cache.system.notifier_actor).__name__ != "NoNotifier":
            await asyncio.sleep(0.01)
        with pytest.raises(SinkError, match="switched off"):
            await cache.resync("memory")
