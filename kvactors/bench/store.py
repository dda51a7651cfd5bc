"""The file store through the storage actors, beside plain O_DIRECT threads of the same depth,
interleaved in one run, and the start-up scan."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from kvactors.actor import Actor, ActorRef, ActorSpec, Group, InFlight, Supervisor, on
from kvactors.bench.report import Row, bench_report, rate_row, time_row
from kvactors.device.arena import Arena
from kvactors.errors import StoreError
from kvactors.flush_notifier.messages import BlocksAdded, BlocksRemoved, PathsFound, TierCleared
from kvactors.identity import StoreIdentity
from kvactors.lineage import Lineage
from kvactors.mooncake_config import MooncakeConfig
from kvactors.observe.lag import Lag, LagMonitor
from kvactors.storage.backends import FileBackend
from kvactors.storage.backends.base import Expired, ReadReport, WriteReport
from kvactors.storage.backends.checked import CheckedBackend
from kvactors.storage.backends.mooncake import MooncakeBackend
from kvactors.storage.backends.slab_table import PAGE, Meta, entry_of
from kvactors.storage.messages import Outcome, Probed, Read, ReadDone, StoreCleared, Write, Written
from kvactors.storage.reader import StorageReader
from kvactors.storage.writer import StorageWriter
from kvactors.terminable import run_terminable
from kvactors.testing.mooncake_master import master
from kvactors.types import join_hashes

PRINT = bytes(32)
DEPTH = 4
BATCH = 16
ROUNDS = 3


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

    def __init__(self, store: CheckedBackend, slots: Arena) -> None:
        self.store = store
        self.slots = slots

    async def read(
        self, generation: int, keys: Sequence[bytes], slots: Sequence[int], expired: Expired
    ) -> ReadReport:
        """See `StoragePlane`."""
        return await self.store.read_slots(keys, self.slots, slots, expired)

    async def write(
        self,
        generation: int,
        keys: Sequence[bytes],
        slots: Sequence[int],
        expired: Expired,
        lineages: Sequence[Lineage | None] = (),
    ) -> WriteReport:
        """See `StoragePlane`."""
        return await self.store.write_slots(keys, self.slots, slots, expired, lineages)


async def ours(
    folder: Path, arena: Arena, size: int, count: int, first: int
) -> tuple[float, float, Lag]:
    """Bytes a second written and read through writer and reader actors, and the loop's lag
    during both."""
    store = FileBackend(folder, PRINT, size, depth=DEPTH)
    await store.open()
    await store.attach(arena)
    plane = StoreOnly(CheckedBackend(store, 60.0), arena)
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
    rates = []
    async with supervisor.running(Group("store", tuple(specs))), LagMonitor().running() as lag:
        for kind in (Write, Read):
            target = refs[StorageWriter] if kind is Write else refs[StorageReader]
            began = time.perf_counter()
            for op, start in enumerate(range(0, count, BATCH)):
                keys = names(min(BATCH, count - start), first + start)
                slots = tuple((start + i) % arena.num_slots for i in range(len(keys)))
                if kind is Write:
                    await target.tell(Write(op, join_hashes(keys), slots, deadline))
                else:
                    await target.tell(Read(op, join_hashes(keys), slots, deadline, take=False))
            await supervisor.in_flight.wait_idle()
            rates.append(count * size / (time.perf_counter() - began))
            sink: Any = supervisor.actor(refs[NullEvictor].name)
            assert all(o == Outcome.OK for outcomes in sink.outcomes.values() for o in outcomes), (
                "a block was lost"
            )
    await store.close()
    return rates[0], rates[1], lag.result()


def plain(folder: Path, arena: Arena, size: int, count: int) -> tuple[float, float]:
    """The same bytes by threads that do nothing but O_DIRECT reads and writes of a preallocated
    file."""
    stride, path = arena.stride, folder / "plain"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    os.posix_fallocate(fd, 0, stride * count)
    memory = [np.frombuffer(arena.view(slot), np.uint8) for slot in range(arena.num_slots)]
    rates = []
    with ThreadPoolExecutor(DEPTH) as threads:
        for call in (os.pwritev, os.preadv):
            began = time.perf_counter()
            done = threads.map(
                lambda i, call=call: call(fd, [memory[i % len(memory)]], i * stride), range(count)
            )
            assert all(moved == size for moved in done)
            rates.append(count * size / (time.perf_counter() - began))
    os.close(fd)
    path.unlink()
    return rates[0], rates[1]


def fio(folder: Path, size: int, count: int) -> tuple[float, float] | None:
    """The rates of fio at the same depth, None if it is not installed."""
    binary = shutil.which("fio")
    if binary is None:
        return None
    rates = []
    for mode in ("write", "read"):
        command = [
            binary,
            "--name=kv",
            f"--filename={folder / 'fio'}",
            f"--rw={mode}",
            f"--bs={size}",
            f"--size={size * count // DEPTH}",
            f"--numjobs={DEPTH}",
            "--thread",
            "--direct=1",
            "--ioengine=psync",
            "--group_reporting",
            "--output-format=json",
            f"--offset_increment={size * count // DEPTH}",
        ]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603  (found on the path)
        rates.append(float(json.loads(out[out.index("{") :])["jobs"][0][mode]["bw_bytes"]))
    (folder / "fio").unlink()
    return rates[0], rates[1]


async def scan_of(folder: Path, slots: int) -> float:
    """Seconds to open a store whose table has so many objects."""
    store = FileBackend(folder, PRINT, PAGE, slots)
    meta = Meta(PRINT.hex(), PAGE, PAGE, slots)
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


def compare(folder: Path, size: int, total: int) -> tuple[list[Row], Lag]:
    """Rows of one block size, medians of ROUNDS rounds of each, taken in turn."""
    count = max(4, total // size)
    arena = Arena(32, size)
    arena.touch()
    for slot in range(arena.num_slots):
        arena.view(slot)[:] = np.random.default_rng(slot).bytes(size)
    mine: list[Sequence[float]] = []
    theirs: list[Sequence[float]] = []
    others: list[Sequence[float]] = []
    lags = []
    for round_ in range(ROUNDS):
        write, read, lag = run_terminable(
            ours(folder / str(round_), arena, size, count, 1 + round_ * count)
        )
        mine.append((write, read))
        lags.append(lag)
        shutil.rmtree(folder / str(round_))
        theirs.append(plain(folder, arena, size, count))
        known = fio(folder, size, count)
        others += [known] if known is not None else []
    arena.close()
    rows = []
    for i, what in enumerate(("write", "read")):
        case = (
            f"{size >> 20} MiB blocks, {what}"
            if size >= 1 << 20
            else f"{size >> 10} KiB blocks, {what}"
        )
        us = statistics.median(one[i] for one in mine) / 1e6
        rows.append(
            rate_row(
                case,
                us,
                statistics.median(one[i] for one in theirs) / 1e6,
                "MB/s",
                f"{DEPTH} plain O_DIRECT threads",
            )
        )
        if others:
            rows.append(
                rate_row(
                    f"{case}, fio",
                    us,
                    statistics.median(one[i] for one in others) / 1e6,
                    "MB/s",
                    f"fio, {DEPTH} jobs",
                )
            )
    return rows, max(lags, key=lambda one: one.p999)


async def in_pool(address: str, size: int, count: int) -> tuple[list[float], list[float]]:
    """Bytes a second written to and read from a pool: through the back end, checksums included, and
    by the raw client in batches of the same size."""
    share = f"{(size * count * 5 >> 20) + 64}MB"
    config = MooncakeConfig(
        master_server_address=address,
        local_hostname="127.0.0.1",
        global_segment_size=share,
        local_buffer_size="16MB",
    )
    store, arena = (
        MooncakeBackend(config, StoreIdentity("bench", "default", PRINT), size),
        Arena(64, size, trailer=MooncakeBackend.slot_trailer_bytes),
    )
    arena.touch()
    await store.open()
    await store.attach(arena)
    client, deadline = store._client, asyncio.get_running_loop().time() + 600.0
    pointers = [[arena.address + slot * arena.stride] for slot in range(arena.num_slots)]
    mine: list[float] = []
    raw: list[float] = []
    for what in ("write", "read"):
        for ours_ in (True, False):
            began = time.perf_counter()
            for start in range(0, count, arena.num_slots):
                keys = names(min(arena.num_slots, count - start), start)
                views = [arena.view(slot) for slot in range(len(keys))]
                texts, sizes = ["raw/" + key.hex() for key in keys], [[size]] * len(keys)
                if ours_:
                    move = store.write if what == "write" else store.read
                    report = await move(
                        keys, views, lambda: asyncio.get_running_loop().time() > deadline
                    )
                    assert set(report.outcomes) == {Outcome.OK}, "a block was lost"
                else:
                    call = client.put if what == "write" else client.get
                    assert all(
                        code >= 0 for code in await call(texts, pointers[: len(keys)], sizes)
                    ), "a block was lost"
            (mine if ours_ else raw).append(count * size / (time.perf_counter() - began))
    await store.close()
    arena.close()
    return mine, raw


def pool_rows(size: int, count: int) -> list[Row]:
    """Medians over ROUNDS rounds beside a real master, every access over TCP as from another node;
    no rows where Mooncake is not installed."""
    os.environ["MC_STORE_MEMCPY"] = "0"
    try:
        with master() as one:
            measured = [run_terminable(in_pool(one.address, size, count)) for _ in range(ROUNDS)]
    except StoreError:
        return []
    rows = []
    for i, what in enumerate(("write", "read")):
        us, raw = (statistics.median(one[k][i] for one in measured) / 1e6 for k in (0, 1))
        rows.append(
            rate_row(
                f"Mooncake over TCP, {size >> 10} KiB blocks, {what}",
                us,
                raw,
                "MB/s",
                "the raw client, no checksums",
            )
        )
    return rows


async def idle(seconds: float) -> Lag:
    """The loop's lag with nothing to do."""
    async with LagMonitor().running() as lag:
        await asyncio.sleep(seconds)
    return lag.result()


def run(*, quick: bool = False) -> dict[str, Any]:
    """All rows. quick: a moment only, for tests."""
    total, slots = (2 << 20, 1000) if quick else (2 << 30, 100_000)
    sizes = (64 << 10,) if quick else (2 << 20, 8 << 20)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kvactors-store-", dir=".") as name:
        folder = Path(name).resolve()
        quiet = run_terminable(idle(0.3 if quick else 3.0))
        for size in sizes:
            some, lag = compare(folder, size, total)
            rows += some
            rows.append(
                time_row(
                    f"loop lag during the run, p99.9, {size >> 10} KiB blocks",
                    lag.p999,
                    quiet.p999 + 2.0,
                    "ms",
                    "idle + 2 ms",
                )
            )
        rows += pool_rows(sizes[0], 32 if quick else 128)
        took = run_terminable(scan_of(folder / "scan", slots))
        rows.append(time_row(f"start-up scan of {slots:,} slots", took, 2.0, "s", "the bar"))
    return bench_report(
        "store", rows, {"bytes": total, "depth": DEPTH, "rounds": ROUNDS, "quick": quick}
    )
