"""The eviction policies of device and host: the order of last use, or RETAIN, which learns from the
requests."""

from __future__ import annotations

from collections.abc import Callable

from kvactors.actor.clock import now
from kvactors.hints import Hints
from kvactors.native import BlockTree, LifeTables, Path

Clock = Callable[[], float]
"""Seconds, never running backwards."""


class TierPolicies:
    """Makes the trees of an index, and passes requests and the time on to them.

    Both tiers share the statistics. The index chooses the victims of the host tier too, see
    `HostVictims`.

    Args:
        tables: the statistics of RETAIN, which outlast a clear. None: both tiers are LRU.
        clock: of the ages of blocks.
        device, host: whether RETAIN is the policy of this tier.
    """

    def __init__(
        self,
        tables: LifeTables | None = None,
        clock: Clock = now,
        *,
        device: bool = True,
        host: bool = False,
    ) -> None:
        self.tables = tables
        self.host = host and tables is not None
        self._device = device
        self._clock = clock

    def tree(
        self, block_size: int, capacity: int, *, hashes: bool, touch: bool = True
    ) -> BlockTree:
        """An empty tree. hashes: blocks are hashed when they enter it. touch: bring its memory in
        now."""
        return BlockTree(
            block_size,
            capacity,
            touch,
            self.tables if self._device else None,
            eager_hashes=hashes,
            retain_host=self.tables if self.host else None,
        )

    def advance(self, tree: BlockTree) -> None:
        """A request is about to be matched."""
        if self.tables is not None:
            tree.advance(self._clock())

    def end(
        self, tree: BlockTree, path: Path, output_tokens: int, hints: Hints | None = None
    ) -> None:
        """A request has ended, and still references its blocks. output_tokens: -1 if not known."""
        if self.tables is None:
            return
        tree.advance(self._clock())
        if hints is None:
            tree.touch(path, output_tokens)
        else:
            later = -1.0 if hints.returns_in is None else hints.returns_in
            tree.touch(path, output_tokens, hints.session_ends, later)


def policies_of(device: str, host: str = "lru", clock: Clock | None = None) -> TierPolicies:
    """The policies of the names in `device.policy` and `host.policy`. clock: the running loop's if
    None."""
    retained = [name == "retain" for name in (device, host)]
    tables = LifeTables() if any(retained) else None
    clock = now if clock is None else clock
    return TierPolicies(tables, clock, device=retained[0], host=retained[1])
