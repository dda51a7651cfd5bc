"""Paths that the blocks of a file store form, read from its table in the background, parents before
children.

First the whole table is read in chunks, to find of every slot the slot of its parent (a join of the
first 8 bytes of keys and parents, in numpy). Then parts are read: from every block that is no
parent up to the root or to a block that has been read already, the upper blocks first. While the
table is read 24 bytes of memory a slot are used, then 5. The store may change during the reading,
so each entry is checked again when its part is read. The parent and the tokens of a key never
change.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvactors.actor.log import get_logger
from kvactors.flush_notifier.messages import PathPart
from kvactors.lineage import Lineage
from kvactors.storage.backends.path_source import PathSource
from kvactors.storage.backends.slab_files import SlabFiles
from kvactors.storage.backends.slab_lineage import TIME_FIELD, lineage_in
from kvactors.storage.backends.slab_table import FIELD, HEAD, MAGIC, PARENT, entry_in, fields_of
from kvactors.storage.backends.slab_threads import SlabThreads
from kvactors.types import HASH_BYTES

log = get_logger()

CHUNK = 4 << 20
"""Bytes of the table that one call reads."""

NO_PARENT, NO_LINEAGE = -1, -2
"""In place of the slot of a parent. NO_PARENT: it is not in the store, or it is a root. NO_LINEAGE:
the slot has no block, or one without a lineage."""

AT_PARENT = HEAD.size + TIME_FIELD
"""Where the field with the parent is in an entry that this package wrote."""

U64 = np.dtype("<u8")


class Rows(NamedTuple):
    """Blocks of a chunk: their slots, and the first 8 bytes of their keys and of their parents (0:
    no lineage)."""

    slots: NDArray[np.int64]
    keys: NDArray[np.uint64]
    parents: NDArray[np.uint64]


class SlabPaths:
    """files: of an open store. Every call blocks briefly and belongs in a thread, one call at a
    time."""

    def __init__(self, files: SlabFiles) -> None:
        self._files = files
        self._rows: list[Rows] | None = []
        self._next = 0  # slot from which the table is to be read on
        self._parent: NDArray[np.int32] = np.empty(0, np.int32)
        self._read = np.empty(0, bool)
        self._leaves: Iterator[int] = iter(())
        self._chain: list[int] = []  # slots still to be read of one path, the deepest first
        self.skipped = 0  # blocks whose lineage was damaged, or not that of their key

    def parts(self, most: int) -> list[PathPart] | None:
        """Parts of paths with about `most` blocks in all, none while the table is being read; None
        when all was read. OSError."""
        if self._rows is not None:
            self._survey(self._rows)
            return []
        found: list[PathPart] = []
        count = 0
        while count < most:
            if not self._chain and not self._climb():
                break
            stop = max(0, len(self._chain) - (most - count))
            slots = self._chain[stop:][::-1]
            del self._chain[stop:]
            count += len(slots)
            found += self._parts_of(slots)
        return found if count else None

    # -- the survey

    def _survey(self, rows: list[Rows]) -> None:
        files, size = self._files, self._files.meta.entry_bytes
        slots = len(files.slabs) * files.meta.slots_per_slab
        if self._next < slots:
            count = min(max(1, CHUNK // size), slots - self._next)
            raw = files.entries(self._next, count)
            rows.append(rows_of(raw, self._next, size, files.meta.generation))
            self._next += count
            return
        self._join(slots, rows)
        self._rows = None

    def _join(self, slots: int, rows: list[Rows]) -> None:
        """Find every block's parent, and the blocks that are no parent."""
        own = np.concatenate([one.slots for one in rows]) if rows else np.empty(0, np.int64)
        keys = np.concatenate([one.keys for one in rows]) if rows else np.empty(0, np.uint64)
        parents = np.concatenate([one.parents for one in rows]) if rows else np.empty(0, np.uint64)
        rows.clear()
        self._parent = np.full(slots, NO_LINEAGE, np.int32)
        self._read = np.zeros(slots, bool)
        if not len(keys):
            return
        order = np.argsort(keys)
        keys, by_key = keys[order], own[order]
        place = np.minimum(np.searchsorted(keys, parents), len(keys) - 1)
        there = keys[place] == parents
        kept = parents != 0
        self._parent[own[kept]] = np.where(there, by_key[place], NO_PARENT)[kept]
        above = self._parent[self._parent >= 0]
        is_leaf = self._parent > NO_LINEAGE
        is_leaf[above] = False
        self._leaves = iter(np.flatnonzero(is_leaf).astype(np.int32))

    # -- the parts

    def _climb(self) -> bool:
        """Collect the unread slots from the next leaf up. Returns whether there are any."""
        for leaf in self._leaves:
            slot = int(leaf)
            while slot >= 0 and not self._read[slot] and self._parent[slot] != NO_LINEAGE:
                self._read[slot] = True
                self._chain.append(slot)
                slot = int(self._parent[slot])
            if self._chain:
                return True
        return False

    def _parts_of(self, slots: list[int]) -> Iterator[PathPart]:
        """The blocks in a run of slots, as parts that end where a block is no child of the one
        before it."""
        part: list[tuple[bytes, Lineage]] = []
        for slot in slots:
            block = self._block(slot)
            follows = (
                block is not None
                and part
                and (part[-1][0], part[-1][1].scope) == (block[1].parent, block[1].scope)
            )
            if part and not follows:
                yield _part(part)
                part = []
            if block is not None:
                part.append(block)
        if part:
            yield _part(part)

    def _block(self, slot: int) -> tuple[bytes, Lineage] | None:
        files = self._files
        one = entry_in(files.entry(slot), slot, files.meta)
        if one is None:
            return None  # it was evicted, or cleared
        fields = fields_of(one.raw)
        found = lineage_in(fields, one.key)
        self.skipped += found is None and PARENT in fields
        return None if found is None else (one.key, found)


