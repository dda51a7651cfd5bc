"""What the same tokens must agree on to share cached bytes: the scope of a chain of block hashes,
and the identity of a store.

Pure, and without dependencies on other parts of the package. `docs/keys.md` has the encoding and
test vectors.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import NamedTuple

from kvactors.discreet import discreet

ROOT_DOMAIN = b"kvactors.key.v2"
STORE_DOMAIN = b"kvactors.store.v2"
TAG_FINGERPRINT, TAG_MODEL, TAG_NAMESPACE, TAG_SALT, TAG_LORA = 1, 2, 3, 4, 5
TAG_RANK, TAG_RANKS = 6, 7
FOLDER_TEXT = 48
"""Characters of a model's name that its folder shows."""


def field(tag: int, value: bytes) -> bytes:
    """A tagged, length-prefixed field: tag u8, length u32 little-endian, bytes."""
    return bytes([tag]) + len(value).to_bytes(4, "little") + value


def block_hash(parent: bytes, tokens: bytes) -> bytes:
    """The hash of a full block without an extra key, below `parent` (a block hash, or the root).
    tokens: little-endian uint32."""
    return hashlib.sha256(parent + bytes(4) + tokens).digest()


class CacheScope(NamedTuple):
    """What requests have in common beside their tokens and media to share blocks: the root of a
    chain of block hashes.

    namespace: of the cache (`cache.namespace`, `KVCache.set_namespace`), such as a version of the
    weights. lora, salt: None without.
    """

    model: str
    namespace: str
    lora: str | None = None
    salt: str | None = None

    def __repr__(self) -> str:
        return discreet(self)

    def root(self, fingerprint: bytes) -> bytes:
        """The 32-byte root hash above the first block, for blocks of the layout that `fingerprint`
        stands for.

        SHA-256 over the domain and the fields that are given, in the order of their tags.
        """
        message = ROOT_DOMAIN + field(TAG_FINGERPRINT, fingerprint)
        message += field(TAG_MODEL, self.model.encode()) + field(
            TAG_NAMESPACE, self.namespace.encode()
        )
        if self.salt is not None:
            message += field(TAG_SALT, self.salt.encode())
        if self.lora is not None:
            message += field(TAG_LORA, self.lora.encode())
        return hashlib.sha256(message).digest()

    @property
    def plain(self) -> bool:
        """Whether it has neither an adapter nor a salt."""
        return self.lora is None and self.salt is None


class StoreIdentity(NamedTuple):
    """What all objects of one store folder, or of one part of a pool, have in common.

    namespace: of the store (`storage.namespace`). fingerprint: of the layout, 32 bytes. rank,
    ranks: the tensor-parallel rank whose part of every block is stored. Objects of different
    identities never mix: the digest is in their headers, and names the folder or the pool keys.
    """

    model: str
    namespace: str
    fingerprint: bytes
    rank: int = 0
    ranks: int = 1

    @property
    def digest(self) -> bytes:
        """32 bytes: SHA-256 over the domain and every field."""
        fields = (
            (TAG_FINGERPRINT, self.fingerprint),
            (TAG_MODEL, self.model.encode()),
            (TAG_NAMESPACE, self.namespace.encode()),
            (TAG_RANK, str(self.rank).encode()),
            (TAG_RANKS, str(self.ranks).encode()),
        )
        return hashlib.sha256(
            STORE_DOMAIN + b"".join(field(tag, value) for tag, value in fields)
        ).digest()

    def folder(self, directory: str | Path) -> Path:
        """`directory`/MODEL/NAMESPACE/rank-R-of-N, where MODEL shows the model's name and ends in
        16 hex digits of its hash."""
        shown = re.sub(r"[^A-Za-z0-9._-]+", "_", self.model)[:FOLDER_TEXT].strip("._-") or "model"
        name = f"{shown}-{hashlib.sha256(self.model.encode()).hexdigest()[:16]}"
        return Path(directory) / name / self.namespace / f"rank-{self.rank}-of-{self.ranks}"

    @property
    def pool_prefix(self) -> str:
        """What the names of its objects in a shared pool begin with; no prefix begins another
        one."""
        return f"kvactors/{self.digest.hex()}/"
