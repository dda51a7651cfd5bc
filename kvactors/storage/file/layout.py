"""Files of a file store and the blocking operations on them, which belong in a thread.

    DIRECTORY / MODEL / NAMESPACE / rank-R-of-N / 16 hex digits of the identity /
        lock            held by the process that writes here, with its number in it
        table           the object in each slot (`table`)
        slab-0000       slots of whole pages, preallocated, one payload each
        table.damaged   a table whose first page was damaged, set aside when the store was opened

Files have mode 0600, folders that are made here 0700, and no symbolic link is followed from the
last folder on. Slabs are read and written around the page cache (O_DIRECT) where the file system
allows it, straight from and to memory that is aligned."""

from __future__ import annotations

import asyncio
import errno
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path

import msgspec

from kvactors.actor.log import get_logger
from kvactors.errors import StoreError
from kvactors.files import FOLDER_MODE, locked, open_folder, open_private, private_folder, read_all
from kvactors.native import SlabQueue, fcntl, register_at_fork, zero_range
from kvactors.storage.file.table import (
    CHUNK_ENTRIES,
    PAGE,
    Damaged,
    Meta,
    Scan,
    StoredSlot,
    meta_of,
    scan,
)
from kvactors.storage.messages import Outcome

log = get_logger()

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

NO_ACCESS = "give the process write access to the folder again"
SPARE_FOLDER = "exclude the folder from programs that clean up"
REMEDIES = {
    errno.ENOSPC: "free space on the disk, or set a smaller storage.capacity_bytes",
    errno.EDQUOT: "raise the quota, or set a smaller storage.capacity_bytes",
    errno.EFBIG: "raise the process's limit on the size of a file",
    errno.EACCES: NO_ACCESS,
    errno.EPERM: NO_ACCESS,
    errno.EROFS: NO_ACCESS,
}
"""Actions of an operator against errors of the file system."""

HELD_SLABS = 256
"""Slabs whose descriptors stay open. Other slabs are opened for each call, so that a large store
does not use up the process's descriptors."""


LOCK_ATTEMPTS = 100
"""Times that the file is opened again because another one has taken its place."""


