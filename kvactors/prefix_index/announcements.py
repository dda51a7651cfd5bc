"""Reports to the notifier about blocks that became resident on the device or left it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvactors.actor import Message
from kvactors.flush_notifier.messages import (
    BlocksAdded,
    BlocksRemoved,
    NamespaceChanged,
    PathCached,
    TierCleared,
)
from kvactors.identity import RequestScope
from kvactors.native import DEVICE, BlockTree, Path, TreeWalk
from kvactors.prefix_index.actions import Action, Work
from kvactors.prefix_index.index import BlockIndex
from kvactors.prefix_index.parts import next_part, parts
from kvactors.types import HASH_BYTES, Reason, Tier

MOST_SCOPES = 65_536
"""Root hashes whose scope is remembered."""

WALK = 512
"""Nodes of the tree that a turn announces to a restarted notifier: each may be a message."""


class Announcements:
    """Makes the messages for the notifier.

    A restarted notifier is sent the whole tree by a walk in parts. Changes during the walk are sent
    after it, so that every block follows its parent.

    Args:
        index: the blocks.
        enabled: whether there is a sink.
        whole: whether a finish announces all blocks of the request, also those announced before.

    Attributes:
        scopes: the inputs of root hashes, the last one used last.
    """

    def __init__(self, index: BlockIndex, *, enabled: bool, whole: bool) -> None:
        self.enabled = enabled
        self.scopes: dict[bytes, RequestScope] = {}
        self._whole = whole
        self._index = index
        self._latest = b""  # the root of the last request
        self._walk: TreeWalk | None = None
        self._delayed: deque[Message] = deque()  # changes since the walk began

    @property
    def up_to_date(self) -> bool:
        """Whether the notifier has been sent every change."""
        return self._walk is None

    def remember(self, root: bytes, scope: RequestScope) -> None:
        """Record the inputs of a root hash. The number of an adapter is the last one given.

        The least recently used of very many roots are dropped, and blocks below those are
        reported by their hashes only: an index that has such a block keeps it, and is not sent new
        ones.
        """
        if root == self._latest and self.scopes.get(root) is scope:
            return
        self._latest = root
        before = self.scopes.pop(root, scope)
        self.scopes[root] = before if scope.lora_id is None else scope
        if len(self.scopes) > MOST_SCOPES:
            del self.scopes[next(iter(self.scopes))]

    def cached(self, path: Path, start: int, stop: int, reason: Reason) -> list[Action]:
        """Blocks [start, stop) of a path are on the device. Those above were announced before."""
        if not self.enabled:
            return []
        part, scope = self._index.part, self.scopes.get(path.root)
        ranges = ((start, stop),) if stop - start <= part else parts(start, stop, part)
        messages: list[Message] = []
        for first, last in ranges:
            hashes = path.hashes(first, last)
            if scope is None:
                messages.append(BlocksAdded(hashes, Tier.DEVICE, reason))
                continue
            parent = path.hashes(first - 1, first) if first else path.root
            tokens, extras = path.tokens(first, last), path.extra_keys(first, last)
            messages.append(
                PathCached(
                    path.root,
                    tokens,
                    hashes,
                    first,
                    last - first,
                    Tier.DEVICE,
                    reason,
                    parent,
                    scope,
                    extras,
                )
            )
        return self._report(messages)

    def finished(self, tree: BlockTree, path: Path, start: int, stop: int) -> list[Action]:
        """Committed blocks [start, stop) of a request that has ended stay cached: for sinks that
        follow finished requests, as far as no finish has announced them."""
        first = tree.mark_announced(path, start, stop)
        first = start if self._whole else first
        return self.cached(path, first, stop, Reason.REQUEST_FINISH) if first < stop else []

    def removed(self, hashes: bytes, reason: Reason) -> list[Action]:
        """Blocks left the device."""
        if not (hashes and self.enabled):
            return []
        return self._report([BlocksRemoved(hashes, Tier.DEVICE, reason)])

    def cleared(self, reason: Reason) -> list[Action]:
        """No block is on the device any more."""
        return self._report([TierCleared(Tier.DEVICE, reason)]) if self.enabled else []

    def namespace_changed(self, namespace: str) -> list[Action]:
        """Requests are admitted under another namespace."""
        return self._report([NamespaceChanged(namespace)]) if self.enabled else []

    def announce_all(self) -> list[Action]:
        """Begin to announce every block to a notifier that has restarted."""
        if not self.enabled:
            return []
        self._delayed.clear()  # the tree has these changes already
        tree = self._index.tree
        self._walk = walk = TreeWalk(tree)
        return next_part(self._announce_parts(tree, walk))

    def _report(self, messages: Sequence[Message]) -> list[Action]:
        if self._walk is None:
            return list(messages)
        self._delayed += messages
        return []

    def _announce_parts(self, tree: BlockTree, walk: TreeWalk) -> Work:
        over = False
        while not over and not tree.retired:
            over, stretches = walk.step(min(self._index.part, WALK))
            yield [self._stretch(*stretch) for stretch in stretches]
            if self._walk is not walk:
                return []  # the notifier has restarted again
        while self._delayed:
            count = min(WALK, len(self._delayed))
            yield [self._delayed.popleft() for _ in range(count)]
            if self._walk is not walk:
                return []
        self._walk = None
        return []

    def _stretch(
        self,
        root: bytes,
        parent: bytes,
        start: int,
        tokens: bytes,
        hashes: bytes,
        states: bytes,
        extras: tuple[tuple[int, bytes], ...],
    ) -> Message:
        """Announce consecutive blocks of a path, as the walk finds them, as far as they are on the
        device."""
        resident = next((j for j, state in enumerate(states) if not state & DEVICE), len(states))
        scope, reason = self.scopes.get(root), Reason.REQUEST_FINISH
        if scope is None:
            return BlocksAdded(hashes[: resident * HASH_BYTES], Tier.DEVICE, reason)
        return PathCached(
            root, tokens, hashes, start, resident, Tier.DEVICE, reason, parent, scope, extras
        )
