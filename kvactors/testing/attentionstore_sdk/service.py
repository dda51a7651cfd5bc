"""What stands behind the SDK: one index and one store of bytes for each shard, with knobs to make it misbehave."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Any, NamedTuple

Path = tuple[int, ...]


class Call(NamedTuple):
    """One call of the SDK: its name and its arguments."""

    name: str
    arguments: tuple[Any, ...]


class Service:
    """resident: the paths (all tokens from the root on) of the blocks on this node. objects: bytes by path and layer.

    not_ready: look-ups to refuse with "cuda memory not ready". broken: message of the error that every call gives. hang: seconds every
    call takes. fail_every: fail every n-th flush. fail_after: do what is asked and fail all the same. token_bytes: handed to the index.
    """

    def __init__(self) -> None:
        self.resident: set[Path] = set()
        self.objects: dict[tuple[Path, int], bytes] = {}
        self.calls: deque[Call] = deque(maxlen=10_000)
        self.not_ready = 0
        self.broken = ""
        self.hang = 0.0
        self.fail_every = 0
        self.fail_after = False
        self.flushes = 0
        self.token_bytes = 0
        self.at_once = self.most_at_once = 0

    def enter(self, name: str, *arguments: Any) -> None:
        """A call begins."""
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.calls.append(Call(name, arguments))
        if self.hang:
            time.sleep(self.hang)

    def leave(self) -> None:
        """A call ends."""
        self.at_once -= 1


services: dict[tuple[str, str, str, int], Service] = {}
"""By namespace, pod name, model version and shard."""


def service(namespace: str = "default_ns", pod: str = "default_pod_mixed_0", version: str = "v0", shard: int = 0) -> Service:
    """The service of a shard, made when first asked for."""
    return services.setdefault((namespace, pod, version, shard), Service())


def install() -> None:
    """Let `import attentionstore_sdk` find the stand-in."""
    from kvactors.testing.attentionstore_sdk.api.common import common_pb2
    from kvactors.testing.attentionstore_sdk.client import client
    from kvactors.testing.attentionstore_sdk.utils import err

    package = "kvactors.testing.attentionstore_sdk"
    from kvactors.testing.attentionstore_sdk import sdk

    modules = (sdk, err, common_pb2, client)
    for name in [package, f"{package}.utils", f"{package}.api", f"{package}.api.common", f"{package}.client"]:
        sys.modules[name.replace(package, "attentionstore_sdk")] = sys.modules[name]
    for module in modules:
        sys.modules[module.__name__.replace(package, "attentionstore_sdk")] = module
