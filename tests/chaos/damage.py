"""Files of the store are deleted, cut, overwritten and bits in them flipped under load. Then
another process opens the remains."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anyio.to_thread import run_sync

from kvactors.errors import StoreError
from kvactors.storage.file.store import FileBackend
from kvactors.storage.file.table import PAGE
from tests.chaos.record import Setting, Tally, reached
from tests.chaos.rest import at_rest, loaded, settings, varied

PATIENCE = 30.0
"""Seconds within which a file to damage must exist."""

Damage = Callable[[FileBackend, random.Random], None]


def flip(path: Path, rng: random.Random, count: int, first: int = 0) -> None:
    """Flip bits of a file, anywhere from byte `first` on."""
    with path.open("r+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        for _ in range(count if size > first else 0):
            at = file.seek(rng.randrange(first, size))
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([(byte or b"\0")[0] ^ 1 << rng.randrange(8)]))


def bits_of_payloads(store: FileBackend, rng: random.Random) -> None:
    """Flip a bit in every other block or so."""
    flip(any_slab(store, rng), rng, 200)


def bits_of_the_table(store: FileBackend, rng: random.Random) -> None:
    """Flip bits in the entries."""
    flip(store.files.folder / "table", rng, 100, PAGE)


def cut_a_slab(store: FileBackend, rng: random.Random) -> None:
    """Cut a slab anywhere."""
    slab = any_slab(store, rng)
    os.truncate(slab, int(slab.stat().st_size * rng.random()))


def bits_of_the_first_page(store: FileBackend, rng: random.Random) -> None:
    """Flip a bit in the table's first page: it costs the contents of the next start, and nothing of
    this one."""
    path = store.files.folder / "table"
    at = rng.randrange(PAGE)
    with path.open("r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 1 << rng.randrange(8)]), at)


def cut_the_table(store: FileBackend, rng: random.Random) -> None:
    """Cut the table after its first page, in the middle of an entry as well."""
    table = store.files.folder / "table"
    os.truncate(table, PAGE + int((table.stat().st_size - PAGE) * rng.random()))


def swap_blocks(store: FileBackend, rng: random.Random) -> None:
    """Write whole payloads over others': good blocks, in the wrong places."""
    meta = store.files.meta
    with any_slab(store, rng).open("r+b", buffering=0) as file:
        for _ in range(20):
            source, target = rng.sample(range(meta.slots_per_slab), 2)
            data = os.pread(file.fileno(), meta.stride, source * meta.stride)
            os.pwrite(file.fileno(), data, target * meta.stride)


def swap_entries(store: FileBackend, rng: random.Random) -> None:
    """Write whole entries of the table over others'."""
    size = store.files.meta.entry_bytes
    with (store.files.folder / "table").open("r+b", buffering=0) as file:
        slots = (file.seek(0, os.SEEK_END) - PAGE) // size
        for _ in range(20 if slots > 1 else 0):
            source, target = rng.sample(range(slots), 2)
            os.pwrite(
                file.fileno(),
                os.pread(file.fileno(), size, PAGE + source * size),
                PAGE + target * size,
            )


def delete_a_slab(store: FileBackend, rng: random.Random) -> None:
    """Delete a slab."""
    any_slab(store, rng).unlink()


def delete_the_table(store: FileBackend, _: random.Random) -> None:
    """Delete the table."""
    (store.files.folder / "table").unlink()


def delete_the_folder(store: FileBackend, _: random.Random) -> None:
    """Delete everything."""
    shutil.rmtree(store.files.folder, ignore_errors=True)


GENTLE: tuple[Damage, ...] = (
    bits_of_payloads,
    bits_of_the_table,
    cut_a_slab,
    cut_the_table,
    swap_blocks,
    swap_entries,
)
FINAL: tuple[Damage, ...] = (
    delete_a_slab,
    delete_the_table,
    delete_the_folder,
    bits_of_payloads,
    bits_of_the_first_page,
)


def any_slab(store: FileBackend, rng: random.Random) -> Path:
    """One of the slabs."""
    return rng.choice(sorted(store.files.folder.glob("slab-*")))


def attempt(damage: Damage, store: FileBackend, rng: random.Random) -> bool:
    """Do it; False if there was nothing to damage."""
    try:
        damage(store, rng)
    except (FileNotFoundError, IndexError):
        return False
    return True


async def run(setting: Setting, tally: Tally) -> None:
    """Mild damage several times, then in some rounds a fatal one. No wrong byte is served, in this
    process and in the next."""
    mapping = varied(
        settings(setting.folder / "store", capacity_blocks=setting.rng.choice([120, 1000])), setting
    )
    async with loaded(mapping, setting, tally) as (cache, load):
        store: Any = cache.system.backend
        async with load.running():
            if not await reached(lambda: store.statistics().writes > 40, PATIENCE):
                tally.complain("nothing is stored")
            for damage in [
                *setting.rng.sample(GENTLE, setting.times(3, 6)),
                setting.rng.choice(FINAL),
            ]:
                await setting.moment(0.1, 0.6)
                tally.faults += await run_sync(attempt, damage, store, setting.rng)
            await setting.moment(0.1, 0.6)
        await load.everything()
        await at_rest(cache, tally)
        tally.count("corrupt objects found and counted", store.statistics().corrupt)
    try:
        async with loaded(mapping, setting, tally) as (cache, load):
            async with load.running():
                await setting.moment(0.1, 0.6)
            await load.everything()
            await at_rest(cache, tally)
    except StoreError as error:
        tally.note(
            f"the next life refused what was left: {error}".replace(str(setting.folder), "..")
        )
