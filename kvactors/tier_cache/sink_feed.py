"""Changes of the tiers on their way to sinks. Used by the thread that owns the `TierCache`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvactors.identity import CacheScope
from kvactors.tier_cache.paths import DescribedBlock, DescribedPath, PathBook, block_name
from kvactors.types import Reason, Tier

if TYPE_CHECKING:
    from kvactors.flush_notifier.messages import PathCached, Report

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

    Args:
        tiers: whose changes are sent.
        block_size: tokens of a block.
        scope: of a request, without adapter and salt.
        fingerprint: 32 bytes, part of every root.
        num_slots: of the host tier.

    Attributes:
        outbox: messages that the event loop has not taken.
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
        """The tier holds the keys now (stored), or does not any more."""
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
        """See `TierCache.describe`."""
        from kvactors.flush_notifier.messages import RequestScope

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
        """Hand the messages to the event loop."""
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
