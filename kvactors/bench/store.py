"""The file store through the storage actors, beside plain O_DIRECT threads and vLLM's `fs` tier,
interleaved in one run. A shared pool beside its raw client, and the start-up scan."""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvactors.bench.report import Row, bench_report, rate_row, time_row
from kvactors.bench.store_rounds import (
    DIGEST,
    VllmTier,
    load_of,
    measured,
    names,
    rows_of,
    spread_of,
)
from kvactors.device.arena import Arena
from kvactors.errors import StoreError
from kvactors.identity import StoreIdentity
from kvactors.mooncake_config import MooncakeConfig
from kvactors.observe.lag import Lag, LagMonitor
from kvactors.storage.backends import FileBackend
from kvactors.storage.backends.mooncake import MooncakeBackend
from kvactors.storage.backends.slab_table import PAGE, Meta, entry_of
from kvactors.storage.messages import Outcome
from kvactors.terminable import run_terminable
from kvactors.testing.mooncake_master import master

ROUNDS = 9
POOL_ROUNDS = 3
LOADS = ((2 << 20, 1 << 30), (8 << 20, 1 << 30), (64 << 10, 128 << 20), (4 << 10, 32 << 20))
"""Bytes of an object, and of a round."""


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
        MooncakeBackend(config, StoreIdentity("bench", "default", DIGEST), size),
        Arena(64, size, trailer=MooncakeBackend.slot_trailer_bytes),
    )
    arena.touch()
    await store.open()
    await store.attach(arena)
    client, deadline = store.client, asyncio.get_running_loop().time() + 600.0
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
    """Medians over POOL_ROUNDS rounds beside a real master, every access over TCP as from another
    node. No rows where Mooncake is not installed."""
    os.environ["MC_STORE_MEMCPY"] = "0"
    try:
        with master() as one:
            measured = [
                run_terminable(in_pool(one.address, size, count)) for _ in range(POOL_ROUNDS)
            ]
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


def run(*, quick: bool = False, vllm_python: str = "") -> dict[str, Any]:
    """All rows.

    Args:
        quick: a moment only, for tests.
        vllm_python: a Python that has vLLM, whose `fs` tier takes its turn in every round. By
            default this one, if it has vLLM.

    Raises:
        ConfigError: that Python has no vLLM.
    """
    if not vllm_python and find_spec("vllm") is not None:
        vllm_python = sys.executable
    rounds, slots = (1, 1000) if quick else (ROUNDS, 100_000)
    loads = [load_of(*one) for one in (((64 << 10, 2 << 20),) if quick else LOADS)]
    rows: list[Row] = []
    spread: dict[str, str] = {}
    with (
        tempfile.TemporaryDirectory(prefix="kvactors-store-", dir=".") as name,
        ExitStack() as stack,
    ):
        folder = Path(name).resolve()
        vllm = None
        if vllm_python:
            vllm = VllmTier(vllm_python, folder / "vllm")
            stack.callback(vllm.close)
        quiet = run_terminable(idle(0.3 if quick else 3.0))
        for load in loads:
            found = measured(folder, load, rounds, vllm)
            rows += rows_of(found)
            spread |= spread_of(found)
            rows.append(
                time_row(
                    f"loop lag during the run, p99.9, {load.case}",
                    found.lag.p999,
                    quiet.p999 + 2.0,
                    "ms",
                    "idle + 2 ms",
                )
            )
        rows += pool_rows(loads[0].size, 32 if quick else 128)
        took = run_terminable(scan_of(folder / "scan", slots))
        rows.append(time_row(f"start-up scan of {slots:,} slots", took, 2.0, "s", "the bar"))
    settings = {"rounds": rounds, "quick": quick, "vllm": vllm_python or "not installed"}
    return bench_report("store", rows, settings | {"GB/s, " + k: v for k, v in spread.items()})
