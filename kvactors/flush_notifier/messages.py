"""Messages to FlushNotifier, and its messages to sinks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvactors.actor import Ask, Control
from kvactors.actor.message import Message
from kvactors.identity import PLAIN, RequestScope
from kvactors.redact import redacted_repr
from kvactors.types import HASH_BYTES, Reason, Residency, Tier

ExtraKeys = tuple[tuple[int, bytes], ...]
"""(position in the path, extra key) of the blocks that have one, in order: their media
(`identity.media_items`)."""


class PathCached(Message, frozen=True, eq=False):
    """Blocks of a path are resident on `tier`. The ledger learns their tokens and hashes from it.

    Attributes:
        tokens: little-endian uint32 of the blocks from position `start` of the path on.
        hashes: their hashes, 32 bytes each. The first `count` of them are resident, the others are
            only named.
        parent: hash of the block before them, the root hash if `start` is 0. It is resident on
            `tier` and was announced before.
        extra_keys: of these blocks. With Reason.REQUEST_FINISH, gains that a sink wants only at the
            finish are due now.
    """

    root: bytes
    tokens: bytes
    hashes: bytes
    start: int
    count: int
    tier: Tier
    reason: Reason
    parent: bytes
    scope: RequestScope = PLAIN
    extra_keys: ExtraKeys = ()


class BlocksAdded(Message, frozen=True, eq=False):
    """Blocks with these hashes, 32 bytes each, are resident on `tier` now."""

    hashes: bytes
    tier: Tier
    reason: Reason


class PathPart(NamedTuple):
    """Consecutive blocks of a path, each the parent of the next.

    Attributes:
        parent: hash of the block before them, or the root hash.
        extra_keys: (index, extra key) of those that have one.
    """

    parent: bytes
    hashes: bytes
    tokens: bytes
    scope: RequestScope = PLAIN
    extra_keys: tuple[tuple[int, bytes], ...] = ()

    def __repr__(self) -> str:
        return redacted_repr(self)

    @property
    def blocks(self) -> int:
        return len(self.hashes) // HASH_BYTES

    def whole(self) -> bool:
        blocks, rest = divmod(len(self.hashes), HASH_BYTES)
        if len(self.parent) != HASH_BYTES or rest or not blocks:
            return False
        return len(self.tokens) > 0 and not len(self.tokens) % (4 * blocks)


class PathsFound(Message, frozen=True, eq=False):
    """Parents and tokens of blocks that were found in storage. `BlocksAdded` reports where they
    are. roots: parents of parts that are root hashes of requests of now."""

    parts: tuple[PathPart, ...]
    roots: frozenset[bytes]


class BlocksRemoved(Message, frozen=True, eq=False):
    """Blocks with these hashes, 32 bytes each, left `tier`."""

    hashes: bytes
    tier: Tier
    reason: Reason


class TierCleared(Message, frozen=True, eq=False):
    """Nothing is resident on `tier` any more."""

    tier: Tier
    reason: Reason


class NamespaceChanged(Message, frozen=True, eq=False):
    """Requests are admitted under this namespace from now on."""

    namespace: str


class WaitFlushed(Ask[bool], frozen=True, eq=False):
    """Wait until sinks (all if None) have acknowledged everything due at this message. healthy:
    leave out sinks whose last call failed. Answered with True."""

    sinks: tuple[str, ...] | None = None
    healthy: bool = False


class Resync(Ask[bool], frozen=True, eq=False):
    """Send a sink everything again, for an index that lost its state. Answered with True once it
    has taken all of that."""

    sink: str


class SetIdleLimit(Control, frozen=True, eq=False):
    """The number of idle blocks that the ledger keeps."""

    limit: int


class GroupLabel(NamedTuple):
    """A group of layers beside `[layout]` (see `kvactors.groups`).

    Attributes:
        number: 1 for the first of `cache.groups`.
        kind: window or state.
        window: tokens, 0 for a state.
    """

    number: int
    name: str
    kind: str
    window: int


class FlushTask(Message, frozen=True, eq=False):
    """A change sent to a sink: blocks [start_block_idx, start_block_idx + count) of a path are
    resident, or gone. It carries no KV data.

    Attributes:
        tokens: the complete path from the root to the deepest block concerned, little-endian
            uint32: (start_block_idx + count) whole blocks. For a sink that identifies blocks by
            name (`Sink.by_name`) only those of the `count` blocks, and nothing if they are gone.
        count: 0 if everything is gone (only to sinks that take it so).
        hashes: hashes of the `count` blocks, 32 bytes each.
        parent: name of the block before them (the root hash if start_block_idx is 0).
        epoch: grows with each start of the notifier. Tasks of an earlier epoch are void.
        group: the layers that the task is about, None for `[layout]`. The task of a group
            is sent to sinks that take groups, and is about blocks anywhere in prompts: `hashes` and
            `tokens` are of these blocks, there is no parent, and `start_block_idx` is 0.
    """

    tokens: bytes
    start_block_idx: int
    count: int
    hashes: bytes
    parent: bytes
    residency: Residency
    tier: Tier
    reason: Reason
    epoch: int
    scope: RequestScope = PLAIN
    extra_keys: ExtraKeys = ()
    group: GroupLabel | None = None


class Deliver(Control, frozen=True, eq=False):
    """To itself: the facts received since the last call can be sent together."""


class Continue(Control, frozen=True, eq=False):
    """To itself: the next slice of a large fact or delivery, before any other fact."""

    work: Iterator[None]


class Delivered(Control, frozen=True, eq=False):
    """To itself: the call to a sink with this number has ended. `error`: empty if it worked."""

    sink: str
    number: int
    error: str


class CallLate(Control, frozen=True, eq=False):
    """To itself: the time of a call to a sink is over."""

    sink: str
    number: int


class ResyncDue(Control, frozen=True, eq=False):
    """To itself: it is time to send a sink again what it was sent."""

    sink: str


class RetryDue(Control, frozen=True, eq=False):
    """To itself: a sink's back-off is over."""

    sink: str


Report = PathCached | BlocksAdded | BlocksRemoved | TierCleared | NamespaceChanged | PathsFound
"""Changes of residency, and the paths and scopes of blocks."""
