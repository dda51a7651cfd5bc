"""Cache identity: block hashes, the scope of a chain of them, and the identity of a store.

Equal tokens share cached bytes only within one scope and one store identity. `docs/keys.md` has the
encoding and test vectors.
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
TAG_LORA_VERSION = 8
FOLDER_TEXT = 48
"""Maximum number of characters of a model's name in its folder's name."""


def field(tag: int, value: bytes) -> bytes:
    """A tagged, length-prefixed field: tag u8, length u32 little-endian, bytes."""
    return bytes([tag]) + len(value).to_bytes(4, "little") + value


def hash_of_block(parent: bytes, tokens: bytes) -> bytes:
    """The hash of a full block without an extra key.

    Args:
        parent: the parent's block hash, or the root hash.
        tokens: the block's tokens, little-endian uint32.
    """
    return hashlib.sha256(parent + bytes(4) + tokens).digest()


class CacheScope(NamedTuple):
    """The properties beside tokens and media that requests must share to share blocks.

    A chain of block hashes starts from the scope's root hash.

    Attributes:
        model: the model's name.
        namespace: the cache's namespace (`cache.namespace`, `KVCache.set_namespace`), such as a
            version of the weights.
        lora: the LoRA adapter, or None.
        salt: the cache salt, or None.
        lora_version: of the adapter, None unless it was cleared (`KVCache.clear(lora=)`).
    """

    model: str
    namespace: str
    lora: str | None = None
    salt: str | None = None
    lora_version: str | None = None

    def __repr__(self) -> str:
        return discreet(self)

    def root(self, fingerprint: bytes) -> bytes:
        """The 32-byte root hash above the first block.

        The hash is SHA-256 over the domain and the fields that are not None, in the order of their
        tags.

        Args:
            fingerprint: of the blocks' layout, 32 bytes.
        """
        message = ROOT_DOMAIN + field(TAG_FINGERPRINT, fingerprint)
        message += field(TAG_MODEL, self.model.encode()) + field(
            TAG_NAMESPACE, self.namespace.encode()
        )
        if self.salt is not None:
            message += field(TAG_SALT, self.salt.encode())
        if self.lora is not None:
            message += field(TAG_LORA, self.lora.encode())
        if self.lora_version is not None:
            message += field(TAG_LORA_VERSION, self.lora_version.encode())
        return hashlib.sha256(message).digest()

    @property
    def plain(self) -> bool:
        """Whether the scope has neither an adapter nor a salt."""
        return self.lora is None and self.salt is None


class StoreIdentity(NamedTuple):
    """The identity that all objects of one store folder, or of one part of a pool, share.

    Objects of different identities never mix. Object headers and pool keys contain the digest.

    Attributes:
        model: the model's name.
        namespace: the store's namespace (`storage.namespace`).
        fingerprint: of the layout, 32 bytes.
        rank: the tensor-parallel rank whose part of every block is stored.
        ranks: the number of tensor-parallel ranks.
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
        """The store's folder: `directory`/MODEL/NAMESPACE/rank-R-of-N.

        MODEL starts with the model's name and ends in 16 hex digits of its hash.
        """
        shown = re.sub(r"[^A-Za-z0-9._-]+", "_", self.model)[:FOLDER_TEXT].strip("._-") or "model"
        name = f"{shown}-{hashlib.sha256(self.model.encode()).hexdigest()[:16]}"
        return Path(directory) / name / self.namespace / f"rank-{self.rank}-of-{self.ranks}"

    @property
    def pool_prefix(self) -> str:
        """The prefix of the store's object names in a shared pool.

        No pool prefix is a prefix of another one.
        """
        return f"kvactors/{self.digest.hex()}/"
