"""Ranks that fall silent, die, are cut off and come back, on the loop of virtual time. Random
faults of ranks are part of `tests/simulation`."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

import kvactors
from kvactors.data_plane.base import Direction
from kvactors.data_plane.ranks.protocol import CopyBlocks
from kvactors.data_plane.ranks.worker import _Refuse, _Serving
from kvactors.device.base import DeviceBlocks
from kvactors.settings import DeviceConfig, HostConfig
from kvactors.settings.ranks import RanksConfig
from kvactors.testing.loop import simulate
from tests.ranks.simulated import (
    BLOCK,
    ENDPOINT,
    Rank,
    all_there,
    at_rest,
    led,
    load,
    prompt,
    serve,
    settings,
    stored,
    wrong,
)

INCLUSIVE = HostConfig(slots=16, transit_slots=16, mode="inclusive")
WRITE_THROUGH = {"host": INCLUSIVE, "storage": stored(write_policy="write_through")}
LAYERS = {
    "device": DeviceConfig(num_blocks=12, layerwise=True),
    "storage": stored(write_policy="write_through_selective"),
}


def test_layers_are_reported_by_ranks():
    async def main() -> None:
        async with led(settings(**LAYERS)) as (cache, ranks):
            requests = load(cache, ranks)
            await requests.run(60)
            assert requests.wrong == 0
            for family in (90, 91, 92):
                await serve(cache, ranks, prompt(family, 5))
            await cache.wait_idle()
            lease = await cache.acquire("by layers", prompt(90, 5))
            assert lease.pending
            assert [await lease.wait_layer(layer) for layer in range(3)] == [5 * BLOCK] * 3
            await lease.wait_ready()
            assert wrong(lease, ranks, 5) == []
            await lease.finish()
            await at_rest(cache)

    simulate(main, 3)


@pytest.mark.parametrize("end", ["finish", "preempt", "abandon"])
def test_a_lease_granted_before_a_loss_raises_and_leaks_nothing(end):
    async def main() -> None:
        async with led(settings(device=DeviceConfig(num_blocks=16, layerwise=True))) as (
            cache,
            ranks,
        ):
            engine = load(cache, ranks)
            await engine.run(40)
            held = [await cache.acquire(f"h{f}", prompt(f, 2), deadline=60.0) for f in range(2)]
            for rank in ranks:
                rank.latency = lambda: 0.05  # the loads of this request stay in flight
            pending = await cache.acquire("pending", prompt(0, 3), deadline=60.0)
            ranks[1].gate.close()
            waits = (
                [asyncio.ensure_future(pending.wait_layer(layer)) for layer in (0, 2)]
                if pending.pending
                else []
            )
            ranks[1].cut()
            await asyncio.sleep(0.1)
            for lease in (*held, pending):
                with pytest.raises(kvactors.RankLost):
                    await lease.extend([1] * BLOCK)
                with pytest.raises(kvactors.RankLost):
                    await lease.commit(BLOCK)
            for result in await asyncio.gather(*waits, return_exceptions=True):
                assert isinstance(result, int | kvactors.RankLost)
            for lease in (*held, pending):
                if end == "abandon":
                    lease.abandon()
                else:
                    await getattr(lease, end)()
            ranks[1].gate.open()
            await all_there(cache)
            await engine.run(20)
            assert engine.wrong == 0
            await at_rest(cache)

    simulate(main, 1)


def test_requests_that_wait_when_a_rank_is_lost_are_matched_again():
    async def main(seed: int) -> None:
        async with led(settings(device=DeviceConfig(num_blocks=10))) as (cache, ranks):
            engine = load(cache, ranks)
            await engine.run(20)
            ranks[0].gate.close()
            asked = [
                asyncio.ensure_future(cache.acquire(f"w{f}", prompt(f, 4), deadline=20.0))
                for f in range(5)
            ]
            await asyncio.sleep(0.05)
            ranks[0].cut()
            ranks[0].gate.open()
            while asked:
                await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                for task in [one for one in asked if one.done()]:
                    asked.remove(task)
                    if task.exception() is None:
                        await task.result().finish()
            await all_there(cache)
            await engine.run(20)
            assert engine.wrong == 0
            await at_rest(cache)

    for seed in range(4):
        simulate(lambda seed=seed: main(seed), seed)


def test_a_rank_that_connects_and_fails_before_the_others_connect():
    async def main() -> None:
        config = settings(storage=stored(write_policy="write_through"))
        ranks = [Rank(config, number) for number in range(2)]

        async def come() -> None:
            await ranks[0].start()
            await asyncio.sleep(0.1)
            await ranks[0].stop()
            await asyncio.sleep(0.1)
            await ranks[1].start()
            await asyncio.sleep(0.1)
            await ranks[0].start()

        coming = asyncio.ensure_future(come())
        async with kvactors.open(config, inline_copies=True) as cache:
            engine = load(cache, ranks)
            await engine.run(30)
            assert engine.totals.finished
            assert engine.wrong == 0
            await at_rest(cache)
        await coming
        for rank in ranks:
            await rank.close()

    simulate(main, 2)


def test_a_leader_without_its_ranks_names_the_missing_ones():
    async def main() -> None:
        config = settings(ranks=RanksConfig(3, ENDPOINT, 0.3, 2.0))
        rank = Rank(config, 1)
        await rank.start()
        with pytest.raises(kvactors.ConfigError, match="tensor_parallel"):
            async with kvactors.open(config, inline_copies=True):
                pass
        config = settings(3, ranks=RanksConfig(3, ENDPOINT, 0.3, 2.0))
        await rank.close()
        rank = Rank(config, 1)
        await rank.start()
        with pytest.raises(kvactors.RankError, match=r"\[0, 2\] of 3"):
            async with kvactors.open(config, inline_copies=True):
                pass
        await rank.close()

    simulate(main, 0)


@pytest.mark.parametrize("lost", [False, True], ids=["", "a rank has lost the end"])
def test_a_chunk_begins_after_the_blocks_that_all_ranks_have_stored(lost):
    """The leader has the names that all ranks hold, so later chunks take no blocks ahead."""

    async def main() -> None:
        async with led(settings(**WRITE_THROUGH)) as (cache, ranks):
            tokens = prompt(1, 9)
            first, _ = await serve(cache, ranks, tokens[: 5 * BLOCK + 1])
            last = first.hashes(4, 5)
            await cache.wait_idle()
            await cache.clear()
            known = 5
            if lost:
                await ranks[1].store.remove([last])
                known = 4
                await ranks[1].stop()
                await ranks[1].start()
                await all_there(cache)
            lease = await cache.acquire("chunked", tokens, chunk_tokens=2 * BLOCK)
            assert len(lease.block_table) == known + 2
            await lease.wait_ready()
            assert lease.hits.storage == known
            assert wrong(lease, ranks, known) == []
            await lease.commit((known + 2) * BLOCK)
            assert len(await lease.next_chunk(2 * BLOCK)) == 2
            await lease.finish((known + 2) * BLOCK)
            await at_rest(cache)

    simulate(main, 5)


def test_a_last_block_is_copied_on_every_rank():
    async def main() -> None:
        async with led(settings(device=DeviceConfig(num_blocks=16))) as (cache, ranks):
            lease = await cache.acquire("a", prompt(1, 1), deadline=60.0)
            names = [bytes([rank.rank + 1]) * 32 for rank in ranks]
            for rank, name in zip(ranks, names, strict=True):
                rank.device.fill([lease.block_table[1]], name)
            fork = await lease.fork()
            assert fork.block_table[0] == lease.block_table[0]
            for rank, name in zip(ranks, names, strict=True):
                assert rank.device.check([fork.block_table[1]], name) == []
            ranks[1].gate.close()
            with pytest.raises(kvactors.DeadlineExceeded):
                await lease.fork(deadline=1.0)
            ranks[1].gate.open()
            await fork.finish()
            await lease.finish()
            await at_rest(cache)

    simulate(main, 3)


@pytest.mark.parametrize(
    ("sources", "targets"),
    [((0,), ()), ((0,), (16,)), ((-1,), (1,)), ((0, 1), (1, 2)), ((0, 1), (2, 2))],
)
def test_a_rank_refuses_copies_that_overlap_or_are_out_of_range(sources, targets):
    serving = _Serving.__new__(_Serving)
    serving.plane = SimpleNamespace(device=DeviceBlocks("host", None, 16))
    with pytest.raises(_Refuse):
        serving._check_copy(CopyBlocks(1, Direction.WITHIN, sources, targets))
    serving._check_copy(CopyBlocks(1, Direction.WITHIN, (0, 0), (1, 2)))
