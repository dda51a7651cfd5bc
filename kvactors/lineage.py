"""Lineage of stored blocks: the inputs of their block hashes.

The store keeps lineages beside blocks, so that external indexes can be sent them after a restart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from kvactors.discreet import discreet
from kvactors.flush_notifier.messages import PLAIN, RequestScope


class Lineage(msgspec.Struct, frozen=True, gc=False):
    """The inputs of one block hash. The cyclic garbage collector does not visit it.

    Blocks under a salt have no lineage, because a salt is not written to disk.

    Attributes:
        parent: the parent's block hash, or the root hash for a first block.
        tokens: the block's tokens, little-endian uint32.
        extra_key: the block's extra key.
        scope: the properties that requests for the block share.
    """

    parent: bytes
    tokens: bytes
    extra_key: bytes = b""
    scope: RequestScope = PLAIN

    __repr__ = discreet

    def block_hash(self) -> bytes:
        """The block hash computed from the lineage."""
        extra = self.extra_key
        return hashlib.sha256(
            self.parent + len(extra).to_bytes(4, "little") + extra + self.tokens
        ).digest()


class Lineages(NamedTuple):
    """The lineages of a message's blocks. The message itself has their keys and parents.

    Attributes:
        tokens: the tokens of all blocks, concatenated.
        scopes: one for each block (None: the block has no lineage), or one for all.
        extra_keys: the extra keys of the blocks that have one, by index.
    """

    tokens: bytes
    scopes: tuple[RequestScope | None, ...]
    extra_keys: Mapping[int, bytes] = {}

    def __repr__(self) -> str:
        return discreet(self)

    def of(self, index: int, count: int, parent: bytes) -> Lineage | None:
        """The lineage of one block of the message.

        Args:
            index: of the block in the message.
            count: blocks in the message.
            parent: the hash of the block's parent.

        Returns:
            The lineage, or None if the block has none.
        """
        scope = self.scopes[index if len(self.scopes) > 1 else 0]
        if scope is None:
            return None
        size = len(self.tokens) // count
        return Lineage(
            parent,
            self.tokens[index * size : (index + 1) * size],
            self.extra_keys.get(index, b""),
            scope,
        )


def lineage(lineages: Lineages | None, index: int, count: int, parent: bytes) -> Lineage | None:
    """See `Lineages.of`. Returns None if the message has no lineages."""
    return None if lineages is None else lineages.of(index, count, parent)
