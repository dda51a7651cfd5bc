"""Fields of a table entry that hold the inputs of the key (a block hash).

    tag  value
    2    hash of the parent block, or the root hash: 32 bytes
    3    the block's own tokens, little-endian u32
    4    extra key of the block, left out if it has none
    5    name of the LoRA adapter, UTF-8, left out if there is none
    6    number of the LoRA adapter, i64, left out if there is none

All of them are there, or none: an entry too short for one has none. Blocks under a salt have none,
so that neither a salt nor the tokens behind it are on disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from kvactors.flush_notifier.messages import PLAIN, RequestScope
from kvactors.lineage import Lineage
from kvactors.storage.backends.slab_table import (
    ENTRY_BYTES,
    FIELD,
    HEAD,
    MOST_ENTRY,
    PARENT,
    Meta,
)
from kvactors.storage.inventory import OwnedInventory
from kvactors.types import HASH_BYTES

TOKENS, EXTRA, LORA, LORA_ID = 3, 4, 5, 6

TIME_FIELD = FIELD.size + 8
SPARE = 128
"""Bytes of an entry for an extra key and an adapter: enough for two media items with hashes of 32
bytes, or an adapter's name of 124."""


def entry_bytes_for(block_size: int) -> int:
    """Bytes of an entry of a new store whose blocks have so many tokens (0: it keeps no
    lineages)."""
    if not block_size:
        return ENTRY_BYTES
    wanted = (
        HEAD.size
        + TIME_FIELD
        + (FIELD.size + HASH_BYTES)
        + (FIELD.size + 4 * block_size)
        + SPARE
        + 8
    )
    size = -(-wanted // 8) * 8
    return size if size <= MOST_ENTRY else ENTRY_BYTES


def room_beside(meta: Meta, fields: Mapping[int, bytes]) -> int:
    """Bytes of an entry's metadata area beside other fields."""
    used = sum(FIELD.size + len(value) for value in fields.values())
    return meta.entry_bytes - HEAD.size - 8 - used


def fields_of_lineage(lineage: Lineage | None, space: int) -> dict[int, bytes]:
    """The fields, by tag. Empty if they need more than `space` bytes, or there is no lineage."""
    if lineage is None:
        return {}
    fields = {PARENT: lineage.parent, TOKENS: lineage.tokens}
    if lineage.extra_key:
        fields[EXTRA] = lineage.extra_key
    if lineage.scope.lora is not None:
        fields[LORA] = lineage.scope.lora.encode()
        if lineage.scope.lora_id is not None and lineage.scope.lora_id.bit_length() < 64:
            fields[LORA_ID] = lineage.scope.lora_id.to_bytes(8, "little", signed=True)
    sizes = [len(value) for value in fields.values()]
    return fields if sum(sizes) + FIELD.size * len(sizes) <= space and max(sizes) < 1 << 16 else {}


def lineage_in(fields: dict[int, bytes], key: bytes) -> Lineage | None:
    """The lineage in an entry's metadata; None if there is none, or it is not that of the key."""
    parent, tokens = fields.get(PARENT, b""), fields.get(TOKENS, b"")
    if len(parent) != HASH_BYTES or not tokens:
        return None
    try:
        lora = fields[LORA].decode() if LORA in fields else None
    except UnicodeDecodeError:
        return None
    number = int.from_bytes(fields[LORA_ID], "little", signed=True) if LORA_ID in fields else None
    found = Lineage(
        parent,
        tokens,
        fields.get(EXTRA, b""),
        PLAIN if lora is None else RequestScope(lora, lora_id=number),
    )
    return found if found.block_hash() == key else None


class WritingLineages:
    """Lineages of the objects that are being written, by key."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, tuple[Lineage]] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def get(self, key: bytes) -> Lineage | None:
        """The lineage of a key; None if it has none."""
        found = self._by_key.get(key)
        return None if found is None else found[0]

    @contextmanager
    def of_batch(
        self, keys: Sequence[bytes], lineages: Sequence[Lineage | None], inventory: OwnedInventory
    ) -> Iterator[None]:
        """Keep the lineages of a batch while it is written. Keys that are in the store, or that
        another batch is writing, are not this batch's."""
        # A key of `pending` may have been evicted from the catalog by another batch.
        there = (inventory.catalog, inventory.pending)
        mine = {
            key: (one,)
            for key, one in zip(keys, lineages, strict=False)
            if one is not None and not any(key in held for held in there)
        }
        self._by_key |= mine
        try:
            yield
        finally:
            for key, entry in mine.items():
                # Another batch may have set its own since this one was refused the key.
                if self._by_key.get(key) is entry:
                    del self._by_key[key]
