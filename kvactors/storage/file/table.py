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

An entry of zeros is a free slot. One whose checksum is wrong was torn while it was written, and is
free as well. `entry_bytes` is in the first page: a larger number gives a store more space for
metadata. A reader skips fields whose tag it does not have:

    tag  value
    1    time of the write, u64 microseconds since 1970
    2    hash of the parent block, or the root hash: 32 bytes
    3    the block's own tokens, little-endian u32
    4    extra key of the block, left out if it has none
    5    name of the LoRA adapter, UTF-8, left out if there is none
    6    number of the LoRA adapter, i64, left out if there is none
    7    number of the object's salt (`quotas.salt_id`), left out beside tag 2

Tags 2 to 6 are the inputs of the key (a block hash). All of them are there, or none: an entry too
short for one has none. Blocks under a salt have none, so that neither a salt nor the tokens behind
it are on disk."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from kvactors.errors import StoreError
from kvactors.flush_notifier.messages import PathPart
from kvactors.identity import PLAIN, Lineage, RequestScope
from kvactors.types import HASH_BYTES

if TYPE_CHECKING:
    from kvactors.storage.file.layout import SlabFiles

PAGE = 4096
BODY = PAGE - 8
VERSION = 2
NAME = "KVACTORS slabs"
MAGIC = b"KVACTORS"
HEAD = struct.Struct("<8sII32s32sQQQQ")
FIELD = struct.Struct("<HH")

ENTRY_BYTES = 192
"""Bytes of an entry of a new store without lineages, of which 72 bytes are metadata."""

LEAST_ENTRY, MOST_ENTRY = 128, 65_536
MOST_SLOTS = 1 << 22
"""Slots of a slab at most."""

U64 = np.dtype("<u8")
MOST_BLOCK = 1 << 40
MOST_SEQUENCE = 1 << 63
"""Sequence numbers are below it: an entry without a successor would end all writes."""
CHUNK_ENTRIES = 16_384
"""Entries that are read at once."""

SLOTS = "slots"
"""How a slab is laid out: payload i at i * stride. The only arrangement of this version."""

WRITTEN_AT, PARENT, TOKENS, EXTRA, LORA, LORA_ID, SALT = 1, 2, 3, 4, 5, 6, 7
"""Tags of the metadata fields."""


class Meta(msgspec.Struct, frozen=True):
    """Parameters of a store."""

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
        body = msgspec.json.encode(self).ljust(BODY, b"\n")
        if len(body) > BODY:
            raise StoreError(
                f"the names of the store are too long for the first page of its table: {len(body)} "
                "bytes"
            )
        return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")

    @property
    def identity(self) -> str:
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


class StoredSlot(NamedTuple):
    """An object, by its entry in the table."""

    sequence: int
    slot: int
    key: bytes
    mark: bytes  # distinguishes the entry from every other one (`mark_of`)
    salt: int | None  # None if it is not known
    generation: int


class Scan(NamedTuple):
    """Good entries, oldest first."""

    found: list[StoredSlot]
    torn: int


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


def salt_in(fields: Mapping[int, bytes]) -> int | None:
    """The number of the salt in an entry's fields, 0 for one with the inputs of the key. None if it
    has none that can be read."""
    value = bytes(8) if PARENT in fields else fields.get(SALT, b"")
    return int.from_bytes(value, "little") if len(value) == 8 else None


def mark_of(entry: bytes) -> bytes:
    """The part of an entry that a store keeps in memory to recognize it: the checksums of the
    payload and of the entry."""
    return entry[88:96] + entry[-8:]


def checksum_of(mark: bytes) -> int:
    """The payload's, of a mark."""
    return int.from_bytes(mark[:8], "little")


def entry_in(raw: bytes, slot: int, meta: Meta) -> StoredSlot | None:
    """An entry as it was read, of any generation. None for one that is torn, or of another
    store."""
    size = meta.entry_bytes
    if len(raw) != size or xxhash.xxh3_64_intdigest(raw[:-8]).to_bytes(8, "little") != raw[-8:]:
        return None
    magic, version, area, owner, key, length, _, sequence, generation = HEAD.unpack_from(raw)
    good = (magic, version, owner.hex(), length) == (MAGIC, VERSION, meta.digest, meta.block_bytes)
    if not good or area > size - HEAD.size - 8 or sequence >= MOST_SEQUENCE:
        return None
    return StoredSlot(sequence, slot, key, mark_of(raw), salt_in(fields_of(raw)), generation)


