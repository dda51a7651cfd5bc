"""Rounds of the benchmark `store`: the same bytes through the file store, through plain direct I/O and
through vLLM's `fs` tier, in turn."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from kvactors.actor import Actor, ActorRef, ActorSpec, Group, InFlight, Supervisor, on
from kvactors.device.arena import Arena
from kvactors.flush_notifier.messages import BlocksAdded, BlocksRemoved, PathsFound, TierCleared
from kvactors.identity import Lineage
from kvactors.observe.lag import LagMonitor, Lags
from kvactors.signals import run_terminable
from kvactors.storage.actors import StorageReader, StorageWriter
from kvactors.storage.backend import Expired, ReadReport, SlotViews, WriteReport
from kvactors.storage.file.store import FileBackend
from kvactors.storage.guarded import GuardedBackend
from kvactors.storage.messages import Outcome, Probed, Read, ReadDone, StoreCleared, Write, Written
from kvactors.types import join_hashes
from tests.benchmarks.engine import EngineProcess

DIGEST = bytes(32)
BATCH_BYTES = 32 << 20
"""Bytes of a batch, unless that is more than `MOST` objects or less than `LEAST`."""
LEAST, MOST = 16, 256
LAG_EVERY = 3
"""Rounds after which the loop's lag is measured again."""

PLAIN = {f"{depth} threads": depth for depth in (4, 8, 16, 32)}
"""Plain threads by the name of the variant."""

ORDERS = 1
"""Seed of the order in which the runners of a round take turns."""


LEAST_ROUNDS = 4
"""Rounds of a load, also on a machine where they take long."""


def rounds_within(rounds: int, seconds: float) -> Iterator[int]:
    """The numbers of the rounds of a load.

    Args:
        rounds: at most.
        seconds: no round begins behind them, once there were LEAST_ROUNDS.
    """
    until = time.monotonic() + seconds
    for number in range(rounds):
        if number >= LEAST_ROUNDS and time.monotonic() > until:
            return
        yield number


class Round(NamedTuple):
    """Bytes a second and processor seconds for a GB, written and read."""

    write: float
    read: float
    write_cpu: float
    read_cpu: float


class Load(NamedTuple):
    """The objects that every runner moves in a round.

    Attributes:
        size: bytes of an object.
        objects: how many.
        batch: objects of a message, or of a job.
    """

    size: int
    objects: int
    batch: int

    @property
    def slots(self) -> int:
        """Slots of the arena: one an object. A host tier is larger than a processor's cache, and a
        read into memory that is still cached and that no one has looked at since the last read is
        faster than the device is into any other memory."""
        return self.objects

    @property
    def case(self) -> str:
        """In the names of rows."""
        size = self.size
        return f"{size >> 20} MiB blocks" if size >= 1 << 20 else f"{size >> 10} KiB blocks"


