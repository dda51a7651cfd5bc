"""Clients that use a cache as a serving loop does, over prompts that share prefixes. Every block
they get or keep is verified."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
from numpy.typing import NDArray

from kvactors.cache import KVCache
from kvactors.errors import KVActorsError, NoRoom
from kvactors.lease import Lease
from kvactors.types import HASH_BYTES
from tests.chaos.record import Tally

FAMILIES, MEMBERS, SHARED, OWN, ANSWERS = 6, 6, 4, 4, 3
"""Prompts: families of members that share their first blocks. Each has its own blocks, and a few
possible answers."""

HANG = 60.0
"""Seconds after which a request, whose own deadline is far below, counts as hanging."""

ABANDON, PREEMPT, EXTEND = 0.03, 0.1, 0.3
"""Shares of the requests that are given up before their loads have landed, that give way at their
end, and that get an answer."""

RETRY = 0.005
"""Seconds until a request refused with NoRoom tries again."""

Tokens = NDArray[np.uint32]


class Load:
    """cache: with a device that can `fill` and `check`. seed: of prompts. request_seed: of what is done
    with them. pace: seconds between two requests of a client at most."""

    def __init__(
        self,
        cache: KVCache,
        tally: Tally,
        seed: int,
        *,
        request_seed: int = 0,
        clients: int = 4,
        pace: float = 0.01,
    ) -> None:
        self.cache = cache
        self.tally = tally
        self.seed = seed
        self.request_seed = request_seed
        self.clients = clients
        self.pace = pace
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
        """One request, tried again while it is refused with NoRoom. rng: draws its fate, None for
        an ordinary one."""
        self._numbers += 1
        name = f"r{self._numbers}"
        try:
            with anyio.fail_after(HANG):
                await self._until_room(lambda: self._serve(name, number, rng))
        except KVActorsError as error:
            self.tally.add_violation(f"a request was answered with {type(error).__name__}: {error}")
            await anyio.sleep(RETRY)
        except TimeoutError:
            self.tally.add_violation(f"a request hung for {HANG} s")
        except Exception as error:  # a misuse, or an unexpected error
            self.tally.add_violation(f"a request raised {type(error).__name__}: {error}")
            await anyio.sleep(RETRY)

    async def _until_room(self, serve: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await serve()
                return
            except NoRoom:
                self.tally.no_room += 1
                await anyio.sleep(RETRY)

    async def _serve(self, name: str, number: int, rng: random.Random | None) -> None:
        fate = 1.0 if rng is None else rng.random()
        async with await self.cache.acquire(
            name, self.prompt(number), **self.identity(number, rng)
        ) as lease:
            if fate < ABANDON:
                lease.abandon()  # before its loads have landed
                return
            await lease.wait_ready()
            cached = lease.cached_tokens // self.cache.block_size
            if lease.cached_tokens > lease.num_tokens:
                self.tally.add_violation("cached_tokens exceeds the tokens of the request")
            self._verify(lease, 0, cached, "served")
            self.tally.loaded += lease.hits.host + lease.hits.storage
            self.tally.stored += lease.hits.storage
            await self._compute(lease, cached)
            if rng is not None:
                await anyio.sleep(rng.uniform(0, self.pace))
            if rng is not None and fate > 1 - EXTEND:
                full = lease.num_tokens // self.cache.block_size
                await lease.extend(self.answer(number, rng.randrange(ANSWERS)))
                await self._compute(lease, full)
            self._verify(lease, cached, lease.num_tokens // self.cache.block_size, "held")
            await (lease.preempt() if fate < ABANDON + PREEMPT else lease.finish())
        self.tally.requests += 1

    async def _compute(self, lease: Lease, first: int) -> None:
        """The model's work on the full blocks from `first` on."""
        full = lease.num_tokens // self.cache.block_size
        if first < full:
            self.cache.device.fill(
                lease.block_table[first:full], lease.hashes(0, full)[first * HASH_BYTES :]
            )
        await lease.commit(lease.num_tokens)

    def _verify(self, lease: Lease, start: int, stop: int, what: str) -> None:
        if start < stop:
            bad = self.cache.device.check(lease.block_table[start:stop], lease.hashes(start, stop))
            self.tally.verified += stop - start
            self.tally.wrong += len(bad)
            if bad:
                self.tally.add_violation(
                    f"blocks {what} by the cache did not hold what they should"
                )
