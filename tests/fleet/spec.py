"""The scenario of a fleet, and its report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple, Self

import msgspec
import numpy as np
from rich.console import Console

from kvactors.errors import ConfigError
from kvactors.lease import Hits
from kvactors.scenario.output import print_details
from kvactors.scenario.pages import Chart, charts_of, increase, page_of
from kvactors.scenario.report import (
    TIERS,
    Report,
    print_caches,
    print_figures,
    print_proof,
    print_summary,
)
from kvactors.scenario.spec import Complaints, Positive, Scenario
from kvactors.settings.check import Number, Seconds

Placement = Literal["random", "kv_aware", "no_pool"]


class FleetFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fault of the fleet, in the run of every placement.

    Attributes:
        kind: kill (SIGKILL, started again at the end), pause (SIGSTOP), slow (the node's link has
            `mbit_per_s` only), cut (the link is down), full (the node fills the pool with pinned
            objects, and removes them at the end). slow and cut need network namespaces.
        after: requests that have ended when the fault begins. Further ones wait until it has.
        requests: how many requests end during it at least.
    """

    kind: Literal["kill", "pause", "slow", "cut", "full"]
    target: Literal["master", "node"] = "node"
    node: Number = 0
    after: Number = 0
    seconds: Seconds = 1.0
    requests: Number = 0
    mbit_per_s: Positive = 8.0


class FleetSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fleet of nodes over one Mooncake pool, each in a process and a network namespace.

    Attributes:
        clients: how many of them, the last ones, give the pool no memory.
        placements: how requests choose their node. The workload runs once for each: random,
            kv_aware (the node with the fewest tokens to compute, by the nodes' KV events and the
            requests in flight) and no_pool (random, without a pool, for comparison).
        twins: every n-th request is served by two nodes at once (0: none).
    """

    nodes: Number = 0
    clients: Number = 0
    placements: tuple[Placement, ...] = ("random", "kv_aware")
    twins: Number = 0
    fault: tuple[FleetFault, ...] = ()


class Served(NamedTuple):
    """A request that has ended. at: seconds since the beginning. The others: blocks."""

    at: float
    node: int
    looked_up: int
    hits: Hits


class FleetReport(Report):
    """A report with the figures of each placement, of its nodes, and of its requests in the order
    of their ends. namespaces: whether nodes had some."""

    fleet: dict[str, dict[str, float]] = msgspec.field(default_factory=dict)
    nodes: dict[str, dict[str, dict[str, int]]] = msgspec.field(default_factory=dict)
    served: dict[str, list[Served]] = msgspec.field(default_factory=dict)


class FleetScenario(Scenario, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A scenario of a fleet."""

    fleet: FleetSpec

    @classmethod
    def from_mapping(cls, data: Any) -> Self:
        scenario = super().from_mapping(data)
        for complaint, applies in about_fleet(scenario).items():
            if applies:
                raise ConfigError(complaint)
        return scenario

    @classmethod
    def report_type(cls) -> type[Report]:
        return FleetReport


def about_fleet(scenario: FleetScenario) -> Complaints:
    """A fleet that cannot be."""
    fleet = scenario.fleet
    found: Complaints = {
        f"fleet.nodes must be in 2..64, not {fleet.nodes}": not 2 <= fleet.nodes <= 64,
        "fleet needs storage.backend = 'mooncake' and workload.kind = 'chat'": (
            scenario.storage.backend != "mooncake" or scenario.workload.kind != "chat"
        ),
        "fleet.clients must be fewer than the nodes: the pool needs memory": (
            fleet.clients >= fleet.nodes
        ),
        "fleet.placements must name at least one placement, each once": (
            not fleet.placements or len(set(fleet.placements)) < len(fleet.placements)
        ),
    }
    for number, fault in enumerate(fleet.fault):
        where = f"fleet.fault[{number}]"
        found[f"{where}: a master has no fault {fault.kind!r}"] = (
            fault.target == "master" and fault.kind not in ("kill", "pause")
        )
        found[f"{where}: there is no node {fault.node}"] = fault.node >= fleet.nodes
    return found


FLEET = (
    ("requests", "requests"),
    ("hit rate", "hit_rate"),
    ("hit rate of one large cache", "ideal_hit_rate"),
    ("on the node's device", "hit_rate_device"),
    ("in its host memory", "hit_rate_host"),
    ("from the pool", "hit_rate_storage"),
    ("tokens computed once (one large cache: 1)", "computed_once"),
    ("blocks computed", "blocks_computed"),
    ("distinct blocks", "blocks_distinct"),
    ("objects in the pool at the end", "pool_objects"),
    ("objects that the pool evicted", "pool_evicted"),
    ("requests sent again", "retried"),
    ("faults", "faults"),
    ("faults left out", "faults_left_out"),
    ("blocks verified", "verified"),
    ("wrong bytes", "corrupt"),
    ("wait for loads, s (p50)", "wait_p50_s"),
    ("wait for loads, s (p99)", "wait_p99_s"),
    ("seconds", "seconds"),
)
"""The figures of a fleet, and how they are labelled."""


def print_fleet(report: FleetReport, console: Console, title: str = "") -> None:
    """The report, and the figures of the fleet, a column for each placement of its requests."""
    print_summary(report, console, title)
    fleet = report.fleet
    placements = {name: figures for name, figures in fleet.items() if name != "namespaces"}
    where = "network namespaces" if fleet["namespaces"]["used"] else "processes on loopback"
    print_figures(f"fleet, {where}", FLEET, placements, console)
    for name, nodes in report.nodes.items():
        print_caches(name, nodes, console)
    print_details(
        "A node that was killed counts its bytes of the store from its new start.", console
    )


def fleet_page(report: FleetReport, settings: Mapping[str, Any]) -> str:
    """The page of a fleet: the report, and the course of each placement with its faults."""
    charts = [course(name, served, report) for name, served in report.served.items()]
    remark = "Dotted lines: a fault begins, or ends."
    drawn = [charts_of("Hit rates of the placements", list(chain(*charts)), remark)]

    def printed(console: Console) -> None:
        print_proof(report, console)
        print_fleet(report, console)

    return page_of(report.name, printed, drawn, settings, "python -m tests.fleet")


def course(placement: str, served: Sequence[Served], report: FleetReport) -> Iterator[Chart]:
    """The charts of one placement: shares of the blocks that requests looked up."""
    marks = [one.at for one in report.events if one.what.startswith(f"{placement}: ")]

    def line(requests: Sequence[Served], hits: Sequence[int]) -> tuple[list[float], list[float]]:
        looked_up = [one.looked_up for one in requests]
        ends, shares = increase(np.cumsum([0, *hits]), np.cumsum([0, *looked_up]))
        return [requests[end - 1].at for end in ends], shares

    tiers = {
        tier: line(served, [getattr(one.hits, tier) for one in served])
        for tier in TIERS
        if any(getattr(one.hits, tier) for one in served)
    }
    nodes = {}
    for node in sorted({one.node for one in served}):
        own = [one for one in served if one.node == node]
        nodes[f"node {node}"] = line(own, [sum(one.hits) for one in own])
    for what, lines in (("by tier", tiers), ("by node", nodes)):
        title = f"{placement}: hit rate {what}"
        yield Chart(title, "seconds", "share of blocks", lines, top=1.0, marks=marks)
