"""The native core under one name, and the functions of Linux that other systems lack or define
differently. On another system, and in a source tree that is not built, the import of this module
raises an ImportError that names the reason and the remedy."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from pathlib import Path as File

NEEDS = (
    "this part of kvactors needs Linux (file locks, O_DIRECT, futexes), and this system is "
    "{system}. Settings and layouts work everywhere (kvactors.settings, kvactors.layout). Run the "
    "cache in a Linux container or virtual machine"
)
TREE = File(__file__).resolve().parents[1]

if sys.platform != "linux":
    raise ImportError(NEEDS.format(system=sys.platform))

import fcntl as fcntl  # noqa: E402  (Windows has no such module: the error above names the reason)


def native_missing(reason: str) -> str:
    """The message for a missing native module."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    text = f"kvactors' native module is missing or was built for another Python than {version}"
    if (TREE / "native" / "CMakeLists.txt").exists():
        text += (
            f": {TREE} is a source tree. Build it with `pip install -e .` in that folder (needs a "
            "C++17 compiler), or run from another folder if kvactors is installed"
        )
    return f"{text} ({reason})"


try:
    from kvactors._native import *  # noqa: F403  (each name of the stub)
except ImportError as error:
    raise ImportError(native_missing(str(error))) from error

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
