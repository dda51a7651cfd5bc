"""Settings of PrefixIndex."""

from __future__ import annotations

from typing import NamedTuple

from kvactors.native import Path
from kvactors.prefix_index.messages import Stored
from kvactors.settings.check import WritePolicy


class IndexSettings(NamedTuple):
    """Settings that follow from the tiers, the store and the sinks.

    Attributes:
        exclusive: a block has one copy among device and host.
        host_tier: evicted blocks are offered to the host tier.
        fetch: the store may hold blocks that the tree does not.
        announce: there is a sink.
        announce_whole: a finish announces all blocks of the request, also those announced before.
        free_low, free_high: once fewer than `free_low` device blocks are free after a grant, blocks
            are evicted until `free_high` are.
        save: when finished requests are written to the store.
        min_hits: hits of a block before `write_through_selective` saves it.
        host_blocks: blocks that the host tier keeps at most before and after an eviction, as far as
            it evicts ahead of need.
        token_root: with a store that is addressed by tokens alone, the root hash of the scope it
            was opened with.
        asleep: the cache sleeps, so that no request is admitted.
        keep_lineages: the store keeps the inputs of block hashes.
        pin_share: of the device blocks, at most so many are pinned.
    """

    exclusive: bool
    host_tier: bool
    fetch: bool = False
    announce: bool = False
    announce_whole: bool = False
    free_low: int = 0
    free_high: int = 0
    save: WritePolicy = "none"
    min_hits: int = 1
    host_blocks: tuple[int, int] = (0, 0)
    token_root: bytes | None = None
    keep_lineages: bool = False
    asleep: bool = False
    pin_share: float = 0.25

    @property
    def offload(self) -> bool:
        """Whether evicted blocks are copied to the host before they are free."""
        return self.host_tier and self.exclusive

    @property
    def save_after(self) -> int:
        """Hits after which a finish writes a block to the store; 0 for never."""
        return {"write_through": 1, "write_through_selective": self.min_hits}.get(self.save, 0)

    def storable(self, path: Path) -> int:
        """Leading blocks that the store can tell from all others.

        A store that is addressed by tokens alone can do so only in the scope it was opened with,
        up to the first block whose path has extra keys.
        """
        if self.token_root is None:
            return path.num_full_blocks
        return path.num_plain_blocks if path.root == self.token_root else 0

    def fetchable(self, path: Path, stored: Stored | None = None) -> int:
        """Leading blocks that may be looked for in the store. stored: see `Acquire`. Ignored
        if it was counted under another namespace."""
        storable = self.storable(path) if self.fetch else 0
        if stored is None or stored.root != path.root:
            return storable
        return min(storable, stored.blocks)
