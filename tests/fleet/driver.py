"""Drives a fleet: `python -m tests.fleet.driver`.

It reads its task as a line of JSON, prints the totals as lines while it runs, and a report at the
end.
"""

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
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from signal import Signals
from typing import Any, Literal

import anyio
import msgspec
import numpy as np
from anyio.to_thread import run_sync

from kvactors.errors import KVActorsError
from kvactors.identity import CacheScope
from kvactors.layout import make_layout
from kvactors.native import Path
from kvactors.scenario.engine import reporting
from kvactors.scenario.report import MOVED, TIERS, Event, Totals, report_of
from kvactors.scenario.workload import Conversation, serve_turn
from kvactors.signals import run_terminable
from kvactors.types import split_hashes
from tests.fleet.node import NodeAnswer, Order
from tests.fleet.run import Network
from tests.fleet.spec import FleetFault, FleetReport, FleetScenario, Placement, Served
from tests.support.child import Child, log_errors_only, say, start_child
from tests.support.masters import Master, free_port
from tests.support.mirror import Reader, differing

START_S, ANSWER_S = 120.0, 300.0
"""Seconds within which a node must start, and answer. Only a hang takes as long."""

LOG_BYTES = 3000
"""Bytes of a node's log in the error of a failed start."""

HOST_CREDIT = 0.8
"""Share of a device block's worth that a host block has, as in vLLM's router."""

DRIVERS = ("fleet", "expect", "fault")
"""Tables of a scenario that are the driver's, not a node's."""

POOL = {"pool_objects": "master_key_count", "pool_evicted": "master_evicted_key_count"}
"""Figures of the pool, and the master's metrics that they come from. A restarted master begins to
count again."""


class NodeFigures:
    """The counts of one placement of the workload. One large cache would have `seen` blocks, and
    `repeated` blocks of prompts when they were asked for."""

    def __init__(self) -> None:
        self.computed: Counter[bytes] = Counter()  # how often each block was computed
        self.seen: set[bytes] = set()
        self.looked_up = self.repeated = self.finished = self.retried = 0
        self.hits = [0, 0, 0]
        self.waits: list[float] = []
        self.faults = self.faults_left_out = 0
        self.served: list[Served] = []
        self.nodes: dict[str, dict[str, int]] = {}

    def dispatched(self, prompt: Sequence[bytes], whole: Sequence[bytes]) -> None:
        """A request is sent to a node: count it for one large cache."""
        self.looked_up += len(prompt)
        self.repeated += sum(each in self.seen for each in prompt)
        self.seen.update(whole)

    def ended(self, answer: NodeAnswer, whole: Sequence[bytes]) -> None:
        self.finished += 1
        self.hits = [total + blocks for total, blocks in zip(self.hits, answer.hits, strict=True)]
        self.computed.update(whole[sum(answer.hits) :])
        self.waits.append(answer.wait_s)

    def as_dict(self) -> dict[str, float]:
        """By name, shares rounded. `computed_once` is the share of the computed tokens that the
        fleet computed for the first time, which is 1 for one large cache."""
        looked_up, computed = max(1, self.looked_up), sum(self.computed.values())
        shares = dict(zip(("device", "host", "storage"), self.hits, strict=True))
        p50, p99, longest = np.percentile(self.waits or [0.0], [50, 99, 100])
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
            "wait_p50_s": round(float(p50), 4),
            "wait_p99_s": round(float(p99), 4),
            "wait_max_s": round(float(longest), 4),
        }


# -- nodes


