"""Clients that use a cache as a serving loop does, over prompts that share prefixes. Every block
they get or keep is verified."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
from numpy.typing import NDArray

from kvactors.cache import KVCache
from kvactors.scenario.engine import RETRY, Engine, ScenarioRequest
from tests.chaos.record import Tally

FAMILIES, MEMBERS, SHARED, OWN, ANSWERS = 6, 6, 4, 4, 3
"""Prompts: families of members that share their first blocks. Each has its own blocks, and a few
possible answers."""

HANG = 60.0
"""Seconds after which a request, whose own deadline is far below, counts as hanging."""

ABANDON, PREEMPT, EXTEND = 0.03, 0.1, 0.3
"""Shares of the requests that are given up before their loads have landed, that give way at their
end, and that get an answer."""

Tokens = NDArray[np.uint32]


class Load:
    """seed: of prompts. request_seed: of what is done with them. pace: seconds between two requests
    of a client at most. options: of the reference engine, which serves them."""

    def __init__(
        self,
        cache: KVCache,
        tally: Tally,
        seed: int,
        *,
        request_seed: int = 0,
        clients: int = 4,
        pace: float = 0.01,
        **options: Any,
    ) -> None:
        self.cache = cache
        self.tally = tally
        self.seed = seed
        self.request_seed = request_seed
        self.clients = clients
        self.pace = pace
        options = {"on_wrong": self._wrong, **options}
        self.engine = Engine(cache, tally, thorough=True, **options)
        self._stopping = False
        self._numbers = 0

    def prompt(self, number: int) -> Tokens:
        """One of FAMILIES * MEMBERS prompts, half a block longer than its full blocks."""
        family, member = divmod(number % (FAMILIES * MEMBERS), MEMBERS)
        size = self.cache.block_size
        shared = np.random.default_rng((self.seed, family)).integers(
            0, 50_000, SHARED * size, np.uint32
        )
        own = np.random.default_rng((self.seed, family, 1 + member)).integers(
            0, 50_000, OWN * size + size // 2, np.uint32
        )
        return np.concatenate([shared, own])

    def answer(self, number: int, which: int) -> Tokens:
        """One of ANSWERS to a prompt: a block and a half."""
        rng = np.random.default_rng((self.seed, number, which, 7))
        return rng.integers(0, 50_000, self.cache.block_size * 3 // 2, np.uint32)

    def identity(self, number: int, rng: random.Random | None) -> dict[str, Any]:
        """Salt, adapter and media of a request: none."""
        return {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Clients run during the `async with` block. At its end each finishes its current
        request."""
        self._stopping = False
        rngs = [
            random.Random(f"{self.seed}:{self.request_seed}:{number}")
            for number in range(self.clients)
        ]
        tasks = [asyncio.get_running_loop().create_task(self._client(rng)) for rng in rngs]
        try:
            yield
            self._stopping = True
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _client(self, rng: random.Random) -> None:
        while not self._stopping:
            await self.one(int(FAMILIES * MEMBERS * rng.random() * rng.random()), rng)
            await anyio.sleep(rng.uniform(0, self.pace))

    async def everything(self) -> None:
        """Every prompt once, whole: after a fault all of them must be served."""
        numbers = iter(range(FAMILIES * MEMBERS))
        async with anyio.create_task_group() as tasks:
            for _ in range(self.clients):
                tasks.start_soon(self._each, numbers)

    async def _each(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            await self.one(number, None)

    async def one(self, number: int, rng: random.Random | None) -> None:
        """One request, tried again while it is refused with NoRoom. rng: draws its course, None for
        an ordinary one."""
        self._numbers += 1
        work = self._drawn(number, rng) if rng is not None else {}
        work |= self.identity(number, rng)
        try:
            with anyio.fail_after(HANG):
                await self.engine.serve_patiently(f"r{self._numbers}", self.prompt(number), **work)
        except TimeoutError:
            self.tally.complain(f"a request hung for {HANG} s")
        except Exception as error:  # a misuse, or an unexpected error
            self.tally.complain(f"a request raised {type(error).__name__}: {error}")
            await anyio.sleep(RETRY)

    def _drawn(self, number: int, rng: random.Random) -> dict[str, Any]:
        """How a request goes: its pace, its end, and the output that it may have."""
        course = rng.random()
        work: dict[str, Any] = {"think": rng.uniform(0, self.pace)}
        if course < ABANDON:
            work["end"] = "abandon"
        elif course < ABANDON + PREEMPT:
            work["end"] = "preempt"
        elif course > 1 - EXTEND:
            work["output"] = self.answer(number, rng.randrange(ANSWERS))
        return work

    async def _wrong(self, _request: ScenarioRequest, _positions: Sequence[int], when: str) -> None:
        self.tally.complain(f"blocks {when} by the cache did not hold what they should")
