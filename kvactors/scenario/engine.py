"""A stand-in for a serving engine: its model writes a pattern derived from each block hash, and
every block that comes back is verified."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import anyio

from kvactors.cache import KVCache
from kvactors.errors import DeadlineExceeded, KVActorsError
from kvactors.lease import Lease
from kvactors.scenario.report import Totals
from kvactors.types import KEY_BYTES

IDLE = 300.0
"""Seconds within which a cache must be idle between turns. Only a hang takes as long."""


class Engine:
    """Serves requests on a cache whose device can `fill` and `check`, and keeps the totals."""

    def __init__(self, cache: KVCache, totals: Totals) -> None:
        self.cache = cache
        self.totals = totals

    async def begin(self, lease: Lease) -> None:
        """Wait for the loads, count the hits, verify byte for byte the blocks loaded from a lower
        tier."""
        await lease.wait_ready()
        hits, totals = lease.hits, self.totals
        totals.requests += 1
        totals.blocks_looked_up += lease.num_tokens // self.cache.block_size
        totals.device += hits.device
        totals.host += hits.host
        totals.storage += hits.storage
        loaded = hits.host + hits.storage
        if loaded:
            stop = hits.device + loaded
            bad = self.cache.device.check(
                lease.block_table[hits.device : stop], lease.keys(hits.device, stop)
            )
            totals.verified_blocks += loaded
            totals.corrupt_blocks_served += len(bad)

    def compute(self, lease: Lease, first_token: int) -> None:
        """The model's work: write every full block from `first_token` on."""
        first, full = (
            first_token // self.cache.block_size,
            lease.num_tokens // self.cache.block_size,
        )
        if first < full:
            keys = lease.keys(0, full)[first * KEY_BYTES :]
            self.cache.device.fill(lease.block_table[first:full], keys)

    async def serve(
        self, name: str, tokens: Any, output: Any = (), think: float = 0.0, **options: Any
    ) -> None:
        """Serve one request from acquire to finish. The model takes `think` seconds.

        Raises:
            NoRoom: the cache has no free blocks for the request.
        """
        async with await self.cache.acquire(name, tokens, **options) as lease:
            await self.begin(lease)
            self.compute(lease, lease.cached_tokens)
            await lease.commit(lease.num_tokens)
            if think:
                await anyio.sleep(think)
            if len(output):
                before = lease.num_tokens
                await lease.extend(output)
                self.compute(lease, before)
                await lease.commit(lease.num_tokens)
            await lease.finish()

    async def settle(self, sinks: Collection[str] | None = None) -> None:
        """Wait until nothing is in flight and every sink (of those named) has its deliveries. A
        missed deadline is an error in the totals."""
        try:
            await self.cache.wait_flushed(sinks=sinks)
        except DeadlineExceeded as error:
            self.totals.complain(f"at the end: {error}")

    async def idle(self) -> None:
        """Wait until the cache has nothing left to do, however slow the disk is. More than IDLE
        seconds are an error in the totals."""
        try:
            await self.cache.wait_idle(IDLE)
        except DeadlineExceeded as error:
            self.totals.complain(f"between turns: {error}")

    def failed(self, name: str, error: KVActorsError) -> None:
        """A request was not served."""
        self.totals.complain(f"request {name}: {type(error).__name__}: {error}")
