"""The blocks of the how-to page about embedding are one program that runs, and its batch loop is
right when clients leave at any moment."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvactors.testing import Sim
from tests.docs.pages import HOW_TO, blocks_of, output_of

PAGE = HOW_TO / "embed_in_your_engine.md"


def test_the_page_runs_as_one_program(tmp_path):
    blocks = blocks_of(PAGE)
    assert len(blocks) == 9
    output = output_of("\n".join(blocks), tmp_path)
    assert "the first 80 tokens are committed" in output
    assert " requests were preempted" in output
    assert "cached: 240 of 243 tokens" in output
    assert "long: 0 tokens" not in output
    assert "drained: served 3, given up 0" in output


@pytest.mark.parametrize("seed", range(8))
def test_its_batch_is_right_when_clients_leave_and_parts_fail(seed):
    """No block is written without a lease, and every answer is that of a request alone."""
    page: dict = {"__name__": "page"}
    exec("\n".join(blocks_of(PAGE)[:-1]), page)
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