def load_of(size: int, total: int) -> Load:
    """The load of an object size and a number of bytes."""
    return Load(size, max(4, total // size), max(LEAST, min(MOST, BATCH_BYTES // size)))


class NullEvictor(Actor):
    """Stands where evictor and notifier stand: it counts answers."""

    ROLE: ClassVar[str] = "cpu_evictor"

    def __init__(self, ref: ActorRef) -> None:
        super().__init__(ref)
        self.outcomes: dict[int, bytes] = {}

    @on(Written)
    def written(self, message: Written) -> None:
        """A batch was written."""
        self.outcomes[message.op] = message.outcomes

    @on(ReadDone)
    def read_done(self, message: ReadDone) -> None:
        """A batch was read."""
        self.outcomes[message.op] = message.outcomes

    @on(Probed)
    def probed(self, message: Probed) -> None:
        """Ignored: the benchmark sends no probe."""

    @on(StoreCleared)
    def store_cleared(self, message: StoreCleared) -> None:
        """Ignored: the benchmark clears no store."""


class NullNotifier(Actor):
    """Stands in for the notifier."""

    ROLE: ClassVar[str] = "flush_notifier"

    @on(BlocksAdded)
    def blocks_added(self, message: BlocksAdded) -> None:
        """Nothing to do."""

    @on(BlocksRemoved)
    def blocks_removed(self, message: BlocksRemoved) -> None:
        """Nothing to do."""

    @on(TierCleared)
    def tier_cleared(self, message: TierCleared) -> None:
        """Nothing to do."""

    @on(PathsFound)
    def paths_found(self, message: PathsFound) -> None:
        """Nothing to do."""


def names(count: int, first: int = 0) -> list[bytes]:
    """Names of blocks."""
    return [(first + i).to_bytes(32, "little") for i in range(count)]


class StoreOnly:
    """The part of a data plane that storage actors use."""

    def __init__(self, store: GuardedBackend, slots: Arena) -> None:
        self.store = store
        self.slots = slots

    async def read(
        self, generation: int, keys: Sequence[bytes], slots: Sequence[int], expired: Expired
    ) -> ReadReport:
        """See `StoragePlane`."""
        return await self.store.read(keys, SlotViews(self.slots, slots), expired)

    async def write(
        self,
        generation: int,
        keys: Sequence[bytes],
        slots: Sequence[int],
        expired: Expired,
        lineages: Sequence[Lineage | None] = (),
        salts: Sequence[int] = (),
    ) -> WriteReport:
        """See `StoragePlane`."""
        return await self.store.write(keys, SlotViews(self.slots, slots), expired, lineages, salts)


def processor_seconds() -> float:
    """Processor time of this process, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Meter:
    """Rates of the two directions, in the order of their ends."""

    def __init__(self, load: Load) -> None:
        self._bytes = load.size * load.objects
        self._rates: list[float] = []
        self._costs: list[float] = []

    @contextmanager
    def direction(self) -> Iterator[None]:
        """One direction is moved inside."""
        began, used = time.perf_counter(), processor_seconds()
        yield
        seconds = time.perf_counter() - began
        self.add(seconds, processor_seconds() - used)

    def add(self, seconds: float, processor: float) -> None:
        """A direction took so long."""
        self._rates.append(self._bytes / seconds)
        self._costs.append(processor / (self._bytes / 1e9))

    def round(self) -> Round:
        """Both directions."""
        return Round(*self._rates, *self._costs)


async def ours(folder: Path, arena: Arena, load: Load, lag: LagMonitor | None = None) -> Round:
    """Objects through writer and reader actors. lag: measures the loop's lag during both, which
    takes processor time."""
    store = FileBackend(folder, DIGEST, load.size)
    await store.open()
    await store.attach(arena)
    plane = StoreOnly(GuardedBackend(store, 60.0), arena)
    supervisor = Supervisor(InFlight())
    refs = {
        kind: supervisor.make_ref(kind, 256)
        for kind in (StorageReader, StorageWriter, NullEvictor, NullNotifier)
    }
    parts: dict[str, Any] = {
        "backend": plane.store,
        "plane": plane,
        "evictor": refs[NullEvictor],
        "notifier": refs[NullNotifier],
    }
    specs = [
        ActorSpec(StorageReader, lambda ref: StorageReader(ref, **parts), refs[StorageReader]),
        ActorSpec(StorageWriter, lambda ref: StorageWriter(ref, **parts), refs[StorageWriter]),
        ActorSpec(NullEvictor, NullEvictor, refs[NullEvictor]),
        ActorSpec(NullNotifier, NullNotifier, refs[NullNotifier]),
    ]
    deadline = asyncio.get_running_loop().time() + 600.0
    meter = Meter(load)
    ticking = nullcontext() if lag is None else lag.running()
    async with supervisor.running(Group("store", tuple(specs))), ticking:
        for kind in (Write, Read):
            target = refs[StorageWriter] if kind is Write else refs[StorageReader]
            with meter.direction():
                for op, start in enumerate(range(0, load.objects, load.batch)):
                    keys = names(min(load.batch, load.objects - start), start)
                    slots = tuple((start + i) % arena.num_slots for i in range(len(keys)))
                    if kind is Write:
                        await target.tell(Write(op, join_hashes(keys), slots, deadline))
                    else:
                        await target.tell(Read(op, join_hashes(keys), slots, deadline, take=False))
                await supervisor.in_flight.wait_idle()
            sink: Any = supervisor.actor(refs[NullEvictor].name)
            if not all(o == Outcome.OK for outcomes in sink.outcomes.values() for o in outcomes):
                raise RuntimeError("a block was lost")
    await store.close()
    return meter.round()


def plain(folder: Path, arena: Arena, load: Load, threads: int) -> Round:
    """Objects by threads that do nothing but O_DIRECT reads and writes of a preallocated file."""
    size, stride = load.size, arena.stride
    memory = [np.frombuffer(arena.view(slot), np.uint8) for slot in range(arena.num_slots)]
    path = folder / "plain"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)

    def move(call: Callable[..., int], i: int) -> None:
        if call(file, [memory[i % len(memory)]], i * stride) != size:
            raise RuntimeError("a plain transfer was short")

    meter = Meter(load)
    try:
        os.posix_fallocate(file, 0, stride * load.objects)
        with ThreadPoolExecutor(threads) as pool:
            for call in (os.pwritev, os.preadv):
                with meter.direction():
                    list(pool.map(partial(move, call), range(load.objects)))
    finally:
        os.close(file)
        path.unlink()
    return meter.round()


class VllmTier:
    """vLLM's `fs` tier in another process. folder: of its files."""

    def __init__(self, python: str, folder: Path) -> None:
        self._process = EngineProcess(python, "its fs tier", "store_child.py")
        self._folder = folder

    def round(self, load: Load) -> Round:
        """A round in an empty folder."""
        ask = self._process.ask
        ask("open", folder=str(self._folder), size=load.size, slots=load.slots)
        meter = Meter(load)
        for what in ("write", "read"):
            found = ask(what, first=0, count=load.objects, batch=load.batch)
            if found["failed"]:
                raise RuntimeError(f"{found['failed']} jobs of vLLM's fs tier failed")
            meter.add(found["seconds"], found["processor"])
        ask("close")
        return meter.round()

    def close(self) -> None:
        """End the process."""
        self._process.close()


class Measured(NamedTuple):
    """Rounds of one load, by runner.

    Attributes:
        plain: by the name of the variant.
        vllm: empty without a Python that has it.
        lags: of the loop in further rounds of ours.
    """

    load: Load
    ours: list[Round]
    plain: dict[str, list[Round]]
    vllm: list[Round]
    lags: Lags


def measured(folder: Path, load: Load, numbers: Iterable[int], vllm: VllmTier | None) -> Measured:
    """Interleaved rounds of these numbers, in a random order each, so that no runner always has the
    disk as the same other one leaves it. In every LAG_EVERY-th one the store takes a second turn,
    in which the loop's lag is measured."""
    arena = Arena(load.slots, load.size)
    arena.fresh.touch()
    for slot in range(arena.num_slots):
        arena.view(slot)[:] = np.random.default_rng(slot).bytes(load.size)
    lag = LagMonitor()
    found = Measured(load, [], {name: [] for name in PLAIN}, [], lag.results())

    def run_ours(lag: LagMonitor | None = None) -> None:
        result = run_terminable(ours(folder / "ours", arena, load, lag))
        if lag is None:
            found.ours.append(result)
        shutil.rmtree(folder / "ours")

    def run_plain(name: str, threads: int) -> None:
        found.plain[name].append(plain(folder, arena, load, threads))

    runners: list[Callable[[], None]] = [run_ours]
    runners += [partial(run_plain, *variant) for variant in PLAIN.items()]
    if vllm is not None:
        peer = vllm
        runners.append(lambda: found.vllm.append(peer.round(load)))
    orders = np.random.default_rng(ORDERS)
    for number in numbers:
        for which in orders.permutation(len(runners)):
            runners[which]()
        if number % LAG_EVERY == 0:
            run_ours(lag)
        print(f"{load.case}, round {number + 1}: {_line(found)}", file=sys.stderr, flush=True)
    arena.close()
    return found._replace(lags=lag.results())


def _line(found: Measured) -> str:
    """The last round: each runner, written / read, in GB/s. Of plain threads the slowest and the
    fastest variant."""
    last = {name: of[-1:] for name, of in (("ours", found.ours), ("vLLM's", found.vllm)) if of}
    shown = []
    for name, of in {"plain": [one[-1] for one in found.plain.values()], **last}.items():
        rates = [
            sorted({f"{getattr(one, what) / 1e9:.2f}" for one in of}, key=float)
            for what in ("write", "read")
        ]
        shown.append(f"{name} " + " / ".join(" to ".join((r[0], r[-1])[: len(r)]) for r in rates))
    return ", ".join(shown)
