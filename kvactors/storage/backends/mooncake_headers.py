"""Headers of the objects of a Mooncake pool: made before a write, compared after a read."""

from __future__ import annotations

from typing import NamedTuple

from kvactors.native import check_headers, make_headers
from kvactors.storage.backends.header import HEADER, Fit
from kvactors.storage.backends.mooncake_codes import NO_SPACE, NOT_FOUND, NOT_READY, OK
from kvactors.storage.messages import Outcome


class Compared(NamedTuple):
    """Objects of a read that were compared with their headers.

    Attributes:
        outcomes: one a key.
        without_checksum: misses among them: objects that have no checksum.
    """

    outcomes: bytes
    without_checksum: int = 0


class PoolHeaders:
    """Makes and compares headers. Its calls may run in any thread.

    Args:
        digest: of the store's identity, in every header.
        block_bytes: bytes of a payload.
        checksums: whether headers have a checksum of the payload. With it, an object without one
            is a miss. Without it, no checksum is compared.
    """

    def __init__(self, digest: bytes, block_bytes: int, checksums: bool) -> None:
        self.checksums = checksums
        self._digest = digest
        self._block_bytes = block_bytes
        self._whole = block_bytes + HEADER.size
        without = Outcome.MISS if checksums else Outcome.OK
        self._outcome_of_fit = bytes.maketrans(
            bytes([Fit.DIFFERS, Fit.FITS, Fit.NO_CHECKSUM]),
            bytes([Outcome.CORRUPT, Outcome.OK, without]),
        )

    def make(self, keys: bytes, pointers: list[list[int]]) -> None:
        """Write the header of each object. `keys` are joined."""
        make_headers(self._digest, keys, pointers, self._block_bytes, self.checksums)

    def compare(self, keys: bytes, pointers: list[list[int]], codes: list[int]) -> Compared:
        """Compare the objects that arrived, by the codes of the client. `keys` are joined."""
        if codes.count(self._whole) == len(codes) == len(pointers):
            fits = self._fits(keys, pointers)
            return Compared(fits.translate(self._outcome_of_fit), self._refused(fits))
        arrived = [i for i, code in enumerate(codes) if code == self._whole]
        some = b"".join(keys[32 * i : 32 * i + 32] for i in arrived)
        fits = self._fits(some, [pointers[i] for i in arrived])
        outcomes = bytearray(Outcome.CORRUPT if code >= 0 else outcome_of(code) for code in codes)
        for i, fit in zip(arrived, fits, strict=True):
            outcomes[i] = self._outcome_of_fit[fit]
        return Compared(bytes(outcomes), self._refused(fits))

    def _fits(self, keys: bytes, pointers: list[list[int]]) -> bytes:
        return check_headers(self._digest, keys, pointers, self._block_bytes, self.checksums)

    def _refused(self, fits: bytes) -> int:
        return fits.count(Fit.NO_CHECKSUM) if self.checksums else 0


def outcome_of(code: int) -> Outcome:
    """The outcome that a return code of the client stands for."""
    if code >= OK:
        return Outcome.OK
    return {NO_SPACE: Outcome.NO_SPACE, NOT_FOUND: Outcome.MISS, NOT_READY: Outcome.MISS}.get(
        code, Outcome.UNAVAILABLE
    )
