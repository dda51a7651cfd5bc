"""PrefixIndex, the part that reports to the notifier what becomes resident on the device and what
leaves it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from kvactors.actor import ActorRef
from kvactors.actor.message import Message
from kvactors.flush_notifier.messages import Announced, Cleared, Gained, Gone, Origin, Scoped
from kvactors.native import DEVICE, BlockTree, Path, TreeWalk
from kvactors.prefix_index.index import BlockIndex
from kvactors.prefix_index.parts import parts
from kvactors.prefix_index.works import Works
from kvactors.types import KEY_BYTES, Reason, Tier

ORIGINS = 65_536
"""Roots that are remembered."""

WALK = 512
"""Nodes that a turn of an announcement of the whole tree looks at: each may be a message."""


class Announcing(Works):
    """notifier: who gets the reports. announce: whether there is a sink for them. announce_whole:
    whether a finish announces all blocks of the request, also those that were announced before."""

    def __init__(
        self,
        ref: ActorRef,
        *,
        index: BlockIndex,
        notifier: ActorRef,
        announce: bool,
        announce_whole: bool = False,
    ) -> None:
        super().__init__(ref, index=index)
        self.notifier = notifier
        self.announce = announce
        self.announce_whole = announce_whole
        self.origins: dict[bytes, Origin] = {}  # by root, the last used one last
        self._latest = b""  # root of the last request
        self._walk: TreeWalk | None = None  # of the announcement of the whole tree
        self._behind: deque[Message] = deque()  # what changed since it began: sent after it

    def remember_origin(self, root: bytes, origin: Origin) -> None:
        """What is in a root, for reports about blocks below it. The adapter's number is the last
        one given. The least recently used of very many are forgotten: blocks below them are
        reported by their hashes only. An index that has such a block keeps it; new ones are not
        sent."""
        if root == self._latest and self.origins.get(root) is origin:
            return
        self._latest = root
        before = self.origins.pop(root, origin)
        self.origins[root] = before if origin.lora_id is None else origin
        if len(self.origins) > ORIGINS:
            del self.origins[next(iter(self.origins))]

    def announced(self, path: Path, start: int, stop: int, reason: Reason) -> None:
        """Blocks [start, stop) of the path are on the device, and those before them were
        announced."""
        if not self.announce:
            return
        origin = self.origins.get(path.root)
        for first, last in (
            parts(start, stop, self.part) if stop - start > self.part else ((start, stop),)
        ):
            if origin is None:
                self.report(Gained(path.keys(first, last), Tier.DEVICE, reason))
                continue
            parent = path.keys(first - 1, first) if first else path.root
            tokens, keys = path.tokens(first, last), path.keys(first, last)
            extras = path.extra_keys(first, last)
            self.report(
                Announced(
                    path.root,
                    tokens,
                    keys,
                    first,
                    last - first,
                    Tier.DEVICE,
                    reason,
                    parent,
                    origin,
                    extras,
                )
            )

    def gone(self, keys: bytes, reason: Reason) -> None:
        """These left the device."""
        if keys and self.announce:
            self.report(Gone(keys, Tier.DEVICE, reason))

    def device_cleared(self, reason: Reason) -> None:
        """Nothing is on the device any more."""
        if self.announce:
            self.report(Cleared(Tier.DEVICE, reason))

    def scoped(self, namespace: str) -> None:
        """Requests are admitted under another namespace."""
        if self.announce:
            self.report(Scoped(namespace))

    def report(self, message: Message) -> None:
        """Send the notifier a change, after the announcement of the whole tree if that is not
        over."""
        if self._walk is None:
            self.tell(self.notifier, message)
        else:
            self._behind.append(message)

    def announce_all(self) -> None:
        """Announce every block to a notifier that has started anew, a part of them a turn. What
        changes until the last part is sent follows."""
        if self.announce:
            self._behind.clear()  # the tree has these changes already
            tree = self.index.tree
            self._walk = walk = TreeWalk(tree)
            self.in_parts(self._announce_parts(tree, walk))

    def _announce_parts(self, tree: BlockTree, walk: TreeWalk) -> Iterator[None]:
        over = False
        while not over and not tree.retired:
            over, stretches = walk.step(min(self.part, WALK))
            for root, parent, start, tokens, keys, states, extras in stretches:
                resident = next(
                    (j for j, state in enumerate(states) if not state & DEVICE), len(states)
                )
                origin, reason = self.origins.get(root), Reason.REQUEST_FINISH
                if origin is None:
                    self.tell(
                        self.notifier, Gained(keys[: resident * KEY_BYTES], Tier.DEVICE, reason)
                    )
                else:
                    one = Announced(
                        root,
                        tokens,
                        keys,
                        start,
                        resident,
                        Tier.DEVICE,
                        reason,
                        parent,
                        origin,
                        extras,
                    )
                    self.tell(self.notifier, one)
            yield
            if self._walk is not walk:
                return  # the notifier has started anew once more
        while self._behind:
            for _ in range(min(WALK, len(self._behind))):
                self.tell(self.notifier, self._behind.popleft())
            yield
            if self._walk is not walk:
                return
        self._walk = None
