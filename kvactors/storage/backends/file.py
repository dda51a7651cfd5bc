"""A store of files: one per block, under hashed folders, written under a temporary name and renamed, verified on every read.

    DIRECTORY / first 16 hex digits of the fingerprint / key[0] / key[1] / key .kv          (hex)

A file is a header (see `header`) and then the payload.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import TypeVar

import anyio
from aiofiles.os import wrap

from kvactors.actor.uncancelled import to_the_end
from kvactors.errors import StoreError
from kvactors.storage.backends.header import HEADER, fits, header_of
from kvactors.storage.backends.owned import OwnedBackend
from kvactors.storage.messages import Outcome
from kvactors.threads import lower_priority

SUFFIX, TEMPORARY = ".kv", ".tmp"
IN_FLIGHT = 2
"""Files read or written at once: more gain nothing from a page cache, and cost the loop its promptness."""

T = TypeVar("T")


class FileBackend(OwnedBackend):
    """directory: made if missing. capacity: files at most, 0 for no limit. Other fingerprints' folders are never touched."""

    def __init__(self, directory: str | Path, fingerprint: bytes, block_bytes: int, capacity: int = 0) -> None:
        super().__init__(fingerprint, block_bytes, capacity)
        self.folder = Path(directory) / fingerprint.hex()[:16]
        self._temporary = count()
        self._threads = ThreadPoolExecutor(IN_FLIGHT, "kvactors-file", lower_priority)

    def path(self, key: bytes) -> Path:
        """Where an object lives."""
        name = key.hex()
        return self.folder / name[:2] / name[2:4] / (name + SUFFIX)

    async def open(self) -> None:
        """Index complete files, oldest first, evict down to the capacity, delete what a crash left. StoreError if it cannot be done."""
        try:
            keys = await self._in_thread(self._scan)
        except OSError as error:
            raise StoreError(f"{self.folder}: {error}") from error
        evicted: list[bytes] = []
        for key in keys:
            evicted += self.catalog.admit([key]).evicted
        await self.erase(evicted)

    def _scan(self) -> list[bytes]:
        self.folder.mkdir(parents=True, exist_ok=True)
        found: list[tuple[int, bytes]] = []
        for file in self.folder.glob("??/??/*"):
            status = file.stat()
            key = key_of(file)
            if key is None or status.st_size != HEADER.size + self.block_bytes:
                file.unlink()
            else:
                found.append((status.st_mtime_ns, key))
        return [key for _, key in sorted(found)]

    async def load(self, key: bytes, into: memoryview) -> Outcome:
        """See `Backend.load`."""
        return await self._in_thread(self._load, key, into)

    def _load(self, key: bytes, into: memoryview) -> Outcome:
        try:
            with self.path(key).open("rb", buffering=0) as file:
                header = bytearray(HEADER.size)
                if os.preadv(file.fileno(), [header, into], 0) != HEADER.size + len(into) or file.seek(
                    0, 2
                ) != HEADER.size + len(into):
                    return Outcome.CORRUPT
        except (FileNotFoundError, NotADirectoryError):
            return Outcome.MISS
        except OSError:
            return Outcome.UNAVAILABLE
        return Outcome.OK if fits(header, self.fingerprint, key, into) else Outcome.CORRUPT

    async def save(self, key: bytes, data: memoryview) -> Outcome:
        """See `Backend.save`."""
        return await self._in_thread(self._save, key, data)

    def _save(self, key: bytes, data: memoryview) -> Outcome:
        path = self.path(key)
        temporary = path.with_suffix(f".{os.getpid()}-{next(self._temporary)}{TEMPORARY}")
        header = header_of(self.fingerprint, key, data)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("xb", buffering=0) as file:
                if os.writev(file.fileno(), [header, data]) != HEADER.size + len(data):
                    raise OSError(errno.ENOSPC, "short write")
            temporary.replace(path)
        except OSError as error:
            forget(temporary)
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            return Outcome.NO_SPACE if full else Outcome.UNAVAILABLE
        return Outcome.OK

    async def erase(self, keys: Sequence[bytes]) -> None:
        """See `Backend.erase`."""
        if keys:
            await self._in_thread(self._erase, keys)

    def _erase(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            forget(self.path(key))

    async def each(self, work: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """A few at once."""
        queue = iter(work)

        async def worker() -> None:
            for item in queue:
                await item()

        async with anyio.create_task_group() as tasks:
            for _ in range(min(IN_FLIGHT, len(work))):
                tasks.start_soon(worker)

    async def close(self) -> None:
        """Let the threads end; every call has been waited for."""
        self._threads.shutdown(wait=False)

    async def _in_thread(self, function: Callable[..., T], *args: object) -> T:
        """Run a blocking call in a thread, and wait for its end even if cancelled: it works on memory that is lent to it."""
        return await to_the_end(asyncio.ensure_future(wrap(function)(*args, executor=self._threads)))


def key_of(file: Path) -> bytes | None:
    """The key a file's name stands for, None if it is not an object's name."""
    try:
        key = bytes.fromhex(file.stem)
    except ValueError:
        return None
    return key if file.suffix == SUFFIX and len(key) == 32 else None


def forget(file: Path) -> None:
    """Delete a file if it is there; one that cannot be deleted is left: nothing refers to it."""
    try:
        file.unlink(missing_ok=True)
    except OSError:
        return
