"""Flush: how soon a sink has a change, how many event batches a second reach another process, and
what an evicted run costs."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import anyio
import msgspec
import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from kvactors.actor import ActorRef, ActorSpec, Group, InFlight, Supervisor
from kvactors.errors import ConfigError, KVActorsError
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
from kvactors.flush_notifier.sinks.memory import MemorySink
from kvactors.native import HASH_BYTES, chain_hashes
from kvactors.observe.lag import Lag, LagMonitor
from kvactors.settings import FlushConfig
from kvactors.settings.sinks import KvEventsSinkConfig, MemorySinkConfig
from kvactors.signals import run_terminable
from kvactors.types import Reason, Residency, Tier, split_hashes
from tests.benchmarks.report import Row, bench_report, rate_row, time_row
from tests.support.child import Child, child, start_child
from tests.support.deadline import deadline_after

BLOCK, DEPTH, PATHS = 64, 16, 500
RATE = 10_000
BAR_BATCHES, BAR_BLOCKS = 40_000, 300_000
ROOT = bytes(HASH_BYTES)

FRAMES = 3
"""Frames of a message."""

TOGETHER = 64
"""Events of a batch where several changes wait."""

PEER_LIMIT = 300.0
"""Seconds that another publisher may take, its start included."""


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


def part_of(path: PathCached, start: int, count: int) -> PathCached:
    """Blocks [start, start + count) of a path that is announced from its first block on."""
    hashes, tokens = (
        whole[size * start : size * (start + count)]
        for whole, size in ((path.hashes, HASH_BYTES), (path.tokens, 4 * BLOCK))
    )
    parent = path.hashes[HASH_BYTES * (start - 1) : HASH_BYTES * start] if start else path.parent
    return msgspec.structs.replace(
        path, tokens=tokens, hashes=hashes, start=start, count=count, parent=parent
    )


async def changes(seconds: float, folder: str) -> tuple[list[float], Lag, Lag]:
    """Add and remove deepest blocks, RATE times a second. Returns the seconds from each change to
    its publication, and the loop's lag before and during the changes."""
    sink = TimedSink(f"ipc://{folder}/changes")
    async with notifier(sink) as ref:
        hashes = []
        for seed in range(PATHS):
            path = path_of(seed, DEPTH)
            hashes.append(path.hashes[-HASH_BYTES:])
            await ref.tell(path)
        await ref.ask(WaitFlushed(), deadline=deadline_after(30.0))
        async with LagMonitor().running() as idle:
            await asyncio.sleep(min(2.0, seconds))
        async with LagMonitor().running() as busy:
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
    return sorted(sink.took), idle.results().wall, busy.results().wall


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
    """The same through vLLM's publisher, in a process of the Python that has it. ConfigError if
    that Python has no vLLM."""
    endpoint = f"ipc://{folder}/vllm-{time.monotonic_ns()}"
    script = str(Path(__file__).with_name("vllm_publisher.py"))
    blocks, tokens, events, count = load
    arguments = (script, endpoint, *map(str, (count, blocks, tokens, events)))
    peer = await start_child(*arguments, python=python)
    try:
        with anyio.move_on_after(PEER_LIMIT):
            while (await peer.receive(2 * PEER_LIMIT)).strip() != "ready":
                pass  # vLLM logs before it
            async with subscribed(endpoint, count) as reader:
                await asyncio.sleep(0.5)
                await peer.send("go")
                return await received(reader, count)
        raise ConfigError(f"{python} did not run vLLM's publisher within {PEER_LIMIT:g} s")
    except KVActorsError as error:
        raise ConfigError(f"{python} cannot run vLLM's publisher: {error}, see above") from error
    finally:
        await peer.kill()


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


