"""The table of a file store, format version 2: a first page, then one entry a slot. Start-up is one
sequential read of this file.

First page, 4096 bytes: JSON (`Meta`) padded with newlines to 4088 bytes, and the XXH3-64 of the
4088 bytes as u64. Every later version keeps this envelope, `magic` and `version`. Fields that a
reader does not have are skipped.

Entry of slot i, at 4096 + entry_bytes * i, little-endian:

    0    magic "KVACTORS"
    8    format version u32 = 2
    12   length of the metadata area that is used, u32
    16   digest of the store's identity, 32 bytes (model, namespace, rank, ranks, layout)
    48   key, 32 bytes
    80   length of the payload u64
    88   XXH3-64 of the payload u64
    96   sequence number of the write u64
    104  generation of the store u64: an entry of another generation than the first page's is free
    112  metadata area: fields, each tag u16, length u16, bytes, and zeros behind the last
    -8   XXH3-64 of everything before it u64

A reader skips fields whose tag it does not have. Tag 1: time of the write, u64 microseconds since
1970. Tags 2 to 6 are the inputs of the key (`slab_lineage`). An entry of zeros is a free slot.
One whose checksum is wrong was torn while it was written, and is free as well. `entry_bytes` is in
the first page: a larger number gives a store more space for metadata.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from kvactors.errors import StoreError

PAGE = 4096
BODY = PAGE - 8
VERSION = 2
NAME = "KVACTORS slabs"
MAGIC = b"KVACTORS"
HEAD = struct.Struct("<8sII32s32sQQQQ")
FIELD = struct.Struct("<HH")
KEY, SEQUENCE = slice(48, 80), slice(96, 104)
"""Places in an entry."""

ENTRY_BYTES = 192
"""Bytes of an entry of a new store without lineages, of which 72 bytes are metadata."""

LEAST_ENTRY, MOST_ENTRY = 128, 65_536
MOST_SLOTS = 1 << 22
"""Slots of a slab at most."""

MOST_BLOCK = 1 << 40
MOST_SEQUENCE = 1 << 63
"""Sequence numbers are below it: an entry without a successor would end all writes."""
SLOTS = "slots"
"""How a slab is laid out: payload i at i * stride. The only arrangement of this version."""

WRITTEN_AT = 1
"""Tag of the metadata field with the time of the write."""

PARENT = 2
"""Tag of the metadata field with the hash of the parent block, see `slab_lineage`. No object under
a salt has it."""

SALT = 7
"""Tag of the metadata field with the number of the object's salt (`quotas.salt_id`), left out
beside PARENT."""


class Meta(msgspec.Struct, frozen=True):
    """Parameters of a store.

    Attributes:
        digest: of the identity, hex.
        model, namespace, rank, ranks: the names behind it.
    """

    digest: str
    block_bytes: int
    stride: int
    slots_per_slab: int
    model: str = ""
    namespace: str = ""
    rank: int = 0
    ranks: int = 1
    generation: int = 0
    entry_bytes: int = ENTRY_BYTES
    slab_layout: str = SLOTS
    magic: str = NAME
    version: int = VERSION

    def page(self) -> bytes:
        """The file's first page."""
        body = msgspec.json.encode(self).ljust(BODY, b"\n")
        if len(body) > BODY:
            raise StoreError(
                f"the names of the store are too long for the first page of its table: {len(body)} "
                "bytes"
            )
        return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")

    @property
    def identity(self) -> str:
        """For error messages."""
        names = (
            f"model {self.model!r}, namespace {self.namespace!r}, rank {self.rank} of {self.ranks}"
        )
        return f"{names}, blocks of {self.block_bytes} bytes, identity {self.digest[:16]}"


class Damaged(StoreError):
    """The first page of a table is damaged: its store's contents cannot be found any more."""


class _Stamp(msgspec.Struct, frozen=True):
    magic: str
    version: int


