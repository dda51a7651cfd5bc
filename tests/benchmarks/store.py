"""The file store through the storage actors, beside plain O_DIRECT threads and vLLM's `fs` tier,
interleaved in one run. A Mooncake pool beside its raw client, and the start-up scan."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, NamedTuple

import numpy as np

from kvactors.actor import Actor, ActorRef, ActorSpec, Group, InFlight, Supervisor, on
from kvactors.device.arena import Arena
from kvactors.flush_notifier.messages import BlocksAdded, BlocksRemoved, PathsFound, TierCleared
from kvactors.identity import Lineage
from kvactors.signals import run_terminable
from kvactors.storage.actors import StorageReader, StorageWriter
from kvactors.storage.backend import Expired, ReadReport, SlotViews, WriteReport
from kvactors.storage.file.store import FileBackend
from kvactors.storage.file.table import PAGE, Meta
from kvactors.storage.guarded import GuardedBackend
from kvactors.storage.messages import Outcome, Probed, Read, ReadDone, StoreCleared, Write, Written
from kvactors.types import join_hashes
from tests.benchmarks.frame import Peer, Report, Row, rate_row, time_row
from tests.benchmarks.lines import processor_seconds
from tests.benchmarks.store_pool import pool_rows
from tests.storage.helpers import entry_of

DIGEST = bytes(32)
ROUNDS, LEAST_ROUNDS = 9, 4
LOADS = (
    (2 << 20, 768 << 20, 100.0),
    (8 << 20, 768 << 20, 100.0),
    (64 << 10, 64 << 20, 25.0),
    (4 << 10, 16 << 20, 45.0),
)
"""Bytes of an object, and of a round, and the seconds behind which no further round begins. Nine
rounds end earlier on an idle disk of 2 GB/s, and the whole run takes less than 6 minutes."""

BATCH_BYTES = 32 << 20
"""Bytes of a batch, unless that is more than `MOST` objects or less than `LEAST`."""
LEAST, MOST = 16, 256

PLAIN = {f"{depth} threads": depth for depth in (4, 8, 16, 32)}
"""Plain threads by the name of the variant."""

VLLM = "vLLM's fs tier"

ORDERS = 1
"""Seed of the order in which the runners of a round take turns."""


def rounds_within(rounds: int, seconds: float) -> Iterator[int]:
    """The numbers of the rounds of a load. No round begins behind the seconds, once there were
    LEAST_ROUNDS."""
    until = time.monotonic() + seconds
    for number in range(rounds):
        if number >= LEAST_ROUNDS and time.monotonic() > until:
            return
        yield number


class Load(NamedTuple):
    """The objects that every runner moves in a round.

    Attributes:
        size: bytes of an object.
        objects: how many, each in a slot of its own. A host tier is larger than a processor's
            cache, and a read into memory that is still cached is faster than the device is into any
            other memory.
        batch: objects of a message, or of a job.
    """

    size: int
    objects: int
    batch: int

    @property
    def case(self) -> str:
        size = self.size
        return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def load_of(size: int, total: int) -> Load:
    """The load of an object size and a number of bytes."""
    return Load(size, max(4, total // size), max(LEAST, min(MOST, BATCH_BYTES // size)))


def names(count: int, first: int = 0) -> list[bytes]:
    """Names of blocks."""
    return [(first + i).to_bytes(32, "little") for i in range(count)]


class Round:
    """Seconds, and processor seconds, of the two directions, in the order of their ends."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.processor: list[float] = []

    @contextmanager
    def direction(self) -> Iterator[None]:
        """One direction is moved inside."""
        began, used = time.perf_counter(), processor_seconds()
        yield
        self.seconds.append(time.perf_counter() - began)
        self.processor.append(processor_seconds() - used)


# -- the runners


class NullEvictor(Actor):
    """Stands where the evictor stands: it counts answers."""

    ROLE: ClassVar[str] = "cpu_evictor"

    def __init__(self, ref: ActorRef) -> None:
        super().__init__(ref)
        self.outcomes: dict[int, bytes] = {}

    @on(Written)
    def written(self, message: Written) -> None:
        self.outcomes[message.op] = message.outcomes

    @on(ReadDone)
    def read_done(self, message: ReadDone) -> None:
        self.outcomes[message.op] = message.outcomes

    @on(Probed)
    def probed(self, message: Probed) -> None:
        """Ignored: the benchmark sends no probe."""

    @on(StoreCleared)
    def store_cleared(self, message: StoreCleared) -> None:
        """Ignored: the benchmark clears no store."""


