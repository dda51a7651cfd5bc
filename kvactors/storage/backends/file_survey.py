"""Survey of a file store when it is opened: its objects, and its capacity."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

from kvactors.actor.log import get_logger
from kvactors.errors import StoreError
from kvactors.storage.backends.slab_files import SlabFiles
from kvactors.storage.backends.slab_table import salt_in, scan
from kvactors.storage.backends.slots import Slots

log = get_logger()

SHARE = 0.8
"""Of the free space and what the store has already: its capacity if none is set."""


class FileStatistics(NamedTuple):
    """A moment's picture of the files.

    Attributes:
        direct: whether the page cache is passed by.
        quarantined: slots that held bad objects and are not used now.
        torn: entries that made no sense when the store was opened.
        scan_s: seconds to find out what was there.
        capacity: objects at most.
    """

    slots: int
    free: int
    slabs: int
    direct: bool
    quarantined: int
    torn: int
    scan_s: float
    capacity: int


CHUNK = 16_384
"""Entries that are read at once."""


class Stored(NamedTuple):
    """An object.

    Attributes:
        mark: identifies its entry (`slab_table.mark_of`).
        salt: the number of its salt, None if it is not known.
    """

    sequence: int
    slot: int
    key: bytes
    mark: bytes
    salt: int | None


def survey(files: SlabFiles, wanted: int) -> tuple[list[Stored], int, int]:
    """Open the files, read the table, and reckon the capacity: the objects, the oldest first, torn
    entries, and the capacity in objects. wanted: as configured, 0 for a share of the space. Blocks.
    StoreError."""
    try:
        slots = files.open()
        own, free, others = own_bytes(files), files.free_bytes(), bytes_of_others(files)
    except StoreError:  # an OSError, which names the folder already
        raise
    except OSError as error:
        raise StoreError(f"{files.folder}: {error}") from error
    stride = files.meta.stride
    size = wanted * stride - others if wanted else int(SHARE * (free + own)) - files.floor
    capacity = max(1, size // stride)
    if wanted and capacity < wanted:
        log.warning(
            "stores of other layouts take part of the capacity; 'kvactors store prune' removes "
            "them",
            folder=str(files.folder.parent),
            bytes=others,
            objects=wanted,
            left=capacity,
        )
    found: list[Stored] = []
    torn = 0
    for first in range(0, slots, CHUNK):
        try:
            chunk = files.entries(first, min(CHUNK, slots - first))
        except OSError as error:
            raise StoreError(f"{files.folder}: {error}") from error
        some = scan(chunk, files.meta, first)
        found += [
            Stored(one.sequence, one.slot, one.key, one.mark, salt_in(one.raw))
            for one in some.found
        ]
        torn += some.torn
    found.sort(key=lambda one: one[:4])
    log.info(
        "file store open",
        folder=str(files.folder),
        capacity_bytes=capacity * stride,
        capacity_objects=capacity,
        configured=bool(wanted),
        own_bytes=own,
        free_bytes=free,
        other_layouts_bytes=others,
        objects=len(found),
        torn=torn,
    )
    return found, torn, capacity


def own_bytes(files: SlabFiles) -> int:
    """Bytes that the store's slabs occupy. OSError."""
    slabs = (files.folder / f"slab-{number:04}" for number in range(len(files.slabs)))
    return sum(slab.lstat().st_blocks * 512 for slab in slabs)


def bytes_of_others(files: SlabFiles) -> int:
    """Bytes that stores of other layouts (identities) occupy beside this one, under the same model,
    namespace and rank."""
    found = 0
    for slab in files.folder.parent.glob("*/slab-*"):
        if slab.parent != files.folder:
            with suppress(OSError):
                found += slab.lstat().st_blocks * 512
    return found


def statistics(
    files: SlabFiles, slots: Slots, torn: int, scan_s: float, capacity: int
) -> FileStatistics:
    """A moment's picture."""
    slabs = len(files.slabs)
    total = slabs * files.meta.slots_per_slab
    return FileStatistics(
        total, len(slots.free), slabs, files.direct, slots.quarantined, torn, scan_s, capacity
    )
