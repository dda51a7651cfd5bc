"""Drives a fleet: `python -m kvactors.scenario.fleet.driver`.

It reads its task as a line of JSON, prints the totals as lines while it runs, and a report at the
end."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from signal import Signals
from typing import Any, Literal

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import structlog

from kvactors.errors import KVActorsError
from kvactors.identity import CacheScope
from kvactors.layout import make_layout
from kvactors.scenario.child import Child, start_child
from kvactors.scenario.fleet.network import Network
from kvactors.scenario.fleet.node import Answer, Chain, Conversation, Order, Orders
from kvactors.scenario.mirror import Reader
from kvactors.scenario.mooncake_master import Master, free_port
from kvactors.scenario.report import Report, Totals
from kvactors.scenario.session import beside
from kvactors.scenario.spec import FleetFault, Placement, Scenario
from kvactors.signals import run_terminable

PROGRESS = 0.2
"""Seconds between two lines of totals."""


class Task(msgspec.Struct):
    """The first line that the driver reads.

    Attributes:
        data: the scenario.
        seed: of everything random.
        isolated: whether the driver has a network namespace.
    """

    data: dict[str, Any]
    seed: int
    isolated: bool


class Figures:
    """The counts of one placement of the workload.

    Attributes:
        computed: how often each block was computed.
        needed: full blocks of all requests.
        seen: blocks that one large cache would have.
        repeated: blocks of prompts that it would have had.
    """

    def __init__(self) -> None:
        self.computed: Counter[bytes] = Counter()
        self.needed = 0
        self.seen: set[bytes] = set()
        self.looked_up = self.repeated = self.finished = self.retried = self.rerouted = 0
        self.hits = [0, 0, 0]
        self.waits: list[float] = []
        self.faults = self.faults_left_out = 0

    def dispatched(self, prompt: Sequence[bytes], whole: Sequence[bytes]) -> None:
        """A request is sent to a node: count it for one large cache."""
        self.looked_up += len(prompt)
        self.repeated += sum(each in self.seen for each in prompt)
        self.seen.update(whole)
        self.needed += len(whole)

    def ended(self, answer: Answer, whole: Sequence[bytes]) -> None:
        """A node has served a request."""
        self.finished += 1
        for tier, blocks in enumerate(answer.hits):
            self.hits[tier] += blocks
        self.computed.update(whole[sum(answer.hits) :])
        self.waits.append(answer.wait_s)

    def as_dict(self) -> dict[str, float]:
        """By name, shares rounded. `computed_once` is the share of the computed tokens that the
        fleet computed for the first time, which is 1 for one large cache."""
        looked_up, computed = max(1, self.looked_up), sum(self.computed.values())
        shares = dict(zip(("device", "host", "storage"), self.hits, strict=True))
        return {
            "requests": self.finished,
            "retried": self.retried,
            "faults": self.faults,
            "faults_left_out": self.faults_left_out,
            **{f"hit_rate_{tier}": round(hits / looked_up, 4) for tier, hits in shares.items()},
            "hit_rate": round(sum(self.hits) / looked_up, 4),
            "ideal_hit_rate": round(self.repeated / looked_up, 4),
            "blocks_computed": computed,
            "blocks_distinct": len(self.computed),
            "computed_once": round(len(self.computed) / max(1, computed), 4),
            "wait_p50_s": round(float(np.percentile(self.waits or [0.0], 50)), 4),
            "wait_p99_s": round(float(np.percentile(self.waits or [0.0], 99)), 4),
            "wait_max_s": round(max(self.waits, default=0.0), 4),
        }


class Run:
    """The workload under one placement."""

    def __init__(
        self, scenario: Scenario, task: Task, network: Network, placement: Placement, totals: Totals
    ) -> None:
        self.figures = Figures()
        self._served = False
        self._pause_at = 0.0  # requests wait for the first fault
        self._scenario = scenario
        self._fleet, self._work = scenario.fleet, scenario.workload
        self._aware = placement == "kv_aware"
        self._totals = totals
        self._network = network
        self._master = Master(host=network.hub)
        self._pooled = placement != "no_pool"
        self._draw = random.Random(task.seed)  # noqa: S311  (placement is no secret)
        layout = make_layout(scenario.layout, scenario.cache.block_size)
        root = CacheScope(scenario.cache.model, scenario.cache.namespace).root(layout.fingerprint)
        sessions = range(self._work.sessions)
        self._texts = [Conversation(self._work, task.seed, number) for number in sessions]
        self._chains = [Chain(root, scenario.cache.block_size) for _ in sessions]
        self._members = [
            Member(number, network, self._data(task.data, number), task.seed)
            for number in range(self._fleet.nodes)
        ]

    def _data(self, data: dict[str, Any], node: int) -> dict[str, Any]:
        """The scenario of a node."""
        of_node = {name: value for name, value in deepcopy(data).items() if name not in DRIVERS}
        if not self._pooled:
            of_node["storage"] = {"backend": "none"}
            return of_node
        pool = of_node["storage"].setdefault("mooncake", {})
        pool["master_server_address"] = self._master.address
        if node >= self._fleet.nodes - self._fleet.clients:
            pool["global_segment_size"] = 0
        return of_node

    async def run(self) -> dict[str, float]:
        """Start the fleet, serve the workload, compare the mirrors with the nodes, and end."""
        try:
            if self._pooled:
                await anyio.to_thread.run_sync(self._master.start)
            async with anyio.create_task_group() as tasks:
                for member in self._members:
                    tasks.start_soon(member.start)
            began = time.monotonic()
            async with anyio.create_task_group() as faults:
                faults.start_soon(self._faults)
                await self._chat()
                self._served = True
            seconds = time.monotonic() - began
            return self.figures.as_dict() | {"seconds": round(seconds, 2)} | await self._judge()
        finally:
            with anyio.CancelScope(shield=True):
                for member in self._members:
                    await member.close()
                await anyio.to_thread.run_sync(self._master.kill)

    async def _chat(self) -> None:
        """Every conversation has its turn before any has its next one. Requests wait for a fault
        that is due."""

        async def client(sessions: Iterator[int], turn: int) -> None:
            for session in sessions:
                while self.figures.finished >= self._pause_at:  # noqa: ASYNC110  (set elsewhere)
                    await anyio.sleep(0.02)
                await self._turn(session, turn)

        for turn in range(self._work.turns):
            sessions = iter(range(self._work.sessions))
            async with anyio.create_task_group() as tasks:
                for _ in range(min(self._work.concurrency, self._work.sessions)):
                    tasks.start_soon(client, sessions, turn)

    async def _turn(self, session: int, turn: int) -> None:
        prompt, answer = self._texts[session].turn(turn)
        whole = self._chains[session].of(np.concatenate([prompt, answer]))
        blocks = whole[: len(prompt) // self._scenario.cache.block_size]
        number = turn * self._work.sessions + session
        twins = self._fleet.twins
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._serve, session, turn, blocks, whole)
            if twins and number % twins == twins - 1:
                tasks.start_soon(self._serve, session, turn, blocks, whole)

    async def _serve(
        self, session: int, turn: int, blocks: Sequence[bytes], whole: Sequence[bytes]
    ) -> None:
        """Send a request to a node, and to another one when that node ends."""
        figures, size = self.figures, self._scenario.cache.block_size
        figures.dispatched(blocks, whole)
        while True:
            try:
                member, tokens = choose(self._members, blocks, size, self._draw, aware=self._aware)
            except KVActorsError:
                await anyio.sleep(0.05)
                continue
            member.in_flight += tokens
            try:
                with anyio.fail_after(PATIENCE):
                    answer = await member.ask("serve", session, turn)
                break
            except KVActorsError:
                figures.retried += 1
            except TimeoutError:
                self._totals.complain(f"node {member.number} did not answer {session}.{turn}")
                return
            finally:
                member.in_flight -= tokens
        figures.ended(answer, whole)
        totals = self._totals
        totals.requests += 1
        totals.blocks_looked_up += len(blocks)
        totals.device, totals.host, totals.storage = (
            total + hits
            for total, hits in zip(
                (totals.device, totals.host, totals.storage), answer.hits, strict=True
            )
        )

    # -- faults

    async def _faults(self) -> None:
        """Carry the faults out, one after another. One that needs more requests than there are, or
        a namespace, is left out."""
        faults = [
            fault
            for fault in sorted(self._fleet.fault, key=lambda fault: fault.after)
            if self._pooled or not (fault.target == "master" or fault.kind == "full")
        ]
        for fault, following in itertools.zip_longest(faults, faults[1:]):
            self._pause_at = fault.after
            await self._reach(fault.after)
            if not self._served and await self._begin(fault):
                self.figures.faults += 1
                until = self.figures.finished + fault.requests
                self._pause_at = max(until, following.after) if following else math.inf
                await anyio.sleep(fault.seconds)
                await self._reach(until)
                await self._end(fault)
            else:
                self.figures.faults_left_out += 1
        self._pause_at = math.inf

    async def _reach(self, finished: int) -> None:
        """Return when so many requests have ended, or all."""
        while self.figures.finished < finished and not self._served:  # noqa: ASYNC110  (counted elsewhere)
            await anyio.sleep(0.02)

    async def _begin(self, fault: FleetFault) -> bool:
        member, process = self._members[fault.node], self._master.process
        if fault.kind == "slow":
            return self._network.slow(fault.node, fault.mbit_per_s)
        if fault.kind == "cut":
            return self._network.cut(fault.node)
        if fault.target == "master":
            if fault.kind == "kill":
                await anyio.to_thread.run_sync(self._master.kill)
            elif process is not None:
                process.send_signal(Signals.SIGSTOP)
        elif fault.kind == "full":
            await member.ask("fill")
        elif fault.kind == "kill":
            await member.kill()
        else:
            member.signal(Signals.SIGSTOP)
        return True

    async def _end(self, fault: FleetFault) -> None:
        member, process = self._members[fault.node], self._master.process
        if fault.kind in ("slow", "cut"):
            self._network.restore(fault.node)
        elif fault.target == "master":
            if fault.kind == "kill":
                await anyio.to_thread.run_sync(self._master.start)
            elif process is not None:
                process.send_signal(Signals.SIGCONT)
        elif fault.kind == "full":
            await member.ask("drain")
        elif fault.kind == "kill":
            await member.start()
        else:
            member.signal(Signals.SIGCONT)

    # -- the end

    async def _judge(self) -> dict[str, float]:
        """Let every node settle, and compare the mirrors with the nodes. Returns sums over the
        nodes."""
        sums: Counter[str] = Counter()
        for member in self._members:
            with anyio.fail_after(PATIENCE):
                answer = await member.ask("settle")
            for name, value in answer.counts.items():
                sums[name] += value  # type: ignore[assignment]
            for error in answer.errors:
                self._totals.complain(f"node {member.number}: {error}")
            sums["router_divergence"] += await anyio.to_thread.run_sync(behind, member, answer)
        if self._pooled:
            address = f"{self._network.hub}:{self._master.metrics_port}"
            for name, metric in POOL.items():
                sums[name] = int(await anyio.to_thread.run_sync(gauge, address, metric))
        self._totals.verified_blocks += int(sums["verified"])
        self._totals.corrupt_blocks_served += int(sums["corrupt"])
        self._totals.no_room += int(sums["no_room"])
        return {name: round(value, 3) for name, value in sums.items()}


DRIVERS = ("fleet", "expect", "mooncake", "fault")
"""Tables of a scenario that are the driver's, not a node's."""


POOL = {"pool_objects": "master_key_count", "pool_evicted": "master_evicted_key_count"}
"""Figures of the pool, and the master's metrics that they come from. A restarted master begins to
count again."""


def behind(member: Member, answer: Answer) -> int:
    """Blocks on which a node's mirror and the node differ."""
    member.reader.reach(answer.sequence, PATIENCE)
    view = member.reader.mirror.view
    return sum(
        len(view.get(medium, set()) ^ set(answer.held.get(medium, ())))
        for medium in view.keys() | answer.held.keys()
    )


