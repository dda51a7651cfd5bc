"""kvactors as an L2 adapter of LMCache, loaded by module path.

LMCache owns chunk hashes, its L1 memory, and the decisions which chunks to store and to prefetch.
`KVActorsL2` keeps its objects in kvactors' verified file store.
"""

from typing import TYPE_CHECKING

from kvactors.integrations.engine import entry_points

if TYPE_CHECKING:
    from kvactors.integrations.lmcache.adapter import KVActorsL2

__all__ = ["KVActorsL2"]
__getattr__ = entry_points(__name__, {"KVActorsL2": "adapter"})
