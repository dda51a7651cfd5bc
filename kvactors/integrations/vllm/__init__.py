"""kvactors as an offloading tier of vLLM, loaded by module path.

vLLM owns device blocks, block hashes and scheduling. `KVActorsConnector` is its connector and
`KVActorsOffloadingSpec` its `OffloadingSpec`: kvactors owns the host tier and storage.
`KVActorsTier` is a secondary tier of vLLM: kvactors owns storage below vLLM's own host tier.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvactors.integrations.vllm.connector import KVActorsConnector
    from kvactors.integrations.vllm.spec import KVActorsOffloadingSpec
    from kvactors.integrations.vllm.tier import KVActorsTier

__all__ = ["KVActorsConnector", "KVActorsOffloadingSpec", "KVActorsTier"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvactors.integrations.vllm import connector, spec, tier  # they import vLLM

    modules = {"KVActorsConnector": connector, "KVActorsOffloadingSpec": spec, "KVActorsTier": tier}
    return getattr(modules[name], name)
