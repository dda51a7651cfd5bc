"""A Mooncake pool through the back end beside its raw client, in `bench store`."""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager

from kvactors.bench.report import Row, rate_row
from kvactors.bench.store_rounds import DIGEST, names, processor_seconds
from kvactors.device.arena import Arena
from kvactors.errors import StoreError
from kvactors.identity import StoreIdentity
from kvactors.mooncake_config import MooncakeConfig
from kvactors.storage.backends.mooncake import MooncakeBackend
from kvactors.storage.messages import Outcome
from kvactors.terminable import run_terminable
from kvactors.testing.mooncake_master import master

ROUNDS = 9
LOADS = ((2 << 20, 256 << 20), (64 << 10, 64 << 20), (4 << 10, 16 << 20))
"""Bytes of an object, and of a round."""

BATCH_BYTES = 64 << 20
RAW = "the raw client, no checksums"
MEMCPY = "MC_STORE_MEMCPY"
"""Variable of the client: with 0 it moves objects in the same process over TCP as well."""

Directions = dict[tuple[str, bool], list[tuple[float, float]]]
"""Bytes a second and processor seconds for a GB, by direction and whether through the back end."""


async def in_pool(address: str, size: int, total: int, rounds: int) -> Directions:
    """Rounds through the back end, checksums included, and through the raw client in calls of
    BATCH_BYTES, in another order each time. The first round is not counted."""
    count, slots = total // size, max(4, min(total, BATCH_BYTES) // size)
    config = MooncakeConfig(
        master_server_address=address,
        local_hostname="127.0.0.1",
        global_segment_size=f"{(total * 5 >> 20) + 64}MB",
        local_buffer_size="16MB",
    )
    store = MooncakeBackend(config, StoreIdentity("bench", "default", DIGEST), size)
    arena = Arena(slots, size, trailer=MooncakeBackend.slot_trailer_bytes)
    arena.touch()
    await store.open()
    await store.attach(arena)
    client, deadline = store.client, asyncio.get_running_loop().time() + 600.0
    found: Directions = {(what, ours): [] for what in ("write", "read") for ours in (True, False)}
    raw = ["raw/" + key.hex() for key in names(count)]

    async def move(what: str, start: int, ours: bool) -> None:
        some = min(slots, count - start)
        if ours:
            call = store.write if what == "write" else store.read
            views = [arena.view(slot) for slot in range(some)]
            expired = lambda: asyncio.get_running_loop().time() > deadline  # noqa: E731
            report = await call(names(some, start), views, expired)
            good = set(report.outcomes) == {Outcome.OK}
        else:
            transfer = client.put if what == "write" else client.get
            pointers = [[arena.address + slot * arena.stride] for slot in range(some)]
            codes = await transfer(raw[start : start + some], pointers, [[size]] * some)
            good = min(codes) >= 0
        if not good:
            raise RuntimeError("a block was lost")

    for number in range(rounds + 1):
        for what in ("write", "read"):
            for ours in (True, False) if number % 2 else (False, True):
                began, used = asyncio.get_running_loop().time(), processor_seconds()
                for start in range(0, count, slots):
                    await move(what, start, ours)
                took = asyncio.get_running_loop().time() - began
                cost = (processor_seconds() - used) / (total / 1e9)
                if number:
                    found[what, ours].append((total / took, cost))
        await store.remove(names(count))
        await client.remove(raw)
    await store.close()
    arena.close()
    return found


@contextmanager
def over_tcp(wanted: bool) -> Iterator[None]:
    """Objects are moved over TCP inside, as from another node, or in memory."""
    before = os.environ.get(MEMCPY)
    os.environ[MEMCPY] = "0" if wanted else "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[MEMCPY]
        else:
            os.environ[MEMCPY] = before


def pool_rows(*, quick: bool = False) -> tuple[list[Row], dict[str, str]]:
    """Medians beside a real master, over TCP and in memory, and the spread of the ratios. No rows
    where Mooncake is not installed."""
    rows: list[Row] = []
    spread: dict[str, str] = {}
    loads = ((64 << 10, 2 << 20),) if quick else LOADS
    rounds = 1 if quick else ROUNDS
    for tcp in (True, False):
        for size, total in loads:
            try:
                with over_tcp(tcp), master() as one:
                    found = run_terminable(in_pool(one.address, size, total, rounds))
            except StoreError:
                return [], {}
            place = "over TCP" if tcp else "in memory"
            for what in ("write", "read"):
                case = f"Mooncake {place}, {size >> 10} KiB blocks, {what}"
                both = found[what, True], found[what, False]
                us, raw = (statistics.median(rate for rate, _ in of) / 1e6 for of in both)
                rows.append(rate_row(case, us, raw, "MB/s", RAW))
                ratios = [mine / theirs for (mine, _), (theirs, _) in zip(*both, strict=True)]
                cost, theirs = (statistics.median(used for _, used in of) for of in both)
                spread[case] = (
                    f"of the raw client {min(ratios):.2f} to {max(ratios):.2f}, "
                    f"processor {cost:.2f} and {theirs:.2f} s/GB"
                )
    return rows, spread
