"""The file store through the storage actors, beside plain O_DIRECT threads and vLLM's `fs` tier,
interleaved in one run. A shared pool beside its raw client, and the start-up scan."""

from __future__ import annotations

import asyncio
import gc
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvactors.observe.lag import LagMonitor, Lags
from kvactors.signals import run_terminable
from kvactors.storage.file.store import FileBackend
from kvactors.storage.file.table import PAGE, Meta
from tests.benchmarks.report import Row, bench_report, time_row
from tests.benchmarks.store_pool import pool_rows
from tests.benchmarks.store_rounds import (
    DIGEST,
    Measured,
    VllmTier,
    load_of,
    measured,
    names,
    rounds_within,
)
from tests.benchmarks.store_summary import counted, rows_of, spread_of
from tests.storage.helpers import entry_of

ROUNDS = 9
LOADS = (
    (2 << 20, 768 << 20, 100.0),
    (8 << 20, 768 << 20, 100.0),
    (64 << 10, 64 << 20, 25.0),
    (4 << 10, 16 << 20, 45.0),
)
"""Bytes of an object, and of a round, and the seconds behind which no further round begins. Nine
rounds end earlier on an idle disk of 2 GB/s, and the whole run takes less than 6 minutes."""


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


async def idle(seconds: float) -> Lags:
    """The loop's lag with nothing to do."""
    async with LagMonitor().running() as lag:
        await asyncio.sleep(seconds)
    return lag.results()


def lag_rows(found: Measured, quiet: Lags) -> list[Row]:
    """The loop's lag in the rounds that measured it, by the clock, and without waits for a core."""
    parts = [(" ", found.lags.wall, quiet.wall)]
    if found.lags.own is not None and quiet.own is not None:
        parts.append((" without waits for a core, ", found.lags.own, quiet.own))
    return [
        time_row(
            f"loop lag during the run,{what}p99.9, {found.load.case}",
            lag.p999,
            least.p999 + 2.0,
            "ms",
            "idle + 2 ms",
        )
        for what, lag, least in parts
    ]


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
    loads = ((64 << 10, 2 << 20, 60.0),) if quick else LOADS
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
        gc.collect()
        gc.freeze()  # a pass over all objects of the process is no lag of the store
        stack.callback(gc.unfreeze)
        quiet = run_terminable(idle(0.3 if quick else 3.0))
        counts: dict[str, int] = {}
        for size, total, seconds in loads:
            load = load_of(size, total)
            found = measured(folder, load, rounds_within(rounds, seconds), vllm)
            counts[load.case] = len(found.ours)
            rows += rows_of(found)
            spread |= spread_of(found)
            rows += lag_rows(found, quiet)
        pool, pool_spread = pool_rows(quick=quick)
        rows += pool
        took = run_terminable(scan_of(folder / "scan", slots))
        rows.append(time_row(f"start-up scan of {slots:,} slots", took, 2.0, "s", "the bar"))
    settings: dict[str, Any] = {"rounds": counted(counts)}
    settings |= {"quick": quick, "vllm": vllm_python or "not installed"}
    settings |= {"GB/s, " + k: v for k, v in spread.items()} | pool_spread
    return bench_report("store", rows, settings)
