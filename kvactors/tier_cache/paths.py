"""Paths of blocks, as an engine describes them for sinks. Pure state, used by one thread."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

from kvactors.identity import CacheScope
from kvactors.tier_cache.answers import TierEvent
from kvactors.types import Reason, Tier

if TYPE_CHECKING:
    from kvactors.flush_notifier.messages import PathCached, PathPart, Report
    from kvactors.identity import RequestScope

NAME_BYTES = 32
NAME_DOMAIN = b"kvactors.tiers.block.v1"


class DescribedBlock(NamedTuple):
    """The place of a block in its path.

    Attributes:
        parent: name of the block before it, or the root.
        tokens: its own, little-endian uint32.
        extra_key: of its media, empty without.
    """

    parent: bytes
    tokens: bytes
    scope: RequestScope
    extra_key: bytes
    first: bool


def block_name(key: bytes) -> bytes:
    """The 32-byte name under which sinks are sent a key: the key itself if it has that length, else
    its SHA-256."""
    return key if len(key) == NAME_BYTES else sha256(NAME_DOMAIN + key).digest()


class DescribedPath(NamedTuple):
    """Consecutive blocks of a path.

    Attributes:
        tokens: of all of them, little-endian uint32.
        parent: the key before them, None if they begin their path.
    """

    keys: list[bytes]
    tokens: bytes
    parent: bytes | None
    lora: str | None
    salt: str | None
    extra_keys: dict[int, bytes]


def checked_path(
    keys: list[bytes],
    tokens: Any,
    block_size: int,
    parent: bytes | None,
    lora: str | None,
    salt: str | None,
    extra_keys: Iterable[tuple[Any, Any]],
) -> DescribedPath:
    """A path as an engine describes it."""
    try:
        packed = array("I", tokens)
        extra: dict[Any, Any] = dict(extra_keys)
    except (TypeError, OverflowError, ValueError) as error:
        raise ValueError(
            "tokens must be integers from 0 to 2**32 - 1, and extra keys pairs of an index and "
            f"bytes: {error}"
        ) from None
    if len(packed) != len(keys) * block_size:
        raise ValueError(f"{len(packed)} tokens of {len(keys)} blocks of {block_size} tokens")
    for i, extra_key in extra.items():
        if not isinstance(i, int) or not isinstance(extra_key, bytes) or not 0 <= i < len(keys):
            raise ValueError(f"({i!r}, {extra_key!r}) is no extra key of {len(keys)} blocks")
    for name, value in (("lora", lora), ("salt", salt)):
        if not isinstance(value, str | None):
            raise ValueError(f"{name} must be a string or None, not {value!r}")
    return DescribedPath(keys, packed.tobytes(), parent, lora, salt, extra)


class PathBook:
    """The described blocks: all that a tier holds, and some that none holds.

    Args:
        idle_limit: blocks kept that no tier holds. Beyond that the oldest is forgotten.
    """

    def __init__(self, idle_limit: int) -> None:
        self._idle_limit = idle_limit
        self._held: dict[bytes, DescribedBlock] = {}
        self._idle: dict[bytes, DescribedBlock] = {}

    def add(self, blocks: Mapping[bytes, DescribedBlock], is_held: Iterable[bool]) -> list[bytes]:
        """An engine described blocks.

        Returns:
            The held ones that were not described before.
        """
        new = []
        for (name, block), held in zip(blocks.items(), is_held, strict=True):
            if held and name not in self._held:
                self._held[name] = block
                new.append(name)
            elif not held:
                self._idle.pop(name, None)
                self._idle[name] = block
        while len(self._idle) > self._idle_limit:
            del self._idle[next(iter(self._idle))]
        return new

    def hold(self, names: Iterable[bytes]) -> None:
        for name in names:
            block = self._idle.pop(name, None)
            if block is not None:
                self._held[name] = block

    def release(self, names: Iterable[bytes]) -> None:
        gone = {name: self._held.pop(name) for name in names if name in self._held}
        self.add(gone, [False] * len(gone))

    def parts(self, names: Sequence[bytes] | None = None) -> tuple[PathPart, ...]:
        """Runs of described blocks that a tier holds.

        Args:
            names: which. None: all.
        """
        from kvactors.flush_notifier.messages import PathPart

        found: list[tuple[DescribedBlock, list[bytes], list[DescribedBlock]]] = []
        last = b""
        for name in list(self._held) if names is None else names:
            block = self._held.get(name)
            if block is None:
                continue
            if found and block.parent == last and block.scope == found[-1][0].scope:
                found[-1][1].append(name)
                found[-1][2].append(block)
            else:
                found.append((block, [name], [block]))
            last = name
        return tuple(
            PathPart(
                first.parent,
                b"".join(run),
                b"".join(block.tokens for block in blocks),
                first.scope,
                tuple((i, block.extra_key) for i, block in enumerate(blocks) if block.extra_key),
            )
            for first, run, blocks in found
        )

    def roots(self, names: Sequence[bytes] | None = None) -> frozenset[bytes]:
        """The roots of these blocks' paths. None: of all."""
        blocks = (self._held.get(name) for name in (list(self._held) if names is None else names))
        return frozenset(block.parent for block in blocks if block is not None and block.first)


# -- Changes of the tiers on their way to sinks. Used by the thread that owns the `TierCache`.