def words_of(table: bytes, size: int) -> NDArray[np.uint64]:
    """Entries of `size` bytes as rows of words."""
    count = len(table) // size
    return np.frombuffer(table[: count * size], U64).reshape(count, size // 8)


def count_used(table: bytes, meta: Meta) -> int:
    """Entries of objects, by magic and generation alone: no checksum is compared."""
    words, magic = words_of(table, meta.entry_bytes), int.from_bytes(MAGIC, "little")
    return int(((words[:, 0] == magic) & (words[:, 13] == meta.generation)).sum())


def scan(table: bytes, meta: Meta, first: int = 0) -> Scan:
    """Check every entry: one pass of numpy to find the entries in use, then one checksum each.
    first: slot of the first entry."""
    size = meta.entry_bytes
    used = np.flatnonzero(words_of(table, size).any(axis=1))
    found, torn = list[StoredSlot](), 0
    for slot in used.tolist():
        one = entry_in(table[slot * size : (slot + 1) * size], first + slot, meta)
        if one is None:
            torn += 1
        elif one.generation == meta.generation:
            found.append(one)
    return Scan(sorted(found), torn)


if HEAD.size + 8 > LEAST_ENTRY:
    raise ImportError("an entry does not fit")


# -- lineages: the inputs of a key


TIME_FIELD = FIELD.size + 8
SPARE = 128
"""Bytes of an entry for an extra key and an adapter: enough for two media items with hashes of 32
bytes, or an adapter's name of 124."""


def entry_bytes_for(block_size: int) -> int:
    """Bytes of an entry of a new store whose blocks have so many tokens (0: it keeps no
    lineages)."""
    if not block_size:
        return ENTRY_BYTES
    wanted = (
        HEAD.size
        + TIME_FIELD
        + (FIELD.size + HASH_BYTES)
        + (FIELD.size + 4 * block_size)
        + SPARE
        + 8
    )
    size = -(-wanted // 8) * 8
    return size if size <= MOST_ENTRY else ENTRY_BYTES


def room_beside(meta: Meta, fields: Mapping[int, bytes]) -> int:
    """Bytes of an entry's metadata area beside other fields."""
    used = sum(FIELD.size + len(value) for value in fields.values())
    return meta.entry_bytes - HEAD.size - 8 - used


def fields_of_lineage(lineage: Lineage | None, space: int) -> dict[int, bytes]:
    """The fields, by tag. Empty if they need more than `space` bytes, or there is no lineage."""
    if lineage is None:
        return {}
    fields = {PARENT: lineage.parent, TOKENS: lineage.tokens}
    if lineage.extra_key:
        fields[EXTRA] = lineage.extra_key
    if lineage.scope.lora is not None:
        fields[LORA] = lineage.scope.lora.encode()
        if lineage.scope.lora_id is not None and lineage.scope.lora_id.bit_length() < 64:
            fields[LORA_ID] = lineage.scope.lora_id.to_bytes(8, "little", signed=True)
    sizes = [len(value) for value in fields.values()]
    return fields if sum(sizes) + FIELD.size * len(sizes) <= space and max(sizes) < 1 << 16 else {}


def lineage_in(fields: dict[int, bytes], key: bytes) -> Lineage | None:
    """The lineage in an entry's metadata; None if there is none, or it is not that of the key."""
    parent, tokens = fields.get(PARENT, b""), fields.get(TOKENS, b"")
    if len(parent) != HASH_BYTES or not tokens:
        return None
    try:
        lora = fields[LORA].decode() if LORA in fields else None
    except UnicodeDecodeError:
        return None
    number = int.from_bytes(fields[LORA_ID], "little", signed=True) if LORA_ID in fields else None
    found = Lineage(
        parent,
        tokens,
        fields.get(EXTRA, b""),
        PLAIN if lora is None else RequestScope(lora, lora_id=number),
    )
    return found if found.block_hash() == key else None


# -- paths that the blocks form


class SlabPaths:
    """Reads the paths that the blocks of an open store form: of each block, first the blocks above
    it up to the root, or up to one that was read already. The store may change during the reading.
    The parent and the tokens of a key never change. Every call blocks briefly and belongs in a
    thread, one call at a time.

    Args:
        objects: slot and mark of each object.
        keys: of the objects, in parts.
    """

    def __init__(
        self,
        files: SlabFiles,
        objects: Mapping[bytes, tuple[int, bytes]],
        keys: Iterable[Sequence[bytes]],
    ) -> None:
        self._files = files
        self._objects = objects
        self._keys = chain.from_iterable(keys)
        self._read = bytearray(len(files.slabs) * files.meta.slots_per_slab)
        self._path: list[tuple[bytes, Lineage]] = []  # still to be given, the deepest block first
        self.skipped = 0  # blocks whose lineage was damaged, or not that of their key

    def parts(self, most: int) -> list[PathPart] | None:
        """Parts of paths with about `most` blocks in all, fewer if many blocks have no lineage;
        None when all was read. OSError."""
        found: list[PathPart] = []
        looked = 0
        while looked < most:
            if some := self._path[looked - most :]:
                del self._path[looked - most :]
                looked += len(some)
                found += _parts_of(some[::-1])
            elif (key := next(self._keys, None)) is not None:
                looked += 1
                self._climb(key)
            else:
                break
        return found if looked else None

    def _climb(self, key: bytes) -> None:
        """Read a block and those above it."""
        while (found := self._objects.get(key)) is not None:
            slot, _ = found
            if slot >= len(self._read) or self._read[slot]:
                return
            self._read[slot] = True
            lineage = self._lineage(slot, key)
            if lineage is None:
                return
            self._path.append((key, lineage))
            key = lineage.parent

    def _lineage(self, slot: int, key: bytes) -> Lineage | None:
        raw, meta = self._files.entry(slot), self._files.meta
        one = entry_in(raw, slot, meta)
        if one is None or (one.key, one.generation) != (key, meta.generation):
            return None  # it was evicted, or cleared
        fields = fields_of(raw)
        found = lineage_in(fields, key)
        self.skipped += found is None and PARENT in fields
        return found


def _parts_of(blocks: list[tuple[bytes, Lineage]]) -> Iterator[PathPart]:
    """A run of blocks, as parts that end where a block is no child of the one before it."""
    part: list[tuple[bytes, Lineage]] = []
    for key, lineage in blocks:
        if part and (part[-1][0], part[-1][1].scope) != (lineage.parent, lineage.scope):
            yield _part(part)
            part = []
        part.append((key, lineage))
    yield _part(part)


def _part(blocks: list[tuple[bytes, Lineage]]) -> PathPart:
    first = blocks[0][1]
    extra_keys = tuple((i, one.extra_key) for i, (_, one) in enumerate(blocks) if one.extra_key)
    keys = b"".join(key for key, _ in blocks)
    return PathPart(
        first.parent, keys, b"".join(one.tokens for _, one in blocks), first.scope, extra_keys
    )
