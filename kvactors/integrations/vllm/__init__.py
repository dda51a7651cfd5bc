"""kvactors as an offloading tier of vLLM, loaded by module path.

vLLM owns device blocks, block hashes and scheduling. `KVActorsConnector` is its connector and
`KVActorsOffloadingSpec` its `OffloadingSpec`: kvactors owns the host tier and storage.
`KVActorsTier` is a secondary tier of vLLM: kvactors owns storage below vLLM's own host tier.
"""

from typing import TYPE_CHECKING

from kvactors.integrations.engine import entry_points

if TYPE_CHECKING:
    from kvactors.integrations.vllm.connector import KVActorsConnector
    from kvactors.integrations.vllm.spec import KVActorsOffloadingSpec
    from kvactors.integrations.vllm.tier import KVActorsTier

__all__ = ["KVActorsConnector", "KVActorsOffloadingSpec", "KVActorsTier"]
__getattr__ = entry_points(
    __name__,
    {"KVActorsConnector": "connector", "KVActorsOffloadingSpec": "spec", "KVActorsTier": "tier"},
)
