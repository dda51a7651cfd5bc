"""A node as the driver of its fleet sees it: a process, and a mirror of its blocks."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from contextlib import suppress
from copy import deepcopy
from signal import Signals
from typing import Any, Literal

import msgspec

from kvactors.errors import KVActorsError
from kvactors.scenario.child import Child, start_child
from kvactors.scenario.fleet.messages import Answer, Order, Orders
from kvactors.scenario.fleet.network import Network
from kvactors.scenario.mooncake_master import free_port
from kvactors.testing.kv_mirror import Reader

START, PATIENCE = 120.0, 300.0
"""Seconds within which a node must start, and answer. Only a hang takes as long."""

LOGGED = 3000
"""Bytes of a node's log in the error of a failed start."""


class Member:
    """One node.

    Attributes:
        number: of the node.
        in_flight: tokens that its requests must compute or fetch.
        up: whether its process runs.

    Args:
        number: of the node.
        network: of the fleet.
        data: the scenario of a node.
        seed: of the texts.
    """

    def __init__(self, number: int, network: Network, data: dict[str, Any], seed: int) -> None:
        self.number = number
        self.in_flight = 0
        self.up = False
        self._network = network
        address = network.address(number)
        self._ends = [f"tcp://{address}:{free_port()}" for _ in range(2)]
        self._data = deepcopy(data)
        pool = self._data["storage"].get("mooncake")
        if pool is not None:
            pool["local_hostname"] = address
        sinks = self._data.setdefault("flush", {}).setdefault("sinks", [])
        sinks.insert(
            0,
            {
                "kind": "kv_events",
                "endpoint": self._ends[0],
                "replay_endpoint": self._ends[1],
                "bind": "bind",
            },
        )
        self._seed = seed
        # Mooncake's client logs every step to standard error.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the member)
        self._numbers = itertools.count()
        self._child: Child | None = None
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._answers: asyncio.Task[None] | None = None
        self.reader = Reader(self._ends[0], self._ends[1])

    async def start(self) -> None:
        """Start the process and wait until its cache is open."""
        prefix = self._network.prefix()
        child = await start_child(
            "-m", "kvactors.scenario.fleet.node", prefix=prefix, errors=self._log
        )
        self._child = child
        try:
            await child.receive(START)
            commands = self._network.attach(self.number, child.process.pid)
            orders = Orders(self._data, self._seed, commands)
            await child.send(msgspec.json.encode(orders).decode())
            await child.receive(START)
        except KVActorsError as error:
            raise KVActorsError(f"node {self.number}: {error}\n{self._log_tail()}") from error
        self._answers = asyncio.get_running_loop().create_task(self._receive(child))
        self.up = True

    async def _receive(self, child: Child) -> None:
        with suppress(KVActorsError):
            while True:
                answer = msgspec.json.decode(await child.receive(10 * PATIENCE), type=Answer)
                waiting = self._waiting.pop(answer.number, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        self.up = False
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(KVActorsError(f"node {self.number} has ended"))
        self._waiting.clear()

    async def ask(
        self,
        do: Literal["serve", "fill", "drain", "settle"],
        session: int = 0,
        turn: int = 0,
    ) -> Answer:
        """Send an order and wait for its answer.

        Raises:
            KVActorsError: the process ended before.
        """
        child = self._child
        if child is None or not self.up:
            raise KVActorsError(f"node {self.number} does not run")
        order = Order(next(self._numbers), do, session, turn)
        waiting = self._waiting[order.number] = asyncio.get_running_loop().create_future()
        await child.send(msgspec.json.encode(order).decode())
        answer: Answer = await waiting
        return answer

    def signal(self, number: Signals) -> None:
        """Send a signal if the process runs."""
        if self._child is not None and self.up:
            self._child.signal(number)

    async def kill(self) -> None:
        """SIGKILL. Requests in flight fail."""
        self.up = False
        if self._child is not None:
            await self._child.kill()
        if self._answers is not None:
            await self._answers
        self._child = self._answers = None

    async def close(self) -> None:
        """End the process and the mirror."""
        await self.kill()
        self.reader.close()
        self._log.close()

    def _log_tail(self) -> str:
        self._log.seek(0)
        return self._log.read()[-LOGGED:].decode(errors="replace")

    def watch(self) -> dict[str, set[Any]]:
        """Take the events that have arrived. Returns hashes of resident blocks by medium."""
        self.reader.step(0)
        return self.reader.mirror.view
