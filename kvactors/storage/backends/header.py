"""Header of every object of a shared pool, compared on every read (`native.make_headers`).

Little-endian: magic "KVACTORS", version u32, kind u32, digest 32 bytes, key 32 bytes, payload
length u64, XXH3-64 of the payload u64: together 96 bytes. An object without a checksum has kind 1,
and 0 in the place of the checksum. Others have kind 0.
"""

from __future__ import annotations

import struct
from enum import IntEnum

MAGIC = b"KVACTORS"
VERSION = 1
HEADER = struct.Struct("<8sII32s32sQQ")


class Fit(IntEnum):
    """How a header compares with its object (`native.check_headers`)."""

    DIFFERS = 0
    FITS = 1
    NO_CHECKSUM = 2  # everything else fits
