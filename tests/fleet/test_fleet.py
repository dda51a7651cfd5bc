"""The parts of a fleet's scenario that need no processes: texts, placement, figures, settings."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from kvactors.errors import ConfigError, KVActorsError
from kvactors.lease import Hits
from kvactors.scenario import pages
from kvactors.scenario.pages import Chart
from kvactors.scenario.report import Event, Totals, report_of
from kvactors.settings import read_toml
from tests.fleet.driver import choose
from tests.fleet.run import FLEET, run_fleet
from tests.fleet.spec import FleetReport, FleetScenario, Served, fleet_page


@pytest.mark.parametrize("missing", ["zmq", "mooncake"])
async def test_a_fleet_without_a_package_names_what_to_install(missing, monkeypatch):
    def found(name: str) -> object:
        return None if name == missing else object()

    monkeypatch.setattr("tests.fleet.run.find_spec", found)
    with pytest.raises(ConfigError, match=rf"{missing} not found.*mooncake,kv-events"):
        await run_fleet({}, 0, lambda _: None)


class Node:
    """A node as the placement sees it."""

    def __init__(self, device: str = "", host: str = "", in_flight: int = 0) -> None:
        self.up = True
        self.in_flight = in_flight
        self._view = {
            medium: {int.from_bytes(block(name)[-8:], "big") for name in names}
            for medium, names in (("GPU", device), ("CPU", host))
        }

    def watch(self) -> dict[str, set[int]]:
        return self._view


def block(name: str) -> bytes:
    return name.encode() * 32


def chosen(*nodes: Node, aware: bool = True, seed: int = 0) -> tuple[int, int]:
    members: Any = nodes
    hashes = [block(name) for name in "abcd"]
    member, tokens = choose(members, hashes, 16, random.Random(seed), aware=aware)
    return members.index(member), tokens


def test_a_prompt_goes_where_the_fewest_tokens_are_missing():
    assert chosen(Node(), Node("ab"), Node("a")) == (1, 16 * 3)
    assert chosen(Node("ab"), Node("a", "b")) == (0, 16 * 3)
    assert chosen(Node("bcd"), Node("a"))[0] == 1, "blocks behind a missing one are of no use"
    assert chosen(Node("abcd", in_flight=100), Node())[0] == 1
    assert chosen(Node("abcd", in_flight=60), Node())[0] == 0
    assert {chosen(Node(), Node(), seed=seed)[0] for seed in range(20)} == {0, 1}


def test_a_prompt_goes_to_a_node_that_runs():
    stopped = Node("abcd")
    stopped.up = False
    for aware in (False, True):
        assert {chosen(stopped, Node(), aware=aware, seed=seed)[0] for seed in range(9)} == {1}
        with pytest.raises(KVActorsError, match="no node"):
            chosen(stopped, aware=aware)


def test_the_page_of_a_fleet_shows_kills_and_what_each_node_served(monkeypatch):
    charts: list[Chart] = []
    monkeypatch.setattr(pages, "svg_of", lambda chart: charts.append(chart) or "")
    hits = {"random": [Hits(0, 0, 0), Hits(1, 2, 0), Hits(0, 0, 3)], "no_pool": [Hits(1, 0, 0)]}
    served = {
        name: [Served(float(at), at % 2, 4, one) for at, one in enumerate(each)]
        for name, each in hits.items()
    }
    node = {"requests": 2, "blocks_looked_up": 8, "device": 1, "host": 2, "storage": 3}
    report = report_of(
        FleetReport,
        "fleet",
        Totals(blocks_looked_up=16, device=2, host=2, storage=3),
        1.0,
        flush={},
        loop_lag_ms={},
        messages=0,
        errors=[],
        events=[Event(1.5, "random: node 1: kill"), Event(2.0, "random: node 1: started again")],
        fleet={"namespaces": {"used": 0.0}, "random": {"hit_rate": 0.5}, "no_pool": {}},
        nodes={"random": {"node 0": node | {"read": 3072, "written": 0}}},
        served=served,
    )
    page = re.sub("(<[^>]+>)+", " ", fleet_page(report, {}))
    for text in ("1.5 s: random: node 1: kill", "node 0 3 KiB 100.0% 0 B", "random no_pool"):
        assert text in page.replace("\xa0", " ")
    of_random, nodes, *_ = charts
    assert of_random.marks == [1.5, 2.0]
    assert of_random.lines["storage"] == ([0.0, 1.0, 2.0], [0.0, 0.0, 0.75])
    assert list(nodes.lines) == ["node 0", "node 1"]
    assert [chart.marks for chart in charts[2:]] == [[], []]


def fleet(**changes: Any) -> dict[str, Any]:
    data = read_toml(FLEET)
    data["fleet"] = {"nodes": 3} | changes
    return data


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"nodes": 1}, "fleet.nodes must be in 2..64, not 1"),
        ({"clients": 3}, "fleet.clients must be fewer"),
        ({"placements": []}, "fleet.placements"),
        ({"placements": ["random", "random"]}, "fleet.placements"),
        ({"twins": -1}, "fleet.twins"),
        ({"fault": [{"kind": "slow", "target": "master"}]}, "a master has no fault 'slow'"),
        ({"fault": [{"kind": "kill", "node": 3}]}, "there is no node 3"),
        (
            {"fault": [{"kind": "kill", "seconds": 0.0}]},
            r"fleet\.fault\[0\]\.seconds must be above 0",
        ),
    ],
)
def test_a_fleet_that_cannot_be_is_named(changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        FleetScenario.from_mapping(fleet(**changes))
