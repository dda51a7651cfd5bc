"""Faults in the system calls of a file store's native threads."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Fault = Callable[[int, int, int], int | None]
"""Given descriptor, offset and bytes: None for the real call, a negative error number in its place,
or the most bytes that the real call may move."""


class _Part(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


_MOVE = ctypes.CFUNCTYPE(
    ctypes.c_int64, ctypes.c_int, ctypes.POINTER(_Part), ctypes.c_int, ctypes.c_int64
)
_SYNC = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int)
_INODE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_char_p)


def _move(call: Callable[..., int], fault: Fault) -> Any:
    def move(fd: int, parts: Any, count: int, at: int) -> int:
        sizes = [parts[i].size for i in range(count)]
        limit = fault(fd, at, sum(sizes))
        if limit is not None and limit <= 0:
            return limit
        left = sum(sizes) if limit is None else limit
        buffers = []
        for i, size in enumerate(sizes):
            if left > 0:
                buffers.append((ctypes.c_char * min(size, left)).from_address(parts[i].base))
            left -= size
        try:
            return call(fd, buffers, at)
        except OSError as error:
            return -(error.errno or errno.EIO)

    return _MOVE(move)


@contextmanager
def faults(
    store: Any,
    *,
    read: Fault | None = None,
    write: Fault | None = None,
    inode: Callable[[], int] | None = None,
    sync: Callable[[int], int] | None = None,
) -> Iterator[None]:
    """Calls of the store's native threads go through these inside. inode: a negative error number,
    or the inode of the table's path. sync: given a descriptor, 0 or a negative error number."""
    queue = store.io._queue
    calls = (
        _move(os.preadv, read) if read else None,
        _move(os.pwritev, write) if write else None,
        _INODE(lambda _path: inode()) if inode else None,
        _SYNC(sync) if sync else None,
    )
    store.kept_calls = [*getattr(store, "kept_calls", []), calls]  # a thread may be in one
    queue.set_calls(*(ctypes.cast(one, ctypes.c_void_p).value or 0 if one else 0 for one in calls))
    try:
        yield
    finally:
        queue.set_calls(0, 0, 0, 0)


def failing(number: int) -> Fault:
    """Every call fails with this error."""
    return lambda _fd, _at, _size: -number
