"""Plans of faults, drawn from the kinds that a system's parts can meet."""

from __future__ import annotations

import random
from typing import NamedTuple, get_args

from kvactors.testing.faults import Kind, RankKind, SinkKind, StoreKind
from kvactors.testing.plan import DRAWN, FaultPlan, draw_one


class Targets(NamedTuple):
    """The possible targets of a plan. span: seconds in which faults begin. steps: turns or awaits
    among which they do. direct: whether the store moves device memory itself, and so has neither
    checksums nor a disk of this node."""

    actors: tuple[str, ...] = ()
    sinks: tuple[str, ...] = ()
    ranks: int = 1
    clients: int = 1
    store: bool = False
    direct: bool = False
    span: float = 1.0
    steps: int = 200


def possible(targets: Targets) -> list[Kind]:
    """Kinds that have something to hit."""
    without: set[Kind] = set()
    if not targets.actors:
        without.add("actor_crash")
    if not targets.sinks:
        without.update(get_args(SinkKind))
    if targets.ranks == 1:
        without.update(get_args(RankKind))
    else:
        without |= {"copy_slow", "copy_hang"}  # the ranks' messages are slow and held instead
    if not targets.store:
        without.update(get_args(StoreKind))
    if targets.direct:
        without |= {"torn_write", "bit_flip", "disk_full"}
    return [kind for kind in DRAWN if kind not in without]


def draw(rng: random.Random, count: int, targets: Targets) -> FaultPlan:
    """`count` faults, drawn from the kinds that have something to hit."""
    kinds = possible(targets)
    faults = []
    for _ in range(count):
        kind = rng.choice(kinds)
        faults.append(draw_one(rng, kind, aims(kind, targets), targets.span, targets.steps))
    return FaultPlan(tuple(sorted(faults, key=lambda fault: fault.at)))


def aims(kind: Kind, targets: Targets) -> tuple[str, ...]:
    """The possible targets of a kind of fault."""
    if kind == "actor_crash":
        return targets.actors
    if kind.startswith("sink_"):
        return targets.sinks
    if kind == "cancel":
        return tuple(str(number) for number in range(targets.clients))
    return tuple(str(number) for number in range(targets.ranks))