OUTBOX = 16_384
"""Messages at most that wait for the event loop. Beyond that all are dropped, and the whole state
is sent when the loop works again."""


class StateSent(NamedTuple):
    """Mark in the outbox: the messages before it are the whole state.

    Attributes:
        incarnation: of FlushNotifier, for which the state was sent.
    """

    incarnation: int


class SinkFeed:
    """Turns changes into messages to FlushNotifier, and keeps the state that they add up to.

    Sinks are sent only blocks whose path an engine has described, below blocks that they have been
    sent, so what a sink has been sent is a tree at every moment. FlushNotifier's ledger sees to it.

    Attributes:
        resend: the state is to be sent again: FlushNotifier lost it, or messages were dropped.
        wanted: the incarnation of FlushNotifier that is to have the state. Set by the event loop.
        token_root: root hash of the scope whose blocks go to sinks that identify blocks by tokens
            alone. Empty: none.
    """

    def __init__(
        self,
        tiers: Iterable[Tier],
        block_size: int,
        scope: CacheScope,
        fingerprint: bytes,
        num_slots: int,
    ) -> None:
        self.tiers = frozenset(tiers)
        self.block_size = block_size
        self.idle_limit = 4 * num_slots + 1024
        self.outbox: deque[Report | StateSent] = deque()
        self.resend = False
        self.wanted = 0
        self.wake: Callable[[], object] = lambda: None
        self.token_root = b""
        self._scope = scope
        self._fingerprint = fingerprint
        self._held: dict[Tier, dict[bytes, None]] = {tier: {} for tier in self.tiers}
        self._book = PathBook(self.idle_limit)

    def _is_held(self, name: bytes) -> bool:
        return any(name in held for held in self._held.values())

    def record(self, tier: Tier, stored: bool, keys: Sequence[bytes], reason: Reason) -> None:
        from kvactors.flush_notifier.messages import BlocksAdded, BlocksRemoved

        names = [block_name(key) for key in keys]
        if stored:
            self._held[tier].update(dict.fromkeys(names))
            self._book.hold(names)
            self._put(BlocksAdded(b"".join(names), tier, reason))
            self._name(names)
            return
        for name in names:
            self._held[tier].pop(name, None)
        self._put(BlocksRemoved(b"".join(names), tier, reason))
        self._book.release(name for name in names if not self._is_held(name))

    def announce(self, path: PathCached) -> None:
        """A request has computed or finished a path, for sinks that tell the two apart. The blocks
        are recorded and described as well."""
        self._put(path)

    def describe(self, path: DescribedPath) -> None:
        from kvactors.identity import RequestScope

        size = 4 * self.block_size
        scope = RequestScope(path.lora, path.salt)
        above = (
            self._scope._replace(lora=path.lora, salt=path.salt).root(self._fingerprint)
            if path.parent is None
            else block_name(path.parent)
        )
        blocks: dict[bytes, DescribedBlock] = {}
        for i, key in enumerate(path.keys):
            name = block_name(key)
            blocks[name] = DescribedBlock(
                above,
                path.tokens[i * size : (i + 1) * size],
                scope,
                path.extra_keys.get(i, b""),
                path.parent is None and i == 0,
            )
            above = name
        self._name(self._book.add(blocks, map(self._is_held, blocks)))

    def _name(self, names: Sequence[bytes] | None) -> None:
        """Send the paths of held blocks. None: of all."""
        from kvactors.flush_notifier.messages import PathsFound

        parts = self._book.parts(names)
        if parts:
            found = PathsFound(parts, self._book.roots(names))
            if names is None:
                self.outbox.append(found)
            else:
                self._put(found)

    def _put(self, message: Report) -> None:
        if len(self.outbox) >= OUTBOX:
            self.resend = True
        if not self.resend:
            self.outbox.append(message)

    def flush(self) -> None:
        if self.resend and len(self.outbox) < OUTBOX:
            self._send_everything()
        if self.outbox:
            self.wake()

    def _send_everything(self) -> None:
        from kvactors.flush_notifier.messages import BlocksAdded, TierCleared

        incarnation = self.wanted
        self.resend = False
        self.outbox.clear()
        for tier, held in self._held.items():
            self.outbox.append(TierCleared(tier, Reason.RESTART))
            if held:
                self.outbox.append(BlocksAdded(b"".join(held), tier, Reason.RESTART))
        self._name(None)
        self.outbox.append(StateSent(incarnation))


# -- Changes of the tiers that an engine's publisher has not taken yet. Pure state.


class EventLog:
    """Collects changes of some tiers, in order.

    Args:
        feed: takes the changes of other tiers, for sinks.
    """

    def __init__(self, tiers: Iterable[Tier], feed: SinkFeed | None = None) -> None:
        self.tiers = frozenset(tiers)
        self.feed = feed
        self._events: list[TierEvent] = []

    def record(self, tier: Tier, stored: bool, keys: Iterable[bytes], reason: Reason) -> None:
        if tier in self.tiers:
            if found := tuple(keys):
                self._events.append(TierEvent(tier, stored, found, reason))
        elif self.feed is not None and tier in self.feed.tiers and (found := tuple(keys)):
            self.feed.record(tier, stored, found, reason)

    def wants(self, tier: Tier) -> bool:
        return tier in self.tiers or (self.feed is not None and tier in self.feed.tiers)

    def take(self) -> list[TierEvent]:
        events, self._events = self._events, []
        return events
