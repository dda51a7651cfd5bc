"""Headers of objects in a store that several nodes share: identity, key, length and checksum.

A header is behind the payload and is compared on every read (`native.make_headers`). Little-endian:
magic "KVACTORS", version u32, kind u32, digest 32 bytes, key 32 bytes, payload length u64, XXH3-64
of the payload u64: together 96 bytes. An object without a checksum has kind 1, and 0 in the place
of the checksum. Others have kind 0.
"""

from __future__ import annotations

import struct
from enum import IntEnum

from kvactors.native import check_headers, make_headers
from kvactors.storage.messages import Outcome

MAGIC = b"KVACTORS"
VERSION = 1
HEADER = struct.Struct("<8sII32s32sQQ")

OK, NO_SPACE, NOT_FOUND, NOT_READY, RPC_FAILED = 0, -200, -704, -703, -900
"""Codes of Mooncake's client. Sizes and codes of other stores stand for their answers likewise."""


class Fit(IntEnum):
    """How a header compares with its object (`native.check_headers`)."""

    DIFFERS = 0
    FITS = 1
    NO_CHECKSUM = 2  # everything else fits


class PoolHeaders:
    """Makes and compares headers. Its calls may run in any thread.

    Args:
        checksums: whether headers have a checksum of the payload. With it, an object without one
            is a miss. Without it, no checksum is compared.
    """

    def __init__(self, digest: bytes, block_bytes: int, checksums: bool) -> None:
        self.checksums = checksums
        self._digest = digest
        self._block_bytes = block_bytes
        self._whole = block_bytes + HEADER.size
        without = Outcome.MISS if checksums else Outcome.OK
        self._outcomes = (Outcome.CORRUPT, Outcome.OK, without)  # by `Fit`

    def make(self, keys: bytes, pointers: list[list[int]]) -> None:
        make_headers(self._digest, keys, pointers, self._block_bytes, self.checksums)

    def compare(
        self, keys: bytes, pointers: list[list[int]], codes: list[int]
    ) -> tuple[bytes, int]:
        """Compare the objects that arrived, by the codes of the client. `keys` are joined. Returns
        outcomes, and the number of misses for lack of a checksum."""
        arrived = [i for i, code in enumerate(codes) if code == self._whole]
        fits = check_headers(
            self._digest,
            b"".join(keys[32 * i : 32 * i + 32] for i in arrived),
            [pointers[i] for i in arrived],
            self._block_bytes,
            self.checksums,
        )
        outcomes = bytearray(Outcome.CORRUPT if code >= 0 else outcome_of(code) for code in codes)
        for i, fit in zip(arrived, fits, strict=True):
            outcomes[i] = self._outcomes[fit]
        return bytes(outcomes), fits.count(Fit.NO_CHECKSUM) if self.checksums else 0


OUTCOMES = {NO_SPACE: Outcome.NO_SPACE, NOT_FOUND: Outcome.MISS, NOT_READY: Outcome.MISS}


def outcome_of(code: int) -> Outcome:
    """The outcome that a return code of the client stands for."""
    return Outcome.OK if code >= OK else OUTCOMES.get(code, Outcome.UNAVAILABLE)
