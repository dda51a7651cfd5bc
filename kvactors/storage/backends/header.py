"""Header of every stored object, compared on every read.

Little-endian: magic "KVACTORS", version u32, reserved u32 = 0, digest 32 bytes, key 32 bytes,
payload length u64, XXH3-64 of the payload u64: together 96 bytes.
"""

from __future__ import annotations

import struct
from typing import Any

import xxhash

MAGIC = b"KVACTORS"
VERSION = 1
HEADER = struct.Struct("<8sII32s32sQQ")


def header_of(digest: bytes, key: bytes, payload: Any, checksum: int | None = None) -> bytes:
    """The header of a payload (any buffer), or of its length and checksum."""
    if checksum is not None:
        return HEADER.pack(MAGIC, VERSION, 0, digest, key, payload, checksum)
    return HEADER.pack(
        MAGIC, VERSION, 0, digest, key, len(payload), xxhash.xxh3_64_intdigest(payload)
    )


def fits(header: Any, digest: bytes, key: bytes, payload: Any) -> bool:
    """Whether a payload matches its header, and is the object of this key."""
    return bytes(header) == header_of(digest, key, payload)
