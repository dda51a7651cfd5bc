"""What the leader and its ranks say to each other: msgpack maps with a tag `t`, each behind its length in four bytes (little-endian)."""

from __future__ import annotations

from typing import Literal

import msgspec

VERSION = 1
"""Of this protocol; both ends must speak the same."""

MOST_BYTES = 64 << 20
"""Bytes of one message at most: more is not a message of ours."""


class Frame(msgspec.Struct, frozen=True, tag_field="t", tag=str.lower, omit_defaults=True):
    """Base of every message."""


class Hello(Frame, frozen=True):
    """A rank asks to be admitted. It copies nothing at this moment: whatever it was asked on an earlier connection is over.

    fingerprint: of the layout. blocks, slots: of its device and its arena. keys: names its store holds, 32 bytes each.
    """

    version: int
    rank: int
    ranks: int
    fingerprint: bytes
    blocks: int
    slots: int
    keys: bytes


class Welcome(Frame, frozen=True):
    """The rank is admitted."""


class Refused(Frame, frozen=True):
    """It never will be as it is, and why."""

    reason: str


class CopyBlocks(Frame, frozen=True):
    """Copy pairs (blocks[j], slots[j]) of the rank's device and arena. layerwise: report layers as they arrive."""

    op: int
    to_device: bool
    blocks: tuple[int, ...]
    slots: tuple[int, ...]
    layerwise: bool = False


class StoreObjects(Frame, frozen=True):
    """Read or write slots (one a key), ask which leading keys can be read (the others are MISS), remove keys, or clear the rank's store.

    seconds: what is not begun by then is LATE.
    """

    op: int
    kind: Literal["read", "write", "ask", "remove", "clear"]
    keys: bytes = b""
    slots: tuple[int, ...] = ()
    seconds: float = 0.0


class Arrived(Frame, frozen=True):
    """A copy's first `layers` layers are there."""

    op: int
    layers: int


class Answer(Frame, frozen=True):
    """An operation is over: no slot and no block of it is touched any more.

    outcomes: a byte a pair or key; 0 is good, in a store operation it is a `storage.messages.Outcome`. gone: names the rank's store does
    not hold any more.
    """

    op: int
    outcomes: bytes = b""
    gone: bytes = b""


ToRank = Welcome | Refused | CopyBlocks | StoreObjects
FromRank = Hello | Arrived | Answer
AnyFrame = Welcome | Refused | CopyBlocks | StoreObjects | Hello | Arrived | Answer
