"""File systems that are really small, and files that really cannot be written, as far as this
machine permits."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import anyio

GET_FLAGS, SET_FLAGS, IMMUTABLE = 0x80086601, 0x40086602, 0x10
CHUNK = 1 << 16


async def command(name: str, *arguments: str) -> bool:
    """Run one of the system's commands. Returns whether it exists and succeeded."""
    path = shutil.which(name)
    return (
        path is not None
        and (await anyio.run_process([path, *arguments], check=False)).returncode == 0
    )


@asynccontextmanager
async def mounted(folder: Path, *arguments: str) -> AsyncIterator[bool]:
    """Mount something at a folder, which must exist, while the block runs; False if that is not
    permitted."""
    done = await command("mount", *arguments, str(folder))
    try:
        yield done
    finally:
        with anyio.CancelScope(shield=True):
            if done:
                await command("umount", "-l", str(folder))


def fill_disk(ballast: Path) -> int:
    """Write until the file system has no space for a further byte. Returns how many bytes that
    took."""
    with ballast.open("wb", buffering=0) as file:
        for size in (CHUNK, 4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
        return file.tell()


def set_immutable(path: Path, *, on: bool) -> None:
    """As `chattr +i` or `-i` does. OSError if that is not permitted, or the file system does not
    support it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        flags = int.from_bytes(fcntl.ioctl(fd, GET_FLAGS, bytes(8))[:4], "little")
        flags = flags | IMMUTABLE if on else flags & ~IMMUTABLE
        fcntl.ioctl(fd, SET_FLAGS, flags.to_bytes(8, "little"))
    finally:
        os.close(fd)


@contextmanager
def immutable(folder: Path) -> Iterator[int]:
    """Makes a folder and everything under it immutable while the block runs, also for root and
    through open files. Yields how many."""
    paths = [folder, *folder.rglob("*")]
    try:
        for path in paths:
            with suppress(FileNotFoundError):
                set_immutable(path, on=True)
        yield len(paths)
    finally:
        for path in paths:
            with suppress(FileNotFoundError):
                set_immutable(path, on=False)


def can_freeze(folder: Path) -> bool:
    """Whether `immutable` is permitted here and stops writes through files that are open
    already."""
    probe = folder / "probe"
    try:
        with probe.open("wb", buffering=0) as file:
            set_immutable(probe, on=True)
            try:
                file.write(b"x")
            except OSError:
                return True
            finally:
                set_immutable(probe, on=False)
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
    return False
