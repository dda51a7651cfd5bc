"""Inspection of the file stores under a folder, and removal of those that no process needs any
more. An inspection changes no file and does not disturb a process that writes there."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from kvactors.errors import StoreError
from kvactors.files import open_folder, open_private, read_all
from kvactors.native import fcntl
from kvactors.storage.file.table import (
    PAGE,
    VERSION,
    Damaged,
    Meta,
    StoredSlot,
    checksum_of,
    mark_of,
    meta_of,
    scan,
    version_of,
)

STORE_FOLDER = re.compile("[0-9a-f]{16}")
"""Names of the folders of stores: the beginning of the digest of their identity."""


class Inspection(msgspec.Struct, frozen=True):
    """One store."""

    path: str
    state: str  # ok, damaged (the first page of the table), or other version
    version: int
    model: str = ""
    namespace: str = ""
    rank: int = 0
    ranks: int = 1
    digest: str = ""  # of the identity
    generation: int = 0
    block_bytes: int = 0
    objects: int = 0
    bytes: int = 0  # of the objects
    slots: int = 0
    slab_bytes: int = 0  # that the store occupies
    torn: int = 0  # slots whose entries make no sense
    opened_at: float = 0.0  # when a process last opened it to write
    in_use: bool = False
    verified: int = 0
    bad: list[str] = []  # hex keys of objects whose payload does not match its checksum
    left: int = 0  # objects that were removed before they were checked


def inspect(folder: str | Path, *, verify: bool = False) -> list[Inspection]:
    """Every store under a folder, no symbolic link followed. verify: read and check every object.
    StoreError if there is none, or one cannot be read."""
    tables = sorted(
        path for path in Path(folder).rglob("table") if path.is_file() and not path.is_symlink()
    )
    looked = [look(Path(folder), table, verify=verify) for table in tables]
    found = [one for one in looked if one is not None]
    if not found:
        raise StoreError(f"{folder}: no file store here")
    return found


def look(root: Path, table: Path, *, verify: bool) -> Inspection | None:
    """A store, by its table. None for a file that is not one: another program may have a file of
    this name, and 'prune' must not remove it. One whose first page is damaged is, if its folder has
    the name of a store's."""
    folder = table.parent
    path = str(folder.relative_to(root))
    try:
        with table.open("rb") as file:
            page = file.read(PAGE)
        if not of_a_store(page, folder):  # the files beside it are another program's too
            return None
        slabs = sorted(folder.glob("slab-*"))
        occupied = sum(slab.lstat().st_blocks * 512 for slab in slabs)
        about: dict[str, Any] = {"slab_bytes": occupied, "in_use": in_use(folder)}
        with suppress(FileNotFoundError):
            about["opened_at"] = (folder / "lock").lstat().st_mtime
        with table.open("rb") as file:
            page = file.read(PAGE)
            try:
                version = version_of(page)
                if version != VERSION:
                    return Inspection(path, "other version", version, **about)
                meta = meta_of(page, str(table))
            except Damaged:
                return Inspection(path, "damaged", 0, **about)
            found, torn = scan(file.read(), meta)
        differing = list(differing_from(folder, meta, found)) if verify else []
        bad = [one.key.hex() for one in differing if still_there(table, meta, one)]
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"{table}: {error}") from error
    names = ("model", "namespace", "rank", "ranks", "digest", "generation", "block_bytes")
    return Inspection(
        path,
        "ok",
        version,
        **{name: getattr(meta, name) for name in names},
        objects=len(found),
        bytes=len(found) * meta.block_bytes,
        slots=len(slabs) * meta.slots_per_slab,
        torn=torn,
        verified=len(found) if verify else 0,
        bad=bad,
        left=len(differing) - len(bad),
        **about,
    )


def of_a_store(page: bytes, folder: Path) -> bool:
    """Whether the first page of a table is a store's, perhaps a damaged one."""
    try:
        version_of(page)
    except Damaged:
        return STORE_FOLDER.fullmatch(folder.resolve().name) is not None
    return True


