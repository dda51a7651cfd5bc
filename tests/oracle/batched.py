"""Batches of requests that are decoded together, see `tests.support.batch`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvactors import KVActorsError, Lease
from tests.support.batch import Batch, Content, Row

from .model import Prompt

if TYPE_CHECKING:
    from .client import Client, Request


class Stepped(Row):
    """A row of the oracle. request: that was granted the lease, or the one that a fork is of."""

    def __init__(self, lease: Lease, content: Content, request: Request) -> None:
        super().__init__(lease, content)
        self.request = request


class Batched(Batch):
    """A batch of a client."""

    def __init__(self, client: Client) -> None:
        world = client.world
        super().__init__(world.cache, client.batch_rng, world.seen, world.fail, client.left)
        self.client = client
        self.world = world
        self.requests: list[Request] = []

    async def serve(self) -> None:
        """Serve the batch. Its errors are noted."""
        world = self.world
        try:
            await self.run()
        except KVActorsError as error:
            world.judge("a batch", error)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            world.fail(f"a batch raised {error!r}")
        finally:
            world.record.finished += self.finished
            self.client.requests[0] -= max(0, len(self.requests) - 1)
            for request in self.requests:
                world.leases -= request.held
                world.history.end(request.number)

    async def admit(self) -> Row:
        """See `Batch.admit`."""
        from .client import Request

        world, rng, size = self.world, self.rng, self.world.drawn.block_size
        world.record.requests += 1
        request = Request(self.client, world.history.request())
        self.requests.append(request)
        if self.left and rng.random() < 0.5:
            longest = world.drawn.longest * size
            request.tokens, request.media = list(rng.choice(self.left))[:longest], ()
        request.chunk = rng.choice((None, None, 1, size, 2 * size + 1))
        await request._acquire()
        row = Stepped(request.lease, (request.tokens, request.media), request)
        await row.lease.wait_ready()
        row.solid = row.lease.cached_tokens // size
        prompt = self._prompt(row, row.content)
        world.verify("hit in a batch", row.lease.block_table[: row.solid], prompt, request.until)
        await self._compute(row)
        return row

    def _prompt(self, row: Row, content: Content) -> Prompt:
        assert isinstance(row, Stepped)
        return Prompt(self.world.drawn.block_size, row.request.prompt.scope, *content)

    async def fill(self, row: Row, content: Content, start: int, stop: int) -> None:
        """See `Batch.fill`."""
        assert isinstance(row, Stepped)
        digests = self._prompt(row, content).digests[start:stop]
        stamp = self.world.history.stamp(row.request.number)
        self.world.memory.write(row.lease.block_table[start:stop], digests, stamp)

    async def check(self, row: Row, stop: int) -> None:
        """See `Batch.check`."""
        prompt = self._prompt(row, row.content)
        self.world.verify("in a batch", row.lease.block_table[:stop], prompt, -1)

    def judge(self, what: str, error: KVActorsError) -> None:
        """See `Batch.judge`."""
        self.world.judge(f"{what} of a batch", error)

    def over(self) -> bool:
        """See `Batch.over`."""
        return self.world.draining
