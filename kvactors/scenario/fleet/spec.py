"""The table `fleet` of a scenario file."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from kvactors.errors import ConfigError

Placement = Literal["random", "kv_aware", "no_pool"]


class FleetFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fault of the fleet, in the run of every placement.

    Attributes:
        kind: kill (SIGKILL, started again at the end), pause (SIGSTOP), slow (the node's link has
            `mbit_per_s` only), cut (the link is down), full (the node fills the pool with pinned
            objects, and removes them at the end). slow and cut need network namespaces.
        target: the pool's master, or a node.
        node: number of the node.
        after: requests that have ended when the fault begins. Further ones wait until it has.
        seconds: duration at least.
        requests: how many requests end during it at least.
        mbit_per_s: of a slow link.
    """

    kind: Literal["kill", "pause", "slow", "cut", "full"]
    target: Literal["master", "node"] = "node"
    node: int = 0
    after: int = 0
    seconds: float = 1.0
    requests: int = 0
    mbit_per_s: float = 8.0


class FleetSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fleet of nodes over one Mooncake pool, each in a process and a network namespace.

    Attributes:
        nodes: number of nodes, 0 for no fleet.
        clients: how many of them, the last ones, give the pool no memory.
        placements: how requests choose their node. The workload runs once for each: random,
            kv_aware (the node with the fewest tokens to compute, by the nodes' KV events and the
            requests in flight) and no_pool (random, without a pool, for comparison).
        twins: every n-th request is served by two nodes at once (0: none).
        fault: what goes wrong.
    """

    nodes: int = 0
    clients: int = 0
    placements: tuple[Placement, ...] = ("random", "kv_aware")
    twins: int = 0
    fault: tuple[FleetFault, ...] = ()


def check_fleet(fleet: FleetSpec, backend: str, kind: str) -> None:
    """Raise ConfigError for a fleet that cannot be.

    Args:
        fleet: the table.
        backend: of the storage.
        kind: of the workload.
    """
    if not fleet.nodes:
        if fleet != FleetSpec():
            raise ConfigError("fleet.nodes is missing: the other settings of [fleet] need it")
        return
    if not 2 <= fleet.nodes <= 64:
        raise ConfigError(f"fleet.nodes must be in 2..64, not {fleet.nodes}")
    if backend != "mooncake" or kind != "chat":
        raise ConfigError("fleet needs storage.backend = 'mooncake' and workload.kind = 'chat'")
    if not 0 <= fleet.clients < fleet.nodes:
        raise ConfigError("fleet.clients must be fewer than the nodes: the pool needs memory")
    if not fleet.placements or len(set(fleet.placements)) < len(fleet.placements):
        raise ConfigError("fleet.placements must name at least one placement, each once")
    if fleet.twins < 0:
        raise ConfigError(f"fleet.twins must not be negative: {fleet.twins}")
    for number, fault in enumerate(fleet.fault, 1):
        if fault.target == "master" and fault.kind not in ("kill", "pause"):
            raise ConfigError(f"fleet.fault {number}: a master has no fault {fault.kind!r}")
        if not 0 <= fault.node < fleet.nodes:
            raise ConfigError(f"fleet.fault {number}: there is no node {fault.node}")
        if (
            min(fault.after, fault.requests) < 0
            or not 0 < fault.seconds < math.inf
            or not fault.mbit_per_s > 0
        ):
            raise ConfigError(
                f"fleet.fault {number}: after and requests must not be negative, seconds and "
                "mbit_per_s must be above 0"
            )