def version_of(page: bytes) -> int:
    """The format version that a first page names. Damaged if the page is none."""
    if (
        len(page) == PAGE
        and xxhash.xxh3_64_intdigest(page[:BODY]).to_bytes(8, "little") == page[BODY:]
    ):
        least = 2
    elif len(page) == PAGE and page[BODY:] == b"\n" * 8:
        least = 1  # version 1 had no checksum: the page was JSON and newlines
    else:
        raise Damaged("its checksum is wrong")
    try:
        stamp = msgspec.json.decode(page[: BODY if least == 2 else PAGE], type=_Stamp)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Damaged(str(error)) from error
    if stamp.magic != NAME or (stamp.version == 1) != (least == 1):
        raise Damaged(f"it names {stamp.magic!r} version {stamp.version}")
    return stamp.version


def meta_of(page: bytes, where: str) -> Meta:
    """The first page read. StoreError for another version, Damaged for what is no first page or has
    values out of range."""
    version = version_of(page)
    if version != VERSION:
        raise StoreError(
            f"{where} has format version {version}, this is version {VERSION}: use another folder, "
            "or remove it with "
            "'kvactors store prune'"
        )
    try:
        meta = msgspec.json.decode(page[:BODY], type=Meta)
        digest = bytes.fromhex(meta.digest)
    except (msgspec.DecodeError, ValueError) as error:
        raise Damaged(str(error)) from error
    ranges = (
        ("digest", len(digest), 32, 32),
        ("block_bytes", meta.block_bytes, 1, MOST_BLOCK),
        ("stride", meta.stride, meta.block_bytes, MOST_BLOCK + PAGE),
        ("stride % 4096", meta.stride % PAGE, 0, 0),
        ("slots_per_slab", meta.slots_per_slab, 1, MOST_SLOTS),
        ("entry_bytes", meta.entry_bytes, LEAST_ENTRY, MOST_ENTRY),
        ("entry_bytes % 8", meta.entry_bytes % 8, 0, 0),
        ("generation", meta.generation, 0, (1 << 63) - 1),
    )
    for name, value, least, most in ranges:
        if not least <= value <= most:
            raise Damaged(f"{name} is {value}, which is not in [{least}, {most}]")
    if meta.slab_layout != SLOTS:
        raise StoreError(
            f"{where} has slabs of layout {meta.slab_layout!r}, which this version cannot read"
        )
    return meta


class Found(NamedTuple):
    """An entry of the table.

    Attributes:
        checksum: of the payload.
        metadata: by tag.
        mark: distinguishes it from every other entry.
    """

    slot: int
    key: bytes
    sequence: int
    checksum: int
    raw: bytes

    @property
    def mark(self) -> bytes:
        """See `mark_of`."""
        return mark_of(self.raw)

    @property
    def metadata(self) -> dict[int, bytes]:
        """By tag, unassigned tags included."""
        return fields_of(self.raw)


class Scan(NamedTuple):
    """Good entries, oldest first.

    Attributes:
        torn: slots that hold something that is no entry.
        stale: entries of other generations.
    """

    found: list[Found]
    torn: int
    stale: int


def entry_of(
    meta: Meta,
    key: bytes,
    checksum: int,
    sequence: int,
    generation: int,
    metadata: Mapping[int, bytes] | None = None,
) -> bytes:
    """A slot's entry. Fields of metadata that do not fit are left out, the last ones first."""
    blank = blank_entry(meta, key, sequence, generation, metadata)
    body = blank[:88] + checksum.to_bytes(8, "little") + blank[96:-8]
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


def blank_entry(
    meta: Meta,
    key: bytes,
    sequence: int,
    generation: int,
    metadata: Mapping[int, bytes] | None = None,
) -> bytes:
    """A slot's entry whose two checksums are zero: they are filled in when the payload is
    written."""
    area, space = b"", meta.entry_bytes - HEAD.size - 8
    for tag, value in (metadata or {}).items():
        field = FIELD.pack(tag, len(value)) + value
        if len(area) + len(field) <= space:
            area += field
    head = HEAD.pack(
        MAGIC,
        VERSION,
        len(area),
        bytes.fromhex(meta.digest),
        key,
        meta.block_bytes,
        0,
        sequence,
        generation,
    )
    return (head + area).ljust(meta.entry_bytes, b"\0")


