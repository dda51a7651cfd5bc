"""Removing file stores that no process needs any more: of other layouts, of other format versions,
and of a namespace."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from kvactors.errors import StoreError
from kvactors.files import open_folder, open_private
from kvactors.linux import fcntl
from kvactors.storage.inspect import Inspection, inspect


class Pruned(msgspec.Struct, frozen=True):
    """A store that is not needed.

    Attributes:
        removed: it is gone (with a dry run: it would be).
        refused: why it is not.
    """

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
        fd = open_folder(folder)
        try:
            lock = open_private("lock", os.O_RDWR | os.O_CREAT, dir_fd=fd)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for name in sorted(path.name for path in folder.iterdir()):
                    if name.startswith("slab-") or name in ("table", "table.damaged"):
                        os.unlink(name, dir_fd=fd)
                os.unlink("lock", dir_fd=fd)
            finally:
                os.close(lock)
        finally:
            os.close(fd)
    except BlockingIOError:
        return Pruned(one.path, why, one.slab_bytes, False, "in use by a process")
    except OSError as error:
        return Pruned(one.path, why, one.slab_bytes, False, str(error))
    with suppress(OSError):  # a folder with anything else in it stays
        while folder not in (root, folder.parent):
            folder.rmdir()
            folder = folder.parent
    return Pruned(one.path, why, one.slab_bytes, True)


def lines(found: list[Pruned], *, dry_run: bool) -> Iterator[str]:
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
