"""KV events on the wire, as vLLM and SGLang publish and read them (vllm/distributed/kv_events.py;
docs/kv_events.md has golden bytes).

A batch is a msgpack array [timestamp in seconds, events, data-parallel rank]. An event is a map
with its class under `type` (vLLM after 0.23, SGLang 0.5.23), or an array with the class first
(older vLLM). In maps, fields that have their default are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from kvactors.discreet import discreet, discreet_rich
from kvactors.types import Tier

MEDIA = {
    "vllm": {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.STORAGE: "STORAGE"},
    "sglang": {Tier.DEVICE: "GPU", Tier.HOST: "CPU_PINNED", Tier.STORAGE: "DISK"},
}
"""By dialect: what a tier is called."""

END = (1 << 64) - 1
"""In place of a sequence number: the end of a reply."""

Hash = int | bytes


class BlockStored(
    msgspec.Struct, frozen=True, tag=True, tag_field="type", omit_defaults=True, gc=False
):
    """Blocks of one path, each the parent of the next, are on `medium`.

    Attributes:
        parent_block_hash: None at the start of a sequence.
        token_ids: of all these blocks.
        extra_keys, block_mm_infos, cache_salt: what beside tokens identifies the blocks
            (`kv_identity`).
    """

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None

    __repr__ = discreet
    __rich_repr__ = discreet_rich


class StoredMap(BlockStored, frozen=True, tag="BlockStored"):
    """With the fields for Dynamo and SGLang, which other readers of maps pass over."""

    block_mm_infos: list[Any] | None = None
    cache_salt: str | None = None


class BlockRemoved(
    msgspec.Struct, frozen=True, tag=True, tag_field="type", omit_defaults=True, gc=False
):
    """Blocks have left `medium`."""

    block_hashes: list[Hash]
    medium: str | None


class AllBlocksCleared(
    msgspec.Struct, frozen=True, tag=True, tag_field="type", omit_defaults=True, gc=False
):
    """Nothing is held any more, on any medium."""


class StoredArray(BlockStored, frozen=True, array_like=True, tag="BlockStored"):
    """The same for older readers."""


class StoredArrayDynamo(StoredArray, frozen=True, array_like=True, tag="BlockStored"):
    """With media where Dynamo looks for them in arrays. vLLM's older types have another field at
    this place."""

    block_mm_infos: list[Any] | None = None


class RemovedArray(BlockRemoved, frozen=True, array_like=True, tag="BlockRemoved"):
    """The same for older readers."""


class ClearedArray(AllBlocksCleared, frozen=True, array_like=True, tag="AllBlocksCleared"):
    """The same for older readers."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


_encoder = msgspec.msgpack.Encoder()


def encode_batch(timestamp: float, events: Sequence[Any], dp_rank: int) -> bytes:
    """A batch as its payload frame."""
    return _encoder.encode((timestamp, events, dp_rank))


def encode_sequence(number: int) -> bytes:
    """A sequence number as its frame: 8 bytes, big-endian."""
    return number.to_bytes(8, "big")


MapEvents = list[StoredMap | BlockRemoved | AllBlocksCleared]
ArrayEvents = list[StoredArrayDynamo | RemovedArray | ClearedArray]
_decoders: dict[str, Any] = {
    "map": msgspec.msgpack.Decoder(tuple[float, MapEvents, int | None]),
    "array": msgspec.msgpack.Decoder(tuple[float, ArrayEvents, int | None]),
}


def decode_batch(
    payload: bytes, dialect: Literal["map", "array"] = "map"
) -> tuple[float, Sequence[Event], int | None]:
    """A payload frame as timestamp, events and rank. msgspec.DecodeError (or its ValidationError)
    if it is none."""
    decoded: tuple[float, Sequence[Event], int | None] = _decoders[dialect].decode(payload)
    return decoded
