"""The files of a file store, and what is done with them; every call here blocks and belongs in a thread.

    DIRECTORY / NAMESPACE / rank-R-of-N / 16 hex digits of the fingerprint /
        lock        held by the process that writes here, with its number in it
        table       what is in which slot (`slab_table`)
        slab-0000   slots of whole pages, preallocated, one payload each

Slabs are read and written around the page cache (O_DIRECT) where the file system allows it, straight from and to memory that is aligned.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from kvactors.errors import StoreError
from kvactors.storage.backends.slab_table import ENTRY, FREE, PAGE, Meta, meta_of
from kvactors.storage.messages import Outcome

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SlabFiles:
    """folder: where. meta: what the store is for. read_only: look, and touch nothing. floor: bytes of the file system left free."""

    def __init__(self, folder: Path, meta: Meta, *, read_only: bool, floor: int) -> None:
        self.folder = folder
        self.meta = meta
        self.read_only = read_only
        self.floor = floor
        self.direct = True
        self.slabs: list[int] = []  # file descriptors
        self._table = self._lock = -1
        self._bounce = threading.local()

    # -- opening

    def open(self) -> bytes:
        """Open (or make) everything; the table's entries. StoreError if another process writes here, or it is another store."""
        try:
            if not self.read_only:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._take_lock()
            return self._open_table()
        except OSError as error:
            self.close()
            raise StoreError(f"{self.folder}: {error}") from error
        except BaseException:
            self.close()
            raise

    def _take_lock(self) -> None:
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._lock, 32, 0).decode("ascii", "replace").strip() or "?"
            raise StoreError(
                f"{self.folder} is in use by process {holder}; open it with read_only, or another folder"
            ) from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)

    def _open_table(self) -> bytes:
        path = self.folder / "table"
        self._table = os.open(path, os.O_RDONLY if self.read_only else os.O_RDWR | os.O_CREAT, 0o644)
        if not self.read_only and os.fstat(self._table).st_size < PAGE:
            os.pwrite(self._table, self.meta.page(), 0)
        there = meta_of(os.pread(self._table, PAGE, 0), str(path))
        if (there.fingerprint, there.block_bytes) != (self.meta.fingerprint, self.meta.block_bytes):
            raise StoreError(
                f"{path} is for fingerprint {there.fingerprint[:16]} and blocks of {there.block_bytes} bytes, not "
                f"{self.meta.fingerprint[:16]} and {self.meta.block_bytes}"
            )
        self.meta = there  # slabs keep the size they were made with
        while (self.folder / f"slab-{len(self.slabs):04}").exists():
            self.slabs.append(self._open_slab(len(self.slabs)))
        size = os.fstat(self._table).st_size - PAGE
        slots = min(size // ENTRY, len(self.slabs) * self.meta.slots_per_slab)
        return os.pread(self._table, max(0, slots) * ENTRY, PAGE)

    def _open_slab(self, number: int) -> int:
        path = self.folder / f"slab-{number:04}"
        flags = os.O_RDONLY if self.read_only else os.O_RDWR | os.O_CREAT
        if self.direct:
            try:
                return os.open(path, flags | os.O_DIRECT, 0o644)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct = False  # tmpfs, some network file systems
        return os.open(path, flags, 0o644)

    def grow(self) -> Outcome:
        """One more slab: OK, NO_SPACE or UNAVAILABLE."""
        size = self.meta.slots_per_slab * self.meta.stride
        try:
            if self._free_bytes() - size < self.floor:
                return Outcome.NO_SPACE
            slab = self._open_slab(len(self.slabs))
        except OSError as error:
            return outcome_of(error)
        try:
            os.posix_fallocate(slab, 0, size)
        except OSError as error:
            os.close(slab)
            with suppress(OSError):
                (self.folder / f"slab-{len(self.slabs):04}").unlink()
            return outcome_of(error)
        self.slabs.append(slab)
        return Outcome.OK

    def _free_bytes(self) -> int:
        free = os.statvfs(self.folder)
        return free.f_bavail * free.f_frsize

    def shrink(self, slabs: int) -> None:
        """Delete the last slabs until `slabs` are left."""
        while len(self.slabs) > slabs:
            os.close(self.slabs.pop())
            (self.folder / f"slab-{len(self.slabs):04}").unlink(missing_ok=True)

    # -- slots

    def _place(self, slot: int) -> tuple[int, int]:
        slab, index = divmod(slot, self.meta.slots_per_slab)
        return self.slabs[slab], index * self.meta.stride

    def read(self, slot: int, address: int, room: int) -> Outcome:
        """A slot's payload to memory; `room` bytes may be written there. MISS if the file is shorter than that."""
        try:
            return self._read(slot, address, room)
        except OSError as error:
            if self._buffered_from_now_on(error):
                return self.read(slot, address, room)
            return outcome_of(error)

    def _read(self, slot: int, address: int, room: int) -> Outcome:
        fd, at = self._place(slot)
        size = self.meta.block_bytes
        if not self.direct:
            return Outcome.OK if os.preadv(fd, [memory(address, size)], at) == size else Outcome.MISS
        if not (address % PAGE or room < self.meta.stride):
            return Outcome.OK if os.preadv(fd, [memory(address, self.meta.stride)], at) >= size else Outcome.MISS
        bounce = self._bounce_buffer()
        if os.preadv(fd, [bounce], at) < size:
            return Outcome.MISS
        ctypes.memmove(address, address_of(bounce), size)
        return Outcome.OK

    def _buffered_from_now_on(self, error: OSError) -> bool:
        """Whether it was direct I/O that was refused (some file systems open for it and then do not do it): from now on it goes through
        the page cache."""
        if error.errno != errno.EINVAL or not self.direct:
            return False
        for fd in self.slabs:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        self.direct = False
        return True

    def write(self, slot: int, address: int, room: int) -> Outcome:
        """Memory to a slot's payload; `room` bytes may be read there."""
        fd, at = self._place(slot)
        size, stride = self.meta.block_bytes, self.meta.stride
        try:
            if not self.direct:
                written, wanted = os.pwritev(fd, [memory(address, size)], at), size
            elif not (address % PAGE or room < stride):
                written, wanted = os.pwritev(fd, [memory(address, stride)], at), stride
            else:
                bounce = self._bounce_buffer()
                ctypes.memmove(address_of(bounce), address, size)
                written, wanted = os.pwritev(fd, [bounce], at), stride
        except OSError as error:
            if self._buffered_from_now_on(error):
                return self.write(slot, address, room)
            return outcome_of(error)
        return Outcome.OK if written == wanted else Outcome.NO_SPACE

    def _bounce_buffer(self) -> mmap.mmap:
        """Aligned memory of this thread's own, for callers whose memory is not."""
        if getattr(self._bounce, "map", None) is None:
            self._bounce.map = mmap.mmap(-1, self.meta.stride)
        found: mmap.mmap = self._bounce.map
        return found

    def seal(self, entries: list[tuple[int, bytes]], *, sync: bool) -> Outcome:
        """Write entries, once their payloads are where they belong; with `sync` both are on the device when it returns."""
        try:
            if not self.in_place():
                return Outcome.UNAVAILABLE
            if sync:
                for fd in {self._place(slot)[0] for slot, _ in entries}:
                    os.fdatasync(fd)
            for slot, entry in entries:
                if os.pwrite(self._table, entry, PAGE + ENTRY * slot) != ENTRY:
                    return Outcome.NO_SPACE
            if sync:
                os.fdatasync(self._table)
        except OSError as error:
            return outcome_of(error)
        return Outcome.OK

    def free(self, slots: list[int]) -> None:
        """Forget what is in slots, before anything else is written there."""
        with suppress(OSError):  # their payloads still have to match the old entries to be served
            for slot in slots:
                os.pwrite(self._table, FREE, PAGE + ENTRY * slot)

    def entry(self, slot: int) -> bytes:
        """A slot's entry as it is in the table now; empty if it cannot be read."""
        try:
            return os.pread(self._table, ENTRY, PAGE + ENTRY * slot)
        except OSError:
            return b""

    def in_place(self) -> bool:
        """Whether the table is still in its folder: what is written to deleted files is lost."""
        try:
            there = (self.folder / "table").stat()
        except OSError:
            return False
        return there.st_ino == os.fstat(self._table).st_ino

    def close(self) -> None:
        """Close everything."""
        for fd in (*self.slabs, self._table, self._lock):
            if fd >= 0:
                os.close(fd)
        self.slabs.clear()
        self._table = self._lock = -1


def memory(address: int, size: int) -> Any:
    """Memory as a buffer."""
    return (ctypes.c_char * size).from_address(address)


def address_of(buffer: Any) -> int:
    """Where a buffer lies."""
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


def outcome_of(error: OSError) -> Outcome:
    """The one place where errors of the file system become outcomes."""
    return Outcome.NO_SPACE if error.errno in FULL else Outcome.UNAVAILABLE
