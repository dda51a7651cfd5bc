"""The ground of chaos: clients of a cache whose files, sockets and processes fail."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from kvactors import DeadlineExceeded, DeviceError, KVActorsError, KVCache, LeaseEnded, NoRoom
from kvactors.errors import Paused, TokensCommitted
from kvactors.scenario.engine import Model
from tests.chaos.record import Tally
from tests.load.client import Client, serve_all
from tests.load.ground import Ground, Mix, Row

HANG = 60.0
"""Seconds beyond its deadline after which a call, on a busy machine, counts as hanging."""

ORDERS = {"prefetch": 2, "clear part": 1, "quota": 1, "unpin": 1, "pause": 1, "check": 2}

EXCUSED = (NoRoom, DeadlineExceeded, Paused, TokensCommitted)
"""Errors that need no reason."""


def make_mix(**shares: Any) -> Mix:
    """Prompts that are far more than the tiers hold, and every kind of request."""
    return Mix(
        families=16, longest=9, orders=ORDERS, cut=0.05, forks=0.1, hints=0.3, pins=0.2, **shares
    )


class Load(Ground):
    """Clients, while `running`.

    Args:
        seed: of what the clients do.
        model: computes the blocks. None: on the cache's own device.
        excused: further errors that need no reason.
    """

    deadlines = (0.2, 5.0, 20.0)

    def __init__(
        self,
        cache: KVCache,
        tally: Tally,
        seed: object,
        *,
        clients: int = 4,
        mix: Mix | None = None,
        model: Model | None = None,
        excused: tuple[type[KVActorsError], ...] = (),
    ) -> None:
        super().__init__(cache, make_mix() if mix is None else mix, Counter())
        self.tally = tally
        self.seed = seed
        self.clients = clients
        self.model = Model(cache.device) if model is None else model
        self._excused = excused

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Clients run during the `async with` block. At its end each finishes its current
        request."""
        going = True
        clients = [Client(self, f"{self.seed} {i}", lambda: going) for i in range(self.clients)]
        tasks = [asyncio.get_running_loop().create_task(client.run()) for client in clients]
        try:
            yield
            going = False
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def everything(self) -> None:
        """Every family once, whole: after a fault all of them must be served."""
        try:
            await serve_all(self, f"{self.seed} at rest")
        except KVActorsError as error:
            self.fail(f"not served after all faults: {error!r}")

    # -- see `Ground`

    def fail(self, what: str) -> None:
        self.tally.complain(what)

    def judge(self, what: str, error: KVActorsError, row: Row | None) -> None:
        expected = (
            isinstance(error, (*EXCUSED, *self._excused))
            or (isinstance(error, LeaseEnded) and row is not None and row.cut)
            or (isinstance(error, DeviceError) and what == "step")
        )
        if not expected:
            self.fail(f"{what}: {type(error).__name__}: {error}")

    def began(self, client: Client) -> float:
        return asyncio.get_running_loop().time()

    def ended(self, client: Client, what: str, outcome: str, seconds: float, began: Any) -> None:
        took = asyncio.get_running_loop().time() - began
        if took > seconds + HANG:
            self.fail(f"{what} hung for {took:.0f} s of {seconds:.0f}")

    async def write(self, row: Row, start: int, names: Sequence[bytes]) -> None:
        blocks = row.lease.block_table[start : start + len(names)]
        await self.model.fill(blocks, b"".join(names))

    async def differing(
        self, row: Row, start: int, names: Sequence[bytes], *, hits: bool = False
    ) -> Sequence[int]:
        blocks = row.lease.block_table[start : start + len(names)]
        found = await self.model.check(blocks, b"".join(names))
        self.tally.verified_blocks += len(names)
        self.tally.corrupt_blocks_served += len(found)
        self.tally.storage += row.lease.hits.storage * hits
        return found

    def finish(self, row: Row, epoch: int) -> None:
        super().finish(row, epoch)
        self.tally.finished += 1
