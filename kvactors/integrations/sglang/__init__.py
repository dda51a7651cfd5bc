"""kvactors as HiCache storage of SGLang, loaded by module path.

SGLang owns device blocks, host blocks, page hashes and scheduling. kvactors keeps pages below
SGLang's host pool.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvactors.integrations.sglang.hicache import KVActorsHiCache

__all__ = ["KVActorsHiCache"]


def __getattr__(name: str) -> Any:
    if name != "KVActorsHiCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvactors.integrations.sglang.hicache import KVActorsHiCache  # imports SGLang

    return KVActorsHiCache
