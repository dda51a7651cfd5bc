"""KV events on the wire, as vLLM and SGLang publish and read them (vllm/distributed/kv_events.py;
docs/kv_events.md has golden bytes).

A batch is a msgpack array [timestamp in seconds, events, data-parallel rank]. An event is a map
with its class under `type` (vLLM after 0.23, SGLang 0.5.23), or an array with the class first
(older vLLM). In maps, fields that have their default are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import xxhash

from kvactors.flush_notifier.blocks import HeldBlock
from kvactors.flush_notifier.messages import ExtraKeys, FlushTask, GroupLabel
from kvactors.identity import PLAIN, MediaHash, RequestScope, media_items
from kvactors.native import EventEncoder
from kvactors.settings.sinks import KvEventsSinkConfig
from kvactors.types import HASH_BYTES, Residency, Tier, split_hashes

MEDIA = {
    "vllm": {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.STORAGE: "STORAGE"},
    "sglang": {Tier.DEVICE: "GPU", Tier.HOST: "CPU_PINNED", Tier.STORAGE: "DISK"},
}
"""By dialect: the names of the tiers."""

GROUP_FIELDS = ("group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window")
GROUP_KINDS = {"window": "sliding_window", "state": "mamba"}
"""vLLM's names, by the kind of a group of layers."""

END = (1 << 64) - 1  # in place of a sequence number: the end of a reply

_pack = msgspec.msgpack.Encoder().encode


def encode_sequence(number: int) -> bytes:
    """A sequence number as its frame."""
    return number.to_bytes(8, "big")


# -- the identity of a block beside its tokens, as vLLM, llm-d and Dynamo read it

DYNAMO_SALT = "dynamo-cache-salt:"  # Dynamo's prefix of a salt, where a bare one is ambiguous
EMPTY = "\0"  # in place of an empty salt or adapter's name, which readers take for none at all
DIGEST = re.compile("[0-9a-fA-F]{64}")  # the identifiers that vLLM computes


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
    """Dynamo's 64-bit number of a media item: of an identifier of 64 hexadecimal digits the first
    16, of any other text its XXH3. An integer of at most 64 bits is that number itself."""
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
    infos: list[Any] = [None] * count
    for block, items in media.items():
        keys[block] = adapter + [[identifier(value), offset] for value, offset in items]
        # Dynamo takes the item itself into account, not its place.
        objects = [{"mm_hash": mm_hash(value), "offsets": []} for value, _ in items]
        infos[block] = {"mm_objects": objects}
    if first:
        keys[0] = (keys[0] or []) + first
    return Fields(keys, infos if first or media else None, cache_salt)


# -- the encoder, in the form that a sink is configured for

IDENTITIES = 256  # identities without media that are kept encoded


class Form(NamedTuple):
    """How the identity of blocks is sent: in arrays, where a field without a value is nil, or in
    maps, where it is left out. num_fields: how many of the fields of `Fields` are sent."""

    array: bool
    num_fields: int
    tagged: bool = False

    @classmethod
    def of(cls, config: KvEventsSinkConfig) -> Form:
        if config.dialect == "map":
            return cls(array=False, num_fields=3 if config.maps_for == "all" else 1)
        if config.arrays_for == "dynamo":
            return cls(array=True, num_fields=2, tagged=True)
        return cls(array=True, num_fields=1)


Identity = tuple[bytes, bytes, int, bytes]
"""Encoded: lora_id, lora_name, how many fields follow it, and these fields."""


class KvEventEncoder:
    """Encodes events of one sink, as MessagePack encoders that write numbers in the shortest form,
    bit for bit."""

    __slots__ = (
        "_form",
        "_max_blocks",
        "_media",
        "_native",
        "_whole",
        "batch",
        "cleared",
        "takes_groups",
    )

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
        self._max_blocks, self._whole = config.max_blocks, config.hashes == "bytes"
        self._media = MEDIA[config.media]
        self.takes_groups = config.arrays_for == "vllm"  # Dynamo reads other fields in arrays
        self.batch = self._native.batch
        cleared = "AllBlocksCleared"
        self.cleared = _pack([cleared] if form.array else {"type": cleared})

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
            tokens: of these blocks alone.
            position: of the first of them in its path. At 0 there is no parent.
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
        if tasks and tasks[0].group is not None:
            if sum(task.count for task in tasks) > self._max_blocks:
                return None
            return self.batch(timestamp, [self.event(task) for task in tasks])
        return self._native.batch_of_tasks(timestamp, tasks, self._max_blocks, self.event)

    def event(self, task: FlushTask) -> bytes:
        if task.residency is Residency.RESIDENT:
            content = task.hashes, task.parent, task.tokens, task.tier
            if task.group is not None:
                return self._stored_in_group(*content, task.scope, task.group)
            return self.stored(*content, task.start_block_idx, task.scope, task.extra_keys)
        if task.group is not None:
            return self._removed_from_group(task.hashes, task.tier, task.group)
        return self._native.removed(task.hashes, task.tier) if task.count else self.cleared

    def events(self, task: FlushTask, max_blocks: int) -> Iterator[tuple[bytes, int]]:
        """Encode a task as events of at most `max_blocks` blocks, with their numbers."""
        count, hashes = task.count, task.hashes
        if count <= max_blocks:
            yield self.event(task), count
            return
        spans = [(at, min(at + max_blocks, count)) for at in range(0, count, max_blocks)]
        if task.residency is Residency.GONE:  # children before parents
            spans = [(max(0, end - max_blocks), end) for end in range(count, 0, -max_blocks)]
        size = len(task.tokens) // count
        for at, end in spans:
            part = msgspec.structs.replace(
                task,
                tokens=task.tokens[size * at : size * end],
                start_block_idx=task.start_block_idx + at,
                count=end - at,
                hashes=hashes[HASH_BYTES * at : HASH_BYTES * end],
                parent=hashes[HASH_BYTES * (at - 1) : HASH_BYTES * at] if at else task.parent,
            )
            yield self.event(part), end - at

    def _stored_in_group(
        self,
        hashes: bytes,
        parent: bytes,
        tokens: bytes,
        tier: Tier,
        scope: RequestScope,
        group: GroupLabel,
    ) -> bytes:
        """A BlockStored with the fields of vLLM's hybrid models. It has no parent: the index has
        blocks of the group anywhere in prompts."""
        count = len(hashes) // HASH_BYTES
        lora_id, lora_name, fields, packed = pack_identity(self._form, scope, 1, count, ())
        values = (group.number, GROUP_KINDS[group.kind], group.window or None)
        for name, value in zip(GROUP_FIELDS, values, strict=True):
            packed += _pack(value) if self._form.array else _pack(name) + _pack(value)
        more = (lora_id, lora_name, fields + len(values), packed)
        return self._native.stored_with(hashes, b"", tokens, tier, *more)

    def _removed_from_group(self, hashes: bytes, tier: Tier, group: GroupLabel) -> bytes:
        names: list[Any] = split_hashes(hashes)
        if not self._whole:
            names = [int.from_bytes(name[-8:], "big") for name in names]
        event: dict[str, Any] = {"type": "BlockRemoved", "block_hashes": names}
        event |= {"medium": self._media[tier], "group_idx": group.number}
        return _pack(list(event.values()) if self._form.array else event)

    def held(self, held: HeldBlock, tier: Tier) -> bytes:
        if held.group is not None:
            content = held.hash, b"", held.tokens, tier, held.scope, held.group
            return self._stored_in_group(*content)
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