class SlabFiles:
    """folder: of the store. meta: its identity and geometry. floor: bytes of the file system left
    free."""

    def __init__(self, folder: Path, meta: Meta, floor: int = 0) -> None:
        self.folder = folder
        self.meta = meta
        self.floor = floor
        self.direct = True
        self.slabs: list[int] = []  # file descriptors; -1 beyond the first HELD_SLABS
        self.trouble = ""  # the last thing that the file system refused, and the remedy
        self.lost = False  # the table is not in its folder any more
        self.loop: asyncio.AbstractEventLoop | None = None  # of the store
        self._slots_per_slab = meta.slots_per_slab  # of a new store on a disk with space
        self._folder = self._table = self._lock = -1
        OPEN.add(self)

    # -- opening

    def open(self) -> None:
        """Open or create the files. Raises StoreError if another process writes here, or the folder
        holds another store."""
        try:
            private_folder(self.folder)
            self._folder = open_folder(self.folder)
            os.fchmod(self._folder, FOLDER_MODE)
            self._unlock_abandoned()
            self._lock = self._take_lock()
            self._open_table()
        except BaseException as error:
            self.close()
            if isinstance(error, StoreError) or not isinstance(error, OSError):
                raise
            raise StoreError(f"{self.folder}: {error}") from error

    def _unlock_abandoned(self) -> None:
        """A store of this process whose loop was closed before the store will not write any more,
        and is never closed: it may not be collected either."""
        for files in list(OPEN):
            if files.folder == self.folder and files.loop is not None and files.loop.is_closed():
                files.unlock()

    def _take_lock(self) -> int:
        """The descriptor of the lock, with this process's number in it. StoreError if another
        process has it."""
        for _ in range(LOCK_ATTEMPTS):
            lock = self._open("lock", os.O_RDWR | os.O_CREAT)
            try:
                if not locked(lock):
                    holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip() or "?"
                    raise StoreError(
                        f"{self.folder} is in use by process {holder}: use another folder"
                    )
                there = self._state("lock")
                if there is not None and there.st_ino == os.fstat(lock).st_ino:
                    os.ftruncate(lock, 0)
                    os.pwrite(lock, str(os.getpid()).encode(), 0)
                    return lock
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)  # 'kvactors store prune' has removed it since it was opened
        raise StoreError(
            f"{self.folder / 'lock'}: another file took its place {LOCK_ATTEMPTS} times while it "
            "was opened"
        )

    def _open(self, name: str, flags: int) -> int:
        return open_private(name, flags, dir_fd=self._folder)

    def _state(self, name: str) -> os.stat_result | None:
        """Of a file in the folder where it is expected now, symbolic links not followed; None if
        there is none."""
        try:
            return (self.folder / name).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _open_table(self) -> None:
        path = self.folder / "table"
        self._table = self._open("table", os.O_RDWR | os.O_CREAT)
        if not os.fstat(self._table).st_size:
            self._make_table()
        try:
            there = meta_of(os.pread(self._table, PAGE, 0), str(path))
        except Damaged as error:
            self._set_aside(str(error))
            there = self.meta  # as it was created again
        if (there.digest, there.block_bytes) != (self.meta.digest, self.meta.block_bytes):
            raise StoreError(
                f"{path} belongs to another store: it is of {there.identity}, expected "
                f"{self.meta.identity}"
            )
        self.meta = there  # slabs and entries keep the sizes they were made with
        while self._state(f"slab-{len(self.slabs):04}") is not None:
            self._add_slab(self._open_slab(len(self.slabs)))

    def scan(self) -> Scan:
        """The objects in the table. OSError."""
        meta, found, torn = self.meta, list[StoredSlot](), 0
        slots = len(self.slabs) * meta.slots_per_slab
        for first in range(0, slots, CHUNK_ENTRIES):
            raw = self.entries(first, min(CHUNK_ENTRIES, slots - first))
            part = scan(raw, meta, first)
            found += part.found
            torn += part.torn
        return Scan(sorted(found), torn)

    def _make_table(self) -> None:
        self._write_page(self.meta)
        os.fsync(self._folder)

    def _write_page(self, meta: Meta) -> None:
        if os.pwrite(self._table, meta.page(), 0) != PAGE:
            raise OSError(
                errno.ENOSPC, "the first page was not written whole", str(self.folder / "table")
            )
        os.fdatasync(self._table)
        self.meta = meta

    def _set_aside(self, reason: str) -> None:
        log.warning(
            "store table damaged, contents given up",
            folder=str(self.folder),
            reason=reason,
            kept="table.damaged",
        )
        os.rename("table", "table.damaged", src_dir_fd=self._folder, dst_dir_fd=self._folder)
        for slab in self.folder.glob("slab-*"):
            os.unlink(slab.name, dir_fd=self._folder)
        os.close(self._table)
        self._table = -1
        self._table = self._open("table", os.O_RDWR | os.O_CREAT | os.O_EXCL)
        self._make_table()

    def _add_slab(self, fd: int) -> None:
        if len(self.slabs) >= HELD_SLABS:
            os.close(fd)
            fd = -1
        self.slabs.append(fd)

    def _open_slab(self, number: int, *, create: bool = True) -> int:
        name = f"slab-{number:04}"
        flags = os.O_RDWR | (os.O_CREAT if create else 0)
        if self.direct:
            try:
                return self._open(name, flags | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL or "regular" in str(error):
                    raise
                self.direct = False  # tmpfs, some network file systems
        return self._open(name, flags)

    def grow(self) -> Outcome:
        """One more slab: OK, NO_SPACE or UNAVAILABLE."""
        number = len(self.slabs)
        try:
            if not number:
                self._fit_slabs()
            meta = self.meta
            size = meta.slots_per_slab * meta.stride
            if self.free_bytes() - size < self.floor:
                self.trouble = (
                    f"{self.folder}: no space for another slab beside storage.free_space_floor "
                    f"({self.floor:,} bytes): {REMEDIES[errno.ENOSPC]} or "
                    "storage.free_space_floor"
                )
                return Outcome.NO_SPACE
            entries = meta.slots_per_slab * meta.entry_bytes
            os.posix_fallocate(self._table, PAGE + number * entries, entries)
            slab = self._open_slab(number)
        except OSError as error:
            return self.failed(error)
        try:
            os.posix_fallocate(slab, 0, size)
        except OSError as error:
            os.close(slab)
            with suppress(OSError):
                os.unlink(f"slab-{number:04}", dir_fd=self._folder)
            return self.failed(error)
        self._add_slab(slab)
        return Outcome.OK

    def _fit_slabs(self) -> None:
        """Before the first slab: a disk with less space gets smaller ones."""
        space = int(0.8 * self.free_bytes()) - self.floor
        slots = max(1, min(self._slots_per_slab, space // self.meta.stride))
        if slots != self.meta.slots_per_slab:
            self._write_page(msgspec.structs.replace(self.meta, slots_per_slab=slots))

    def failed(self, error: OSError) -> Outcome:
        """The one place where errors of the file system become outcomes."""
        remedy = REMEDIES.get(error.errno or 0, "")
        self.trouble = f"{self.folder}: {error}{remedy and f': {remedy}'}"
        return Outcome.NO_SPACE if error.errno in DISK_FULL else Outcome.UNAVAILABLE

    def free_bytes(self) -> int:
        """Of the file system, for this user."""
        free = os.fstatvfs(self._folder)
        return free.f_bavail * free.f_frsize

    def own_bytes(self) -> int:
        slabs = (self.folder / f"slab-{number:04}" for number in range(len(self.slabs)))
        return sum(slab.lstat().st_blocks * 512 for slab in slabs)

    def shrink(self, slabs: int) -> None:
        while len(self.slabs) > slabs:
            fd = self.slabs.pop()
            if fd >= 0:
                os.close(fd)
            with suppress(FileNotFoundError):
                os.unlink(f"slab-{len(self.slabs):04}", dir_fd=self._folder)

    def advance(self, generation: int) -> None:
        """Make `generation` the store's, durably: entries of earlier ones are free from here on.
        OSError if the disk refuses."""
        self._write_page(msgspec.structs.replace(self.meta, generation=generation))
        there = self._state("table")
        if there is not None and there.st_ino != os.fstat(self._table).st_ino:
            raise OSError(
                errno.ESTALE,
                "another table is in the place of this one",
                str(self.folder / "table"),
            )

    # -- slots

    @contextmanager
    def _place(self, slot: int) -> Iterator[tuple[int, int]]:
        """A descriptor of a slot's slab, and where the slot begins there. OSError."""
        slab, index = divmod(slot, self.meta.slots_per_slab)
        held = self.slabs[slab]
        fd = held if held >= 0 else self._open_slab(slab, create=False)
        try:
            yield fd, index * self.meta.stride
        finally:
            if held < 0:
                os.close(fd)

    def buffered_from_now_on(self) -> None:
        """Direct I/O was refused by a call that had begun with it (some file systems open for it
        only): slabs go through the page cache from now on."""
        for fd in self.slabs[:HELD_SLABS]:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        self.direct = False

    def bind(self, queue: SlabQueue) -> None:
        meta = self.meta
        queue.bind(
            self._folder,
            self._table,
            os.fsencode(self.folder / "table"),
            os.fstat(self._table).st_ino,
            os.O_RDWR,
            meta.block_bytes,
            meta.stride,
            meta.entry_bytes,
            meta.slots_per_slab,
        )

    def entries(self, first: int, count: int) -> bytes:
        """Entries as they are in the table now, fewer if the table is shorter. Raises OSError."""
        size = self.meta.entry_bytes
        return read_all(self._table, count * size, PAGE + first * size)

    def entry(self, slot: int) -> bytes:
        """A slot's entry as it is in the table now, shorter if the table is. Raises OSError."""
        return os.pread(self._table, self.meta.entry_bytes, PAGE + self.meta.entry_bytes * slot)

    def sync_table(self) -> None:
        if not self.lost:
            os.fdatasync(self._table)

    def wipe(self, slots: Sequence[int]) -> None:
        """Overwrite the payloads and the entries of slots with zeros. OSError."""
        size, stride, per_slab = self.meta.entry_bytes, self.meta.stride, self.meta.slots_per_slab
        # Neighbours in one slab are overwritten together.
        runs = groupby(enumerate(sorted(slots)), lambda one: (one[1] - one[0], one[1] // per_slab))
        for _, run in runs:
            (_, slot), *more = run
            with self._place(slot) as (fd, at):
                zero_range(fd, at, (1 + len(more)) * stride)
            os.pwrite(self._table, bytes((1 + len(more)) * size), PAGE + slot * size)

    def wiped(self) -> None:
        """Wait until the device has the zeros of `wipe`, and delete a table that was set aside.
        OSError."""
        for slab in range(len(self.slabs)):
            with self._place(slab * self.meta.slots_per_slab) as (fd, _):
                os.fsync(fd)
        self.sync_table()
        with suppress(FileNotFoundError):
            os.unlink("table.damaged", dir_fd=self._folder)

    def lose(self) -> None:
        """The files were found deleted or moved: further writes to them are lost."""
        self.lost = True
        self.trouble = (
            f"{self.folder}: the table was deleted or moved by another program, and the next write "
            f"makes it anew: {SPARE_FOLDER}"
        )

    def remake(self, generation: int) -> None:
        """Make the files anew, without objects, in this generation. No other call may be running.
        StoreError if that is not possible."""
        self.close()
        self.meta = msgspec.structs.replace(self.meta, generation=generation)
        try:
            self.open()
            if os.fstat(self._table).st_size > PAGE:  # of another program
                self.advance(max(generation, self.meta.generation) + 1)
        except OSError as error:
            self.close()
            self.failed(error)
            raise error if isinstance(error, StoreError) else StoreError(self.trouble) from error
        self.lost = False

    # -- the end

    def unlock(self) -> None:
        """Let other processes write here, also if a forked child has the lock's descriptor
        still."""
        if self._lock >= 0:
            with suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = -1

    def close(self) -> None:
        self.unlock()
        self.drop()

    def drop(self) -> None:
        """Close every descriptor and leave the lock as it is: in a forked child it is the
        parent's."""
        for fd in (*self.slabs, self._table, self._lock, self._folder):
            if fd >= 0:
                os.close(fd)
        self.slabs.clear()
        self._folder = self._table = self._lock = -1


OPEN: weakref.WeakSet[SlabFiles] = weakref.WeakSet()
"""Open files of this process. A forked child closes its copies of their descriptors, or the lock
would outlive the parent in it."""


def after_fork() -> None:
    """In a child: the files are the parent's."""
    for files in list(OPEN):
        with suppress(OSError):
            files.drop()


register_at_fork(after_in_child=after_fork)
