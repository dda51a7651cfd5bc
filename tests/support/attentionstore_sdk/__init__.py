"""A stand-in for AttentionStore's SDK: the same modules and calls, and a real token index behind
them.

The service outlives its clients, so the index of a (namespace, pod, version, shard) is shared by
every SDK object of this process. `service` finds it, and tells it to misbehave. It is as strict
about its arguments as the real one could be.
"""

from tests.support.attentionstore_sdk.service import (
    Service,
    install,
    reset,
    restart_process,
    service,
    services,
)

__all__ = ["Service", "install", "reset", "restart_process", "service", "services"]
