"""KV events on the wire, as vLLM and SGLang publish and read them (vllm/distributed/kv_events.py;
docs/kv_events.md has golden bytes).

A batch is a msgpack array [timestamp in seconds, events, data-parallel rank]. An event is a map
with its class under `type` (vLLM after 0.23, SGLang 0.5.23), or an array with the class first
(older vLLM). In maps, fields that have their default are left out.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import msgspec

from kvactors.discreet import discreet, discreet_rich
from kvactors.flush_notifier.blocks import HeldBlock
from kvactors.flush_notifier.messages import ExtraKeys, FlushTask, Origin
from kvactors.flush_notifier.sinks.kv_identity import identity_fields, text
from kvactors.native import pack_tokens
from kvactors.sink_config import KvEventsSinkConfig
from kvactors.types import KEY_BYTES, Residency, Tier

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
    """Blocks of one path, each the parent of the next, are on `medium`. parent_block_hash: None at
    the start of a sequence. token_ids: of all these blocks. extra_keys, block_mm_infos, cache_salt:
    what beside tokens identifies the blocks (`kv_identity`)."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int] | msgspec.Raw  # packed when sent, a list when read
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


class Dialect(NamedTuple):
    """How a reader wants it. identity: how many of the fields of `kv_identity.Fields` a stored
    event has. tagged: see `identity_fields`."""

    stored: type[BlockStored]
    removed: type[BlockRemoved]
    cleared: type[AllBlocksCleared]
    media: dict[Tier, str]
    as_bytes: bool
    block_size: int
    identity: int
    tagged: bool

    @classmethod
    def of(cls, config: KvEventsSinkConfig, block_size: int) -> Dialect:
        """The dialect that a sink is configured for."""
        media, as_bytes = MEDIA[config.media], config.hashes == "bytes"
        if config.dialect == "map":
            fields = 3 if config.maps_for == "all" else 1
            return cls(
                StoredMap,
                BlockRemoved,
                AllBlocksCleared,
                media,
                as_bytes,
                block_size,
                fields,
                tagged=False,
            )
        if config.arrays_for == "dynamo":
            return cls(
                StoredArrayDynamo,
                RemovedArray,
                ClearedArray,
                media,
                as_bytes,
                block_size,
                2,
                tagged=True,
            )
        return cls(
            StoredArray, RemovedArray, ClearedArray, media, as_bytes, block_size, 1, tagged=False
        )

    def hashes(self, keys: bytes) -> list[Hash]:
        """Names as readers expect them: the last 8 bytes as a big-endian unsigned number, or all
        32."""
        if self.as_bytes:
            return [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]
        return list(numbers_in(len(keys) // KEY_BYTES)(keys))

    def stored_event(
        self,
        keys: bytes,
        parent: bytes,
        tokens: bytes,
        tier: Tier,
        position: int,
        origin: Origin,
        extra_keys: ExtraKeys,
    ) -> BlockStored:
        """tokens: of these blocks alone. position: of the first of them in its path. At 0 there is
        no parent. extra_keys: of the path."""
        lora, salt, lora_id = origin
        fields: tuple[Any, ...] = ()
        if extra_keys or lora is not None or salt is not None:
            count = len(keys) // KEY_BYTES
            fields = identity_fields(origin, position, count, extra_keys, tagged=self.tagged)[
                : self.identity
            ]
        return self.stored(
            self.hashes(keys),
            None
            if not position
            else parent
            if self.as_bytes
            else int.from_bytes(parent[-8:], "big"),
            msgspec.Raw(pack_tokens(tokens)),
            self.block_size,
            lora_id,
            self.media[tier],
            text(lora),
            *fields,
        )

    def held(self, held: HeldBlock, tier: Tier) -> BlockStored:
        """One block that is resident on `tier`, for snapshots and repetitions."""
        extra_keys = ((held.position, held.extra_key),) if held.extra_key else ()
        return self.stored_event(
            held.key, held.parent, held.tokens, tier, held.position, held.origin, extra_keys
        )

    def events(self, task: FlushTask, max_blocks: int) -> list[Event]:
        """A task (of a sink that identifies blocks by name) as events of at most `max_blocks`
        blocks each."""
        count, keys, tier = task.count, task.keys, task.tier
        if not count:
            return [self.cleared()]
        if task.residency is Residency.GONE:
            hashes = self.hashes(keys)[::-1]  # children before parents
            return [
                self.removed(hashes[at : at + max_blocks], self.media[tier])
                for at in range(0, count, max_blocks)
            ]
        first, origin, extra_keys = task.start_block_idx, task.origin, task.extra_keys
        if count <= max_blocks:
            return [
                self.stored_event(keys, task.parent, task.tokens, tier, first, origin, extra_keys)
            ]
        size = 4 * self.block_size
        made: list[Event] = []
        for at in range(0, count, max_blocks):
            end = min(at + max_blocks, count)
            parent = keys[KEY_BYTES * (at - 1) : KEY_BYTES * at] if at else task.parent
            part, tokens = (
                keys[KEY_BYTES * at : KEY_BYTES * end],
                task.tokens[size * at : size * end],
            )
            made.append(
                self.stored_event(part, parent, tokens, tier, first + at, origin, extra_keys)
            )
        return made


@lru_cache(1024)
def numbers_in(count: int) -> Callable[[bytes], tuple[int, ...]]:
    """Reads so many names: the last 8 bytes of each as a big-endian unsigned number."""
    return struct.Struct(">" + "24xQ" * count).unpack


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
