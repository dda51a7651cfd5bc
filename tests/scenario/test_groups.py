"""Replays and scenarios of caches whose model has layers with a window or a state."""

from __future__ import annotations

import numpy as np
import pytest

from kvactors.errors import ConfigError
from kvactors.scenario.engine import Engine
from kvactors.scenario.replay import ReplayConfig, replay
from kvactors.scenario.report import Totals
from kvactors.scenario.runner import run_scenario
from kvactors.scenario.sweep import sweep
from tests.scenario.test_replay import trace
from tests.support.cache import BLOCK
from tests.support.layers import opened, state, window

KINDS = {
    "window": [window(60, slots=60)],
    "state": [state(30, slots=30, every=4)],
    "both": [window(60, slots=60), state(30, slots=30)],
}


def tables(groups, *, device=40, **more):
    return {
        "cache": {"block_size": BLOCK, "groups": groups},
        "device": {"num_blocks": device},
        "layout": {"num_layers": 1, "num_kv_heads": 1, "head_dim": 4},
        "host": {"slots": 200},
        "flush": {"sinks": [{"kind": "memory"}]},
        **more,
    }


def conversations(path, *, outputs=1):
    """Turns of six conversations, whose prompts begin with the same three blocks."""
    rng, requests, said = np.random.default_rng(0), [], [[1, 2, 3] for _ in range(6)]
    for number in range(60):
        ids = said[int(rng.integers(6))]
        ids += [1000 * (number + 1) + at for at in range(1 + int(rng.integers(4)))]
        if len(ids) > 18:
            del ids[3:]
            ids.append(1000 * (number + 1) + 900)
        requests.append((100 * number, outputs, list(ids)))
    return trace(path, *requests)


@pytest.mark.parametrize(
    ("kind", "mode"), [*((kind, "sequential") for kind in KINDS), ("both", "timed")]
)
async def test_a_replay_verifies_the_blocks_of_every_group(tmp_path, kind, mode):
    path = conversations(tmp_path / "t.jsonl", outputs=30)
    settings = {"mode": mode, "speed": 1000.0, "decode_tokens_per_s": 500.0, "baselines": []}
    report, without = [
        await replay(path, ReplayConfig.from_mapping(tables(groups, replay=settings)))
        for groups in (KINDS[kind], [])
    ]
    for one in (report, without):
        assert (one.requests, one.corrupt_blocks_served, one.errors) == (60, 0, [])
    assert report.verified_blocks > without.verified_blocks
    assert report.hit_rate["total"] > 0.2
    if mode == "timed":
        assert report.serving["cache"]["preemptions"] > 0
    else:
        assert report.hit_rate["total"] <= without.hit_rate["total"]


async def test_hits_are_those_that_the_groups_allow(tmp_path):
    path = trace(tmp_path / "t.jsonl", (0, 1, [1, 2, 3, 4]), (1, 1, [1, 2, 5]), (2, 1, [1, 2, 5]))
    rates = {}
    for every in (0, 1):
        config = ReplayConfig.from_mapping(tables([state(30, every=every)]))
        rates[every] = (await replay(path, config)).hit_rate["device"]
    # without snapshots inside a prompt, the second request makes the one that the third one hits
    assert rates == {0: round(2 / 10, 6), 1: round((2 + 2) / 10, 6)}


@pytest.mark.parametrize("kind", KINDS)
async def test_wrong_bytes_of_a_group_are_found(kind):
    async with opened(KINDS[kind], host={"slots": 30}) as cache:
        engine = Engine(cache, Totals())
        tokens = list(range(9 * BLOCK + 1))
        await engine.serve("a", tokens)
        for group in cache.groups.values():
            group.device.fill(range(group.device.num_blocks), bytes(32) * group.device.num_blocks)
        await engine.serve("b", [*tokens, 1])
        span = {"window": 3, "state": 1, "both": 4}[kind]
        assert (engine.totals.device, engine.totals.corrupt_blocks_served) == (9, span)


async def test_a_request_that_a_group_can_never_hold_is_rejected():
    async with opened([window(3)]) as cache:
        engine = Engine(cache, Totals())
        await engine.serve_patiently("a", range(4 * BLOCK))
        assert (engine.totals.rejected, engine.totals.errors) == (1, [])


CHAT = {
    "scenario": {"name": "groups", "seed": 1},
    "workload": {
        "kind": "chat",
        "sessions": 4,
        "turns": 3,
        "system_tokens": 20,
        "user_tokens": 6,
        "output_tokens": 4,
    },
}


@pytest.mark.parametrize("virtual", [False, True])
def test_a_scenario_runs_with_groups(tmp_path, virtual):
    storage = {"backend": "memory" if virtual else "file"}
    storage |= {} if virtual else {"directory": str(tmp_path), "free_space_floor": 0}
    data = tables(KINDS["both"], device=60, storage=storage)
    data["cache"]["model"] = "m"
    data["cache"]["groups"] = [window(60), state(30)]
    _, report = run_scenario({**data, **CHAT, "expect": {}}, virtual=virtual)
    assert (report.requests, report.corrupt_blocks_served, report.errors) == (12, 0, [])
    assert report.hit_rate["total"] > 0.2


def test_faults_of_the_store_and_groups_are_refused():
    data = tables(
        [window(60)],
        storage={"backend": "memory"},
        fault=[{"kind": "down", "at": 1, "storage": True}],
    )
    with pytest.raises(ConfigError, match="faults of the store and cache"):
        run_scenario({**data, **CHAT})


def test_a_sweep_of_a_config_with_groups_is_refused_with_the_remedy(tmp_path):
    path = conversations(tmp_path / "t.jsonl")
    with pytest.raises(ConfigError, match="take the sizes of the groups from `kvactors size`"):
        sweep(path, config=ReplayConfig.from_mapping(tables([window(60)])))
