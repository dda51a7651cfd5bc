"""kvactors as an L2 adapter of LMCache, loaded by module path.

LMCache owns chunk hashes, its L1 memory, and the decisions which chunks to store and to prefetch.
`KVActorsL2` keeps its objects in kvactors' verified file store.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvactors.integrations.lmcache.adapter import KVActorsL2

__all__ = ["KVActorsL2"]


def __getattr__(name: str) -> Any:
    if name != "KVActorsL2":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvactors.integrations.lmcache.adapter import KVActorsL2  # imports LMCache

    return KVActorsL2
