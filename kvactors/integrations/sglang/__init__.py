"""kvactors in SGLang, loaded by module path: `KVActorsHiCache` and `KVActorsLinker`.

SGLang owns device blocks, page hashes and scheduling. kvactors keeps pages below SGLang's host pool
(`KVActorsHiCache`, the HiCache storage), or below its device pool (`KVActorsLinker`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvactors.integrations.sglang.hicache import KVActorsHiCache
    from kvactors.integrations.sglang.linker import KVActorsLinker

__all__ = ["KVActorsHiCache", "KVActorsLinker"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "hicache" if name == "KVActorsHiCache" else "linker"  # both import SGLang
    return getattr(import_module(f"{__name__}.{module}"), name)
