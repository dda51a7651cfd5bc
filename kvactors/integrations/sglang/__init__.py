"""kvactors in SGLang, loaded by module path: `KVActorsHiCache` and `KVActorsLinker`.

SGLang owns device blocks, page hashes and scheduling. kvactors keeps pages below SGLang's host pool
(`KVActorsHiCache`, the HiCache storage), or below its device pool (`KVActorsLinker`).
"""

from typing import TYPE_CHECKING

from kvactors.integrations.engine import entry_points

if TYPE_CHECKING:
    from kvactors.integrations.sglang.hicache import KVActorsHiCache
    from kvactors.integrations.sglang.linker import KVActorsLinker

__all__ = ["KVActorsHiCache", "KVActorsLinker"]
__getattr__ = entry_points(__name__, {"KVActorsHiCache": "hicache", "KVActorsLinker": "linker"})
