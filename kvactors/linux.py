"""Functions of Linux that other systems lack or define differently. On another system the import of
this module raises an ImportError that names the reason."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys

NEEDS = (
    "this part of kvactors needs Linux (file locks, O_DIRECT, futexes), and this system is "
    "{system}. Settings and layouts work everywhere (kvactors.settings, kvactors.layout). Run the "
    "cache in a Linux container or virtual machine"
)

if sys.platform != "linux":
    raise ImportError(NEEDS.format(system=sys.platform))

import fcntl  # noqa: E402  (Windows has no such module: the error above names the reason)

register_at_fork = os.register_at_fork

FALLOC_FL_ZERO_RANGE = 0x10
"""Of fallocate(2): the range reads as zeros, and keeps its space on the disk."""

_libc = ctypes.CDLL(None, use_errno=True)


def zero_range(fd: int, at: int, length: int) -> None:
    """Overwrite a range of whole pages of a file with zeros, by a change of its extents if the file
    system can. OSError."""
    if not _libc.fallocate(fd, FALLOC_FL_ZERO_RANGE, ctypes.c_long(at), ctypes.c_long(length)):
        return
    if (number := ctypes.get_errno()) not in (errno.EOPNOTSUPP, errno.ENOSYS):
        raise OSError(number, os.strerror(number))
    with mmap.mmap(-1, min(length, 1 << 20)) as zeros:  # aligned, for O_DIRECT
        for start in range(0, length, len(zeros)):
            part = memoryview(zeros)[: length - start]
            os.pwrite(fd, part, at + start)
            part.release()


__all__ = ["fcntl", "register_at_fork", "zero_range"]
