"""The simulation of a `TierCache` holds, replays exactly, and reaches what it is for."""

from __future__ import annotations

from collections import Counter

from tests.simulation.tiers import SimEngine, main, run_seed


def test_seeds_hold_and_reach_every_kind_of_move():
    reached: Counter[str] = Counter()
    for seed in range(40):
        engine = SimEngine(seed)
        engine.run()
        reached.update(engine.cache.statistics()._asdict())
        reached["tasks"] += sum(engine.sink.counts.values())
    never = [name for name, count in reached.items() if not count and name != "pinned"]
    assert never == []


def test_a_seed_replays_exactly():
    assert [run_seed(seed) for seed in (3, 4)] == [run_seed(seed) for seed in (3, 4)]


def test_the_command_runs_seeds(capsys):
    assert main(["--seeds", "3", "--first", "100"]) == 0
    assert "3 seeds" in capsys.readouterr().out