class Member:
    """A node as its driver sees it: a process, and a mirror of its blocks. in_flight: tokens that
    its requests must compute or fetch."""

    def __init__(self, number: int, network: Network, data: dict[str, Any], seed: int) -> None:
        self.number = number
        self.in_flight = 0
        self.up = False
        self._network, self._data, self._seed = network, data, seed
        events, replay = (f"tcp://{network.address(number)}:{free_port()}" for _ in range(2))
        self.reader = Reader(events, replay)
        publisher = {"endpoint": events, "replay_endpoint": replay, "bind": "bind"}
        sinks = data.setdefault("flush", {}).setdefault("sinks", [])
        sinks.insert(0, {"kind": "kv_events", **publisher})
        # Mooncake's client logs every step to standard error.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the member)
        self._numbers = itertools.count()
        self._child: Child | None = None
        self._waiting: dict[int, asyncio.Future[NodeAnswer]] = {}
        self._answers: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._child = child = await start_child(
            "-m", "tests.fleet.node", prefix=self._network.prefix, errors=self._log
        )
        try:
            await child.receive(START_S)
            commands = self._network.attach(self.number, child.process.pid)
            await child.send_json({"data": self._data, "seed": self._seed, "commands": commands})
            await child.receive(START_S)
        except KVActorsError as error:
            self._log.seek(0)
            tail = self._log.read()[-LOG_BYTES:].decode(errors="replace")
            raise KVActorsError(f"node {self.number}: {error}\n{tail}") from error
        self._answers = asyncio.get_running_loop().create_task(self._receive(child))
        self.up = True

    async def _receive(self, child: Child) -> None:
        with suppress(KVActorsError):
            while True:
                answer = msgspec.json.decode(await child.receive(10 * ANSWER_S), type=NodeAnswer)
                waiting = self._waiting.pop(answer.number, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        self.up = False
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(KVActorsError(f"node {self.number} has ended"))
        self._waiting.clear()

    async def ask(
        self, do: Literal["serve", "fill", "drain", "settle"], session: int = 0, turn: int = 0
    ) -> NodeAnswer:
        """Send an order and wait for its answer. KVActorsError if the process ended before."""
        child = self._child
        if child is None or not self.up:
            raise KVActorsError(f"node {self.number} does not run")
        order = Order(next(self._numbers), do, session, turn)
        waiting: asyncio.Future[NodeAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[order.number] = waiting
        await child.send_json(order)
        return await waiting

    def signal(self, number: Signals) -> None:
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
        await self.kill()
        self.reader.close()
        self._log.close()

    def watch(self) -> dict[str, set[Any]]:
        """Take the events that have arrived. Returns hashes of resident blocks by medium."""
        self.reader.step(0)
        return self.reader.mirror.view

    def divergence(self, answer: NodeAnswer) -> int:
        self.reader.reach(answer.sequence, ANSWER_S)
        return differing(self.reader.mirror.view, answer.held)


def choose(
    members: Sequence[Member],
    hashes: Sequence[bytes],
    block_size: int,
    draw: random.Random,
    *,
    aware: bool,
) -> tuple[Member, int]:
    """The node for a prompt, and the tokens that it must compute or fetch, as far as is known."""
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


# -- the workload


class Run:
    """The workload under one placement."""

    def __init__(
        self,
        data: dict[str, Any],
        seed: int,
        network: Network,
        placement: Placement,
        totals: Totals,
        events: list[Event],
        clock: Callable[[], float],
    ) -> None:
        scenario = FleetScenario.from_mapping(data)
        self.figures = NodeFigures()
        self._served = False
        self._pause_at = 0.0  # requests wait for the first fault
        self._fleet, self._work = scenario.fleet, scenario.workload
        self._size = scenario.cache.block_size
        self._aware, self._pooled = placement == "kv_aware", placement != "no_pool"
        self._totals, self._network = totals, network
        self._placement, self._events, self._clock = placement, events, clock
        self._master = Master(host=network.hub)
        self._draw = random.Random(seed)
        layout = make_layout(scenario.layout, self._size)
        self._block_bytes = int(layout.block_bytes)
        root = CacheScope(scenario.cache.model, scenario.cache.namespace).root(layout.fingerprint)
        sessions = range(self._work.sessions)
        self._texts = [Conversation(self._work, seed, number) for number in sessions]
        self._paths = [Path(self._size, root) for _ in sessions]  # of the texts
        self._members = [
            Member(number, network, self._data(data, number), seed)
            for number in range(self._fleet.nodes)
        ]

    def _data(self, data: dict[str, Any], node: int) -> dict[str, Any]:
        of_node = {name: value for name, value in deepcopy(data).items() if name not in DRIVERS}
        if not self._pooled:
            return of_node | {"storage": {"backend": "none"}}
        pool = of_node["storage"].setdefault("mooncake", {})
        pool["master_server_address"] = self._master.address
        pool["local_hostname"] = self._network.address(node)
        if node >= self._fleet.nodes - self._fleet.clients:
            pool["global_segment_size"] = 0
        return of_node

    async def run(self) -> dict[str, float]:
        try:
            if self._pooled:
                await run_sync(self._master.start)
            async with anyio.create_task_group() as tasks:
                for member in self._members:
                    tasks.start_soon(member.start)
            began = time.monotonic()
            async with anyio.create_task_group() as faults:
                faults.start_soon(self._faults)
                for turn in range(self._work.turns):
                    await serve_turn(self._work, turn, self._turn)
                self._served = True
            seconds = time.monotonic() - began
            return self.figures.as_dict() | {"seconds": round(seconds, 2)} | await self._judge()
        finally:
            with anyio.CancelScope(shield=True):
                for member in self._members:
                    await member.close()
                await run_sync(self._master.kill)

    async def _turn(self, session: int, turn: int) -> None:
        """Serve a turn of a conversation, once no fault is due that must begin before it."""
        while self.figures.finished >= self._pause_at:
            await anyio.sleep(0.02)
        prompt, answer = self._texts[session].turn(turn)
        path = self._paths[session]
        path.extend(np.concatenate([prompt, answer])[path.num_tokens :])
        whole = split_hashes(path.hashes(0, path.num_full_blocks))
        blocks = whole[: len(prompt) // self._size]
        number, twins = turn * self._work.sessions + session, self._fleet.twins
        async with anyio.create_task_group() as tasks:
            for _ in range(2 if twins and number % twins == twins - 1 else 1):
                tasks.start_soon(self._serve, session, turn, blocks, whole)

    async def _serve(
        self, session: int, turn: int, blocks: Sequence[bytes], whole: Sequence[bytes]
    ) -> None:
        """Send a request to a node, and to another one when that node ends."""
        figures, totals = self.figures, self._totals
        figures.dispatched(blocks, whole)
        while True:
            try:
                member, tokens = choose(
                    self._members, blocks, self._size, self._draw, aware=self._aware
                )
            except KVActorsError:
                await anyio.sleep(0.05)
                continue
            member.in_flight += tokens
            try:
                with anyio.fail_after(ANSWER_S):
                    answer = await member.ask("serve", session, turn)
                break
            except KVActorsError:
                figures.retried += 1
            except TimeoutError:
                totals.complain(f"node {member.number} did not answer {session}.{turn}")
                return
            finally:
                member.in_flight -= tokens
        figures.ended(answer, whole)
        figures.served.append(Served(self._clock(), member.number, len(blocks), answer.hits))
        totals.count_request(len(blocks), answer.hits)

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
            if not self._served and await self._set(fault, on=True):
                self.figures.faults += 1
                self._note(fault, fault.kind)
                until = self.figures.finished + fault.requests
                self._pause_at = max(until, following.after) if following else math.inf
                await anyio.sleep(fault.seconds)
                await self._reach(until)
                await self._set(fault, on=False)
                self._note(fault, "started again" if fault.kind == "kill" else "fault ended")
            else:
                self.figures.faults_left_out += 1
        self._pause_at = math.inf

    def _note(self, fault: FleetFault, what: str) -> None:
        where = "master" if fault.target == "master" else f"node {fault.node}"
        self._events.append(Event(self._clock(), f"{self._placement}: {where}: {what}"))

    async def _reach(self, finished: int) -> None:
        while self.figures.finished < finished and not self._served:
            await anyio.sleep(0.02)

    async def _set(self, fault: FleetFault, *, on: bool) -> bool:
        """Begin or end a fault. False if it is not possible here."""
        member = self._members[fault.node]
        of_master = fault.target == "master"
        if fault.kind == "kill":
            if of_master:
                await run_sync(self._master.kill if on else self._master.start)
            else:
                await (member.kill if on else member.start)()
        elif fault.kind == "pause":
            target = self._master if of_master else member
            target.signal(Signals.SIGSTOP if on else Signals.SIGCONT)
        elif fault.kind == "full":
            await member.ask("fill" if on else "drain")
        elif not on:
            self._network.restore(fault.node)
        elif fault.kind == "slow":
            return self._network.slow(fault.node, fault.mbit_per_s)
        else:
            return self._network.cut(fault.node)
        return True

    # -- the end

    async def _judge(self) -> dict[str, float]:
        """Let every node settle, and compare the mirrors with the nodes. Returns sums over the
        nodes."""
        sums: Counter[str] = Counter()
        for member in self._members:
            with anyio.fail_after(ANSWER_S):
                answer = await member.ask("settle")
            for name, value in answer.counts.items():
                sums[name] += value  # type: ignore[assignment]
            for error in answer.errors:
                self._totals.complain(f"node {member.number}: {error}")
            sums["router_divergence"] += await run_sync(member.divergence, answer)
            own = [one for one in self.figures.served if one.node == member.number]
            moved = (answer.counts.get(f"pool_{what}", 0) for what in ("reads", "writes"))
            self.figures.nodes[f"node {member.number}"] = {
                "requests": len(own),
                "blocks_looked_up": sum(one.looked_up for one in own),
                **{tier: sum(getattr(one.hits, tier) for one in own) for tier in TIERS},
                **dict(zip(MOVED, (int(n) * self._block_bytes for n in moved), strict=True)),
            }
        if self._pooled:
            address = f"{self._network.hub}:{self._master.metrics_port}"
            for name, metric in POOL.items():
                sums[name] = int(await run_sync(gauge, address, metric))
        self._totals.verified_blocks += int(sums["verified"])
        self._totals.corrupt_blocks_served += int(sums["corrupt"])
        self._totals.no_room += int(sums["no_room"])
        return {name: round(value, 3) for name, value in sums.items()}


def gauge(address: str, name: str) -> float:
    """A value of the master's metrics."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
    raise KVActorsError(f"the master has no metric {name}")


async def drive(data: dict[str, Any], seed: int, *, isolated: bool) -> FleetReport:
    """Run the workload once for each placement. isolated: whether this process has a network
    namespace."""
    scenario, totals = FleetScenario.from_mapping(data), Totals()
    network = Network(isolated=isolated)
    began = time.monotonic()
    figures: dict[str, dict[str, float]] = {}
    events, runs = list[Event](), dict[str, Run]()

    def clock() -> float:
        return round(time.monotonic() - began, 3)

    async with reporting(totals, say):
        for placement in scenario.fleet.placements:
            run = runs[placement] = Run(data, seed, network, placement, totals, events, clock)
            figures[placement] = await run.run()
    divergence = sum(one["divergence"] + one["router_divergence"] for one in figures.values())
    return report_of(
        FleetReport,
        scenario.scenario.name,
        totals,
        time.monotonic() - began,
        flush={"divergence": int(divergence)},
        loop_lag_ms={},
        messages=int(sum(one["messages"] for one in figures.values())),
        errors=totals.errors,
        events=events,
        fleet={"namespaces": {"used": float(isolated)}, **figures},
        nodes={placement: run.figures.nodes for placement, run in runs.items()},
        served={placement: run.figures.served for placement, run in runs.items()},
    )


async def main() -> None:
    """Read the arguments of `drive`, run it, and print the report."""
    arguments = msgspec.json.decode(await run_sync(sys.stdin.readline))
    print("report " + msgspec.json.encode(await drive(**arguments)).decode(), flush=True)


if __name__ == "__main__":
    log_errors_only()
    run_terminable(main())
