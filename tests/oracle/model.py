"""The stand-in for a model: the bytes of a block are a function of everything that identifies
it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

DIGEST = 24
"""Bytes of a block's digest. Every 32 bytes of a block are its digest and the number of the
computation that wrote it."""

STAMP = DIGEST + 8

Media = tuple[int, int, bytes | str | int]


class Scope(NamedTuple):
    """The parts of a request's identity beside tokens and media."""

    model: str
    namespace: str
    lora: str | None = None
    salt: str | None = None

    def is_in(self, part: Mapping[str, str]) -> bool:
        """Whether a clear of that part removes it."""
        return part.items() <= self._asdict().items()


def digests(
    block_size: int, scope: Scope, tokens: Sequence[int], media: Iterable[Media] = ()
) -> list[bytes]:
    """The digest of each full block of a request."""
    found: list[bytes] = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        stop = start + block_size
        parent = found[-1] if found else repr(tuple(scope)).encode()
        seen = [
            (type(hash_).__name__, hash_)
            for offset, length, hash_ in media
            if offset < stop and offset + length > start
        ]
        text = len(parent).to_bytes(4, "big") + parent + repr((tokens[start:stop], seen)).encode()
        found.append(hashlib.blake2b(text, digest_size=DIGEST).digest())
    return found


class Memory:
    """The device memory of one process, as the model reads and writes it. Every piece of a block
    has its own mask."""

    def __init__(self, device: Any, layers: Sequence[int], roles: Sequence[str]) -> None:
        self._layers = [[device.region(layer, role) for role in roles] for layer in layers]
        self._widths = [[region.shape[1] for region in regions] for regions in self._layers]
        self._masks = [
            [self._mask(i, j, width) for j, width in enumerate(widths)]
            for i, widths in enumerate(self._widths)
        ]

    @staticmethod
    def _mask(layer: int, role: int, width: int) -> NDArray[np.uint8]:
        if width % STAMP:
            raise ValueError(
                f"a piece of {width} bytes does not hold whole stamps of {STAMP} bytes"
            )
        return ((np.arange(width) // STAMP * 7 + layer * 31 + role * 101) & 0xFF).astype(np.uint8)

    def write(self, blocks: Sequence[int], digests: Sequence[bytes], number: int) -> None:
        """Compute blocks: their digests and the number of this computation."""
        if not blocks:
            return
        stamps = np.frombuffer(
            b"".join(one + number.to_bytes(8, "big") for one in digests), np.uint8
        ).reshape(len(blocks), STAMP)
        index = list(blocks)
        for regions, masks, widths in zip(self._layers, self._masks, self._widths, strict=True):
            for region, mask, width in zip(regions, masks, widths, strict=True):
                region[index] = np.tile(stamps, (1, width // STAMP)) ^ mask

    def read(
        self, blocks: Sequence[int], digests: Sequence[bytes], layers: Sequence[int] | None = None
    ) -> list[int | None]:
        """For each block the number of the computation that wrote it, None where its bytes are not
        the digest's in every piece.

        layers: positions among this memory's layers, all if None.
        """
        if not blocks:
            return []
        index, count = list(blocks), len(blocks)
        expected = np.frombuffer(b"".join(digests), np.uint8).reshape(count, 1, DIGEST)
        right = np.ones(count, bool)
        first: NDArray[np.uint8] | None = None
        for layer in range(len(self._layers)) if layers is None else layers:
            for region, mask in zip(self._layers[layer], self._masks[layer], strict=True):
                stamps = (region[index] ^ mask).reshape(count, -1, STAMP)
                if first is None:
                    first = stamps[:, :1, :].copy()
                right &= (stamps[:, :, :DIGEST] == expected).all(axis=(1, 2))
                right &= (stamps == first).all(axis=(1, 2))
        assert first is not None
        return [
            int.from_bytes(first[i, 0, DIGEST:].tobytes(), "big") if right[i] else None
            for i in range(count)
        ]
