"""Blocks that were found in storage: they get entries when what their hashes are made of and their
parents are there.

`Gained` says that a block is resident, `Named` what its hash is made of. It becomes an entry below
its parent's entry, or below a root. One whose parent has none waits, until the parent gets one by
any path; if it leaves all tiers before, it is forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from kvactors.discreet import discreet
from kvactors.flush_notifier.messages import Named, Origin
from kvactors.flush_notifier.runs import LAST, Entry
from kvactors.types import Reason, Tier, key_at

if TYPE_CHECKING:
    from kvactors.flush_notifier.ledger import Ledger

WAITING = 65_536
"""Blocks without a parent that wait at most; the oldest is forgotten then, and stays unannounced
until a request names its path."""


class Unplaced(NamedTuple):
    """What a block's hash is made of."""

    parent_key: bytes
    tokens: bytes
    extra_key: bytes
    origin: Origin

    def __repr__(self) -> str:
        return discreet(self)


class Waiting:
    """Named blocks without an entry for their parent. All of them are resident (in
    `Ledger.unnamed`)."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, Unplaced] = {}
        self._below: dict[bytes, dict[bytes, None]] = {}
        self.placeable: deque[bytes] = deque()  # keys with an entry since, below which blocks wait

    def __contains__(self, key: bytes) -> bool:
        return key in self.blocks

    def add(self, key: bytes, block: Unplaced) -> None:
        """Keep a block; the oldest one goes if there are too many."""
        self.drop(key)
        if len(self.blocks) >= WAITING:
            self.drop(next(iter(self.blocks)))
        self.blocks[key] = block
        self._below.setdefault(block.parent_key, {})[key] = None

    def drop(self, key: bytes) -> Unplaced | None:
        """Forget a block; what was kept of it."""
        block = self.blocks.pop(key, None)
        if block is not None:
            below = self._below[block.parent_key]
            del below[key]
            if not below:
                del self._below[block.parent_key]
        return block

    def learned(self, key: bytes) -> None:
        """There is an entry for this block now: it waits no more, and what waits below it can be
        placed."""
        if not self.blocks:
            return
        self.drop(key)
        if key in self._below:
            self.placeable.append(key)

    def next_below(self, key: bytes) -> bytes | None:
        """One of the blocks that wait for this one."""
        return next(iter(self._below.get(key, ())), None)

    def fault(self, key: bytes, ledger: Ledger) -> str:
        """What is wrong with a block that waits; empty if nothing is."""
        block = self.blocks[key]
        if key not in self._below.get(block.parent_key, ()):
            return "a block waits, and its parent does not know"
        if key not in ledger.unnamed:
            return "a block waits for its parent and is nowhere, or has an entry"
        if block.parent_key in ledger.entries and block.parent_key not in self.placeable:
            return "a block waits for a parent that is there"
        return ""


def naming(ledger: Ledger, message: Named) -> Iterator[None]:
    """Make entries of the blocks that are resident and whose parents have one. Steps of about
    `ledger.step` blocks."""
    looked = 0
    for part in message.parts:
        extra_keys, parent_key = dict(part.extra_keys), part.parent
        is_root = parent_key in message.roots
        size = len(part.tokens) // part.blocks
        for i in range(part.blocks):
            key = key_at(part.keys, i)
            if key in ledger.unnamed and size == ledger.block_bytes:
                block = Unplaced(
                    parent_key,
                    part.tokens[i * size : (i + 1) * size],
                    extra_keys.get(i, b""),
                    part.origin,
                )
                parent = ledger.entries.get(parent_key)
                if parent is not None or (is_root and not i):
                    enter(ledger, key, parent, block)
                else:
                    ledger.waiting.add(key, block)
            parent_key = key
            looked += 1
            if not looked % ledger.step:
                yield from placing(ledger)
                yield
                ledger.version += 1
    yield from placing(ledger)


def enter(ledger: Ledger, key: bytes, parent: Entry | None, block: Unplaced) -> None:
    """Make an entry of a resident block; there is none below it yet. It counts as covered by a
    finished request: one brought it to storage."""
    ledger.version += 1
    entry = ledger._learn(
        key, parent, block.parent_key, block.tokens, block.origin, block.extra_key
    )
    entry.finished = True
    entry.reasons[LAST] = entry.reasons[int(Tier.STORAGE)] = Reason.STORED
    ledger._look(entry)


def placing(ledger: Ledger) -> Iterator[None]:
    """Make entries of the blocks that waited for those that have got one, and of the blocks below
    them."""
    waiting, looked = ledger.waiting, 0
    while waiting.placeable:
        parent_key = waiting.placeable[0]
        key = waiting.next_below(parent_key)
        parent = ledger.entries.get(parent_key)
        if key is None or parent is None:
            waiting.placeable.popleft()
            continue
        block = waiting.drop(key)
        if block is not None:
            enter(ledger, key, parent, block)
        looked += 1
        if not looked % ledger.step:
            yield
