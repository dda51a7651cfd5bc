"""kvactors in SGLang, loaded by module path: `KVActorsHiCache`.

SGLang owns device and host blocks, page hashes and scheduling. kvactors keeps pages below SGLang's
host pool, as its HiCache storage.
"""

from typing import TYPE_CHECKING

from kvactors.integrations.engine import entry_points

if TYPE_CHECKING:
    from kvactors.integrations.sglang.hicache import KVActorsHiCache

__all__ = ["KVActorsHiCache"]
__getattr__ = entry_points(__name__, {"KVActorsHiCache": "hicache"})
