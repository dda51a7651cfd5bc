"""Benchmark of copies: gather and scatter against plain memcpy of the same bytes, interleaved, then
whole layouts and ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median

import numpy as np

from kvactors.device.arena import Arena
from kvactors.device.host import HostDevice
from kvactors.layout import DSALayout, GQALayout, Layout, MLALayout
from kvactors.native import copy_bytes, gather, scatter, touch
from kvactors.signals import run_terminable
from tests.benchmarks.copy_ranks import rank_rows
from tests.benchmarks.frame import Report, Row, rate_row

LAYERS = 32
KIB = 1024


def run(*, quick: bool = False) -> Report:
    """All rows: pieces of 8 KiB to 1 MiB, 64 regions (32 layers, key and value), shuffled blocks."""
    total, rounds = (16 << 20, 2) if quick else (256 << 20, 9)
    rows: list[Row] = []
    for piece in (8 * KIB, 32 * KIB, 128 * KIB, KIB * KIB):
        if total >= piece * 2 * LAYERS:
            rows += piece_rows(piece, total, rounds)
    rows += layout_rows(total, rounds)
    rows += run_terminable(rank_rows(20 if quick else 2000))
    settings = {"regions": 2 * LAYERS, "total_bytes": total, "rounds": rounds, "threads": 1}
    return Report(rows, settings | {"quick": quick})


def beside_memcpy(
    work: Mapping[str, Callable[[], object]], memcpy: Callable[[], object], nbytes: int, rounds: int
) -> list[Row]:
    """Each kind of copy beside memcpy of as many bytes, in turns."""
    times: dict[str, list[float]] = {case: [] for case in ("memcpy", *work)}
    for _ in range(rounds):
        for case, call in {"memcpy": memcpy, **work}.items():
            began = time.perf_counter()
            call()
            times[case].append(time.perf_counter() - began)
    rates = {case: nbytes / median(found) / 1e9 for case, found in times.items()}
    limit, name = rates.pop("memcpy"), "memcpy"
    return [rate_row(case, rate, limit, "GB/s", name) for case, rate in rates.items()]


def piece_rows(piece: int, total: int, rounds: int) -> list[Row]:
    """Native gather and scatter of pieces of a size."""
    count = 2 * LAYERS
    blocks = total // (piece * count)
    memory = [np.empty(total, np.uint8) for _ in range(2)]
    for array in memory:
        touch(array.ctypes.data, array.nbytes)
    device, host = (int(array.ctypes.data) for array in memory)
    regions = np.array([device + r * blocks * piece for r in range(count)], np.int64)
    pieces = np.full(count, piece, np.int64)
    ids = np.random.default_rng(3).permutation(blocks).astype(np.int64)
    slots = np.arange(blocks, dtype=np.int64)
    arguments = (regions, pieces, blocks, ids, host, piece * count, blocks, slots)
    size, nbytes = f"{piece // KIB} KiB", blocks * piece * count
    work = {
        f"gather, {size}": partial(gather, *arguments),
        f"scatter, {size}": partial(scatter, *arguments),
    }
    return beside_memcpy(work, partial(copy_bytes, host, device, nbytes), nbytes, rounds)


def layouts() -> dict[str, Layout]:
    """Layouts of an 8B-class model and of DeepSeek's models, with blocks of 64 tokens."""
    return {
        "GQA, 32 layers of 8 heads of 128": GQALayout(32, 8, 128, 64, "bfloat16"),
        "MLA, 61 layers of 512 + 64": MLALayout(61, 64),
        "DSA, 61 layers of 656 + 132 bytes": DSALayout(61, 64),
    }


def layout_rows(total: int, rounds: int) -> list[Row]:
    """Whole blocks through the host device, shuffled."""
    rows: list[Row] = []
    for name, layout in layouts().items():
        blocks = max(2, total // layout.block_bytes)
        device, arena = HostDevice(layout, blocks), Arena(blocks, layout.block_bytes)
        arena.fresh.touch()
        device.fresh.touch()
        ids, slots = np.random.default_rng(5).permutation(blocks).tolist(), list(range(blocks))
        nbytes = blocks * layout.block_bytes
        source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
        memcpy = partial(copy_bytes, target.ctypes.data, source.ctypes.data, nbytes)
        work = {
            f"{name}: to host": partial(device.copy_to_host, ids, arena, slots),
            f"{name}: to device": partial(device.copy_to_device, ids, arena, slots),
        }
        rows += beside_memcpy(work, memcpy, nbytes, rounds)
        arena.close()
    return rows
