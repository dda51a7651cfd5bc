"""KV events as readers of vLLM's and SGLang's messages decode them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

Hash = int | bytes


class Event(msgspec.Struct, frozen=True, tag=True, tag_field="type", omit_defaults=True, gc=False):
    """A change of blocks."""


class BlockStored(Event, frozen=True):
    """Blocks of one path, each the parent of the next, are on `medium`."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None


class StoredMap(BlockStored, frozen=True, tag="BlockStored"):
    """With the fields for Dynamo and SGLang, which other readers of maps pass over."""

    block_mm_infos: list[Any] | None = None
    cache_salt: str | None = None


class BlockRemoved(Event, frozen=True):
    """Blocks have left `medium`."""

    block_hashes: list[Hash]
    medium: str | None


class AllBlocksCleared(Event, frozen=True):
    """Nothing is held any more, on any medium."""


class StoredArrayDynamo(BlockStored, frozen=True, array_like=True, tag="BlockStored"):
    """For older readers, with media where Dynamo looks for them in arrays. vLLM's older types have
    another field at this place."""

    block_mm_infos: list[Any] | None = None


class RemovedArray(BlockRemoved, frozen=True, array_like=True, tag="BlockRemoved"):
    """For older readers."""


class ClearedArray(AllBlocksCleared, frozen=True, array_like=True, tag="AllBlocksCleared"):
    """For older readers."""


MapEvents = list[StoredMap | BlockRemoved | AllBlocksCleared]
ArrayEvents = list[StoredArrayDynamo | RemovedArray | ClearedArray]
_decoders: dict[str, Any] = {
    "map": msgspec.msgpack.Decoder(tuple[float, MapEvents, int | None]),
    "array": msgspec.msgpack.Decoder(tuple[float, ArrayEvents, int | None]),
}


def decode_batch(
    payload: bytes, dialect: Literal["map", "array"] = "map"
) -> tuple[float, Sequence[Event], int | None]:
    """A payload frame as timestamp, events and rank, or msgspec.DecodeError."""
    return _decoders[dialect].decode(payload)  # type: ignore[no-any-return]