async def growth(*, quick: bool) -> list[Row]:
    """Bytes of tokens handed to a sink that wants complete paths, for one evicted run of n blocks,
    against n times a block's."""
    result = []
    for blocks in (50, 100) if quick else (500, 1000, 2000, 4000):
        sink = MemorySink(MemorySinkConfig(granularity="node"), BLOCK)
        path = path_of(blocks, blocks)
        async with notifier(sink) as ref:
            for start in range(0, blocks, 10):  # a conversation that grew turn by turn
                await ref.tell(part_of(path, start, 10))
            await ref.ask(WaitFlushed(), deadline=deadline_after(30.0))
            told = len(sink.tasks)
            await ref.tell(BlocksRemoved(path.hashes, Tier.DEVICE, Reason.CPU_EVICTION))
            await ref.ask(WaitFlushed(), deadline=deadline_after(30.0))
        handed = sum(len(task.tokens) for task in list(sink.tasks)[told:])
        case = f"evicting a run of {blocks} blocks: token bytes handed to the sink"
        result.append(
            time_row(case, handed, blocks * BLOCK * 4, "bytes", "the run's own tokens, once")
        )
    return result


def vllm_row(case: str, ours: float, peer: float, published: float) -> Row:
    """Ours beside vLLM's publisher in the same run, or beside its figure on another machine."""
    if peer:
        return rate_row(
            f"{case}, vLLM beside it", ours, peer, "batches/s", "vLLM's publisher in this run"
        )
    return rate_row(
        f"{case}, vLLM elsewhere",
        ours,
        published,
        "batches/s",
        "vLLM's publisher as measured on another machine",
    )


async def rows(*, quick: bool, vllm_python: str) -> tuple[list[Row], dict[str, Any]]:
    """Every row."""
    seconds, count, rounds = (0.3, 2000, 1) if quick else (10.0, 100_000, 3)
    result: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kvactors-flush-") as folder:
        took, idle, busy = await changes(seconds, folder)
        for name, share in (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999)):
            value = 1000 * took[int(share * len(took))]
            result.append(
                time_row(
                    f"change to sink, {RATE:,} a second, {name}",
                    value,
                    1.0,
                    "ms",
                    "the bar for p99",
                )
            )
        lag = "loop lag during the run"
        result += [
            time_row(f"{lag}, {n}", getattr(busy, n), getattr(idle, n) + 2.0, "ms", "idle + 2 ms")
            for n in Lag._fields
        ]
        for blocks, tokens, published in ((1, 16, 31_500.0), (8, 16, 21_100.0), (8, 64, 0.0)):
            python = vllm_python if published else ""
            load = Load(blocks, tokens, 1, count)
            ours, bare, peer = await beside_vllm(python, load, folder, rounds)
            case = f"batches of {blocks} x {tokens} tokens to another process"
            result.append(rate_row(case, ours, bare, "batches/s", "bare socket, ready-made bytes"))
            if published:
                bar, unit = (BAR_BATCHES, "batches/s") if blocks == 1 else (BAR_BLOCKS, "blocks/s")
                result.append(
                    rate_row(f"{case}, bar", ours * (max(1, blocks)), bar, unit, "the bar")
                )
                result.append(vllm_row(case, ours, peer, published))
        load = Load(1, 16, TOGETHER, max(1, count // 16))
        ours, bare, peer = await beside_vllm(vllm_python, load, folder, rounds)
        case = f"{TOGETHER} events of 1 x 16 tokens a batch to another process"
        result.append(rate_row(case, ours, bare, "batches/s", "bare socket, ready-made bytes"))
        if peer:
            result.append(vllm_row(case, ours, peer, 0.0))
        result += await growth(quick=quick)
    return result, {
        "changes": len(took),
        "batches": count,
        "rounds": rounds,
        "quick": quick,
        "vllm": vllm_python or "not installed",
    }


def run(*, quick: bool = False, vllm_python: str = "") -> dict[str, Any]:
    """All rows. quick: a moment only, for tests. vllm_python: a Python that has vLLM, this one if
    it has."""
    if not vllm_python and find_spec("vllm") is not None:
        vllm_python = sys.executable
    result, settings = run_terminable(rows(quick=quick, vllm_python=vllm_python))
    return bench_report("flush", result, settings)


if __name__ == "__main__":
    read(sys.argv[1], int(sys.argv[2]))
