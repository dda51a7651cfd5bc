"""What the file stores under a folder hold, seen from outside; nothing is changed, and a process that writes there is not disturbed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

from kvactors.errors import StoreError
from kvactors.storage.backends.slab_table import PAGE, Found, Meta, meta_of, scan


class Inspection(msgspec.Struct, frozen=True):
    """One store. path: relative to the folder looked at. bad: objects (hex names) whose payload is not what it should be; verified: how many
    were looked at. torn: slots whose entries make no sense."""

    path: str
    fingerprint: str
    block_bytes: int
    objects: int
    bytes: int
    slots: int
    torn: int
    verified: int
    bad: list[str]


def inspect(folder: str | Path, *, verify: bool = False) -> list[Inspection]:
    """Every store under a folder. verify: read and check every object. StoreError if there is none, or one cannot be read."""
    tables = sorted(Path(folder).rglob("table"))
    found = [look(Path(folder), path, verify=verify) for path in tables if path.is_file()]
    if not found:
        raise StoreError(f"{folder}: no file store here")
    return found


def look(root: Path, table: Path, *, verify: bool) -> Inspection:
    """One store."""
    try:
        raw = table.read_bytes()
        meta = meta_of(raw[:PAGE], str(table))
        objects, torn = scan(raw[PAGE:], bytes.fromhex(meta.fingerprint), meta.block_bytes)
        slabs = sorted(table.parent.glob("slab-*"))
        bad = [one.key.hex() for one in objects if not good(table.parent, meta, one)] if verify else []
    except OSError as error:
        raise StoreError(f"{table}: {error}") from error
    return Inspection(
        str(table.parent.relative_to(root)), meta.fingerprint, meta.block_bytes, len(objects),
        len(objects) * meta.block_bytes, len(slabs) * meta.slots_per_slab, torn, len(objects) if verify else 0, bad,
    )  # fmt: skip


def good(folder: Path, meta: Meta, one: Found) -> bool:
    """Whether an object's payload has its checksum."""
    slab, index = divmod(one.slot, meta.slots_per_slab)
    try:
        with (folder / f"slab-{slab:04}").open("rb") as file:
            file.seek(index * meta.stride)
            payload = file.read(meta.block_bytes)
    except FileNotFoundError:
        return False
    return len(payload) == meta.block_bytes and xxhash.xxh3_64_intdigest(payload) == one.checksum


def lines(found: list[Inspection]) -> Iterator[str]:
    """For people."""
    for one in found:
        yield f"{one.path}"
        yield f"  fingerprint {one.fingerprint[:16]}, blocks of {one.block_bytes:,} bytes"
        yield f"  {one.objects:,} objects, {one.bytes:,} bytes; {one.slots - one.objects:,} of {one.slots:,} slots free; {one.torn} torn"
        if one.verified:
            yield f"  {one.verified:,} verified, {len(one.bad)} bad"
        yield from (f"    bad: {name}" for name in one.bad)
