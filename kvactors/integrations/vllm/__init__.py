"""kvactors as an offloading tier of vLLM, loaded by module path.

vLLM owns device blocks, block hashes and scheduling. `KVActorsOffloadingSpec` is its
`OffloadingSpec`: kvactors owns the host tier and storage. `KVActorsTier` is a secondary tier of
vLLM: kvactors owns storage below vLLM's own host tier.
"""

from kvactors.integrations.vllm.spec import KVActorsOffloadingSpec
from kvactors.integrations.vllm.tier import KVActorsTier

__all__ = ["KVActorsOffloadingSpec", "KVActorsTier"]
