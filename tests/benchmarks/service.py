"""Service: stored blocks that come back to many requests at once and to long prompts, and finished
or evicted blocks that reach the store, beside the time of plain transfers of the same bytes.

All settings but sizes and the write policy are the defaults.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

import kvactors
from kvactors.settings import HostConfig, StorageConfig
from kvactors.signals import run_terminable
from tests.benchmarks.frame import Peer, Report, Row, rate_row, time_row

TOKENS, SIZE = 16, 128 << 10
"""Tokens and bytes of a block in this layout."""
LAYOUT = {"num_layers": 16, "num_kv_heads": 2, "head_dim": 64, "dtype": "float16"}
TIMES = 1.3
"""Longest time of a cache, as a multiple of the disk's."""
DEPTH, TRANSIT = StorageConfig().io_depth, HostConfig().transit_slots
DEADLINE_S = 60.0
RING = 4096
"""Blocks of the memory of plain transfers, more than a processor's cache holds."""
DISK = f"{TIMES} times plain transfers"
BAR = "the bar"
BESIDE = (1, 32)
"""Requests at once where peers do the same work."""
PEERS = {"vllm": "vLLM's CPU and fs tiers", "lmcache": "LMCache's L1 and fs_native L2"}


class Work(NamedTuple):
    """Prompts of some blocks. Those of different numbers, from `first` on, share no block."""

    prompts: int
    blocks: int
    first: int = 0

    @property
    def total(self) -> int:
        """Blocks of all prompts."""
        return self.prompts * self.blocks

    def tokens(self) -> Iterator[array[int]]:
        """The prompts, each with a further token, so that no full block is computed again."""
        for start in range(self.first << 18, (self.first + self.prompts) << 18, 1 << 18):
            yield array("I", range(start, start + self.blocks * TOKENS + 1))

    def __str__(self) -> str:
        return f"{self.prompts} x {self.blocks * TOKENS:,}"


class Moved(NamedTuple):
    """Blocks that a run has moved.

    Attributes:
        share: of the blocks that were to be moved, in per cent.
        seconds: that it took.
        read: blocks from the store.
        written: blocks to the store.
    """

    share: float
    seconds: float
    read: int = 0
    written: int = 0


class Disk:
    """Plain transfers of blocks of a preallocated file by DEPTH threads."""

    def __init__(self, path: Path, blocks: int) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._file, 0, blocks * SIZE)
        noise = np.random.default_rng(0).integers(0, 256, (RING + 1) * SIZE, np.uint8)
        start = -noise.ctypes.data % 4096
        self._ring = noise[start : start + RING * SIZE].reshape(RING, SIZE)
        self.seconds(os.pwritev, Work(1, blocks))

    def seconds(self, call: Callable[..., int], work: Work, at_once: int = 1) -> float:
        """Seconds for reads (os.preadv) or writes (os.pwritev), a number of prompts at once."""

        def move(first: int, end: int) -> None:
            for block in range(first, end, DEPTH):
                if call(self._file, [self._ring[block % RING]], block * SIZE) != SIZE:
                    raise RuntimeError("a plain transfer was short")

        def prompt(first: int) -> None:
            list(threads.map(move, range(first, first + DEPTH), [first + work.blocks] * DEPTH))

        with ThreadPoolExecutor(DEPTH) as threads, ThreadPoolExecutor(at_once) as clients:
            began = time.perf_counter()
            list(clients.map(prompt, range(0, work.total, work.blocks)))
            return time.perf_counter() - began

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


Place = dict[str, Any]
"""The table `storage` of a cache."""


def in_folder(folder: Path) -> Place:
    """The file store."""
    return {"backend": "file", "directory": str(folder), "capacity_blocks": 100_000}


@asynccontextmanager
async def opened(
    place: Place, blocks: int, slots: int, policy: str
) -> AsyncIterator[kvactors.KVCache]:
    """A cache with random bytes in its device memory."""
    settings = {
        "cache": {"model": "service", "block_size": TOKENS},
        "layout": LAYOUT,
        "device": {"num_blocks": blocks},
        "host": {"slots": slots},
        "storage": place | {"write_policy": policy},
    }
    async with kvactors.open(settings) as cache:
        cache.device.fill(range(blocks), os.urandom(32 * blocks))
        yield cache


