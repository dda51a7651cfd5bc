"""KV events as msgspec encodes them from the message types: the reference of the native encoder."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.sinks.kv_wire import MEDIA, identity_fields, text
from kvactors.settings.sinks import KvEventsSinkConfig
from kvactors.types import Residency, split_hashes
from tests.support.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ClearedArray,
    RemovedArray,
    StoredArrayDynamo,
    StoredMap,
)


class StoredArray(BlockStored, frozen=True, array_like=True, tag="BlockStored"):
    """As vLLM's older types have it."""


def hash_of(config: KvEventsSinkConfig, key: bytes) -> int | bytes:
    return key if config.hashes == "bytes" else int.from_bytes(key[-8:], "big")


def stored(config: KvEventsSinkConfig, block_size: int, task: FlushTask, at: int, end: int) -> Any:
    """Blocks [at, end) of a task as one event."""
    keys, position = split_hashes(task.hashes), task.start_block_idx + at
    parent = keys[at - 1] if at else task.parent
    tokens = np.frombuffer(task.tokens, "<u4").reshape(task.count, -1)[at:end].ravel().tolist()
    kind, num_fields = {
        ("map", "all"): (StoredMap, 3),
        ("map", "vllm"): (StoredMap, 1),
        ("array", "vllm"): (StoredArray, 1),
        ("array", "dynamo"): (StoredArrayDynamo, 2),
    }[config.dialect, config.maps_for if config.dialect == "map" else config.arrays_for]
    identity = identity_fields(
        task.scope, position, end - at, task.extra_keys, tagged=kind is StoredArrayDynamo
    )
    return kind(
        [hash_of(config, key) for key in keys[at:end]],
        hash_of(config, parent) if position else None,
        tokens,
        block_size,
        task.scope.lora_id,
        MEDIA[config.media][task.tier],
        text(task.scope.lora),
        *identity[:num_fields],
    )


def events(
    config: KvEventsSinkConfig, block_size: int, task: FlushTask, max_blocks: int
) -> list[Any]:
    """A task as events of at most `max_blocks` blocks each."""
    array = config.dialect == "array"
    if not task.count:
        return [ClearedArray() if array else AllBlocksCleared()]
    starts = range(0, task.count, max_blocks)
    if task.residency is Residency.RESIDENT:
        return [
            stored(config, block_size, task, at, min(at + max_blocks, task.count)) for at in starts
        ]
    hashes = [hash_of(config, key) for key in reversed(split_hashes(task.hashes))]
    kind = RemovedArray if array else BlockRemoved
    medium = MEDIA[config.media][task.tier]
    return [kind(hashes[at : at + max_blocks], medium) for at in starts]


def batch(timestamp: float, made: list[Any], dp_rank: int) -> bytes:
    """A batch of events."""
    return msgspec.msgpack.encode((timestamp, made, dp_rank))
