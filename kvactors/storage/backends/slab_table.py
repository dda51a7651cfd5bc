"""The table of a file store: one entry a slot, all in one file, so that finding out what is there is one sequential read.

The file begins with a page of JSON, {"magic": "KVACTORS slabs", "version": 1, "fingerprint": hex, "block_bytes": n, "stride": n,
"slots_per_slab": n}. Entry i follows at 4096 + 128 * i, little-endian: the 96 bytes of `header` (magic, version, reserved, fingerprint, key,
payload length, XXH3-64 of the payload), the sequence number of the write u64, 16 bytes of zeros, and XXH3-64 of these 120 bytes u64. An
entry of zeros is a free slot; one whose own checksum is wrong was torn while it was written, and is free as well.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from kvactors.errors import StoreError
from kvactors.storage.backends.header import HEADER, MAGIC, VERSION

PAGE = 4096
ENTRY = 128
NAME = "KVACTORS slabs"
FREE = bytes(ENTRY)

LAYOUT = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("reserved", "<u4"),
        ("fingerprint", "V32"),
        ("key", "V32"),
        ("length", "<u8"),
        ("checksum", "<u8"),
        ("sequence", "<u8"),
        ("zeros", "V16"),
        ("own", "<u8"),
    ]
)
assert LAYOUT.itemsize == ENTRY


class Meta(msgspec.Struct, frozen=True):
    """What a store is made for."""

    fingerprint: str
    block_bytes: int
    stride: int
    slots_per_slab: int
    magic: str = NAME
    version: int = VERSION

    def page(self) -> bytes:
        """The file's first page."""
        return msgspec.json.encode(self).ljust(PAGE, b"\n")


def meta_of(page: bytes, where: str) -> Meta:
    """The first page read. StoreError for a file that is none, or of another version."""
    try:
        meta = msgspec.json.decode(page, type=Meta)
    except msgspec.DecodeError as error:
        raise StoreError(f"{where} is no table of a kvactors store: {error}") from error
    if (meta.magic, meta.version) != (NAME, VERSION):
        raise StoreError(f"{where} is of {meta.magic!r} version {meta.version}, and this is version {VERSION}")
    return meta


class Found(NamedTuple):
    """An entry of the table. checksum: of the payload."""

    slot: int
    key: bytes
    sequence: int
    checksum: int


def entry_of(header: bytes, sequence: int) -> bytes:
    """A slot's entry: the object's header, and when it was written."""
    body = header + sequence.to_bytes(8, "little") + bytes(16)
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


def scan(table: bytes, fingerprint: bytes, block_bytes: int) -> tuple[list[Found], int]:
    """Every good entry, oldest first, and how many slots hold something that is none."""
    entries = np.frombuffer(table[: len(table) // ENTRY * ENTRY], LAYOUT)
    used = np.flatnonzero(np.frombuffer(table[: len(entries) * ENTRY], "<u8").reshape(-1, ENTRY // 8).any(axis=1))
    good = used[
        (entries["magic"][used] == MAGIC)
        & (entries["version"][used] == VERSION)
        & (entries["length"][used] == block_bytes)
    ]  # fmt: skip
    found = []
    for slot in good.tolist():
        raw = table[slot * ENTRY : (slot + 1) * ENTRY]
        if xxhash.xxh3_64_intdigest(raw[:120]).to_bytes(8, "little") != raw[120:] or raw[16:48] != fingerprint:
            continue
        found.append(Found(slot, raw[48:80], int.from_bytes(raw[96:104], "little"), int.from_bytes(raw[88:96], "little")))
    found.sort(key=lambda one: one.sequence)
    return found, len(used) - len(found)


assert HEADER.size == 96
