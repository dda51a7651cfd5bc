"""Benchmark of `TierCache`: look-ups beside a plain dict, copies beside memcpy, and fetches beside
a plain read of the same file, in one run."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kvactors.native import copy_bytes
from kvactors.tier_cache import CopyWorker, Lookup, SlotMemory, TierCache, open_tiers
from tests.benchmarks.frame import Report, Row, time_row

KIB = 1024
DICT = "a dict's get"
MEMCPY = "memcpy"


def run(*, quick: bool = False) -> Report:
    """All rows."""
    rounds, keys = (3, 512) if quick else (15, 8192)
    rows = [*lookup_rows(rounds, keys), *copy_rows(rounds, quick=quick)]
    rows += fetch_rows(2 if quick else 8)
    return Report(rows, {"rounds": rounds, "keys": keys, "quick": quick})


def make_keys(count: int, seed: int = 0) -> list[bytes]:
    """Keys of 36 bytes, as vLLM's: a block hash and four bytes of a group."""
    noise = np.random.default_rng(seed)
    return [noise.bytes(32) + bytes(4) for _ in range(count)]


def filled(keys: list[bytes], **storage: Any) -> TierCache:
    """A cache that holds the keys on the host."""
    cache = open_tiers(
        {"model": "m", "block_bytes": 64, "num_slots": len(keys), "storage": storage}
    )
    cache.prepare_store(keys)
    cache.complete_store(keys)
    return cache


def timed_each(call: Callable[[bytes], object], keys: list[bytes]) -> float:
    """Microseconds a call."""
    began = time.perf_counter()
    for key in keys:
        call(key)
    return (time.perf_counter() - began) / len(keys) * 1e6


def lookup_rows(rounds: int, count: int) -> list[Row]:
    """Look-ups that hit the host, with and without storage below, and that miss. Then the calls
    of a store."""
    keys, others = make_keys(count), make_keys(count, 1)
    plain = dict.fromkeys(keys, 0)
    alone, above = filled(keys), filled(keys, backend="memory", write_policy="none")
    times: dict[str, list[float]] = {}
    cases: dict[str, tuple[Callable[[bytes], object], list[bytes]]] = {
        "dict": (plain.get, keys),
        "look-up, on the host": (alone.lookup, keys),
        "look-up, on the host, storage below": (above.lookup, keys),
        "look-up, a miss": (alone.lookup, others),
        "look-up, a miss in storage too": (above.lookup, others),
    }
    for _ in range(rounds):
        for case, (call, asked) in cases.items():
            times.setdefault(case, []).append(timed_each(call, asked))
        alone.end_step()
        above.end_step()
    limit = median(times.pop("dict"))
    rows = [time_row(case, median(found), limit, "us", DICT) for case, found in times.items()]
    stores = [timed_stores(alone, make_keys(32, 2 + i)) for i in range(rounds)]
    rows.append(time_row("store of 32 keys that evict 32", median(stores), 32 * limit, "us", DICT))
    for cache in (alone, above):
        cache.shutdown()
    return rows


def timed_stores(cache: TierCache, keys: list[bytes]) -> float:
    """Microseconds of both calls of a store."""
    began = time.perf_counter()
    cache.prepare_store(keys)
    cache.complete_store(keys)
    return (time.perf_counter() - began) * 1e6


def copy_rows(rounds: int, *, quick: bool) -> list[Row]:
    """Submission to end of one copy: of 128 KiB, copied inline, and of more, copied by threads."""
    rows = []
    for total in (128 * KIB, 2048 * KIB if quick else 32768 * KIB):
        piece, layers = 4 * KIB, 16
        blocks = total // (piece * layers)
        tensors = [np.ones((blocks, piece), np.uint8) for _ in range(layers)]
        memory = SlotMemory(blocks, piece * layers)
        worker = CopyWorker(tensors, memory)
        source = np.ones(total, np.uint8)
        ids = list(range(blocks))
        ours, limit = [], []
        for _ in range(rounds):
            limit.append(timed(partial(copy_bytes, memory.address, int(source.ctypes.data), total)))
            ours.append(timed(partial(one_copy, worker, ids)))
        worker.shutdown()
        case = f"store of {total // KIB} KiB in {layers} layers, submitted to done"
        rows.append(time_row(case, median(ours) * 1e6, median(limit) * 1e6, "us", MEMCPY))
    return rows


def one_copy(worker: CopyWorker, ids: list[int]) -> None:
    """Submit a copy and wait for its result."""
    worker.submit_store("copy", ids, ids)
    if not worker.wait(["copy"]) or len(worker.get_finished()) != 1:
        raise RuntimeError("the copy was not reported")


def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def fetch_rows(count: int) -> list[Row]:
    """A run of stored blocks of 1 MiB: from the first look-up to the last hit, verified."""
    size = KIB * KIB
    keys = make_keys(count)
    with tempfile.TemporaryDirectory() as folder:
        cache = open_tiers(
            {
                "model": "m",
                "block_bytes": size,
                "num_slots": 2 * count,
                "storage": {"backend": "file", "directory": folder, "capacity_blocks": 2 * count},
            }
        )
        cache.prepare_store(keys)
        cache.complete_store(keys)
        while cache.statistics().saved < count:
            cache.end_step()
            time.sleep(0.001)
        plain = Path(folder) / "plain"
        plain.write_bytes(os.urandom(size) * count)
        limit, ours = [], []
        for _ in range(5):
            limit.append(timed(plain.read_bytes))
            cache.reset(storage=False)
            ours.append(timed(partial(fetch_all, cache, keys)))
        cache.shutdown()
    name = "a read from the page cache"
    case = f"fetch of {count} blocks of 1 MiB, look-up to hit"
    return [time_row(case, median(ours) * 1e3, median(limit) * 1e3, "ms", name)]


def fetch_all(cache: TierCache, keys: list[bytes]) -> None:
    """Look the keys up until each is a hit."""
    while sum(cache.lookup(key) is Lookup.HIT for key in keys) < len(keys):
        cache.end_step()
        time.sleep(0.0001)
