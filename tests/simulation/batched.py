"""Batches of requests that are decoded together, see `tests.support.batch`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from kvactors.errors import KVActorsError, LeaseEnded, RankLost
from kvactors.prefix_index.loads import LATE_LOAD_S
from tests.simulation.draw import BLOCK
from tests.support.batch import Batch, Content, Row, named

if TYPE_CHECKING:
    from tests.simulation.workload import Client

T = TypeVar("T")


class Batched(Batch):
    """A batch of a client. An engine detects the failure of the index that gave its leases at once,
    and leaves the blocks alone, which have other owners then."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.world = world = client.world
        self.incarnation = world.system.index.incarnation
        super().__init__(world.cache, client.batch_rng, world.seen, world.violated, client.left)

    async def ask(self, what: str, make: Callable[[], Awaitable[T]], seconds: float) -> T:
        """See `CacheClient.ask`."""
        return await self.client.ask(what, make, seconds)

    async def admit(self) -> Row:
        """See `Batch.admit`."""
        cache, rng, loop = self.world.cache, self.rng, asyncio.get_running_loop()
        prompt, seconds = self.client.prompt(), rng.choice((0.02, 0.2, 1.0))
        if self.left and rng.random() < 0.5:
            longest = self.world.drawn.longest * BLOCK
            prompt = prompt._replace(tokens=list(rng.choice(self.left))[:longest], media=())
        chunk, by = rng.choice((None, None, 1, BLOCK, 2 * BLOCK + 1)), loop.time() + seconds
        lease = await self.ask(
            "acquire",
            lambda: cache.acquire(
                f"batch {self.client.number}",
                prompt.tokens,
                extra_keys=prompt.media,
                salt=prompt.salt,
                lora=prompt.lora,
                deadline=seconds,
                chunk_tokens=chunk,
            ),
            seconds,
        )
        row = Row(lease, (prompt.tokens, prompt.media))
        rest = max(0.0, by - loop.time()) + LATE_LOAD_S
        await self.ask("wait_ready", lambda: lease.wait_ready(deadline=8.0), rest)
        row.solid = lease.cached_tokens // BLOCK
        await self.check(row, row.solid)
        await self._compute(row)
        return row

    def _still_ours(self) -> None:
        if self.world.system.index.incarnation != self.incarnation:
            raise LeaseEnded("the index of this lease has failed")

    async def fill(self, row: Row, content: Content, start: int, stop: int) -> None:
        """See `Batch.fill`."""
        self._still_ours()
        if start < stop:
            names = named(row.lease, content).hashes[32 * start : 32 * stop]
            await self.world.model.fill(row.lease.block_table[start:stop], names)

    async def check(self, row: Row, stop: int) -> None:
        """See `Batch.check`."""
        self._still_ours()
        names = named(row.lease, row.content).hashes[: 32 * stop]
        wrong = await self.world.model.check(row.lease.block_table[:stop], names)
        if wrong:
            await self.client.judge_wrong(row.lease, f"in a batch: {len(wrong)} of {stop} blocks")

    def judge(self, what: str, error: KVActorsError) -> None:
        """See `Batch.judge`."""
        if not isinstance(error, RankLost):
            self.client.judge_error(f"{what} of a batch", error)
