"""Survey of a file store: its objects, and its capacity."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvactors.errors import StoreError
from kvactors.storage.backends.slab_files import SlabFiles
from kvactors.storage.backends.slab_table import PAGE, count_used, meta_of, salt_in, scan
from kvactors.storage.backends.slots import Slots

SHARE = 0.8
"""Of the free space and what the store has already: its capacity if none is set."""

LITTLE_BYTES = 256 << 20
"""A capacity that follows the free space is a fault below this."""


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


class Survey(NamedTuple):
    """Changes in the table since it was read before.

    Attributes:
        found: objects of the entries that have changed, the oldest first.
        changed: slots of these entries. Objects that were in them before are gone.
        torn: entries that make no sense.
    """

    found: list[Stored]
    changed: list[int]
    torn: int


class TableReader:
    """Reads the objects in the table of an open store: all of them at first, then those whose
    entries have changed. Every call blocks and belongs in a thread, one call at a time.

    files: of the store.
    """

    def __init__(self, files: SlabFiles) -> None:
        self._files = files
        self._seen = np.empty(0, np.dtype("<u8"))  # the last word of each entry: its checksum
        self._generation = files.meta.generation

    def read(self, slots: int) -> Survey:
        """The changes in the first `slots` entries. OSError."""
        files, found, changed, torn = self._files, list[Stored](), list[int](), 0
        meta = files.meta
        if meta.generation != self._generation:  # entries that were too new may be objects now
            self._generation = meta.generation
            changed = np.flatnonzero(self._seen).tolist()
            self._seen[:] = 0
        if slots > len(self._seen):
            self._seen = np.pad(self._seen, (0, slots - len(self._seen)))
        for first in range(0, slots, CHUNK):
            raw = files.entries(first, min(CHUNK, slots - first))
            count = len(raw) // meta.entry_bytes
            words = np.frombuffer(raw[: count * meta.entry_bytes], "<u8").reshape(count, -1)
            seen, last = self._seen[first : first + count], words[:, -1]
            different = seen != last
            if not seen.any():  # read for the first time: entries may be torn before their end
                some = scan(raw, meta, first)
            elif different.any():
                some = scan((words * different[:, None]).tobytes(), meta, first)
            else:
                continue
            changed += (first + np.flatnonzero(different & (seen != 0))).tolist()
            found += [
                Stored(one.sequence, one.slot, one.key, one.mark, salt_in(one.raw))
                for one in some.found
            ]
            torn += some.torn
            seen[:] = last
        found.sort(key=lambda one: one[:4])
        return Survey(found, changed, torn)


class Space(NamedTuple):
    """Space for the objects of a store.

    Attributes:
        capacity: objects at most.
        own: bytes that its slabs occupy.
        free: bytes that the file system has left.
        others: bytes of the objects of stores of other layouts.
        concern: why the capacity is less than it should be, and the remedy. Empty if it is not.
    """

    capacity: int
    own: int
    free: int
    others: int
    concern: str


class SpaceReader:
    """Reckons the capacity of a store. Every call blocks and belongs in a thread, one call at a
    time.

    Args:
        files: of the store.
        wanted: capacity in objects as configured, 0 for a share of the space.
    """

    def __init__(self, files: SlabFiles, wanted: int) -> None:
        self._files = files
        self._wanted = wanted
        self._counted: dict[Path, tuple[tuple[int, int], int]] = {}

    def read(self, objects: int) -> Space:
        """The space as it is now. It never makes less of the capacity than the `objects` that the
        store holds within what is configured: nothing is gained by their eviction. OSError."""
        files, wanted, stride = self._files, self._wanted, self._files.meta.stride
        own, free, others = own_bytes(files), files.free_bytes(), 0
        concern = ""
        if wanted:
            others = self._bytes_of_others()
            left = wanted - -(-others // stride)
            capacity = max(1, left, min(wanted, objects))
            if 2 * left < wanted:
                concern = (
                    "stores of other layouts hold more than half of its capacity: "
                    f"'kvactors store prune {files.folder.parent}' removes them"
                )
        else:
            share = int(SHARE * (free + own)) - files.floor
            if files.slabs:  # it grows by whole slabs
                slab = files.meta.slots_per_slab * stride
                share = min(share, (len(files.slabs) + max(0, free - files.floor) // slab) * slab)
            capacity = max(1, objects, share // stride)
            if capacity * stride < LITTLE_BYTES:
                concern = (
                    "its capacity follows the free space and is below 256 MiB: free space at "
                    f"{files.folder}, or set storage.capacity_bytes"
                )
        return Space(capacity, own, free, others, concern)

    def _bytes_of_others(self) -> int:
        """Bytes of the objects of other layouts (identities) beside this store, under the same
        model, namespace and rank."""
        found = 0
        for table in self._files.folder.parent.glob("*/table"):
            if table.parent == self._files.folder:
                continue
            try:
                state = table.lstat()
                stamp = (state.st_mtime_ns, state.st_size)
                if self._counted.get(table, (None,))[0] != stamp:
                    self._counted[table] = (stamp, bytes_held(table))
                found += self._counted[table][1]
            except OSError:  # removed since, damaged, or of another version
                continue
        return found


def survey(files: SlabFiles, space: SpaceReader | None) -> tuple[TableReader, Survey, Space | None]:
    """Open the files, read the table, and reckon the capacity, except for a view. Blocks.
    StoreError."""
    try:
        slots = files.open()
        table = TableReader(files)
        found = table.read(slots)
        return table, found, None if space is None else space.read(len(found.found))
    except StoreError:  # an OSError, which names the folder already
        raise
    except OSError as error:
        raise StoreError(f"{files.folder}: {error}") from error


def bytes_held(table: Path) -> int:
    """Bytes of the objects of a store, by its table. StoreError, OSError."""
    found = 0
    with table.open("rb") as file:
        meta = meta_of(file.read(PAGE), str(table))
        while chunk := file.read(CHUNK * meta.entry_bytes):
            found += count_used(chunk, meta)
    return found * meta.stride


def own_bytes(files: SlabFiles) -> int:
    """Bytes that the store's slabs occupy. OSError."""
    slabs = (files.folder / f"slab-{number:04}" for number in range(len(files.slabs)))
    return sum(slab.lstat().st_blocks * 512 for slab in slabs)


def statistics(
    files: SlabFiles, slots: Slots, torn: int, scan_s: float, capacity: int
) -> FileStatistics:
    """A moment's picture."""
    slabs = len(files.slabs)
    total = slabs * files.meta.slots_per_slab
    return FileStatistics(
        total, len(slots.free), slabs, files.direct, slots.quarantined, torn, scan_s, capacity
    )
