"""One node of a fleet: `python -m tests.fleet.node`.

It reads lines of JSON: first its scenario (`data`), the seed of the texts (`seed`) and `commands`
that connect its network, then orders. It answers each with a line, and ends with its input.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from functools import lru_cache
from typing import Any, Literal
from uuid import uuid4

import anyio
import anyio.to_thread
import msgspec

from kvactors.cache import KVCache
from kvactors.errors import DeadlineExceeded, NoRoom
from kvactors.flush_notifier.sinks.kv_wire import MEDIA
from kvactors.lease import Hits
from kvactors.opening import open_cache
from kvactors.scenario.engine import Engine, ScenarioRequest
from kvactors.scenario.replay import cache_config
from kvactors.scenario.report import Totals
from kvactors.scenario.spec import Scenario, Workload
from kvactors.scenario.workload import Conversation
from kvactors.settings import Config
from kvactors.storage.mooncake import MooncakeBackend
from tests.support.announced import announceable
from tests.support.child import log_errors_only, say

LINE_BYTES = 1 << 24
FILLER = "kvactors-filler/"
"""Prefix of the objects that fill the pool."""
FILLER_BYTES, SMALLEST_BYTES = 1 << 20, 8 << 10
REFILL_S = 0.02
"""Seconds until the pool is filled again: the master evicts other objects."""
STORE_COUNTS = ("writes", "reads", "late", "unavailable", "no_space", "misses", "corrupt")


# -- messages between the driver and its nodes


class Order(msgspec.Struct):
    """A command to a node. number: repeated in the answer. do: serve a request, fill the pool with
    pinned objects, remove them, or settle: wait until nothing is in flight, and describe the
    node."""

    number: int
    do: Literal["serve", "fill", "drain", "settle"]
    session: int = 0
    turn: int = 0


class NodeAnswer(msgspec.Struct):
    """The answer of a node. wait_s: seconds from the grant of the lease until the loads had ended
    and their blocks were verified."""

    number: int
    hits: Hits = Hits(0, 0, 0)
    wait_s: float = 0.0
    held: dict[str, set[int]] = {}
    sequence: int = 0
    counts: dict[str, float] = {}
    errors: list[str] = []


# -- the node


class Node(Engine):
    """Serves orders on an open cache."""

    RETRIED = (NoRoom, DeadlineExceeded)  # of free blocks: ask again

    def __init__(self, cache: KVCache, work: Workload, seed: int) -> None:
        super().__init__(cache, Totals())
        self._work = work
        self._waits: dict[str, float] = {}  # seconds that loads take, by request
        self._filling: asyncio.Task[None] | None = None
        self._conversation = lru_cache(512)(lambda number: Conversation(self._work, seed, number))

    async def begin(self, request: ScenarioRequest, *, resumed: bool = False) -> None:
        began = time.monotonic()
        await super().begin(request, resumed=resumed)
        self._waits[request.lease.request_id] = time.monotonic() - began

    async def carry_out(self, order: Order) -> NodeAnswer:
        if order.do == "serve":
            return await self._serve_turn(order)
        if order.do == "settle":
            return await self._describe(order)
        if order.do == "fill":
            await self._pool(fill)
            self._filling = asyncio.get_running_loop().create_task(self._keep_full())
        elif self._filling is not None:
            self._filling.cancel()
            await asyncio.gather(self._filling, return_exceptions=True)
            await self._pool(drain)
        return NodeAnswer(order.number)

    async def _keep_full(self) -> None:
        while True:
            await self._pool(fill)
            await anyio.sleep(REFILL_S)

    async def _serve_turn(self, order: Order) -> NodeAnswer:
        prompt, answer = self._conversation(order.session).turn(order.turn)
        name = f"{order.session}.{order.turn}.{order.number}"
        lease = await self.serve_patiently(name, prompt, answer, think=self._work.think)
        if lease is None:
            return NodeAnswer(order.number)
        return NodeAnswer(order.number, lease.hits, self._waits.pop(name, 0.0))

    async def _describe(self, order: Order) -> NodeAnswer:
        cache, totals = self.cache, self.totals
        await self.idle()  # saves in flight are objects of the pool that is judged
        await self.settle()
        sink: Any = cache.sinks["kv_events"]
        held = {
            MEDIA["vllm"][tier]: {int.from_bytes(key[-8:], "big") for key in keys}
            for tier, keys in announceable(cache.system).items()
        }
        statistics = cache.statistics()
        counts: dict[str, float] = {
            "verified": totals.verified_blocks,
            "corrupt": totals.corrupt_blocks_served,
            "no_room": totals.no_room,
            "divergence": cache.count_divergent_blocks(),
            "messages": statistics.messages,
            "events": statistics.flush[0].delivered,
            "shed": statistics.host.shed,
            "cpu_s": time.process_time(),
        }
        if statistics.store is not None:
            counts |= {f"pool_{name}": getattr(statistics.store, name) for name in STORE_COUNTS}
        errors = totals.errors + cache.check()
        return NodeAnswer(
            order.number, held=held, sequence=sink.events.sequence, counts=counts, errors=errors
        )

    async def _pool(self, work: Any) -> None:
        backend: Any = self.cache.system.backend
        while not isinstance(backend, MooncakeBackend):
            backend = backend.inner
        await backend.client.call(work, None)


def fill(store: Any) -> None:
    """Put pinned objects into the pool until none has space."""
    from mooncake.store import ReplicateConfig

    pinned = ReplicateConfig()
    pinned.with_hard_pin = True
    size = FILLER_BYTES
    while size >= SMALLEST_BYTES:
        if store.put(FILLER + uuid4().hex, bytes(size), pinned):
            size //= 2


def drain(store: Any) -> None:
    """Remove them."""
    store.remove_by_regex(f"^{FILLER}", True)


async def main() -> None:
    """Read orders until the input ends."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    print("up", flush=True)
    orders = msgspec.json.decode(await reader.readline())
    for command in orders["commands"]:
        subprocess.run(command, check=True, timeout=60)  # noqa: ASYNC221
    scenario = Scenario.from_mapping(orders["data"])
    async with open_cache(Config.from_env(base=cache_config(scenario))) as cache:
        node = Node(cache, scenario.workload, orders["seed"])
        print("ready", flush=True)

        async def answered(order: Order) -> None:
            say(await node.carry_out(order))

        async with anyio.create_task_group() as tasks:
            while line := await reader.readline():
                tasks.start_soon(answered, msgspec.json.decode(line, type=Order))


if __name__ == "__main__":
    log_errors_only()
    asyncio.run(main())
