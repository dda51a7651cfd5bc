"""A cache under load in a separate process, which can be stopped and killed, and its handle for a
situation.

`python -m tests.chaos.worker` reads its orders as one JSON line and works. A few times a second it
reports its counts, first when it is open. After a line on its input it comes to rest, reports its
findings, and stays until its input ends.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import structlog

from kvactors.errors import KVActorsError
from kvactors.settings import Config
from kvactors.storage import attempts
from kvactors.testing.faults import Fault
from kvactors.types import Tier
from tests.chaos.load import Load
from tests.chaos.record import Setting, Tally
from tests.chaos.rest import BREAKER, at_rest, named
from tests.support.child import Child, child
from tests.support.injectors import ProcessFaults

PATIENCE = 90.0
"""Seconds for a worker to open, or to come to rest."""

BEAT = 0.1
"""Seconds between two tallies of a worker."""


class Orders(msgspec.Struct):
    """config: a cache's settings. seed: of the prompts. request_seed: of what the clients do with them."""

    config: dict[str, Any]
    seed: int
    request_seed: int


class Said(msgspec.Struct):
    """One line of a worker. resting: whether it is the final report, with the names (hex) that each
    tier holds."""

    tally: Tally
    resting: bool = False
    names: dict[str, list[str]] = msgspec.field(default_factory=dict)

    def truth(self) -> dict[Tier, set[bytes]]:
        """The names by tier."""
        return {
            Tier[tier]: {bytes.fromhex(name) for name in names}
            for tier, names in self.names.items()
        }


class Worker:
    """A running worker. Its counts are added to `tally`, killed or not."""

    def __init__(self, process: Child, tally: Tally) -> None:
        self._child = process
        self._tally = tally
        self._last = Said(Tally())

    async def inject(self, fault: Fault) -> None:
        """See `Injectable`: process_stop. `killed` kills it."""
        self._tally.faults += 1
        await ProcessFaults(self._child).inject(fault)

    async def recover(self, fault: Fault) -> None:
        """See `Injectable`."""
        await ProcessFaults(self._child).recover(fault)

    async def reach(self, requests: int, *, stored: int = 0) -> None:
        """Wait until it has served so many requests, and loaded so many blocks from the store.
        Errors as of `rest`."""
        await self._hear()
        while self._last.tally.finished < requests or self._last.tally.storage < stored:
            await self._hear()

    async def rest(self) -> Said:
        """Let it come to rest. Returns its final report. KVActorsError if it ends before,
        DeadlineExceeded if it reports nothing."""
        await self._child.send("rest")
        while not self._last.resting:
            await self._hear()
        self._tally.add(self._last.tally)
        return self._last

    async def killed(self) -> None:
        """Kill it at once (SIGKILL), and add its last counts."""
        self._tally.faults += 1
        self._child.signal(signal.SIGKILL)  # its last lines are still to be read
        try:
            while True:
                await self._hear()
        except KVActorsError:
            self._tally.add(self._last.tally)  # its last report
        await self._child.kill()

    async def _hear(self) -> None:
        self._last = msgspec.json.decode(await self._child.receive(PATIENCE), type=Said)


@asynccontextmanager
async def worker(
    config: dict[str, Any], setting: Setting, tally: Tally, *, early: bool = False
) -> AsyncIterator[Worker]:
    """A worker that is open and under load, or with `early` one that has only begun to start;
    killed on the way out."""
    async with child("-m", "tests.chaos.worker") as process:
        await process.send(
            msgspec.json.encode(Orders(config, setting.seed, setting.rng.getrandbits(32))).decode()
        )
        one = Worker(process, tally)
        if not early:
            await one.reach(0)
        yield one


async def work(orders: Orders) -> None:
    """The process: serve requests, report, come to rest."""
    from kvactors.opening import open_cache

    tally = Tally()
    attempts.PAUSE_S = BREAKER
    async with open_cache(Config.from_mapping(orders.config)) as cache:
        say(Said(tally))
        load = Load(cache, tally, (orders.seed, orders.request_seed))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(beat, tally)
            async with load.running():
                await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
            await load.everything()
            await at_rest(cache, tally)
            tasks.cancel_scope.cancel()
        names = {str(tier.name): [key.hex() for key in keys] for tier, keys in named(cache).items()}
        say(Said(tally, resting=True, names=names))
        await anyio.to_thread.run_sync(sys.stdin.readline)


async def beat(tally: Tally) -> None:
    """Report the counts again and again."""
    while True:
        say(Said(tally))
        await anyio.sleep(BEAT)


def say(what: Said) -> None:
    """One line."""
    print(msgspec.json.encode(what).decode(), flush=True)


def main() -> None:
    """Entry point of the process."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(50),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    asyncio.run(work(msgspec.json.decode(sys.stdin.readline(), type=Orders)))


if __name__ == "__main__":
    main()
