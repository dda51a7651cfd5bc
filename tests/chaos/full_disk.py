"""The disk is full, for real: a small tmpfs with the store and a file of JSON lines in it, filled
to the last byte under load, and freed again."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
from anyio.to_thread import run_sync

from kvactors.cache import KVCache
from kvactors.errors import NoRoom
from kvactors.opening import open_cache
from kvactors.settings import Config
from tests.chaos.mounts import fill_disk, mounted
from tests.chaos.record import Setting, Tally, reached
from tests.chaos.rest import at_rest, compare_lines, jsonl, loaded, named, settings

SIZE = "48m"
SLAB = 8
"""Blocks in a slab: the store is made with this capacity first, so that it has to grow many times
later."""

PATIENCE = 30.0
"""Seconds until the store must write again."""


async def run(setting: Setting, tally: Tally) -> None:
    """Fill and free the disk. While it is full requests are served, and afterwards blocks are
    stored again."""
    disk = setting.folder / "disk"
    disk.mkdir()
    async with mounted(disk, "-t", "tmpfs", "-o", f"size={SIZE}", "none") as real:
        tally.note(
            f"a tmpfs of {SIZE}, filled to the last byte"
            if real
            else "no mount permitted: free_space_floor raised instead"
        )
        mapping = settings(disk / "store", jsonl(disk / "lines"))
        async with open_cache(
            Config.from_mapping(settings(disk / "store", capacity_blocks=SLAB))
        ) as cache:
            async with await cache.acquire("first", list(range(32))) as lease:
                await lease.wait_ready()
                cache.device.fill(lease.block_table, lease.hashes(0, 2))
                await lease.commit(32)
            await cache.wait_idle()
        async with loaded(mapping, setting, tally) as (cache, load):
            async with load.running():
                for _ in range(setting.times(1, 3)):
                    await setting.moment(0.0, 0.2)
                    await one_filling(cache, disk, setting, tally, real=real)
            await load.everything()
            await at_rest(cache, tally)
            await run_sync(compare_lines, disk / "lines", named(cache), tally)


async def one_filling(
    cache: KVCache, disk: Path, setting: Setting, tally: Tally, *, real: bool
) -> None:
    """Full, and free again."""
    store: Any = cache.system.backend
    served = tally.finished
    floor, store.files.floor = store.files.floor, store.files.floor if real else 1 << 60
    if real:
        await run_sync(fill_disk, disk / "ballast")
    tally.faults += 1
    try:
        if not await reached(lambda: "free_space_floor" in store.condition(), PATIENCE):
            tally.complain("the store has not met the full disk")
        await setting.moment(0.3, 1.5)
        if not await reached(lambda: tally.finished > served, PATIENCE):
            tally.complain("no request was served while the disk was full")
    finally:
        store.files.floor = floor
        await run_sync(lambda: (disk / "ballast").unlink(missing_ok=True))
    await writes_again(cache, tally)


async def writes_again(cache: KVCache, tally: Tally) -> None:
    """Serve new prompts until one of their blocks has been stored."""
    store: Any = cache.system.backend
    before = store.statistics().writes
    with anyio.move_on_after(PATIENCE):
        number = tally.faults * 100_000
        while store.statistics().writes == before:
            number += 100
            with suppress(NoRoom):  # pins may hold the whole device
                async with await cache.acquire(
                    f"new {number}", list(range(number, number + 32))
                ) as lease:
                    cache.device.fill(lease.block_table, lease.hashes(0, 2))
                    await lease.wait_ready()
                    await lease.commit(32)
            await anyio.sleep(0.05)
        return
    tally.complain("nothing is stored after the disk has free space again")
