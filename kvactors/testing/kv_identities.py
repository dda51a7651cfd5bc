"""The identity of a block to readers of KV events: whether they can tell different blocks apart.

A router does not look up block hashes: it has a prompt, and computes from the events what
identifies each block. Two blocks with different hashes and one identity are one block to it, and a
block whose events disagree is two.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from kvactors.flush_notifier.sinks.kv_wire import BlockStored, Hash


def as_dynamo(event: BlockStored, block: int) -> Any:
    """Adapter, salt and media of each event alone. Nothing is carried over from other tiers'
    events."""
    infos: list[Any] = getattr(event, "block_mm_infos", None) or [None] * len(event.block_hashes)
    objects = (infos[block] or {"mm_objects": []})["mm_objects"]
    return (
        event.lora_name,
        getattr(event, "cache_salt", None),
        sorted(one["mm_hash"] for one in objects),
    )


def as_vllm(event: BlockStored, block: int) -> Any:
    """The extra keys of each block. A salt counts for all blocks below the one that carries it."""
    return event.extra_keys[block] if event.extra_keys else None


READERS: dict[str, Callable[[BlockStored, int], Any]] = {"dynamo": as_dynamo, "vllm": as_vllm}


class Identities:
    """changed: events that disagree with an earlier one about the same block."""

    def __init__(self) -> None:
        self.changed = 0
        self._known: dict[str, dict[Hash, bytes]] = {name: {} for name in READERS}

    def clear(self) -> None:
        """Drop every block."""
        for known in self._known.values():
            known.clear()

    def stored(self, event: BlockStored) -> None:
        """Compute the identity of these blocks for each kind of reader."""
        tokens = event.token_ids
        assert isinstance(tokens, list), "an event that was read"
        for name, read in READERS.items():
            known, parent = self._known[name], event.parent_block_hash
            for block, number in enumerate(event.block_hashes):
                above = b"" if parent is None else known.get(parent, repr(parent).encode())
                own = tokens[block * event.block_size : (block + 1) * event.block_size]
                content = hashlib.sha256(
                    msgspec.msgpack.encode((above, read(event, block), own))
                ).digest()
                self.changed += known.setdefault(number, content) != content
                parent = number

    def ambiguous(self, hashes: Collection[Hash]) -> int:
        """Of these blocks, those that a reader takes for another one of them."""
        counts = (
            Counter(known[number] for number in hashes if number in known)
            for known in self._known.values()
        )
        return sum(count - 1 for contents in counts for count in contents.values())
