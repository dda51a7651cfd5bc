"""Header of every object of a shared pool, compared on every read (`native.make_headers`).

Little-endian: magic "KVACTORS", version u32, reserved u32 = 0, digest 32 bytes, key 32 bytes,
payload length u64, XXH3-64 of the payload u64: together 96 bytes.
"""

from __future__ import annotations

import struct

MAGIC = b"KVACTORS"
VERSION = 1
HEADER = struct.Struct("<8sII32s32sQQ")
