"""Reading objects of a file store: their payloads and their table entries."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from kvactors.device.arena import Arena
from kvactors.storage.backends.base import Expired
from kvactors.storage.backends.slab_files import SlabFiles
from kvactors.storage.backends.slab_memory import address_of, extent
from kvactors.storage.backends.slab_table import checksum_of, is_marked
from kvactors.storage.backends.slab_threads import SlabThreads
from kvactors.storage.messages import Outcome


def load(
    files: SlabFiles, slot: int, mark: bytes, into: memoryview, arena: Arena | None
) -> Outcome:
    """The payload of the object whose entry has this mark: OK, MISS, CORRUPT or UNAVAILABLE.
    Blocks, and belongs in a thread."""
    try:
        if not files.in_place() or (files.read_only and not files.current()):
            return (
                Outcome.MISS
            )  # the folder was deleted, and its open files are freed with this process
        outcome = files.read(slot, *extent(into, arena))
        there = files.entry(slot) if outcome == Outcome.OK else b""
    except OSError as error:
        return files.failed(error)
    if outcome == Outcome.MISS:
        return Outcome.CORRUPT  # the slab is shorter than it was
    if outcome != Outcome.OK:
        return outcome
    whole = is_marked(there, mark) and xxhash.xxh3_64_intdigest(into) == checksum_of(mark)
    return Outcome.OK if whole else Outcome.CORRUPT


async def load_batch(
    files: SlabFiles,
    threads: SlabThreads,
    wanted: Sequence[tuple[int, bytes, memoryview]],
    arena: Arena | None,
    expired: Expired,
) -> list[Outcome]:
    """The outcomes of reading slots with these marks into these views. The native threads read for
    the process that writes: a view beside it has more to check."""
    if not files.read_only:
        slots, marks, views = zip(*wanted, strict=True)
        return await threads.io.read(slots, views, marks, expired)

    def load_all() -> list[Outcome]:
        return [load(files, slot, mark, into, arena) for slot, mark, into in wanted]

    return [Outcome.LATE] * len(wanted) if expired() else await threads.run(load_all)


def proved(files: SlabFiles, slot: int, checksum: int) -> bool:
    """Whether a slot that held a corrupt object returns the payload that was written to it."""
    bounce = files.transfers.bounce_buffer(files.meta.stride)
    if files.read(slot, address_of(bounce), files.meta.stride) != Outcome.OK:
        return False
    return xxhash.xxh3_64_intdigest(memoryview(bounce)[: files.meta.block_bytes]) == checksum
