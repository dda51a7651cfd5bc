"""Flush: how soon a sink has a change, and how many event batches a second reach another process."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from kvactors.actor import ActorRef, ActorSpec, Group, InFlight, Supervisor
from kvactors.flush_notifier.actor import FlushNotifier
from kvactors.flush_notifier.messages import (
    BlocksAdded,
    BlocksRemoved,
    FlushTask,
    PathCached,
    WaitFlushed,
)
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.flush_notifier.sinks.kv_events import KvEventsSink
from kvactors.native import HASH_BYTES, chain_hashes
from kvactors.settings import FlushConfig
from kvactors.settings.sinks import KvEventsSinkConfig
from kvactors.signals import run_terminable
from kvactors.types import Reason, Residency, Tier, split_hashes
from tests.benchmarks.frame import Peer, Report, Row, rate_row, time_row
from tests.support.child import Child, child
from tests.support.deadline import deadline_after

BLOCK, DEPTH, PATHS = 64, 16, 500
RATE = 10_000
ROOT = bytes(HASH_BYTES)

FRAMES = 3
"""Frames of a message."""


class TimedSink(KvEventsSink):
    """Records the seconds from each change to its publication.

    Attributes:
        sent: the time at which each change was sent, by block hash.
    """

    def __init__(self, endpoint: str) -> None:
        super().__init__(KvEventsSinkConfig(endpoint=endpoint), BLOCK)
        self.sent: dict[bytes, float] = {}
        self.took: list[float] = []

    async def deliver(self, tasks: Sequence[FlushTask]) -> None:
        """Publish, and look at the clock."""
        await super().deliver(tasks)
        now = time.perf_counter()
        for task in tasks:
            for block_hash in split_hashes(task.hashes):
                sent = self.sent.pop(block_hash, None)
                if sent is not None:
                    self.took.append(now - sent)


@asynccontextmanager
async def notifier(*sinks: Sink) -> AsyncIterator[ActorRef]:
    """A notifier alone, with its sinks."""
    supervisor = Supervisor(InFlight())
    ref = supervisor.make_ref(FlushNotifier, 1024)

    def make(ref: ActorRef) -> FlushNotifier:
        return FlushNotifier(
            ref,
            block_size=BLOCK,
            sinks=sinks,
            config=FlushConfig(),
            epoch=1,
            idle_limit=PATHS * DEPTH,
        )

    for sink in sinks:
        await sink.open()
    async with supervisor.running(Group("notifier", (ActorSpec(FlushNotifier, make, ref),))):
        yield ref
    for sink in sinks:
        await sink.close()


def path_of(seed: int, blocks: int) -> PathCached:
    """A made-up path, resident on the device."""
    tokens = np.random.default_rng(seed).integers(0, 150_000, blocks * BLOCK, dtype=np.uint32)
    hashes = chain_hashes(ROOT, tokens, BLOCK)
    return PathCached(
        ROOT, tokens.tobytes(), hashes, 0, blocks, Tier.DEVICE, Reason.REQUEST_FINISH, ROOT
    )


async def changes(seconds: float, folder: str) -> list[float]:
    """Add and remove deepest blocks, RATE times a second. Returns the seconds from each change to
    its publication, rising."""
    sink = TimedSink(f"ipc://{folder}/changes")
    async with notifier(sink) as ref:
        hashes = []
        for seed in range(PATHS):
            path = path_of(seed, DEPTH)
            hashes.append(path.hashes[-HASH_BYTES:])
            await ref.tell(path)
        await ref.ask(WaitFlushed(), deadline=deadline_after(30.0))
        began, told = time.perf_counter(), 0
        while told < seconds * RATE:
            due = int((time.perf_counter() - began) * RATE)
            for number in range(told, due):
                block_hash = hashes[number % PATHS]
                gone = number // PATHS % 2 == 0
                sink.sent[block_hash] = time.perf_counter()
                change = (
                    BlocksRemoved(block_hash, Tier.DEVICE, Reason.DEVICE_DROP)
                    if gone
                    else BlocksAdded(block_hash, Tier.DEVICE, Reason.LOAD)
                )
                if not ref.try_tell(change):
                    await ref.tell(change)
            told = due
            await asyncio.sleep(0.0005)
        await ref.ask(WaitFlushed(), deadline=deadline_after(30.0))
    return sorted(sink.took)


@asynccontextmanager
async def subscribed(endpoint: str, count: int) -> AsyncIterator[Child]:
    """A subscriber process that prints how many seconds `count` messages took to arrive."""
    async with child("-m", "tests.benchmarks.flush", endpoint, str(count)) as reader:
        await reader.receive()
        yield reader


def read(endpoint: str, count: int) -> None:
    """Subscribe, print a line when the publisher has accepted the connection, and another one with
    the seconds that `count` messages took."""
    socket: Any = zmq.Context.instance().socket(zmq.SUB)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.subscribe(b"")
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    socket.connect(endpoint)
    recv_monitor_message(monitor)
    print("connected", flush=True)
    began = 0.0
    take: Any = zmq.backend.Socket.recv
    for _ in range(count):
        for _ in range(FRAMES):
            take(socket)
        began = began or time.monotonic()
    print(time.monotonic() - began, flush=True)


async def received(reader: Child, count: int) -> float:
    """Batches a second that a subscriber received."""
    return (count - 1) / float(await reader.receive(120.0))


class Load(NamedTuple):
    """Batches to publish: each of `events` events of `blocks` blocks of `tokens` tokens."""

    blocks: int
    tokens: int
    events: int
    batches: int


async def publish(load: Load, folder: str) -> tuple[float, float]:
    """Batches a second that reach another process: one task for each event through the sink, and
    ready-made bytes of the same size through a bare socket."""
    blocks, tokens, events, count = load
    rng = np.random.default_rng(1)
    config = KvEventsSinkConfig(
        endpoint=f"ipc://{folder}/{blocks}-{tokens}-{events}", high_water_mark=count + 10
    )
    sink = KvEventsSink(config, tokens)

    def task() -> FlushTask:
        ids = rng.integers(0, 150_000, blocks * tokens, dtype=np.uint32).tobytes()
        hashes = rng.bytes(HASH_BYTES * blocks)
        return FlushTask(
            ids,
            blocks,
            blocks,
            hashes,
            rng.bytes(32),
            Residency.RESIDENT,
            Tier.DEVICE,
            Reason.COMMIT,
            1,
        )

    calls = [tuple(task() for _ in range(events)) for _ in range(256)]
    await sink.open()
    rates = []
    payload = b""
    for ours in (True, False):
        async with subscribed(sink.endpoint, count) as reader:
            await asyncio.sleep(0.5)
            for number in range(count):
                if ours:
                    await sink.deliver(calls[number % len(calls)])
                else:
                    sink.events.sender(b"", number, payload)
                if number % 64 == 0:
                    await asyncio.sleep(0)
            rates.append(await received(reader, count))
        payload = sink.events.window.since(sink.events.sequence - 1)[0][1]
    await sink.close()
    return rates[0], rates[1]


async def publish_as_vllm(python: str, load: Load, folder: str) -> float:
    """The same through vLLM's publisher, in a process of the Python that has it."""
    endpoint = f"ipc://{folder}/vllm-{time.monotonic_ns()}"
    blocks, tokens, events, count = load
    arguments = (endpoint, *map(str, (count, blocks, tokens, events)))
    peer = Peer(python, "vllm_publisher.py", *arguments)
    try:
        peer.ask("bind")
        async with subscribed(endpoint, count) as reader:
            await asyncio.sleep(0.5)
            peer.ask("publish")
            return await received(reader, count)
    finally:
        peer.close()


