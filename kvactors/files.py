"""Files that hold tokens or KV bytes: only their owner may read them, and no symbolic link is
followed to them."""

from __future__ import annotations

import errno
import os
import stat
import time
from pathlib import Path

from kvactors.native import fcntl

FILE_MODE = 0o600
FOLDER_MODE = 0o700


def open_private(path: str | Path, flags: int, *, dir_fd: int | None = None) -> int:
    """A descriptor of a regular file of mode 0600, at any umask. Created if `flags` has O_CREAT.

    Raises OSError, also for a symbolic link, a pipe or a device in the file's place: the target is
    not touched.
    """
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, FILE_MODE, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(
                errno.ELOOP, "is a symbolic link, which is not followed", str(path)
            ) from error
        raise
    try:
        state = os.fstat(fd)
        if not stat.S_ISREG(state.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
        if (
            flags & (os.O_WRONLY | os.O_RDWR)
            and stat.S_IMODE(state.st_mode) != FILE_MODE
            and state.st_uid == os.geteuid()
        ):
            os.fchmod(fd, FILE_MODE)
    except BaseException:
        os.close(fd)
        raise
    return fd


def private_folder(path: str | Path) -> None:
    """Make a folder and those above it that are missing, all of mode 0700. Folders that exist keep
    their mode. OSError."""
    path = Path(path)
    missing = []
    while not os.path.lexists(path):
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        try:
            folder.mkdir(FOLDER_MODE)
        except FileExistsError:
            continue  # another process made it at the same moment
        folder.chmod(FOLDER_MODE)


def open_folder(path: str | Path) -> int:
    """A descriptor of a folder, for `dir_fd`. OSError, also for a symbolic link in its place."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if Path(path).is_symlink():
            raise OSError(
                errno.ELOOP, "is a symbolic link, which is not followed", str(path)
            ) from error
        raise


def locked(fd: int) -> bool:
    """Take a lock, if no process has it. 'kvactors store list' holds it for a moment: retried."""
    for _ in range(3):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.02)
        else:
            return True
    return False


def read_all(fd: int, size: int, at: int) -> bytes:
    """`size` bytes from `at` on, fewer at the file's end. A system call reads 2 GiB at most."""
    parts = []
    while size > 0:
        part = os.pread(fd, min(size, 1 << 28), at)
        if not part:
            break
        parts.append(part)
        size, at = size - len(part), at + len(part)
    return b"".join(parts)