def in_use(folder: Path) -> bool:
    """Whether a process has the store open to write. OSError."""
    try:
        fd = os.open(folder / "lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def differing_from(folder: Path, meta: Meta, found: list[StoredSlot]) -> Iterator[StoredSlot]:
    """The objects whose payloads do not have their checksums. OSError."""
    by_slab = groupby(
        sorted(found, key=lambda one: one.slot), lambda one: one.slot // meta.slots_per_slab
    )
    for slab, objects in by_slab:
        try:
            fd = open_private(folder / f"slab-{slab:04}", os.O_RDONLY)
            with os.fdopen(fd, "rb", buffering=0) as file:
                # The check is one of the disk, not of pages that an earlier reader left in memory.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                for one in objects:
                    at = one.slot % meta.slots_per_slab * meta.stride
                    payload = read_all(file.fileno(), meta.block_bytes, at)
                    whole = len(payload) == meta.block_bytes
                    if not whole or xxhash.xxh3_64_intdigest(payload) != checksum_of(one.mark):
                        yield one
        except FileNotFoundError:
            yield from objects


def still_there(table: Path, meta: Meta, one: StoredSlot) -> bool:
    """Whether the table has an entry still: the process that writes there may have removed the
    object, or cleared the store, since the table was read, and another payload is in its slot then.
    An entry is gone, or its generation is, before anything else is written to its slot."""
    try:
        with table.open("rb") as file:
            if meta_of(file.read(PAGE), str(table)).generation != meta.generation:
                return False
            file.seek(PAGE + meta.entry_bytes * one.slot)
            return mark_of(file.read(meta.entry_bytes)) == one.mark
    except FileNotFoundError:
        return False


def inspection_lines(found: list[Inspection]) -> Iterator[str]:
    """For people."""
    for one in found:
        yield f"{one.path}{', in use' if one.in_use else ''}"
        if one.state != "ok":
            what = (
                f"format version {one.version}, which this version cannot read"
                if one.version
                else "table damaged"
            )
            yield f"  {what}; {one.slab_bytes:,} bytes"
            continue
        yield f"  model {one.model!r}, namespace {one.namespace!r}, rank {one.rank} of {one.ranks}"
        yield (
            f"  identity {one.digest[:16]}, blocks of {one.block_bytes:,} bytes, generation "
            f"{one.generation}"
        )
        slots = (
            f"; {one.slots - one.objects:,} of {one.slots:,} slots free; {one.torn} torn; "
            f"{one.slab_bytes:,} bytes occupied"
        )
        yield f"  {one.objects:,} objects, {one.bytes:,} bytes{slots if one.slots else ''}"
        if one.verified:
            whole = one.verified - len(one.bad) - one.left
            yield f"  {one.verified:,} checked: {whole:,} good, {len(one.bad):,} bad"
        if one.left:
            yield f"  {one.left:,} removed by the process that writes there, during the check"
        if one.verified and one.torn:
            yield "  torn entries were damaged, or not written to their end: their objects are lost"
        yield from (f"    bad: {key}" for key in one.bad)


# -- removal


class Pruned(msgspec.Struct, frozen=True):
    """A store that is not needed."""

    path: str
    why: str
    bytes: int
    removed: bool
    refused: str = ""


def prune(
    folder: str | Path, *, keep: int = 1, namespace: str | None = None, dry_run: bool = False
) -> list[Pruned]:
    """Remove stores under a folder that are not needed.

    Those are, of each model, namespace and rank, all but the `keep` that were opened last, and in
    addition those with another format version and those whose table is damaged. With a namespace
    they are all of its stores, and no others. One that a process has open to write is refused.
    StoreError if there is no store at all, or none of the namespace.
    """
    if keep < 0:
        raise StoreError(f"keep must be at least 0, not {keep}")
    found = inspect(folder)
    chosen = unneeded(found, keep) if namespace is None else of_namespace(found, namespace)
    return [remove(Path(folder), one, why, dry_run=dry_run) for one, why in chosen]


def of_namespace(found: list[Inspection], namespace: str) -> list[tuple[Inspection, str]]:
    """Those of a namespace, and why they are removed."""
    chosen = [one for one in found if one.state == "ok" and one.namespace == namespace]
    if not chosen:
        names = sorted({one.namespace for one in found if one.state == "ok"})
        raise StoreError(f"there is no store of namespace {namespace!r}, only of {names}")
    return [(one, f"namespace {namespace}") for one in chosen]


def unneeded(found: list[Inspection], keep: int) -> Iterator[tuple[Inspection, str]]:
    """Those to remove, and why."""
    groups: dict[tuple[str, str, int, int], list[Inspection]] = defaultdict(list)
    for one in found:
        if one.state == "ok":
            groups[(one.model, one.namespace, one.rank, one.ranks)].append(one)
        else:
            yield one, f"format version {one.version}" if one.version else "damaged"
    for group in groups.values():
        group.sort(key=lambda one: one.opened_at, reverse=True)
        yield from (
            (one, "another layout was used later" if keep else "all") for one in group[keep:]
        )


def remove(root: Path, one: Inspection, why: str, *, dry_run: bool) -> Pruned:
    """One store, under its lock."""
    folder = root / one.path
    if one.in_use:
        return Pruned(one.path, why, one.slab_bytes, False, "in use by a process")
    if dry_run:
        return Pruned(one.path, why, one.slab_bytes, True)
    try:
        with ExitStack() as opened:
            fd = open_folder(folder)
            opened.callback(os.close, fd)
            lock = open_private("lock", os.O_RDWR | os.O_CREAT, dir_fd=fd)
            opened.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name in sorted(path.name for path in folder.iterdir()):
                if name.startswith("slab-") or name in ("table", "table.damaged"):
                    os.unlink(name, dir_fd=fd)
            os.unlink("lock", dir_fd=fd)
    except BlockingIOError:
        return Pruned(one.path, why, one.slab_bytes, False, "in use by a process")
    except OSError as error:
        return Pruned(one.path, why, one.slab_bytes, False, str(error))
    with suppress(OSError):  # a folder with anything else in it stays
        while folder not in (root, folder.parent):
            folder.rmdir()
            folder = folder.parent
    return Pruned(one.path, why, one.slab_bytes, True)


def prune_lines(found: list[Pruned], *, dry_run: bool) -> Iterator[str]:
    """For people."""
    for one in found:
        done = (
            f"refused: {one.refused}"
            if one.refused
            else "would be removed"
            if dry_run
            else "removed"
        )
        yield f"{one.path}: {done} ({one.why}, {one.bytes:,} bytes)"
    freed = sum(one.bytes for one in found if one.removed)
    yield f"{freed:,} bytes {'would be freed' if dry_run else 'freed'}"