def gauge(address: str, name: str) -> float:
    """A value of the master's metrics."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
    raise KVActorsError(f"the master has no metric {name}")


async def drive(task: Task) -> Report:
    """Run the workload once for each placement."""
    scenario, totals = Scenario.from_mapping(task.data), Totals()
    network = Network(isolated=task.isolated)
    began = time.monotonic()
    figures: dict[str, dict[str, float]] = {}
    async with beside(progress(totals)):
        for placement in scenario.fleet.placements:
            figures[placement] = await Run(scenario, task, network, placement, totals).run()
    looked_up = max(1, totals.blocks_looked_up)
    hits = {tier: getattr(totals, tier) for tier in ("device", "host", "storage")}
    rates = {tier: round(blocks / looked_up, 6) for tier, blocks in hits.items()}
    divergence = sum(one["divergence"] + one["router_divergence"] for one in figures.values())
    return Report(
        scenario.scenario.name,
        totals.requests,
        totals.rejected,
        totals.no_room,
        totals.blocks_looked_up,
        rates | {"total": round(sum(hits.values()) / looked_up, 6)},
        totals.verified_blocks,
        totals.corrupt_blocks_served,
        {"divergence": int(divergence)},
        {},
        int(sum(one["messages"] for one in figures.values())),
        round(time.monotonic() - began, 3),
        totals.errors,
        fleet={"namespaces": {"used": float(task.isolated)}, **figures},
    )


async def progress(totals: Totals) -> None:
    """Print the totals now and then."""
    while True:
        print(msgspec.json.encode(totals).decode(), flush=True)
        await anyio.sleep(PROGRESS)


async def main() -> None:
    """Read the task, carry it out, and print the report."""
    line = await anyio.to_thread.run_sync(sys.stdin.readline)
    report = await drive(msgspec.json.decode(line, type=Task))
    print("report " + msgspec.json.encode(report).decode(), flush=True)


if __name__ == "__main__":
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(40),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    run_terminable(main())


# -- nodes


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


# -- placement


HOST_CREDIT = 0.8
"""Share of a device block's worth that a host block has, as in vLLM's router."""


def choose(
    members: Sequence[Member],
    hashes: Sequence[bytes],
    block_size: int,
    draw: random.Random,
    *,
    aware: bool,
) -> tuple[Member, int]:
    """The node for a prompt.

    Args:
        members: the fleet.
        hashes: of the prompt's blocks.
        block_size: tokens of a block.
        draw: decides where nothing else does.
        aware: whether the nodes' events and the requests in flight decide.

    Returns:
        The node, and the tokens that it must compute or fetch, as far as that is known.

    Raises:
        KVActorsError: no node runs.
    """
    up = [member for member in members if member.up]
    if not up:
        raise KVActorsError("no node of the fleet runs")
    if not aware:
        return draw.choice(up), block_size * len(hashes)
    names = [int.from_bytes(each[-8:], "big") for each in hashes]
    draw.shuffle(up)
    tokens = [int(block_size * (1 + len(names) - credit(member, names))) for member in up]
    best = min(range(len(up)), key=lambda at: tokens[at] + up[at].in_flight)
    return up[best], tokens[best]


def credit(member: Member, names: Sequence[int]) -> float:
    """Blocks at the start of a prompt that a node has, those on its device counting most."""
    view = member.watch()
    device, host = view.get("GPU", set()), view.get("CPU", set())
    found = 0.0
    for name in names:
        if name in device:
            found += 1
        elif name in host:
            found += HOST_CREDIT
        else:
            break
    return found
