"""A fleet of nodes in processes and network namespaces over one Mooncake pool, and masters that
etcd elects."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvactors.scenario.report import Totals
from kvactors.scenario.spec import disappointments
from kvactors.settings import read_toml
from tests.fleet.run import FLEET, run_fleet
from tests.fleet.spec import FleetReport, FleetScenario
from tests.interop.network import raise_loopback

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("tmp_path")]


def run(data: dict[str, Any], *, isolate: bool = True) -> FleetReport:
    """Run a fleet's scenario. It must hold its expectations."""
    raise_loopback()
    report = asyncio.run(run_fleet(data, 18, lambda _: None, isolate=isolate))
    assert report.errors == []
    assert disappointments(FleetScenario.from_mapping(data).expect, report) == []
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
    """`python -m tests.fleet`: every placement, and no pool."""
    data = read_toml(FLEET)
    report = run(data)
    show(report)
    assert report.requests == data["expect"]["requests"]
    alone, aware = report.fleet["no_pool"], report.fleet["kv_aware"]
    assert aware["blocks_computed"] < alone["blocks_computed"]


def test_2000_requests_with_faults() -> None:
    """Every fault, under the placement that moves most blocks between nodes. Faults cost hits, and
    no byte is wrong."""
    placement = "random"
    data = read_toml(FLEET)
    data["workload"] |= {"sessions": 200, "turns": 10, "user_tokens": 48, "output_tokens": 32}
    data["fleet"] |= {"placements": [placement], "twins": 0}
    for fault in data["fleet"]["fault"]:
        fault["after"] *= 3
    data["expect"] = {"requests": 2000, f"fleet.{placement}.computed_once": {"min": 0.25}}
    report = run(data)
    show(report)
    figures = report.fleet[placement]
    assert report.fleet["namespaces"]["used"] == 1
    assert figures["faults"] == len(data["fleet"]["fault"])
    assert figures["hit_rate"] <= figures["ideal_hit_rate"]
    assert figures["pool_evicted"] > 0, "the pool was full"


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


ALWAYS = {"after": 0, "requests": 1 << 30}
"""A fault from the first request to the last."""


def test_a_full_pool_costs_hits_only() -> None:
    """A node keeps the pool full of pinned objects. Saves are refused, and prompts that a node does
    not have are computed."""
    data = small(fault=[{"kind": "full", "node": 2, **ALWAYS}])
    report = run(data)
    show(report)
    figures = report.fleet["random"]
    assert figures["requests"] == 80
    assert figures["pool_no_space"] > 0
    assert figures["hit_rate_storage"] < 0.1
    assert figures["hit_rate"] > 0.1, "of device and host"


def test_a_slow_pool_costs_hits_only() -> None:
    """One node has the pool's memory, behind a slow link. Loads end at the deadline of their
    request, however little has arrived."""
    slow = {"kind": "slow", "node": 0, "mbit_per_s": 4.0, **ALWAYS}
    data = small(clients=2, fault=[slow])
    data["cache"]["default_deadline_s"] = 1.0
    data["storage"]["mooncake"]["timeout_s"] = 1.0
    report = run(data)
    show(report)
    figures = report.fleet["random"]
    assert figures["requests"] == 80
    # Which end comes first, the deadline of a request or that of the store's call, is a race: the
    # counters of late objects may be 0.
    assert figures["wait_max_s"] >= data["cache"]["default_deadline_s"], "a load missed it"
    assert figures["wait_max_s"] < 30.0, "storage.timeout_s is 60"
    assert figures["hit_rate"] > 0.1, "of device and host, and of the node that has the memory"
    assert figures["hit_rate"] < figures["ideal_hit_rate"]


class Interrupted(Exception):
    """Raised by the caller of a fleet."""


def test_a_fleet_that_is_interrupted_leaves_no_process() -> None:
    """On loopback no namespace ends the master and the nodes."""
    raise_loopback()

    def interrupt(totals: Totals) -> None:
        if totals.requests:
            raise Interrupted

    def listening() -> int:
        states = [line.split()[3] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return states.count("0A")

    before = listening()
    with pytest.raises(Interrupted):
        asyncio.run(run_fleet(small(), 1, interrupt, isolate=False))
    assert listening() == before


RUNNER = """
import asyncio, json, sys
from tests.fleet.run import run_fleet
def served(totals):
    if totals.requests:
        print("served", flush=True)
asyncio.run(run_fleet(json.loads(sys.argv[1]), 1, served, isolate=sys.argv[2] == "True"))
"""
"""Runs the fleet of its first argument, and prints once requests are served."""

LAST = 60.0
"""Seconds within which the processes of a killed fleet must have ended. On loopback the driver ends
its nodes in order."""


def marked(name: str) -> list[int]:
    """Processes with a variable of this name in their environment."""
    found = []
    for one in Path("/proc").iterdir():
        with suppress(OSError):
            if one.name.isdecimal() and name.encode() in (one / "environ").read_bytes():
                found.append(int(one.name))
    return found


@pytest.mark.parametrize("isolate", [True, False])
def test_a_runner_that_is_killed_leaves_no_process(isolate: bool) -> None:
    raise_loopback()
    mark = f"KVACTORS_FLEET_{os.getpid()}_{isolate}"
    command = [sys.executable, "-c", RUNNER, json.dumps(small(placements=["random"])), str(isolate)]
    with subprocess.Popen(command, env={**os.environ, mark: "1"}, stdout=subprocess.PIPE) as runner:
        assert runner.stdout is not None
        assert runner.stdout.readline().strip() == b"served"
        assert len(marked(mark)) > 4, "the runner, the driver, the nodes and the master"
        runner.kill()
    until = time.monotonic() + LAST
    while (left := marked(mark)) and time.monotonic() < until:
        time.sleep(0.1)
    assert left == []
