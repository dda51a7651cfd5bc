"""Plans of faults and their times: pure data, drawn from a seed or written by hand as TOML
([[fault]] tables) or JSON."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvactors.config import convert, read_toml
from kvactors.errors import ConfigError
from kvactors.testing.fault import LASTING, STEPPED, Fault, Kind

DRAWN: tuple[Kind, ...] = (
    "copy_fail",
    "copy_slow",
    "copy_hang",
    "store_down",
    "store_slow",
    "store_hang",
    "torn_write",
    "bit_flip",
    "disk_full",
    "object_lost",
    "sink_down",
    "sink_hang",
    "sink_lose_answers",
    "sink_duplicate",
    "rank_silent",
    "rank_cut",
    "rank_lost",
    "actor_crash",
    "cancel",
    "clock_jump",
)
"""The kinds that plans are drawn from. A seed draws the same plan as long as the list is the
same."""


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


class FaultPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every fault of a run, in order of `at`."""

    fault: tuple[Fault, ...] = ()

    @classmethod
    def from_toml(cls, path: str | Path) -> FaultPlan:
        """Read [[fault]] tables. Raises ConfigError with the reason, OSError if the file cannot be
        read."""
        plan = convert(read_toml(path), cls)
        plan.check()
        return plan

    @classmethod
    def from_json(cls, text: str | bytes) -> FaultPlan:
        """Read the output of `to_json`.

        Raises:
            ConfigError: the text is no valid plan.
        """
        try:
            plan = msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigError(str(error)) from error
        plan.check()
        return plan

    def to_json(self) -> str:
        """As JSON, in one line."""
        return msgspec.json.encode(self).decode()

    def check(self) -> None:
        """ConfigError for values that cannot be."""
        for number, fault in enumerate(self.fault):
            for name, value, low in (
                ("at", fault.at, 0.0),
                ("duration", fault.duration, 0.0),
                ("amount", fault.amount, 1),
            ):
                if not low <= value < float("inf"):
                    raise ConfigError(
                        f"fault {number} ({fault.kind}): {name} must be at least {low:g}, not "
                        f"{value}"
                    )
            if fault.kind in STEPPED and (fault.at < 1 or fault.at != int(fault.at)):
                raise ConfigError(
                    f"fault {number} ({fault.kind}): at counts from 1, it cannot be {fault.at}"
                )


def possible(targets: Targets) -> list[Kind]:
    """Kinds that have something to hit."""
    without: set[Kind] = set()
    if not targets.actors:
        without.add("actor_crash")
    if not targets.sinks:
        without |= {"sink_down", "sink_hang", "sink_lose_answers", "sink_duplicate"}
    if targets.ranks == 1:
        without |= {"rank_silent", "rank_cut", "rank_lost"}
    else:
        without |= {"copy_slow", "copy_hang"}  # the ranks' messages are slow and held instead
    if not targets.store:
        without |= {
            "store_down",
            "store_slow",
            "store_hang",
            "torn_write",
            "bit_flip",
            "disk_full",
            "object_lost",
        }
    if targets.direct:
        without |= {"torn_write", "bit_flip", "disk_full"}
    return [kind for kind in DRAWN if kind not in without]


def draw(rng: random.Random, count: int, targets: Targets) -> FaultPlan:
    """`count` faults, drawn from the kinds that have something to hit."""
    kinds = possible(targets)
    faults = [_draw_one(rng, rng.choice(kinds), targets) for _ in range(count)]
    return FaultPlan(tuple(sorted(faults, key=lambda fault: fault.at)))


def _draw_one(rng: random.Random, kind: Kind, targets: Targets) -> Fault:
    at = (
        float(int(rng.triangular(1, targets.steps, 1)))
        if kind in STEPPED
        else round(rng.uniform(0, targets.span), 4)
    )
    lasting = kind in LASTING
    duration = round(min(3.0, rng.expovariate(3.0)), 4) if lasting else 0.0
    if kind == "cancel":
        duration = round(rng.choice((0.0, 0.0, rng.expovariate(200.0), rng.expovariate(20.0))), 4)
    return Fault(kind, at, rng.choice(aims(kind, targets)), duration, rng.randint(1, 8))


def aims(kind: Kind, targets: Targets) -> tuple[str, ...]:
    """The possible targets of a kind of fault."""
    if kind == "actor_crash":
        return targets.actors
    if kind.startswith("sink_"):
        return targets.sinks
    if kind == "cancel":
        return tuple(str(number) for number in range(targets.clients))
    return tuple(str(number) for number in range(targets.ranks))
