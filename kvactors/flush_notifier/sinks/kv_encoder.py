"""Encodes KV events and batches in the form that a sink is configured for (`kv_wire` describes the
messages, `kv_identity` the fields that identify blocks beside their tokens)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec

from kvactors.flush_notifier.blocks import HeldBlock
from kvactors.flush_notifier.messages import PLAIN, ExtraKeys, FlushTask, RequestScope
from kvactors.flush_notifier.sinks.kv_identity import Fields, identity_fields, text
from kvactors.flush_notifier.sinks.kv_wire import MEDIA, AllBlocksCleared, ClearedArray
from kvactors.native import EventEncoder
from kvactors.sink_config import KvEventsSinkConfig
from kvactors.types import HASH_BYTES, Residency, Tier

IDENTITIES = 256
"""Identities without media that are kept encoded."""

_pack = msgspec.msgpack.Encoder().encode


class Form(NamedTuple):
    """How the identity of blocks is sent.

    Attributes:
        array: in arrays, where a field without a value is nil. Otherwise in maps, where it is left
            out.
        num_fields: how many of the fields of `kv_identity.Fields` are sent.
        tagged: see `identity_fields`.
    """

    array: bool
    num_fields: int
    tagged: bool = False

    @classmethod
    def of(cls, config: KvEventsSinkConfig) -> Form:
        """The form that a sink is configured for."""
        if config.dialect == "map":
            return cls(array=False, num_fields=3 if config.maps_for == "all" else 1)
        if config.arrays_for == "dynamo":
            return cls(array=True, num_fields=2, tagged=True)
        return cls(array=True, num_fields=1)


Identity = tuple[bytes, bytes, int, bytes]
"""Encoded: lora_id, lora_name, how many fields follow it, and these fields."""


class KvEventEncoder:
    """Encodes events of one sink. Its result is that of MessagePack encoders that write numbers in
    their shortest form, bit for bit.

    Args:
        config: the form of the events.
        block_size: tokens of a block.

    Attributes:
        cleared: an AllBlocksCleared event.
        batch: encodes a batch: `batch(timestamp, events)`.
    """

    __slots__ = ("_form", "_max_blocks", "_native", "batch", "cleared")

    def __init__(self, config: KvEventsSinkConfig, block_size: int) -> None:
        self._form = form = Form.of(config)
        self._native = EventEncoder(
            array=form.array,
            whole_hashes=config.hashes == "bytes",
            block_size=block_size,
            media=[MEDIA[config.media][tier] for tier in Tier],
            num_nil=form.num_fields if form.array else 0,
            dp_rank=_pack(config.dp_rank),
            resident=Residency.RESIDENT,
            plain=PLAIN,
        )
        self._max_blocks = config.max_blocks
        self.batch = self._native.batch
        self.cleared = _pack(ClearedArray() if form.array else AllBlocksCleared())

    def stored(
        self,
        hashes: bytes,
        parent: bytes,
        tokens: bytes,
        tier: Tier,
        position: int,
        scope: RequestScope,
        extra_keys: ExtraKeys,
    ) -> bytes:
        """Encode a BlockStored event.

        Args:
            hashes: block hashes.
            parent: hash of the block before them.
            tokens: of these blocks alone.
            tier: where the blocks are.
            position: of the first of them in its path. At 0 there is no parent.
            scope: their scope.
            extra_keys: of the path.
        """
        if not position:
            parent = b""
        lora, salt, lora_id = scope
        if lora is None and salt is None and lora_id is None and not extra_keys:
            return self._native.stored(hashes, parent, tokens, tier)
        count = len(hashes) // HASH_BYTES
        if extra_keys:
            identity = pack_identity(self._form, scope, position, count, extra_keys)
        else:
            identity = scope_identity(self._form, scope, position == 0, count)
        return self._native.stored_with(hashes, parent, tokens, tier, *identity)

    def batch_of_tasks(self, timestamp: float, tasks: Sequence[FlushTask]) -> bytes | None:
        """Encode tasks as one batch, each as one event. None if they have more than `max_blocks`
        blocks, and if there are none."""
        return self._native.batch_of_tasks(timestamp, tasks, self._max_blocks, self.event)

    def event(self, task: FlushTask) -> bytes:
        """Encode a task (of a sink that identifies blocks by name) as one event."""
        if task.residency is Residency.RESIDENT:
            return self.stored(
                task.hashes,
                task.parent,
                task.tokens,
                task.tier,
                task.start_block_idx,
                task.scope,
                task.extra_keys,
            )
        return self._native.removed(task.hashes, task.tier) if task.count else self.cleared

    def events(self, task: FlushTask, max_blocks: int) -> Iterator[tuple[bytes, int]]:
        """Encode a task as events of at most `max_blocks` blocks each, with the number of blocks of
        each."""
        count, hashes = task.count, task.hashes
        if count <= max_blocks:
            yield self.event(task), count
            return
        if task.residency is Residency.GONE:
            for end in range(count, 0, -max_blocks):  # children before parents
                part = hashes[HASH_BYTES * max(0, end - max_blocks) : HASH_BYTES * end]
                yield self._native.removed(part, task.tier), len(part) // HASH_BYTES
            return
        size = len(task.tokens) // count
        for at in range(0, count, max_blocks):
            end = min(at + max_blocks, count)
            event = self.stored(
                hashes[HASH_BYTES * at : HASH_BYTES * end],
                hashes[HASH_BYTES * (at - 1) : HASH_BYTES * at] if at else task.parent,
                task.tokens[size * at : size * end],
                task.tier,
                task.start_block_idx + at,
                task.scope,
                task.extra_keys,
            )
            yield event, end - at

    def held(self, held: HeldBlock, tier: Tier) -> bytes:
        """Encode one block that is resident on `tier`, for snapshots and repetitions."""
        extra_keys = ((held.position, held.extra_key),) if held.extra_key else ()
        return self.stored(
            held.hash, held.parent, held.tokens, tier, held.position, held.scope, extra_keys
        )


def pack_identity(
    form: Form, scope: RequestScope, position: int, count: int, extra_keys: ExtraKeys
) -> Identity:
    """Encode what identifies blocks [position, position + count) of a path beside their tokens."""
    values = identity_fields(scope, position, count, extra_keys, tagged=form.tagged)
    sent = list(zip(Fields._fields, values, strict=True))[: form.num_fields]
    if form.array:
        packed = [_pack(value) for _, value in sent]
    else:
        packed = [_pack(name) + _pack(value) for name, value in sent if value is not None]
    return _pack(scope.lora_id), _pack(text(scope.lora)), len(packed), b"".join(packed)


@lru_cache(IDENTITIES)
def scope_identity(form: Form, scope: RequestScope, at_start: bool, count: int) -> Identity:
    """Encode the identity of blocks without media. at_start: they begin a sequence."""
    return pack_identity(form, scope, 0 if at_start else 1, count, ())
