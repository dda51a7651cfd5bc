"""A fleet of nodes in processes and network namespaces over one Mooncake pool, and masters that
etcd elects."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvactors.scenario.spec import outcomes
from kvactors.settings import read_toml
from tests.fleet.run import FLEET, run_fleet
from tests.fleet.spec import FleetReport, FleetScenario

pytestmark = pytest.mark.interop


def run(data: dict[str, Any], *, isolate: bool = True) -> FleetReport:
    """Run a fleet's scenario. It must hold its expectations."""
    report = asyncio.run(run_fleet(data, 18, lambda _: None, isolate=isolate))
    assert report.errors == []
    expect = FleetScenario.from_mapping(data).expect
    assert [str(one) for one in outcomes(expect, report) if not one.holds] == []
    assert report.corrupt_blocks_served == 0
    assert report.flush["divergence"] == 0
    return report


def show(report: FleetReport) -> None:
    """Print the share of the tokens computed once and what became of the pool's objects, by
    placement."""
    for placement, figures in report.fleet.items():
        if placement != "namespaces":
            pool = {name: n for name, n in figures.items() if name.startswith(("pool_", "shed"))}
            print(
                f"{placement}: {figures['requests']:.0f} requests, hit rate "
                f"{figures['hit_rate']} (one large cache: {figures['ideal_hit_rate']}), tokens "
                f"computed once {figures['computed_once']} (one large cache: 1), "
                f"{figures['verified']:.0f} blocks verified, {figures['corrupt']:.0f} wrong, "
                f"{figures['retried']:.0f} requests sent again, {figures['faults']:.0f} faults, "
                f"wait p99 {figures['wait_p99_s']} s, {pool}"
            )


def test_the_scenario_of_the_package_holds() -> None:
    """`python -m tests.fleet`: every placement, and no pool. Faults cost hits, and no byte is
    wrong."""
    data = read_toml(FLEET)
    report = run(data)
    show(report)
    assert report.requests == data["expect"]["requests"]
    assert report.fleet["namespaces"]["used"] == 1
    assert report.fleet["random"]["faults"] == len(data["fleet"]["fault"])
    alone, aware = report.fleet["no_pool"], report.fleet["kv_aware"]
    assert aware["blocks_computed"] < alone["blocks_computed"]


def small(**fleet: Any) -> dict[str, Any]:
    """A small fleet without faults, with caches that evict, whose pool has space for everything."""
    data = read_toml(FLEET)
    data["fleet"] = {"nodes": 3, "placements": ["random"], **fleet}
    data["workload"] |= {"sessions": 20, "turns": 4}
    data["device"], data["host"] = {"num_blocks": 512}, {"slots": 256, "transit_slots": 512}
    # a loaded machine must not turn a hit into a miss
    data["cache"]["default_deadline_s"] = 60.0
    data["storage"]["timeout_s"] = 60.0
    data["storage"]["mooncake"]["timeout_s"] = 30.0
    data["expect"] = {}
    return data


def test_a_prompt_that_two_nodes_compute_at_once_is_stored_once() -> None:
    """Every request is served by two nodes at once, on loopback."""
    report = run(small(twins=1), isolate=False)
    show(report)
    figures = report.fleet["random"]
    assert report.fleet["namespaces"]["used"] == 0
    assert figures["requests"] == 160
    assert figures["blocks_computed"] > figures["blocks_distinct"]
    assert figures["pool_objects"] == figures["blocks_distinct"]


def test_nodes_without_memory_of_the_pool_hit_what_others_computed() -> None:
    """Two clients that give the pool no memory, and one node that does."""
    report = run(small(clients=2, placements=["random", "no_pool"]))
    show(report)
    figures, alone = report.fleet["random"], report.fleet["no_pool"]
    assert figures["hit_rate_storage"] > 0.1
    # on a loaded machine a node without free transit slots does not save
    least = figures["blocks_distinct"] - figures["shed"]
    assert least <= figures["pool_objects"] <= figures["blocks_distinct"]
    assert figures["blocks_computed"] < alone["blocks_computed"]
