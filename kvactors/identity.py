"""Cache identity: block hashes, the scope of a chain of them, the identity of a store, extra keys
of blocks with media, and lineages, the inputs of a block hash.

Equal tokens share cached bytes only within one scope and one store identity. `docs/keys.md` has the
encoding and test vectors."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import msgspec

from kvactors.redact import redacted_repr

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
    """The hash of a full block without an extra key. tokens: little-endian uint32."""
    return hashlib.sha256(parent + bytes(4) + tokens).digest()


class CacheScope(NamedTuple):
    """The properties beside tokens and media that requests must share to share blocks.

    A chain of block hashes starts from the scope's root hash.

    Attributes:
        namespace: the cache's namespace (`cache.namespace`, `KVCache.set_namespace`), such as a
            version of the weights.
        lora_version: of the adapter, None unless it was cleared (`KVCache.clear(lora=)`).
    """

    model: str
    namespace: str
    lora: str | None = None
    salt: str | None = None
    lora_version: str | None = None

    def __repr__(self) -> str:
        return redacted_repr(self)

    def root(self, fingerprint: bytes) -> bytes:
        """The 32-byte root hash above the first block.

        The hash is SHA-256 over the domain and the fields that are not None, in the order of their
        tags. fingerprint: of the blocks' layout, 32 bytes."""
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


class RequestScope(NamedTuple):
    """The adapter's name and the cache salt of requests, None without. Requests with the same ones
    share blocks.

    Attributes:
        lora_id: the engine's number of the adapter. It is sent on events for readers that identify
            adapters by number, and identifies nothing.
    """

    lora: str | None = None
    salt: str | None = None
    lora_id: int | None = None

    def __repr__(self) -> str:
        return redacted_repr(self)


PLAIN = RequestScope()


class StoreIdentity(NamedTuple):
    """The identity that all objects of one store folder, or of one part of a pool, share.

    Objects of different identities never mix. Object headers and pool keys contain the digest.

    Attributes:
        fingerprint: of the layout, 32 bytes.
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


# -- extra keys of blocks: the media items that take part in a block hash

MediaHash = bytes | str | int
"""The hash of a media item's content, as the caller names it."""

MediaItem = tuple[MediaHash, int]
"""A media item of a block: its hash, and the token at which it begins, counted from the block's
first token (negative if it began before)."""

TAG_BYTES, TAG_TEXT, TAG_INT = 4, 5, 6
HEAD = Struct("<BI")
OFFSET = Struct("<q")


def media_extra(items: Iterable[MediaItem]) -> bytes:
    """The extra key of a block from the media items that it overlaps, in order. Empty for none.
    Raises TypeError for a hash of another type."""
    encoded = b""
    for value, offset in items:
        if isinstance(value, bytes):
            tag, digest = TAG_BYTES, value
        elif isinstance(value, str):
            tag, digest = TAG_TEXT, value.encode()
        elif isinstance(value, int):
            tag, digest = TAG_INT, str(value).encode()
        else:
            raise TypeError(f"a media hash must be bytes, str or int, not {type(value).__name__}")
        encoded += field(tag, OFFSET.pack(offset) + digest)
    return encoded


def media_items(extra_key: bytes) -> list[MediaItem]:
    """The media items in a block's extra key: the inverse of `media_extra`. ValueError for bytes
    that are no such key."""
    items: list[MediaItem] = []
    position = 0
    while position < len(extra_key):
        start = position + HEAD.size
        if start > len(extra_key):
            raise ValueError(f"an extra key of {len(extra_key)} bytes ends within a field")
        tag, size = HEAD.unpack_from(extra_key, position)
        position = start + size
        digest = extra_key[start + OFFSET.size : position]
        if (
            position > len(extra_key)
            or size < OFFSET.size
            or tag not in (TAG_BYTES, TAG_TEXT, TAG_INT)
        ):
            raise ValueError(f"not an extra key: a field of tag {tag} and {size} bytes")
        value: MediaHash = (
            digest if tag == TAG_BYTES else digest.decode() if tag == TAG_TEXT else int(digest)
        )
        items.append((value, OFFSET.unpack_from(extra_key, start)[0]))
    return items


def leading_items(extra_key: bytes, num_tokens: int) -> bytes:
    """The extra key of a block of which only the first `num_tokens` tokens remain."""
    if not extra_key:
        return extra_key
    return media_extra(item for item in media_items(extra_key) if item[1] < num_tokens)


def block_extras(
    num_blocks: int,
    block_size: int,
    positions: Sequence[tuple[int, int]],
    hashes: Sequence[MediaHash],
    num_tokens: int | None = None,
) -> dict[int, bytes]:
    """Extra keys of blocks 0 .. num_blocks - 1 from media items at (offset, length) in tokens.

    An item belongs to every block that it overlaps. An item that ends exactly where a block starts
    does not belong to that block. Several items of a block count in item order. num_tokens: the
    prompt's length, which bounds the items. Raises ValueError for unequal lengths, empty or
    negative ranges, items that are not in ascending order or overlap, or reach beyond the prompt.
    """
    if len(positions) != len(hashes):
        raise ValueError(f"{len(positions)} media positions, {len(hashes)} hashes")
    end = 0
    for offset, length in positions:
        if offset < end or length < 1:
            raise ValueError(
                f"media item at {offset} of length {length}: items must be ascending, disjoint and "
                "not empty"
            )
        end = offset + length
    if num_tokens is not None and end > num_tokens:
        raise ValueError(f"a media item ends at {end}, beyond the prompt's {num_tokens} tokens")
    per_block: dict[int, list[MediaItem]] = {}
    for (offset, length), value in zip(positions, hashes, strict=True):
        for block in range(
            offset // block_size, min(num_blocks, (offset + length - 1) // block_size + 1)
        ):
            per_block.setdefault(block, []).append((value, offset - block * block_size))
    return {block: media_extra(items) for block, items in per_block.items()}


# -- lineages: the store keeps them beside blocks, so that indexes can be sent them after a restart


class Lineage(msgspec.Struct, frozen=True, gc=False):
    """The inputs of one block hash. The cyclic garbage collector does not visit it.

    Blocks under a salt have no lineage, because a salt is not written to disk.

    Attributes:
        parent: the parent's block hash, or the root hash for a first block.
        tokens: the block's tokens, little-endian uint32.
    """

    parent: bytes
    tokens: bytes
    extra_key: bytes = b""
    scope: RequestScope = PLAIN

    __repr__ = redacted_repr

    def block_hash(self) -> bytes:
        extra = self.extra_key
        return hashlib.sha256(
            self.parent + len(extra).to_bytes(4, "little") + extra + self.tokens
        ).digest()


class Lineages(NamedTuple):
    """The lineages of a message's blocks. The message itself has their keys and parents.

    Attributes:
        scopes: one for each block (None: the block has no lineage), or one for all.
        extra_keys: the extra keys of the blocks that have one, by index.
    """

    tokens: bytes
    scopes: tuple[RequestScope | None, ...]
    extra_keys: Mapping[int, bytes] = {}

    def __repr__(self) -> str:
        return redacted_repr(self)


def lineage(lineages: Lineages | None, index: int, count: int, parent: bytes) -> Lineage | None:
    """The lineage of one block of a message, None if the block or the message has none."""
    if lineages is None:
        return None
    scope = lineages.scopes[index if len(lineages.scopes) > 1 else 0]
    if scope is None:
        return None
    size = len(lineages.tokens) // count
    tokens = lineages.tokens[index * size : (index + 1) * size]
    return Lineage(parent, tokens, lineages.extra_keys.get(index, b""), scope)