def blank_entries(
    meta: Meta, keys: Sequence[bytes], sequence: int, generation: int, metadata: Mapping[int, bytes]
) -> list[bytes]:
    """`blank_entry` of several keys with the same metadata and consecutive sequence numbers."""
    one = blank_entry(meta, bytes(KEY.stop - KEY.start), 0, generation, metadata)
    before, between, behind = one[: KEY.start], one[KEY.stop : SEQUENCE.start], one[SEQUENCE.stop :]
    return [
        b"".join((before, key, between, (sequence + n).to_bytes(8, "little"), behind))
        for n, key in enumerate(keys)
    ]


def fields_of(entry: bytes) -> dict[int, bytes]:
    """The metadata of an entry, by tag. A field that is cut short ends the list."""
    used = min(int.from_bytes(entry[12:16], "little"), len(entry) - HEAD.size - 8)
    area, at, found = entry[HEAD.size : HEAD.size + used], 0, {}
    while at + FIELD.size <= len(area):
        tag, size = FIELD.unpack_from(area, at)
        at += FIELD.size
        if at + size > len(area):
            break
        found[tag] = area[at : at + size]
        at += size
    return found


def salt_in(entry: bytes) -> int | None:
    """The number of the salt in an entry, 0 for one with the inputs of the key. None if it has
    none that can be read."""
    fields = fields_of(entry)
    value = bytes(8) if PARENT in fields else fields.get(SALT, b"")
    return int.from_bytes(value, "little") if len(value) == 8 else None


def mark_of(entry: bytes) -> bytes:
    """The part of an entry that a store keeps in memory to recognize it: the checksums of the
    payload and of the entry."""
    return entry[88:96] + entry[-8:]


def checksum_of(mark: bytes) -> int:
    """The payload's, of a mark."""
    return int.from_bytes(mark[:8], "little")


def is_marked(entry: bytes, mark: bytes) -> bool:
    """Whether an entry as it was read is the one with this mark, and whole."""
    return mark_of(entry) == mark and is_whole(entry)


def is_whole(entry: bytes) -> bool:
    """Whether an entry has its checksum."""
    return xxhash.xxh3_64_intdigest(entry[:-8]).to_bytes(8, "little") == entry[-8:]


def entry_in(raw: bytes, slot: int, meta: Meta) -> Found | None:
    """An entry as it was read. None for one that is torn, of another store, or of another
    generation."""
    size = meta.entry_bytes
    if len(raw) != size or not is_whole(raw):
        return None
    magic, version, area, owner, key, length, checksum, sequence, generation = HEAD.unpack_from(raw)
    good = (magic, version, owner.hex(), length) == (MAGIC, VERSION, meta.digest, meta.block_bytes)
    good &= area <= size - HEAD.size - 8 and sequence < MOST_SEQUENCE
    if not good or generation != meta.generation:
        return None
    return Found(slot, key, sequence, checksum, raw)


def count_used(table: bytes, meta: Meta) -> int:
    """Entries of objects, by magic and generation alone: no checksum is compared."""
    size = meta.entry_bytes
    count = len(table) // size
    words = np.frombuffer(table[: count * size], "<u8").reshape(count, size // 8)
    used = (words[:, 0] == int.from_bytes(MAGIC, "little")) & (words[:, 13] == meta.generation)
    return int(np.count_nonzero(used))


def scan(table: bytes, meta: Meta, first: int = 0) -> Scan:
    """Check every entry: one pass of numpy to find the entries in use, then one checksum each.
    first: slot of the first entry."""
    size = meta.entry_bytes
    count = len(table) // size
    words = np.frombuffer(table[: count * size], "<u8").reshape(count, size // 8)
    used = np.flatnonzero(words.any(axis=1))
    found, stale = [], 0
    for slot in used.tolist():
        raw = table[slot * size : (slot + 1) * size]
        one = entry_in(raw, first + slot, meta)
        if one is not None:
            found.append(one)
        elif HEAD.unpack_from(raw)[-1] != meta.generation:
            stale += (
                entry_in(
                    raw, slot, msgspec.structs.replace(meta, generation=HEAD.unpack_from(raw)[-1])
                )
                is not None
            )
    found.sort(key=lambda one: one.sequence)
    return Scan(found, len(used) - len(found) - stale, stale)


if HEAD.size + 8 > LEAST_ENTRY:
    raise ImportError("an entry does not fit")