class NullNotifier(Actor):
    """Stands in for the notifier, and ignores everything."""

    ROLE: ClassVar[str] = "flush_notifier"

    @on(BlocksAdded)
    def blocks_added(self, message: BlocksAdded) -> None: ...

    @on(BlocksRemoved)
    def blocks_removed(self, message: BlocksRemoved) -> None: ...

    @on(TierCleared)
    def tier_cleared(self, message: TierCleared) -> None: ...

    @on(PathsFound)
    def paths_found(self, message: PathsFound) -> None: ...


class StoreOnly:
    """The part of a data plane that storage actors use. See `StoragePlane`."""

    def __init__(self, store: GuardedBackend, slots: Arena) -> None:
        self.store = store
        self.slots = slots

    async def read(
        self, generation: int, keys: Sequence[bytes], slots: Sequence[int], expired: Expired
    ) -> ReadReport:
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
        return await self.store.write(keys, SlotViews(self.slots, slots), expired, lineages, salts)


async def ours(folder: Path, arena: Arena, load: Load) -> Round:
    """Objects through writer and reader actors."""
    store = FileBackend(folder, DIGEST, load.size)
    await store.open()
    await store.attach(arena)
    plane = StoreOnly(GuardedBackend(store, 60.0), arena)
    supervisor = Supervisor(InFlight())
    kinds = (StorageReader, StorageWriter, NullEvictor, NullNotifier)
    refs = {kind: supervisor.make_ref(kind, 256) for kind in kinds}
    parts: dict[str, Any] = {
        "backend": plane.store,
        "plane": plane,
        "evictor": refs[NullEvictor],
        "notifier": refs[NullNotifier],
    }
    specs = (
        ActorSpec(StorageReader, lambda ref: StorageReader(ref, **parts), refs[StorageReader]),
        ActorSpec(StorageWriter, lambda ref: StorageWriter(ref, **parts), refs[StorageWriter]),
        ActorSpec(NullEvictor, NullEvictor, refs[NullEvictor]),
        ActorSpec(NullNotifier, NullNotifier, refs[NullNotifier]),
    )
    deadline = asyncio.get_running_loop().time() + 600.0
    round_ = Round()
    async with supervisor.running(Group("store", specs)):
        for kind in (Write, Read):
            target = refs[StorageWriter] if kind is Write else refs[StorageReader]
            with round_.direction():
                for op, start in enumerate(range(0, load.objects, load.batch)):
                    keys = names(min(load.batch, load.objects - start), start)
                    slots = tuple(range(start, start + len(keys)))
                    if kind is Write:
                        await target.tell(Write(op, join_hashes(keys), slots, deadline))
                    else:
                        await target.tell(Read(op, join_hashes(keys), slots, deadline, take=False))
                await supervisor.in_flight.wait_idle()
            sink: Any = supervisor.actor(refs[NullEvictor].name)
            if not all(o == Outcome.OK for outcomes in sink.outcomes.values() for o in outcomes):
                raise RuntimeError("a block was lost")
    await store.close()
    return round_


def plain(folder: Path, arena: Arena, load: Load, threads: int) -> Round:
    """Objects by threads that do nothing but O_DIRECT reads and writes of a preallocated file."""
    memory = [np.frombuffer(arena.view(slot), np.uint8) for slot in range(arena.num_slots)]
    path = folder / "plain"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)

    def move(call: Callable[..., int], i: int) -> None:
        if call(file, [memory[i]], i * arena.stride) != load.size:
            raise RuntimeError("a plain transfer was short")

    round_ = Round()
    try:
        os.posix_fallocate(file, 0, arena.stride * load.objects)
        with ThreadPoolExecutor(threads) as pool:
            for call in (os.pwritev, os.preadv):
                with round_.direction():
                    list(pool.map(partial(move, call), range(load.objects)))
    finally:
        os.close(file)
        path.unlink()
    return round_


def as_vllm(peer: Peer, folder: Path, load: Load) -> Round:
    """A round of vLLM's `fs` tier in an empty folder."""
    peer.ask("open", folder=str(folder / "vllm"), size=load.size, slots=load.objects)
    round_ = Round()
    for what in ("write", "read"):
        found = peer.ask("move", what=what, count=load.objects, batch=load.batch)
        if found["failed"]:
            raise RuntimeError(f"{found['failed']} jobs of vLLM's fs tier failed")
        round_.seconds.append(found["seconds"])
        round_.processor.append(found["processor"])
    peer.ask("close")
    return round_


