"""The blocks of the how-to page about embedding are one program that runs, and its batch loop is
right when clients leave at any moment."""

from __future__ import annotations

import asyncio
import os
import random
import signal

import pytest

import kvactors
from kvactors.testing import Sim
from tests.docs.pages import HOW_TO, blocks_of, output_of

PAGE = HOW_TO / "embed_in_your_engine.md"


@pytest.fixture
def page():
    """The page's functions."""
    found: dict = {"__name__": "page"}
    exec("\n".join(blocks_of(PAGE)[:-1]), found)
    return found


def test_the_page_runs_as_one_program(tmp_path):
    blocks = blocks_of(PAGE)
    assert len(blocks) == 9
    assert output_of("\n".join(blocks), tmp_path) == "cached: 80 of 83 tokens\n[83, 84, 85]\n"


def test_requests_share_draft_preempt_and_return(page):
    block = page["BLOCK"]

    async def main():
        async with kvactors.open(page["config"]) as cache:
            await page["profiled"](cache, free_bytes=64 * cache.system.layout.block_bytes)
            assert cache.free_blocks().total == 64
            system = list(range(100, 100 + 5 * block))
            first = await page["prefill"](cache, "first", [*system, 1, 2, 3])
            in_chunks = page["prefill_in_chunks"]
            second = await in_chunks(cache, "second", [*system, 4], 2 * block)
            assert (first.cached_tokens, second.cached_tokens) == (0, 5 * block)
            drafts = [7, 8, 9, 9]
            assert await page["speculate"](cache, first, drafts, lambda drafts: 2) == [7, 8]
            assert first.num_tokens == 5 * block + 5
            with pytest.raises(kvactors.TokensCommitted, match="the first 80 tokens are committed"):
                await first.truncate(4 * block)
            for lease in (first, second):
                await lease.finish(lease.num_tokens)

            long = [*range(1000, 1000 + 60 * block)]
            async with await cache.acquire("other", long[: 30 * block]):
                assert await in_chunks(cache, "long", long, 8 * block) is None
            lease = await in_chunks(cache, "long", long, 8 * block)
            assert lease.cached_tokens > 0, "its first attempt is cached"
            await lease.finish(lease.num_tokens)

            engine = page["Engine"](cache)
            batch = asyncio.create_task(engine.run())
            prompts = [[*system, number] for number in range(8)]
            clients = [
                asyncio.create_task(engine.generate(f"{number}", prompt, 10 * block))
                for number, prompt in enumerate(prompts)
            ]
            await asyncio.sleep(0.02)
            clients.pop(3).cancel()  # a client leaves
            answers = [await client for client in clients]
            batch.cancel()
            assert cache.statistics().prefix.preempted > 0
            turn = [*prompts[0], *answers[0], 40, 41]
            again = await page["prefill"](cache, "second turn", turn)
            assert again.cached_tokens == 15 * block
            await again.finish()
            await cache.wait_idle()
            assert cache.check() == []

    asyncio.run(main())


def test_a_server_drains_on_sigterm(page):
    def clients(engine):
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
        return [engine.generate(f"{number}", [number], 2 * page["BLOCK"]) for number in range(3)]

    assert asyncio.run(page["server"](clients, drain_s=30.0)) == (3, 0)


@pytest.mark.parametrize("seed", range(8))
def test_its_batch_is_right_when_clients_leave_and_parts_fail(page, seed):
    """No block is written without a lease, and every answer is that of a request alone."""
    block, sim = page["BLOCK"], Sim(seed, cache={"block_size": page["BLOCK"]})

    async def main():
        async with sim.open() as cache:
            sim.faults.plan(sim.faults.draw(2, leaves=0.3))
            engine, served = page["Engine"](cache), 0
            batch = asyncio.create_task(engine.run())
            rng = random.Random(seed)
            for turn in range(4):
                prompts = [[turn, *range(rng.randrange(8 * block)), n] for n in range(8)]
                clients = [
                    asyncio.create_task(engine.generate(f"{turn}.{n}", prompt, 3 * block))
                    for n, prompt in enumerate(prompts)
                ]
                for prompt, answer in zip(
                    prompts, await asyncio.gather(*clients, return_exceptions=True), strict=True
                ):
                    if not isinstance(answer, BaseException):
                        first = len(prompt)
                        assert answer == [n % 100 for n in range(first, first + 3 * block)]
                        served += 1
                    elif not isinstance(answer, asyncio.CancelledError):
                        raise answer
            batch.cancel()
            await asyncio.gather(batch, return_exceptions=True)
        return served, sum(fault.kind == "client_leave" for fault in sim.faults.befallen)

    served, left = sim.run(main)
    assert served > 5
    assert left > 0
