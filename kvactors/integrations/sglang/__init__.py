"""kvactors in SGLang, loaded by module path: `KVActorsHiCache` and `KVActorsLinker`.

SGLang owns device blocks, page hashes and scheduling. kvactors keeps pages below SGLang's host pool
(`KVActorsHiCache`, the HiCache storage), or below its device pool (`KVActorsLinker`).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvactors.integrations.sglang.hicache import KVActorsHiCache
    from kvactors.integrations.sglang.linker import KVActorsLinker

__all__ = ["KVActorsHiCache", "KVActorsLinker"]


def __getattr__(name: str) -> Any:
    # both import SGLang
    if name == "KVActorsHiCache":
        from kvactors.integrations.sglang.hicache import KVActorsHiCache

        return KVActorsHiCache
    if name == "KVActorsLinker":
        from kvactors.integrations.sglang.linker import KVActorsLinker

        return KVActorsLinker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
