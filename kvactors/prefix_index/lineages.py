"""Lineages: the data that block hashes are made of, for stores that keep it beside the blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvactors.flush_notifier.messages import PLAIN, Origin
from kvactors.lineage import Lineages
from kvactors.native import Path
from kvactors.prefix_index.index import Eviction
from kvactors.types import split_keys


class LineageSource:
    """Makes the lineages of blocks.

    keep: whether the store keeps them. origins: by root hash, plain ones may be missing. root_of:
    the root hash that requests of an origin have now.
    """

    def __init__(
        self, keep: bool, origins: Mapping[bytes, Origin], root_of: Callable[[Origin], bytes]
    ) -> None:
        self._keep = keep
        self._origins = origins
        self._root_of = root_of

    def of_path(self, path: Path, start: int, stop: int) -> Lineages | None:
        """Lineages of blocks [start, stop) of a path. None if the store keeps none, or the path is
        under a salt."""
        if not self._keep or (origin := self._kept_origin(path.root)) is None:
            return None
        extra_keys = {position - start: key for position, key in path.extra_keys(start, stop)}
        return Lineages(path.tokens(start, stop), (origin,), extra_keys)

    def of_eviction(self, op: Eviction) -> Lineages | None:
        """Lineages of blocks that leave the device."""
        if not self._keep:
            return None
        roots, tokens, extra_keys = op.tree.contents(op.nodes)
        each = split_keys(roots)
        origins = {root: self._kept_origin(root) for root in set(each)}
        if not any(origins.values()):
            return None
        return Lineages(tokens, tuple(origins[root] for root in each), dict(extra_keys))

    def _kept_origin(self, root: bytes) -> Origin | None:
        """The origin of a root hash, None if lineages below it are not kept: those under a salt,
        and those of an earlier namespace. The origin of a forgotten root counts as plain only if it
        hashes to that root."""
        origin = self._origins.get(root, PLAIN)
        return origin if origin.salt is None and self._root_of(origin) == root else None
