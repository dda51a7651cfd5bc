"""What block hashes are made of: kept beside stored blocks, so that indexes can be sent them after
a restart."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from kvactors.discreet import discreet
from kvactors.flush_notifier.messages import PLAIN, Origin


class Lineage(NamedTuple):
    """One block: the hash of its parent (the root hash for a first block), its own tokens
    (little-endian uint32), its extra key, and what requests for it have in common. Blocks under a
    salt have none: a salt is not written to disk."""

    parent: bytes
    tokens: bytes
    extra_key: bytes = b""
    origin: Origin = PLAIN

    def __repr__(self) -> str:
        return discreet(self)

    def key(self) -> bytes:
        """The block hash that follows from it."""
        extra = self.extra_key
        return hashlib.sha256(
            self.parent + len(extra).to_bytes(4, "little") + extra + self.tokens
        ).digest()


class Lineages(NamedTuple):
    """Those of the blocks of a message, whose keys and parents are in the message. tokens: of all
    blocks, one after another. origins: one for each block (None: it has no lineage), or one for
    all. extra_keys: by index, of blocks that have one."""

    tokens: bytes
    origins: tuple[Origin | None, ...]
    extra_keys: Mapping[int, bytes] = {}

    def __repr__(self) -> str:
        return discreet(self)

    def of(self, index: int, count: int, parent: bytes) -> Lineage | None:
        """That of one of `count` blocks below its parent."""
        origin = self.origins[index if len(self.origins) > 1 else 0]
        if origin is None:
            return None
        size = len(self.tokens) // count
        return Lineage(
            parent,
            self.tokens[index * size : (index + 1) * size],
            self.extra_keys.get(index, b""),
            origin,
        )


def lineage(lineages: Lineages | None, index: int, count: int, parent: bytes) -> Lineage | None:
    """See `Lineages.of`; None if the message has none."""
    return None if lineages is None else lineages.of(index, count, parent)
