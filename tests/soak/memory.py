"""Memory of this process: what the program holds, which must be flat, and what is resident, which
the allocator decides.

The threads of each round allocate in glibc's arenas for threads (up to 8 for each core). Freed
pieces between others stay resident until they are used again, so resident memory rises in ever
smaller steps until every arena has met its greatest demand. The program's own memory does not
depend on that: bytes that malloc has given out, and blocks of Python's own allocator.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path
from typing import NamedTuple


class Memory(NamedTuple):
    """held_kib: given out by malloc. blocks: given out by Python's allocator. resident_kib: of the
    process, not shared with files. The rest are counts of what the process has open."""

    held_kib: int
    blocks: int
    resident_kib: int
    threads: int
    descriptors: int


class _Mallinfo2(ctypes.Structure):
    """See mallinfo(3)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    )


def measure() -> Memory:
    """The memory of this moment, after a collection."""
    gc.collect()
    return Memory(
        held_kib(),
        sys.getallocatedblocks(),
        resident_kib(),
        len(list(Path("/proc/self/task").iterdir())),
        len(list(Path("/proc/self/fd").iterdir())),
    )


def grow_intern_table() -> None:
    """Make CPython's table of interned strings as large as it gets.

    Names that are interned and dropped use up the entries of the table. It is then made anew with
    space for three times the names in use, once: 940 KiB in one step, after some 20,000 names. Without
    this call that step falls between two measures of a long soak and looks like a leak.
    """
    for number in range(200_000):
        sys.intern(f"name {number} of the soak")


def held_kib() -> int:
    """KiB that malloc has given out, in all arenas and as separate mappings. OSError where the
    C library cannot tell (glibc 2.33 can)."""
    libc = ctypes.CDLL(None)
    try:
        mallinfo2 = libc.mallinfo2
    except AttributeError as error:
        raise OSError(
            "the soak measures memory with mallinfo2, which this C library does not have"
        ) from error
    mallinfo2.restype = _Mallinfo2
    found = mallinfo2()
    return int(found.uordblks + found.hblkhd) >> 10


def resident_kib() -> int:
    """Memory of this process, resident and not shared with files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1])
    return 0


HELD_KIB, BLOCKS, RESIDENT_KIB, HANDLES = 1024, 5_000, 32 * 1024, 8
"""The growth allowed to a process between a quarter of its rounds and their end.

Measured over 60,000 requests of one process: 250 KiB and 400 blocks in the first quarter (caches of
modules), 30 KiB and 100 blocks in the last. One byte lost a request is 370 KiB in a soak of a
million requests in two processes, 16 bytes are found in one of 100,000.
"""


def growth(points: list[Memory]) -> tuple[Memory, Memory]:
    """The memory at a quarter and at the end: medians of the rounds around them, by field."""

    def around(at: int) -> Memory:
        near = points[max(0, at - 4) : at + 5]
        return Memory(*(sorted(column)[len(near) // 2] for column in zip(*near, strict=True)))

    last = len(points) - 1
    return around(last // 4), around(last)


LEAST_ROUNDS = 40
"""Rounds of a process whose memory is judged: caches of modules fill in the first ones."""


def grown(points: list[Memory]) -> str:
    """The measures that have grown too much, empty if there are none, or too few rounds."""
    if len(points) < LEAST_ROUNDS:
        return ""
    quarter, end = growth(points)
    limits = Memory(HELD_KIB, BLOCKS, RESIDENT_KIB, HANDLES, HANDLES)
    too_much = [
        f"{name} from {before} to {after}"
        for name, before, after, limit in zip(Memory._fields, quarter, end, limits, strict=True)
        if after - before > limit
    ]
    return ", ".join(too_much)