class PathReading(PathSource):
    """The path source of a file store: one reading at a time, in the store's threads."""

    def __init__(self, files: SlabFiles, threads: SlabThreads) -> None:
        self._files = files
        self._threads = threads
        self._paths: SlabPaths | None = None

    def begin(self) -> None:
        """Read the whole table again."""
        self._paths = SlabPaths(self._files)

    def end(self) -> None:
        """Read no more."""
        self._paths = None

    async def next(self, most: int) -> list[PathPart] | None:
        """See `SlabPaths.parts`. An error of the disk ends the reading."""
        paths, parts = self._paths, None
        if paths is None:
            return None
        try:
            parts = await self._threads.run(paths.parts, most)
        except OSError as error:
            self._files.failed(error)
        if parts is None:
            if paths.skipped:
                log.warning(
                    "stored blocks whose lineage is damaged",
                    folder=str(self._files.folder),
                    blocks=paths.skipped,
                )
            if paths is self._paths:
                self._paths = None
        return parts


def rows_of(raw: bytes, first: int, size: int, generation: int) -> Rows:
    """The blocks of a chunk of the table. first: slot of its first entry. Only the fields needed
    here are read. Entries are verified later, when a path is read."""
    count = len(raw) // size
    words = np.frombuffer(raw[: count * size], U64).reshape(count, size // 8)
    halves = np.frombuffer(raw[: count * size], "<u4").reshape(count, size // 4)
    used = np.flatnonzero(
        (words[:, 0] == int.from_bytes(MAGIC, "little")) & (words[:, 13] == generation)
    )
    parents = np.zeros(len(used), np.uint64)
    header = int.from_bytes(FIELD.pack(PARENT, HASH_BYTES), "little")
    at = AT_PARENT // 4
    if size >= AT_PARENT + FIELD.size + HASH_BYTES + 8:
        here = halves[used, at] == header
        parents[here] = words[used[here], (AT_PARENT + FIELD.size) // 8]
        others = np.flatnonzero(~here & (halves[used, 3] > TIME_FIELD))
        for i in others.tolist():  # another writer's order of fields
            entry = raw[int(used[i]) * size : (int(used[i]) + 1) * size]
            parents[i] = int.from_bytes(fields_of(entry).get(PARENT, b"")[:8], "little")
    return Rows(first + used, words[used, 6].copy(), parents)


def _part(blocks: list[tuple[bytes, Lineage]]) -> PathPart:
    first = blocks[0][1]
    extra_keys = tuple((i, one.extra_key) for i, (_, one) in enumerate(blocks) if one.extra_key)
    keys = b"".join(key for key, _ in blocks)
    return PathPart(
        first.parent, keys, b"".join(one.tokens for _, one in blocks), first.scope, extra_keys
    )


if AT_PARENT % 4 or (AT_PARENT + FIELD.size) % 8:
    raise ImportError("the parent in an entry is not aligned")
