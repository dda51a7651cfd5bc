"""Seeds, as many as a test run can afford. `python -m tests.simulation` runs as many as there is
time for."""

from __future__ import annotations

import pytest

from kvactors.actor import edges
from kvactors.testing.faults import Fault
from kvactors.testing.plan import FaultPlan
from tests.simulation import run_seed
from tests.simulation.coverage import ACTORS, coverage, universe
from tests.simulation.draw import draw_run

SEEDS, PART = 160, 20


def run_one(seed):
    """Every second part has forks, sleeps, quotas, hints and pins."""
    return run_seed(seed, sharing=bool(seed // PART % 2))


@pytest.fixture(scope="module")
def reports():
    return {}


@pytest.mark.parametrize("first", range(0, SEEDS, PART))
def test_nothing_is_violated(first, reports):
    some = [run_one(seed) for seed in range(first, first + PART)]
    reports.update({one.seed: one for one in some})
    assert {one.seed: one.violations for one in some if one.violations} == {}


@pytest.mark.parametrize("direct", [0.5, 1.0])
def test_nothing_is_violated_with_direct_turns(direct):
    some = [run_seed(seed, direct=direct) for seed in range(8)]
    assert {one.seed: one.violations for one in some if one.violations} == {}
    assert not some[0].same_run(run_seed(0))


def test_so_few_seeds_reach_most_of_it(reports):
    for seed in set(range(SEEDS)) - set(reports):  # run by another worker process
        reports[seed] = run_one(seed)
    found, groups = coverage([one.seen for one in reports.values()]), universe()
    assert sum(one.verified for one in reports.values()) > 5_000
    expected = {"faults": 1.0, "faults met": 0.9, "messages": 0.85, "outcomes": 0.5, "states": 0.7}
    for group, least in expected.items():
        reached = 1 - len(found.never[group]) / len(groups[group])
        assert reached >= least, (group, found.never[group])
    sent = {name for one in reports.values() for name in one.seen if name.startswith("message ")}
    declared = {f"message {e.sender} {e.receiver} {e.message.__name__}" for e in edges(ACTORS)}
    assert sent - declared == set()


def test_a_device_that_loses_writes_is_caught(monkeypatch):
    """A broken copy is detected, so the proof has force."""
    from kvactors.device.host import HostDevice

    copy, calls = HostDevice.copy_to_device, []

    def forgetful(self, blocks, arena, slots, layers=None):
        calls.append(1)
        copy(self, blocks[1:], arena, slots[1:], layers)

    monkeypatch.setattr(HostDevice, "copy_to_device", forgetful)
    assert any(run_seed(seed).wrong for seed in range(10))
    assert calls


def test_a_leak_is_caught(monkeypatch):
    from kvactors.native import BlockPool

    give = BlockPool.give
    monkeypatch.setattr(BlockPool, "give", lambda self, blocks: give(self, list(blocks)[:-1]))
    assert any(run_seed(seed).violations for seed in range(5))


def test_an_unplanned_actor_failure_is_caught(monkeypatch):
    from kvactors.gpu_swapper.actor import GpuSwapper
    from kvactors.gpu_swapper.messages import CopyFinished

    def broken(self, message):
        raise ZeroDivisionError

    monkeypatch.setattr(GpuSwapper, GpuSwapper.HANDLERS[CopyFinished], broken)
    assert any("by plan" in what for seed in range(5) for what in run_seed(seed).violations)


def test_a_sink_that_is_sent_nothing_is_caught(monkeypatch):
    from kvactors.testing.fakes import SimSink

    async def deaf(self, tasks):
        return None

    monkeypatch.setattr(SimSink, "deliver", deaf)
    assert any("differs on" in what for seed in range(8) for what in run_seed(seed).violations)


def test_a_hand_written_plan():
    drawn = draw_run(3)
    plan = FaultPlan(
        (Fault("actor_crash", 20.0, "cpu_evictor"), Fault("clock_jump", 0.01, duration=2.0))
    )
    report = run_seed(3, drawn._replace(plan=plan))
    assert report.violations == []
    assert report.faults == 2
