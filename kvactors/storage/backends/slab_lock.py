"""The lock of a file store's folder: one process writes there."""

from __future__ import annotations

import os
from pathlib import Path

from kvactors.errors import StoreError
from kvactors.files import locked, open_private

ATTEMPTS = 100
"""Times that the file is opened again because another one has taken its place."""


def take_lock(folder: Path, fd: int) -> int:
    """The descriptor of the lock, with this process's number in it. fd: of the folder. StoreError
    if another process has it, OSError. Blocks."""
    for _ in range(ATTEMPTS):
        lock = open_private("lock", os.O_RDWR | os.O_CREAT, dir_fd=fd)
        try:
            if not locked(lock):
                holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip() or "?"
                raise StoreError(
                    f"{folder} is in use by process {holder}: open it with read_only, or another "
                    "folder"
                )
            there = state_of(folder / "lock")
            if there is not None and there.st_ino == os.fstat(lock).st_ino:
                os.ftruncate(lock, 0)
                os.pwrite(lock, str(os.getpid()).encode(), 0)
                return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)  # 'kvactors store prune' has removed it since it was opened
    raise StoreError(
        f"{folder / 'lock'}: another file took its place {ATTEMPTS} times while it was opened"
    )


def state_of(path: Path) -> os.stat_result | None:
    """Of the file that is at a path now, symbolic links not followed; None if there is none."""
    try:
        return path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