# -- the rows


def measured(
    folder: Path, load: Load, rounds: int, seconds: float, peer: Peer | None
) -> dict[str, list[Round]]:
    """Interleaved rounds by runner, in a random order each, so that no runner always has the disk
    as the same other one leaves it."""
    arena = Arena(load.objects, load.size)
    arena.fresh.touch()
    for slot in range(arena.num_slots):
        arena.view(slot)[:] = np.random.default_rng(slot).bytes(load.size)

    def run_ours() -> Round:
        found = run_terminable(ours(folder / "ours", arena, load))
        shutil.rmtree(folder / "ours")
        return found

    runners: dict[str, Callable[[], Round]] = {"ours": run_ours}
    for name, threads in PLAIN.items():
        runners[name] = partial(plain, folder, arena, load, threads)
    if peer is not None:
        runners["vLLM"] = partial(as_vllm, peer, folder, load)
    found: dict[str, list[Round]] = {name: [] for name in runners}
    orders = np.random.default_rng(ORDERS)
    for number in rounds_within(rounds, seconds):
        for which in orders.permutation(len(runners)):
            name = list(runners)[which]
            found[name].append(runners[name]())
        print(f"{load.case}, round {number + 1}", file=sys.stderr, flush=True)
    arena.close()
    return found


def rows_of(load: Load, found: dict[str, list[Round]]) -> list[Row]:
    """Medians of both directions beside the best plain threads and beside vLLM's tier. The best of
    several noisy medians is a little above what any variant has on average."""
    rows, nbytes = [], load.size * load.objects

    def rate(name: str, i: int) -> float:
        return nbytes / median(one.seconds[i] for one in found[name]) / 1e6

    def cost(name: str, i: int) -> float:
        return median(one.processor[i] for one in found[name]) / (nbytes / 1e9)

    for i, what in enumerate(("write", "read")):
        case = f"{load.case}, {what}"
        best = max(PLAIN, key=lambda name: rate(name, i))
        mine = rate("ours", i)
        rows.append(rate_row(case, mine, rate(best, i), "MB/s", f"by {best}"))
        if "vLLM" in found:
            rows.append(rate_row(f"{case}, beside vLLM", mine, rate("vLLM", i), "MB/s", VLLM))
            name = f"{case}, processor time"
            rows.append(time_row(name, cost("ours", i), cost("vLLM", i), "s/GB", VLLM))
    return rows


async def scan_of(folder: Path, slots: int) -> float:
    """Seconds to open a store whose table has so many objects."""
    store = FileBackend(folder, DIGEST, PAGE, slots)
    meta = Meta(DIGEST.hex(), PAGE, PAGE, slots)
    store.files.folder.mkdir(parents=True)
    table = meta.page() + b"".join(
        entry_of(meta, key, 0, i, 0) for i, key in enumerate(names(slots))
    )
    await asyncio.to_thread((store.files.folder / "table").write_bytes, table)
    with (store.files.folder / "slab-0000").open("wb") as slab:
        slab.truncate(slots * PAGE)
    began = time.perf_counter()
    await store.open()
    took = time.perf_counter() - began
    assert len(store.keys()) == slots
    await store.close()
    return took


def run(*, quick: bool = False, vllm_python: str = "") -> Report:
    """All rows. vllm_python: a Python that has vLLM, whose `fs` tier takes its turn in every
    round."""
    rounds, slots = (1, 1000) if quick else (ROUNDS, 100_000)
    loads = ((64 << 10, 2 << 20, 60.0),) if quick else LOADS
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory(prefix="kvactors-store-", dir=".") as name,
        ExitStack() as stack,
    ):
        folder = Path(name).resolve()
        peer = None
        if vllm_python:
            peer = Peer(vllm_python, "store_child.py")
            stack.callback(peer.close)
        for size, total, seconds in loads:
            load = load_of(size, total)
            rows += rows_of(load, measured(folder, load, rounds, seconds, peer))
        rows += pool_rows(quick=quick)
        took = run_terminable(scan_of(folder / "scan", slots))
        rows.append(time_row(f"start-up scan of {slots:,} slots", took, 2.0, "s", "the bar"))
    return Report(rows, {"rounds": rounds, "quick": quick})
