"""Messages between a leader and its ranks: msgpack maps with a tag `t`, each after its length in
four bytes (little-endian).

rank -> leader: Hello. leader -> rank: Challenge. rank -> leader: Proof. leader -> rank: Proof.
Before this point no other message is accepted, and no message may exceed UNPROVEN_BYTES. Then rank
-> leader: Identity. leader -> rank: SendNames, answered by one Names, again until the last page.
leader -> rank: Welcome. From then on the leader sends operations and the rank answers each.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from kvactors.data_plane.base import Direction
from kvactors.flush_notifier.messages import PathPart
from kvactors.identity import Lineage

VERSION = 7
"""Version of this protocol. Both ends must have the same."""

MOST_BYTES = 64 << 20
"""Bytes of one message at most."""

FROM_RANK_BYTES = 16 << 20
"""Bytes of one message from a rank at most: a byte for each key and 32 for each name that it
evicted."""

UNPROVEN_BYTES = 1024
"""Bytes of one message at most before both ends have proved that they have the secret."""

NONCE_BYTES = 32

PAGE_NAMES = 2048
"""Names in one page at most: handled in one step of the loop."""

MOST_NAMES = 1 << 25
"""Objects that a rank's store may hold: the leader keeps about 130 bytes for each of them, and 50
more while a rank joins."""


class Frame(msgspec.Struct, frozen=True, tag_field="t", tag=str.lower, omit_defaults=True):
    """Base of every message."""


class Hello(Frame, frozen=True):
    """A rank's first message."""

    version: int = 0
    nonce: bytes = b""


class Challenge(Frame, frozen=True):
    """The leader's first message."""

    version: int
    nonce: bytes


class Proof(Frame, frozen=True):
    """HMAC-SHA256 over the sender's role and both nonces, keyed with the shared secret."""

    mac: bytes


class Identity(Frame, frozen=True):
    """Identity and configuration of a rank. No copy is in flight on it: operations of an earlier
    connection have ended. namespace, storage: `storage.namespace` (with AttentionStore: the names
    of its shards) and the kind of back end. generation: how often that store was cleared."""

    rank: int
    ranks: int
    model: str
    namespace: str
    storage: str
    fingerprint: bytes
    blocks: int
    slots: int
    objects: int = 0
    generation: int = 0


class SendNames(Frame, frozen=True):
    """Send the next page of the names in the store."""


class Names(Frame, frozen=True):
    """One page: at most PAGE_NAMES names of 32 bytes."""

    keys: bytes = b""
    last: bool = False


class Welcome(Frame, frozen=True):
    """The rank is admitted."""


class Refused(Frame, frozen=True):
    """The rank is not admitted, and why."""

    reason: str


class Ping(Frame, frozen=True):
    """Asks whether the other end still answers."""


class Pong(Frame, frozen=True):
    """Answers a Ping."""


class CopyBlocks(Frame, frozen=True):
    """Copy pairs (blocks[j], slots[j]) of the rank's device and arena, or device block blocks[j] to
    slots[j]. layerwise: report layers as they arrive."""

    op: int
    direction: Direction
    blocks: tuple[int, ...]
    slots: tuple[int, ...]
    layerwise: bool = False


class StoreObjects(Frame, frozen=True):
    """Read or write slots (one for each key), ask which leading keys can be read (the others are
    MISS), remove keys, clear the rank's store (generation: of the store afterwards), or send the
    next parts of the paths that its objects form, with about `most` blocks, begun anew or not. Keys
    not begun after `seconds` are LATE. lineages: of objects to write, one for each key or none."""

    op: int
    kind: Literal["read", "write", "ask", "remove", "clear", "begin_paths", "paths"]
    keys: bytes = b""
    slots: tuple[int, ...] = ()
    seconds: float = 0.0
    generation: int = 0
    lineages: tuple[Lineage | None, ...] = ()
    most: int = 0


NOT_MOVED, FAILED = 1, 2
"""Outcomes of a block that a store which accesses device memory did not move: it is not stored (or
the store is full), or the store failed."""


class MoveDevice(Frame, frozen=True):
    """Move blocks between the rank's device and its own store, which is addressed by tokens. Fields
    as in `storage.messages.FetchDevice`.

    Each outcome is 0 for a block that was moved, 1 for one that was not (it is not stored, or the
    store is full), 2 if the store failed.
    """

    op: int
    kind: Literal["fetch", "save"]
    tokens: bytes
    start: int
    blocks: tuple[int, ...]
    seconds: float


class Arrived(Frame, frozen=True):
    """The first `layers` layers of a copy have arrived."""

    op: int
    layers: int


class RankAnswer(Frame, frozen=True):
    """An operation has ended: the rank does not access its slots and blocks any more. outcomes: a
    byte for each pair or key, one for a clear. 0 is success. In a store operation it is a
    `storage.messages.Outcome`, and after the last parts of paths MISS. gone: keys removed from the
    rank's store. without_checksum: misses of objects without a checksum, since the rank's last
    answer."""

    op: int
    outcomes: bytes = b""
    gone: bytes = b""
    paths: tuple[PathPart, ...] = ()
    without_checksum: Annotated[int, msgspec.Meta(ge=0, le=1 << 32)] = 0