def written(cache: kvactors.KVCache) -> int:
    """Blocks that the cache has written to its store."""
    store = cache.statistics().store
    return 0 if store is None else store.writes


async def serve(cache: kvactors.KVCache, tokens: array[int]) -> int:
    """A request for a prompt. Returns the blocks that it did not compute."""
    async with await cache.acquire(
        "service", tokens, deadline=DEADLINE_S, wait_for_room=True
    ) as lease:
        await lease.wait_ready()
        await lease.finish(len(tokens))
        return lease.cached_tokens // TOKENS


async def store(place: Place, work: Work) -> None:
    """Fill a store with all prompts."""
    async with opened(place, work.blocks + 1, 0, "write_through") as cache:
        for number, tokens in enumerate(work.tokens(), 1):
            while written(cache) < number * work.blocks:
                await serve(cache, tokens)
                await cache.wait_idle(deadline=DEADLINE_S)


async def come_back(place: Place, work: Work, at_once: int, slots: int, *, full: bool) -> Moved:
    """Requests for stored prompts. full: device and host tier are full of other blocks before."""
    gate, capacity = asyncio.Semaphore(at_once), work.total + work.prompts

    async def one(tokens: array[int]) -> int:
        async with gate:
            return await serve(cache, tokens)

    async with opened(place, capacity, slots, "write_back") as cache:
        each = min(250, capacity - 1)
        for tokens in Work(
            full * -(-(capacity + slots) // each), each, 200 + 100 * at_once
        ).tokens():
            await serve(cache, tokens)
        await cache.wait_idle(deadline=DEADLINE_S)
        prompts, before = list(work.tokens()), written(cache)
        began = time.perf_counter()
        found = sum(await asyncio.gather(*map(one, prompts)))
        seconds = time.perf_counter() - began
        saved = written(cache) - before
    return Moved(100 * found / work.total, seconds, found, saved)


async def save(place: Place, work: Work, slots: int, policy: str, pause: float = 0.0) -> Moved:
    """Requests one after another, until all that they save is in the store.

    Args:
        place: of the store.
        work: the requests.
        slots: of the host tier.
        policy: under write_through the device holds all requests, under write_back two.
        pause: seconds from the start of a request to that of the next one, 0 for none.
    """
    requests = 2 if policy == "write_back" else work.prompts
    async with opened(place, requests * work.blocks + 1, slots, policy) as cache:
        began = time.perf_counter()
        for number, tokens in enumerate(work.tokens(), 1):
            await serve(cache, tokens)
            await asyncio.sleep(began + number * pause - time.perf_counter())
        await cache.wait_idle(deadline=DEADLINE_S)
        seconds, saved = time.perf_counter() - began, written(cache)
        due = work.total if policy == "write_through" else saved + cache.statistics().host.shed
    return Moved(100 * saved / due, seconds, written=saved)


def by_peer(
    peer: Peer, name: str, what: str, folder: Path, work: Work, slots: int, **more: int
) -> Moved:
    """Open the tiers of an engine over what is stored, save prompts or bring them back, and
    close. See `service_child`."""
    peer.ask("open", folder=str(folder / name), size=SIZE, slots=slots)
    found = peer.ask("move", what=what, prompts=work.prompts, blocks=work.blocks, **more)
    peer.ask("close")
    return Moved(100 * found["blocks"] / work.total, found["seconds"])


def rows_of(
    case: str, work: Work, found: Moved, disk_s: float | None, peers: dict[str, Moved]
) -> list[Row]:
    """Rows of a case. disk_s: seconds of plain transfers of the same bytes, None if they are no
    limit. peers: what engines' own tiers did, by name."""
    rows = [rate_row(f"{case}, share", found.share, 99.0, "%", BAR)]
    if disk_s:
        rows.append(time_row(case, found.seconds, TIMES * disk_s, "s", DISK))
    for name, peer in peers.items():
        beside, tiers = f"{case}, beside {name}", PEERS[name]
        least = 100 / work.total  # a block, where a peer moves none
        rows.append(rate_row(f"{beside}, share", found.share, max(least, peer.share), "%", tiers))
        if peer.share:
            mine, theirs = (one.share * work.total * SIZE / one.seconds for one in (found, peer))
            rows.append(rate_row(beside, mine / 1e8, theirs / 1e8, "MB/s", tiers))
    return rows


def read_rows(
    folder: Path, work: Work, at_once: int, slots: int, disk: Disk, peers: dict[str, Peer]
) -> list[Row]:
    """Stored prompts come back. Peers have no rows with full tiers: theirs hold copies of stored
    blocks alone, which give way at once."""
    rows = []
    for tier in ("empty", "full", "absent"):
        own = 0 if tier == "absent" else slots
        place = in_folder(folder / "ours")
        found = run_terminable(come_back(place, work, at_once, own, full=tier == "full"))
        disk_s = found.share / 100 * disk.seconds(os.preadv, work, at_once)
        if found.written:
            disk_s += disk.seconds(os.pwritev, Work(1, found.written))
        beside = {
            name: by_peer(peer, name, "back", folder, work, own + TRANSIT, at_once=at_once)
            for name, peer in peers.items()
            if tier != "full" and at_once in BESIDE
        }
        case = f"{work}, {at_once} at once, host {tier}"
        rows += rows_of(case, work, found, disk_s, beside)
    return rows


def save_rows(
    folder: Path, long: Work, short: Work, slots: int, disk: Disk, peers: dict[str, Peer]
) -> list[Row]:
    """Finished and evicted blocks reach the store."""
    rows = []
    half = 2 * disk.seconds(os.pwritev, short) / short.prompts
    for case, work, own, policy, pause in (
        (f"write_through, {long}, host absent", long, 0, "write_through", 0.0),
        (f"write_through, {long}, host empty", long, slots, "write_through", 0.0),
        (f"write_back, {short}, back to back", short, short.blocks, "write_back", 0.0),
        (f"write_back, {short}, half the disk's rate", short, short.blocks, "write_back", half),
    ):
        found = run_terminable(save(in_folder(folder / case), work, own, policy, pause))
        disk_s = None if pause else disk.seconds(os.pwritev, Work(1, found.written))
        beside = {
            name: by_peer(peer, name, "finish", folder / case, work, own + TRANSIT)
            for name, peer in peers.items()
            if own == slots
        }
        rows += rows_of(case, work, found, disk_s, beside)
    return rows


def run(*, quick: bool = False, vllm_python: str = "", lmcache_python: str = "") -> Report:
    """All rows. vllm_python, lmcache_python: Pythons that have vLLM and LMCache, whose tiers do the
    same work."""
    short, slots = Work(128, 125), 2000
    counts: tuple[int, ...] = (1, 32, 128)
    long = Work(1, 100_000 // TOKENS)
    if quick:
        short, counts, slots, long = Work(6, 8), (1, 4), 16, Work(1, 64)
    pythons = {"vllm": vllm_python, "lmcache": lmcache_python}
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory(prefix="kvactors-service-", dir=".") as name,
        ExitStack() as stack,
    ):
        top = Path(name).resolve()
        disk = Disk(top / "plain", 2 * max(short.total, long.total))
        stack.callback(disk.close)
        peers = {
            peer: Peer(python, "service_child.py", peer)
            for peer, python in pythons.items()
            if python
        }
        for one in peers.values():
            stack.callback(one.close)
        for work, numbers in ((short, counts), (long, (1,))):
            with tempfile.TemporaryDirectory(dir=top) as below:
                run_terminable(store(in_folder(Path(below, "ours")), work))
                for peer, one in peers.items():
                    by_peer(one, peer, "save", Path(below), work, slots + TRANSIT)
                for at_once in numbers:
                    rows += read_rows(Path(below), work, at_once, slots, disk, peers)
        rows += save_rows(top, long, short, slots, disk, peers)
    shares = [row for row in rows if row.limit_name == BAR]
    least = min(shares, key=lambda row: row.ours)
    rows = [row for row in rows if row not in shares]
    rows.append(replace(least, case=f"least of {len(shares)} cases: {least.case}"))
    settings: dict[str, Any] = {"block_bytes": SIZE, "slots": slots, "transit_slots": TRANSIT}
    settings |= {"io_depth": DEPTH, "deadline_s": DEADLINE_S, "quick": quick}
    return Report(rows, settings)