async def beside_vllm(
    python: str, load: Load, folder: str, rounds: int
) -> tuple[float, float, float]:
    """Medians of kvactors' sink, the bare socket and vLLM's publisher, measured in turns. The last
    one is 0 without a Python that has vLLM."""
    measured = []
    for _ in range(rounds):
        ours, bare = await publish(load, folder)
        peer = await publish_as_vllm(python, load, folder) if python else 0.0
        measured.append((ours, bare, peer))
    ours, bare, peer = map(median, zip(*measured, strict=True))
    return ours, bare, peer


async def rows(*, quick: bool, vllm_python: str) -> tuple[list[Row], dict[str, Any]]:
    """Every row."""
    seconds, count, rounds = (0.3, 2000, 1) if quick else (10.0, 100_000, 3)
    result: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kvactors-flush-") as folder:
        took = await changes(seconds, folder)
        for name, share in (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999)):
            case = f"change to sink, {RATE:,} a second, {name}"
            value = 1000 * took[int(share * len(took))]
            result.append(time_row(case, value, 1.0, "ms", "the bar for p99"))
        for load in (Load(1, 16, 1, count), Load(8, 16, 1, count), Load(1, 16, 64, count // 16)):
            ours, bare, peer = await beside_vllm(vllm_python, load, folder, rounds)
            case = f"batches of {load.blocks} x {load.tokens} tokens"
            if load.events > 1:
                case = f"{load.events} events of 1 x 16 tokens a batch"
            result.append(rate_row(case, ours, bare, "batches/s", "a bare socket"))
            if peer:
                beside, limit = f"{case}, vLLM beside it", "vLLM's publisher"
                result.append(rate_row(beside, ours, peer, "batches/s", limit))
    return result, {"changes": len(took), "batches": count, "rounds": rounds, "quick": quick}


def run(*, quick: bool = False, vllm_python: str = "") -> Report:
    """All rows. Without a Python that has vLLM there are no rows beside its publisher."""
    return Report(*run_terminable(rows(quick=quick, vllm_python=vllm_python)))


if __name__ == "__main__":
    read(sys.argv[1], int(sys.argv[2]))
