"""Lineages: the inputs of block hashes, for stores that keep them beside the blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvactors.identity import PLAIN, Lineages, RequestScope
from kvactors.native import Path
from kvactors.prefix_index.index import Eviction
from kvactors.types import split_hashes


class LineageSource:
    """Makes the lineages of blocks.

    Args:
        keep: whether the store keeps them.
        scopes: by root hash, plain ones may be missing.
        root_of: the root hash that requests of a scope have now.
    """

    def __init__(
        self,
        keep: bool,
        scopes: Mapping[bytes, RequestScope],
        root_of: Callable[[RequestScope], bytes],
    ) -> None:
        self._keep = keep
        self._scopes = scopes
        self._root_of = root_of

    def of_path(self, path: Path, start: int, stop: int) -> Lineages | None:
        """Lineages of blocks [start, stop) of a path. None if the store keeps none, or the path is
        under a salt."""
        if not self._keep or (scope := self._kept_scope(path.root)) is None:
            return None
        extra_keys = {
            position - start: extra_key for position, extra_key in path.extra_keys(start, stop)
        }
        return Lineages(path.tokens(start, stop), (scope,), extra_keys)

    def of_eviction(self, op: Eviction) -> Lineages | None:
        """Lineages of blocks that leave the device."""
        if not self._keep:
            return None
        roots, tokens, extra_keys = op.tree.contents(op.nodes)
        each = split_hashes(roots)
        scopes = {root: self._kept_scope(root) for root in set(each)}
        if not any(scopes.values()):
            return None
        return Lineages(tokens, tuple(scopes[root] for root in each), dict(extra_keys))

    def _kept_scope(self, root: bytes) -> RequestScope | None:
        """The scope of a root hash, None if lineages below it are not kept: those under a salt,
        and those of an earlier namespace. The scope of a forgotten root counts as plain only if it
        hashes to that root."""
        scope = self._scopes.get(root, PLAIN)
        return scope if scope.salt is None and self._root_of(scope) == root else None
