"""The identity of a block beside its tokens, in the fields of a KV event: adapter, salt and media,
as vLLM, llm-d and Dynamo read them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import xxhash

from kvactors.extra_keys import MediaHash, media_items
from kvactors.flush_notifier.messages import ExtraKeys, RequestScope

DYNAMO_SALT = "dynamo-cache-salt:"
"""Dynamo's prefix of a salt where a bare text would be ambiguous. Engines behind Dynamo get
their salts with it."""

EMPTY = "\0"
"""In place of an empty salt or adapter's name: readers take an empty text for none at all, and
would mix two identities."""

DIGEST = re.compile("[0-9a-fA-F]{64}")
"""The identifiers that vLLM computes."""


class Fields(NamedTuple):
    """extra_keys: per block as vLLM sends them. block_mm_infos: per block as Dynamo reads them.
    cache_salt: as Dynamo and SGLang read it."""

    extra_keys: list[Any] | None = None
    block_mm_infos: list[Any] | None = None
    cache_salt: str | None = None


def identifier(media_hash: MediaHash) -> str:
    """The text that names a media item on the wire: bytes in hexadecimal, an integer in decimal."""
    return media_hash.hex() if isinstance(media_hash, bytes) else str(media_hash)


def mm_hash(media_hash: MediaHash) -> int:
    """Dynamo's 64-bit number of a media item: of an identifier of 64 hexadecimal
    digits the first 16, of any other text its XXH3. An integer hash of at most 64 bits is that
    number itself."""
    if isinstance(media_hash, int) and 0 <= media_hash < 1 << 64:
        return media_hash
    name = identifier(media_hash)
    return int(name[:16], 16) if DIGEST.fullmatch(name) else xxhash.xxh3_64_intdigest(name.encode())


def text(value: str | None) -> str | None:
    """An adapter's name or a salt as it is sent."""
    return EMPTY if value == "" else value


def identity_fields(
    scope: RequestScope, position: int, count: int, extra_keys: ExtraKeys, *, tagged: bool = False
) -> Fields:
    """The fields of an event about blocks [position, position + count) of a path.

    extra_keys: of the path's blocks. tagged: every event's first block carries the salt with
    Dynamo's tag, for readers of arrays. Otherwise the first block of the path carries it bare, as
    vLLM sends it.

    A block's extra keys are in vLLM's order: adapter, [identifier, offset] of each media item,
    salt. Where they hold more than the adapter, `block_mm_infos` marks those that are media:
    Dynamo would take a salt of 64 hexadecimal digits for one.
    """
    lora, salt = text(scope.lora), text(scope.salt)
    first: list[Any] = []  # what only the event's first block carries
    if salt is not None and tagged:
        first = [DYNAMO_SALT + salt.removeprefix(DYNAMO_SALT)]
    elif salt is not None and not position:
        first = [salt]
    media = {
        at - position: media_items(key)
        for at, key in extra_keys
        if position <= at < position + count
    }
    cache_salt = None if salt is None else salt.removeprefix(DYNAMO_SALT) or EMPTY
    if lora is None and not first and not media:
        return Fields(cache_salt=cache_salt)
    adapter: list[Any] = [] if lora is None else [lora]
    keys: list[Any] = [adapter or None] * count
    for block, items in media.items():
        keys[block] = adapter + [[identifier(value), offset] for value, offset in items]
    if first:
        keys[0] = (keys[0] or []) + first
    infos = _mm_infos(media, count) if first or media else None
    return Fields(keys, infos, cache_salt)


def _mm_infos(media: Mapping[int, Any], count: int) -> list[Any]:
    """Per block, its media items as Dynamo's `mm_objects`, None without. Dynamo takes the item
    itself into account, not its place."""
    infos: list[Any] = [None] * count
    for block, items in media.items():
        infos[block] = {
            "mm_objects": [{"mm_hash": mm_hash(value), "offsets": []} for value, _ in items]
        }
    return infos
