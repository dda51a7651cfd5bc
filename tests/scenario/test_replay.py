"""Replay: real bytes, verified, sequential and timed."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvactors.opening import open_cache
from kvactors.scenario.engine import Engine
from kvactors.scenario.replay import ReplayConfig, cache_config, replay
from kvactors.scenario.report import MAX_ERRORS, Totals
from kvactors.settings import CacheConfig, DeviceConfig
from tests.support.traces import SHORT
from tests.support.valkey import MISSING, PROGRAM, valkey_server

SHIPPED = sorted((Path(__file__).parents[2] / "scenarios" / "replay").glob("*.toml"))


def config(*, device=8, host=16, **settings):
    return ReplayConfig.from_mapping(
        {
            "cache": {"block_size": 4, "recompute_last_token": False},
            "device": {"num_blocks": device},
            "layout": {"num_layers": 2, "num_kv_heads": 1, "head_dim": 8, "dtype": "uint8"},
            "host": {"slots": host},
            "flush": {"sinks": [{"kind": "memory"}]},
            "replay": settings,
        }
    )


def trace(path, *requests):
    lines = [{"timestamp": ms, "output_length": out, "hash_ids": ids} for ms, out, ids in requests]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


async def test_sequential_counts_every_block_looked_up(tmp_path):
    path = trace(
        tmp_path / "t.jsonl",
        (0, 1, [1, 2, 3]),
        (0, 1, [1, 2, 4]),
        (0, 1, [5, 6, 7, 8, 9]),
        (0, 1, [1, 2, 3]),
    )
    report = await replay(path, config())
    assert (report.requests, report.blocks_looked_up) == (4, 14)
    assert report.hit_rate == {
        "device": round(4 / 14, 6),
        "host": round(1 / 14, 6),
        "storage": 0.0,
        "total": round(5 / 14, 6),
    }
    assert (report.verified_blocks, report.corrupt_blocks_served, report.errors) == (1, 0, [])
    assert report.flush["delivered"] == report.flush["resident"] + report.flush["gone"] > 0
    assert report.name == "t.jsonl"


async def test_a_prompt_that_ends_in_a_block_is_cached_as_a_whole(tmp_path):
    """With `recompute_last_token` a prompt of whole blocks computes its last one again."""
    path = tmp_path / "t.jsonl"
    line = {"timestamp": 0, "output_length": 1, "hash_ids": [1, 2]}
    settings = msgspec.structs.replace(config(), cache=CacheConfig(block_size=4))
    for tokens, hits in ((8, 1), (9, 2)):
        path.write_text(f"{json.dumps(line | {'input_length': tokens})}\n" * 2)
        report = await replay(path, settings)
        assert report.hit_rate["total"] == hits / 4


def cycle(rounds):
    """Ten prompts of four blocks, asked round and round, one every 5 s."""
    for number in range(10 * rounds):
        yield 5_000 * number, 100, [100 * (number % 10) + depth for depth in range(4)]


async def test_retain_learns_in_the_time_of_the_trace(tmp_path):
    path, rates = trace(tmp_path / "t.jsonl", *cycle(100)), {}
    for policy in ("lru", "retain"):
        used = msgspec.structs.replace(
            config(device=30, host=0), device=DeviceConfig(num_blocks=30, policy=policy)
        )
        report = await replay(path, used)
        assert not report.errors
        rates[policy] = report.hit_rate["device"]
    assert rates["lru"] == 0.0
    assert rates["retain"] > 0.3


async def test_a_request_larger_than_the_device_is_rejected(tmp_path):
    path = trace(tmp_path / "t.jsonl", (0, 1, list(range(9))), (0, 1, [1, 2]))
    for mode in ("sequential", "timed"):
        report = await replay(path, config(mode=mode, speed=1000))
        assert (report.requests, report.rejected, report.blocks_looked_up) == (1, 1, 2)


async def test_speed_divides_time(tmp_path):
    path = trace(tmp_path / "t.jsonl", (5_000, 0, [1]), (15_000, 0, [2]))
    report = await replay(path, config(mode="timed", speed=100))
    assert 0.1 <= report.wall_s < 9, "10 s without it"


async def test_corrupt_bytes_are_found():
    totals = Totals()
    async with open_cache(cache_config(config())) as cache:
        engine = Engine(cache, totals)
        await engine.serve("a", np.arange(20))
        await engine.serve("b", np.arange(100, 120))
        await cache.wait_idle()
        arena = cache.system.arena
        for slot in range(arena.num_slots):
            arena.view(slot)[0] ^= 1
        await engine.serve("a", np.arange(20))
        await engine.settle()
    assert totals.host == totals.verified_blocks == totals.corrupt_blocks_served > 0


async def test_a_failed_request_is_reported_and_the_others_continue(tmp_path):
    requests = [(0, 1, [i]) for i in range(3)]
    settings = config()
    path = trace(tmp_path / "t.jsonl", *requests)
    seen = []
    report = await replay(path, settings, lambda totals: seen.append(totals.requests))
    assert seen == [1, 2, 3]
    assert report.errors == []


def test_complaints_are_bounded():
    totals = Totals()
    for i in range(10 * MAX_ERRORS):
        totals.complain(str(i))
    assert len(totals.errors) == MAX_ERRORS + 1
    assert totals.errors[-1] == "and more"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_settings_are_exact_lru(path):
    shipped = ReplayConfig.from_toml(path)
    assert (shipped.cache.block_size, shipped.cache.recompute_last_token) == (512, False)
    assert shipped.replay.mode == "sequential"
    assert shipped.host.low_watermark == shipped.device.high_watermark == 0
    assert shipped.flush.sinks


@contextmanager
def storage(kind, folder):
    """The table of a store of this kind, which runs meanwhile."""
    if kind == "valkey":
        with valkey_server() as server:
            yield {"backend": kind, "valkey": {"url": server.url}}
    elif kind == "object":
        yield {"backend": kind, "url": f"file://{folder}"}
    else:
        yield {"backend": kind, "capacity_blocks": 10_000} | (
            {"directory": str(folder)} if kind == "file" else {}
        )


VALKEY = pytest.param("valkey", marks=pytest.mark.skipif(PROGRAM is None, reason=MISSING))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["memory", "file", "object", VALKEY])
async def test_a_conversation_hits_blocks_of_each_kind_of_store(kind, tmp_path):
    with storage(kind, tmp_path) as table:
        used = ReplayConfig.from_mapping(
            {
                "cache": {"model": "m", "block_size": 512},
                "device": {"num_blocks": 10},
                "layout": {"num_layers": 1, "num_kv_heads": 1, "head_dim": 4, "dtype": "uint8"},
                "storage": {"write_policy": "write_through", "timeout_s": 60.0, **table},
                "replay": {"limit": 200, "coarse": 32},
            }
        )
        report = await replay(SHORT, used)
    assert (report.corrupt_blocks_served, report.errors, report.requests) == (0, [], 200)
    assert report.storage["reads"] == report.verified_blocks > 20
