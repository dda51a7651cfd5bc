"""Changes of the tiers on their way to sinks, and the paths of blocks as an engine describes them.
Pure state, used by the thread that owns the `TierCache`."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import NamedTuple

from kvactors.flush_notifier.messages import (
    BlocksAdded,
    BlocksRemoved,
    PathPart,
    PathsFound,
    Report,
    TierCleared,
)
from kvactors.identity import CacheScope, RequestScope
from kvactors.types import Reason, Tier

NAME_BYTES = 32
NAME_DOMAIN = b"kvactors.tiers.block.v1"


class DescribedBlock(NamedTuple):
    """The place of a block in its path.

    Attributes:
        tokens: its own, little-endian uint32.
    """

    parent: bytes
    tokens: bytes
    scope: RequestScope
    extra_key: bytes
    first: bool


def block_name(key: bytes) -> bytes:
    """The 32-byte name of a key for sinks: the key itself if it fits, else its SHA-256."""
    return key if len(key) == NAME_BYTES else sha256(NAME_DOMAIN + key).digest()


class DescribedPath(NamedTuple):
    """Consecutive blocks of a path.

    Attributes:
        tokens: of all of them, little-endian uint32.
    """

    keys: list[bytes]
    tokens: bytes
    parent: bytes | None
    lora: str | None
    salt: str | None
    extra_keys: dict[int, bytes]


OUTBOX = 16_384
"""Messages at most that wait for the event loop. Beyond that all are dropped, and the whole state
is sent when the loop works again."""


class SinkFeed:
    """Turns changes into messages to FlushNotifier, and keeps the state that they add up to.

    Sinks are sent only blocks whose path an engine has described, below blocks that they have been
    sent, so what a sink has been sent is a tree at every moment. FlushNotifier's ledger sees to it.

    Attributes:
        resend: the state is to be sent again: FlushNotifier lost it, or messages were dropped.
        incarnation: the incarnation of FlushNotifier, from any thread.
        token_root: root hash of the scope for sinks that identify blocks by tokens, empty for none.
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
        # An incarnation of FlushNotifier marks that the messages before it are the whole state.
        self.outbox: deque[Report | int] = deque()
        self.resend = False
        self.incarnation: Callable[[], int] = lambda: 0
        self._sent = 0  # the incarnation to which the whole state was sent
        self.wake: Callable[[], object] = lambda: None
        self.token_root = b""
        self._scope = scope
        self._fingerprint = fingerprint
        self._held: dict[bytes, Tier] = {}  # the tiers of each block
        self._paths: OrderedDict[bytes, DescribedBlock] = OrderedDict()

    def record(self, tier: Tier, stored: bool, keys: Sequence[bytes], reason: Reason) -> None:
        names = [block_name(key) for key in keys]
        packed, held = b"".join(names), self._held
        if stored:
            for name in names:
                held[name] = held.get(name, Tier(0)) | tier
            self.put(BlocksAdded(packed, tier, reason))
            self._name(names, self.put)
            return
        for name in names:
            if left := held.pop(name, Tier(0)) & ~tier:
                held[name] = left
            elif name in self._paths:
                self._paths.move_to_end(name)
        self.put(BlocksRemoved(packed, tier, reason))
        self._forget_paths()

    def describe(self, path: DescribedPath) -> None:
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
        new = [name for name in blocks if name in self._held and name not in self._paths]
        for name, block in blocks.items():
            if name not in self._held:
                self._paths.pop(name, None)
            self._paths.setdefault(name, block)
        self._forget_paths()
        self._name(new, self.put)

    def _forget_paths(self) -> None:
        """Keep the paths of all blocks that a tier holds, and those of `idle_limit` others."""
        while len(self._paths) > self.idle_limit + len(self._held):
            name, block = self._paths.popitem(last=False)
            if name in self._held:
                self._paths[name] = block

    def _name(self, names: Iterable[bytes], put: Callable[[Report], None]) -> None:
        """Send the paths of those blocks that a tier holds and that are described, in runs."""
        runs: list[list[tuple[bytes, DescribedBlock]]] = []
        last = b""
        for name in names:
            block = self._paths.get(name)
            if block is None:
                continue
            if runs and block.parent == last and block.scope == runs[-1][0][1].scope:
                runs[-1].append((name, block))
            else:
                runs.append([(name, block)])
            last = name
        if not runs:
            return
        parts = tuple(
            PathPart(
                run[0][1].parent,
                b"".join(name for name, _ in run),
                b"".join(block.tokens for _, block in run),
                run[0][1].scope,
                tuple((i, block.extra_key) for i, (_, block) in enumerate(run) if block.extra_key),
            )
            for run in runs
        )
        roots = frozenset(block.parent for run in runs for _, block in run if block.first)
        put(PathsFound(parts, roots))

    def put(self, message: Report) -> None:
        if len(self.outbox) >= OUTBOX:
            self.resend = True
        if not self.resend:
            self.outbox.append(message)

    def flush(self) -> None:
        incarnation = self.incarnation()
        if incarnation != self._sent:  # the ledger of a new incarnation is empty
            self.resend = True
        if self.resend and len(self.outbox) < OUTBOX:
            self._send_everything(incarnation)
        if self.outbox:
            self.wake()

    def _send_everything(self, incarnation: int) -> None:
        self.resend, self._sent = False, incarnation
        self.outbox.clear()
        for tier in self.tiers:
            self.outbox.append(TierCleared(tier, Reason.RESTART))
            if held := b"".join(name for name, tiers in self._held.items() if tier in tiers):
                self.outbox.append(BlocksAdded(held, tier, Reason.RESTART))
        self._name((name for name in self._paths if name in self._held), self.outbox.append)
        self.outbox.append(incarnation)
