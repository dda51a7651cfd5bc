"""What a block is made of: the contract between attention kernels, the copies and the store."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from typing import NamedTuple

from kvactors.errors import LayoutError

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1, "int8": 1}
"""Bytes an element, by dtype name."""


class Piece(NamedTuple):
    """One block's share of one region. shape: of one block, without the block axis. nbytes: of that."""

    layer: int
    role: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


class Layout(ABC):
    """The pieces of a block in contract order: roles key, value inside ascending layers. Kernels index regions by that order, host
    slots and stored objects hold the pieces one after another in it.

    block_size: tokens a block. fingerprint: 32 bytes; blocks of different fingerprints can never be mixed up.
    """

    def __init__(self, block_size: int) -> None:
        if block_size < 1:
            raise LayoutError(f"block_size must be at least 1, not {block_size}")
        self.block_size = block_size
        self.pieces = self.make_pieces()
        self.block_bytes = sum(piece.nbytes for piece in self.pieces)
        self.fingerprint = self._fingerprint()

    @property
    @abstractmethod
    def kind(self) -> str:
        """The layout's name."""

    @abstractmethod
    def make_pieces(self) -> tuple[Piece, ...]:
        """The pieces in contract order."""

    def _fingerprint(self) -> bytes:
        """SHA-256 over kind, block size and every piece, as length-prefixed text."""
        digest = hashlib.sha256(b"kvactors.layout.v1")
        fields = [self.kind, str(self.block_size)]
        fields += [f"{p.layer} {p.role} {'x'.join(map(str, p.shape))} {p.dtype}" for p in self.pieces]
        for field in fields:
            raw = field.encode()
            digest.update(len(raw).to_bytes(4, "little") + raw)
        return digest.digest()
