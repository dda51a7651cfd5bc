"""Benchmark of copies: gather and scatter against plain memcpy of the same bytes, interleaved, then
whole layouts, ranks, and a GPU if there is one."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from kvactors.device.arena import Arena
from kvactors.device.host import HostDevice
from kvactors.layout import DSALayout, GQALayout, Layout, MLALayout
from kvactors.native import copy_bytes, gather, scatter, touch
from kvactors.signals import run_terminable
from tests.benchmarks.copy_gpu import gpu_rows
from tests.benchmarks.copy_ranks import rank_rows
from tests.benchmarks.report import Row, bench_report, rate_row

LAYERS = 32
KIB = 1024


def timed(work: Callable[[], None]) -> float:
    """Seconds."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def run(*, quick: bool = False) -> dict[str, Any]:
    """All rows: pieces of 8 KiB to 1 MiB, 64 regions (32 layers, key and value), shuffled blocks.
    quick: small sizes, for tests."""
    total, rounds = (8 << 20, 2) if quick else (256 << 20, 9)
    rows: list[Row] = []
    rng = np.random.default_rng(3)
    regions_count = 2 * LAYERS
    memory = [np.empty(total, np.uint8) for _ in range(2)]
    for array in memory:
        touch(array.ctypes.data, array.nbytes)
    device, host = (int(array.ctypes.data) for array in memory)
    for piece in (8 * KIB, 32 * KIB, 128 * KIB, KIB * KIB):
        blocks = total // (piece * regions_count)
        if blocks < 1:
            continue
        region_bytes = blocks * piece
        regions = np.array([device + r * region_bytes for r in range(regions_count)], np.int64)
        pieces = np.full(regions_count, piece, np.int64)
        ids, slots = rng.permutation(blocks).astype(np.int64), np.arange(blocks, dtype=np.int64)
        stride, nbytes = piece * regions_count, region_bytes * regions_count
        times: dict[str, list[float]] = {"memcpy": [], "gather": [], "scatter": []}
        for _ in range(rounds):
            times["memcpy"].append(timed(partial(copy_bytes, host, device, nbytes)))
            times["gather"].append(
                timed(partial(gather, regions, pieces, blocks, ids, host, stride, blocks, slots))
            )
            times["scatter"].append(
                timed(partial(scatter, regions, pieces, blocks, ids, host, stride, blocks, slots))
            )
        limit = nbytes / median(times["memcpy"]) / 1e9
        for name in ("gather", "scatter"):
            ours = nbytes / median(times[name]) / 1e9
            rows.append(
                rate_row(
                    f"{name}, pieces of {piece // KIB} KiB",
                    ours,
                    limit,
                    "GB/s",
                    "memcpy of the same bytes, same run",
                )
            )
    rows += layout_rows(*((16 << 20, 2) if quick else (256 << 20, 9)))
    rows += run_terminable(rank_rows(20 if quick else 2000))
    rows += run_terminable(gpu_rows(quick=quick))
    settings = {
        "regions": regions_count,
        "total_bytes": total,
        "rounds": rounds,
        "threads": 1,
        "quick": quick,
    }
    return bench_report("copy", rows, settings)


def layouts() -> dict[str, Layout]:
    """Layouts of an 8B-class model and of DeepSeek's models, with blocks of 64 tokens."""
    return {
        "GQA, 32 layers of 8 heads of 128": GQALayout(32, 8, 128, 64, "bfloat16"),
        "MLA, 61 layers of 512 + 64": MLALayout(61, 64),
        "DSA, 61 layers of 656 + 132 bytes": DSALayout(61, 64),
    }


def layout_rows(total: int, rounds: int) -> list[Row]:
    """Whole blocks through the host device, shuffled, against memcpy of as many bytes."""
    rows = []
    for name, layout in layouts().items():
        blocks = max(2, total // layout.block_bytes)
        device, arena = HostDevice(layout, blocks), Arena(blocks, layout.block_bytes)
        arena.fresh.touch()
        device.fresh.touch()
        ids, slots = np.random.default_rng(5).permutation(blocks).tolist(), list(range(blocks))
        nbytes = blocks * layout.block_bytes
        source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
        times: dict[str, list[float]] = {"memcpy": [], "to host": [], "to device": []}
        for _ in range(rounds):
            times["memcpy"].append(
                timed(partial(copy_bytes, target.ctypes.data, source.ctypes.data, nbytes))
            )
            times["to host"].append(timed(partial(device.copy_to_host, ids, arena, slots)))
            times["to device"].append(timed(partial(device.copy_to_device, ids, arena, slots)))
        limit = nbytes / median(times["memcpy"]) / 1e9
        for way in ("to host", "to device"):
            ours = nbytes / median(times[way]) / 1e9
            rows.append(
                rate_row(
                    f"{name}: {way}", ours, limit, "GB/s", "memcpy of the same bytes, same run"
                )
            )
        arena.close()
    return rows
