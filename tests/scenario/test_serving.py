"""A replay as a serving loop: step times, admission, preemption, and the figures."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import threading

import numpy as np
import pytest
from msgspec.structs import replace

from kvactors.device.host import HostDevice
from kvactors.errors import NoRoom
from kvactors.opening import open_cache
from kvactors.scenario.engine import Engine
from kvactors.scenario.replay import (
    ReplayConfig,
    ReplaySettings,
    Scheduler,
    Serving,
    ServingJob,
    cache_config,
    replay,
    serve_on_model,
)
from kvactors.scenario.report import Totals
from kvactors.scenario.trace import TraceRequest
from kvactors.testing.loop import simulate
from kvactors.testing.sim import problems_at_rest

SIZE = 4
PACE = ReplaySettings(
    prefill_tokens_per_s=100.0,
    decode_tokens_per_s=10.0,
    step_tokens=8,
    most_running=16,
    patience=1e4,
)
FEW, IMPATIENT = replace(PACE, most_running=4), replace(PACE, patience=0.5)


def request(at: float, output: int, *ids: int) -> TraceRequest:
    return TraceRequest(at, output, np.array(ids, np.uint64))


def config(*, device: int = 8, host: int = 16, **tables) -> ReplayConfig:
    return ReplayConfig.from_mapping(
        {
            "cache": {"block_size": SIZE, "recompute_last_token": False},
            "device": {"num_blocks": device},
            "layout": {"num_layers": 1, "num_kv_heads": 1, "head_dim": 4, "dtype": "uint8"},
            "host": {"slots": host},
            "flush": {"sinks": [{"kind": "memory"}]},
            **tables,
        }
    )


def serve(requests, settings=None, *, pace=PACE, seed=0, late=0.0):
    """Serve requests on a cache in virtual time. late: seconds that the process is late."""

    async def main():
        totals = Totals()
        async with open_cache(cache_config(settings or config()), inline_copies=True) as cache:
            loop = Serving(Engine(cache, totals, thorough=True), requests, pace)
            loop._began -= late
            figures = await loop.run()
            assert await problems_at_rest(cache, 60) == []
            assert (totals.errors, totals.corrupt_blocks_served) == ([], 0)
            return figures, totals, cache.statistics()

    return simulate(main, seed)


# -- step times


def test_prefill_takes_its_time_and_decoding_requests_join():
    scheduler = Scheduler(PACE)
    job, other = ServingJob(0, request(0, 3, 1, 2, 3), SIZE), ServingJob(1, request(0, 2, 9), SIZE)
    scheduler.begin(job, SIZE, covered=16)
    first = scheduler.plan(1e9)
    assert (first.seconds, first.prefill, first.decode_steps) == (0.08, ((job, 8),), 0)
    assert scheduler.carry_out(first).prefilled == [job]
    assert (job.produced, job.first_token_at) == (1, 0.08)
    scheduler.begin(other, 0, covered=8)
    second = scheduler.plan(1e9)
    assert second.seconds == pytest.approx(0.1 + 0.04)
    assert scheduler.carry_out(second).prefilled == [other]
    assert (job.produced, other.produced) == (2, 1)
    third = scheduler.plan(1e9)
    assert (third.seconds, third.decode_steps) == (0.1, 1)
    assert sorted(scheduler.carry_out(third).done) == [job, other]
    assert not scheduler.has_work
    assert scheduler.figures.as_dict()["first_token_s"]["p50"] == pytest.approx((0.08 + 0.22) / 2)


def test_decode_steps_without_a_call_between_are_one_stride():
    scheduler = Scheduler(PACE)
    job = ServingJob(0, request(0, 100, 1), SIZE)
    scheduler.begin(job, SIZE, covered=16)
    scheduler.carry_out(scheduler.plan(0.0))
    assert scheduler.plan(0.35).decode_steps == 4  # the next arrival joins after it
    stride = scheduler.plan(1e9)
    assert stride.decode_steps == 12  # 4 + 1 tokens, and the blocks hold 16
    assert scheduler.carry_out(stride).full == [job]


# -- on a cache


def test_a_hit_shortens_the_time_to_the_first_token():
    requests = [request(0, 1, 1, 2, 3), request(10, 1, 1, 2, 3, 4)]
    figures, totals, _ = serve(requests)
    assert figures.first_token_s == pytest.approx([0.12, 0.04], abs=0.01)
    assert (figures.saved_tokens, figures.computed_tokens) == (12, 16)
    assert (totals.requests, totals.device) == (2, 3)
    without = serve_on_model(requests, config(), "none", PACE)
    assert without.first_token_s == pytest.approx([0.12, 0.16])
    ideal = serve_on_model(requests, config(), "lru", PACE)
    assert ideal.first_token_s == pytest.approx([0.12, 0.04])


def test_an_arrival_that_waits_for_no_load_joins_the_next_step():
    requests = [request(0, 9, 1), *(request(i / 2, 1, 11) for i in range(4))]
    figures, _, _ = serve(requests, config(device=20))
    ideal = serve_on_model(requests, config(device=20), "lru", PACE)
    assert figures.first_token_s == pytest.approx(ideal.first_token_s, abs=0.01)


def test_a_decode_step_without_a_free_block_preempts_the_last_arrival():
    """Two requests fit with their prompts, and not with all their tokens."""
    requests = [request(0, 17, 1, 2, 3), request(0.01, 17, 11, 12, 13)]
    figures, totals, statistics = serve(requests)
    assert figures.preemptions == statistics.prefix.preempted == 1
    assert (totals.finished, totals.rejected, totals.requests) == (2, 0, 2)
    assert figures.first_token_s[0] < figures.first_token_s[1]  # the first arrival ends first
    assert figures.output_tokens == 34
    model = serve_on_model(requests, config(), "none", PACE)
    assert model.preemptions == 1


@pytest.mark.parametrize("seed", range(8))
def test_every_request_that_fits_is_served(seed):
    """Small devices, bursts, shared prefixes: no request ends for lack of device blocks."""
    rng = random.Random(seed)
    requests, at = [], 0.0
    for _ in range(25):
        at += rng.choice([0.0, 0.0, 0.3])
        first = 100 * rng.randrange(3)
        ids = range(first, first + rng.randrange(1, 9))
        requests.append(request(at, rng.randrange(1, 20), *ids))
    tables = {} if seed % 2 else {"storage": {"backend": "memory", "write_policy": "write_back"}}
    settings = config(device=10, host=rng.choice([0, 6]), **tables)
    figures, totals, statistics = serve(requests, settings, pace=FEW, seed=seed)
    jobs = [ServingJob(0, one, SIZE) for one in requests]
    fitting = [job for job in jobs if job.prompt_tokens + job.output_tokens - 1 <= 10 * SIZE]
    assert totals.finished == len(figures.first_token_s) == len(fitting)
    assert totals.rejected == 25 - len(fitting)
    assert statistics.prefix.leases == 0
    for baseline in ("none", "lru"):
        model = serve_on_model(requests, settings, baseline, FEW)
        assert len(model.first_token_s) == len(fitting)
        assert model.output_tokens == figures.output_tokens
        assert baseline == "lru" or model.saved_tokens == 0


def test_a_request_whose_failed_load_finds_no_blocks_is_admitted_again(monkeypatch):
    begin, refused = Engine.begin, []

    async def no_blocks_at_first(self, *arguments, **options):
        if not refused:
            refused.append(True)
            raise NoRoom(1, 0)
        await begin(self, *arguments, **options)

    monkeypatch.setattr(Engine, "begin", no_blocks_at_first)
    _, totals, statistics = serve([request(0, 3, 1, 2)])
    assert (totals.finished, totals.rejected, statistics.prefix.abandoned) == (1, 0, 1)


def test_a_process_that_is_too_slow_changes_no_figure():
    requests = [request(0.5 * i, 9, 10 * i, 10 * i + 1) for i in range(6)]
    quick, slow = (serve(requests, late=late)[0].as_dict() for late in (0.0, 1e3))
    assert slow["request_s"]["p99"] < 2 * quick["request_s"]["p99"]
    assert slow["seconds"] < 2 * quick["seconds"]


def test_a_request_that_waits_too_long_is_rejected():
    figures, totals, _ = serve(
        [request(0, 1000, 1, 2, 3, 4, 5), request(0.1, 1, 11, 12, 13, 14, 15)],
        config(device=1000 // SIZE + 6),
        pace=IMPATIENT,
    )
    assert totals.finished == 2
    blocked = [request(0, 12, 1, 2, 3, 4, 5), request(0.1, 1, 11, 12, 13, 14, 15)]
    figures, totals, _ = serve(blocked, pace=IMPATIENT)
    assert (totals.finished, totals.rejected, figures.rejected) == (1, 1, 1)


# -- the whole command


def write_trace(path, *requests):
    lines = [{"timestamp": ms, "output_length": out, "hash_ids": ids} for ms, out, ids in requests]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


async def test_the_report_has_the_cache_and_the_baselines(tmp_path):
    path = write_trace(tmp_path / "t.jsonl", *((i, 2, [1, 2, i]) for i in range(10, 15)))
    settings = config(replay={"mode": "timed", "speed": 100})
    report = await replay(path, settings)
    assert list(report.serving) == ["cache", "none", "lru"]
    for figures in report.serving.values():
        assert set(figures["first_token_s"]) == {"p50", "p90", "p99"}
        assert figures["requests"] == 5
    assert report.serving["none"]["saved_tokens"] == 0
    assert 0 < report.serving["cache"]["saved_tokens"] <= report.serving["lru"]["saved_tokens"]
    only = config(replay={"mode": "timed", "speed": 100, "baselines": []})
    assert list((await replay(path, only)).serving) == ["cache"]
    assert (await replay(path, config())).serving == {}


async def test_blocks_are_computed_and_verified_beside_the_loop(tmp_path, monkeypatch):
    threads = set()

    def note(name):
        original = getattr(HostDevice, name)

        def call(self, *arguments):
            assert not gc.isenabled()  # its passes stop the loop
            threads.add((name, threading.current_thread() is threading.main_thread()))
            return original(self, *arguments)

        monkeypatch.setattr(HostDevice, name, call)

    note("fill")
    note("check")
    rows = [(i, 1, [10 * (i % 3) + j for j in range(6)]) for i in range(9)]
    report = await replay(
        write_trace(tmp_path / "t.jsonl", *rows), config(replay={"mode": "timed", "speed": 100})
    )
    assert report.verified_blocks > 0
    assert gc.isenabled()
    assert threads == {("fill", False), ("check", False)}


async def test_an_interrupted_replay_leaves_no_lease():
    async with open_cache(cache_config(config())) as cache:
        requests = [request(0, 20, 1, 2), request(0, 1, *range(20, 28))]
        loop = Serving(Engine(cache, Totals()), requests, ReplaySettings())
        task = asyncio.ensure_future(loop.run())
        while not cache.statistics().prefix.leases:
            assert not task.done()
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await cache.wait_idle()
        assert cache.statistics().prefix.leases == 0
        assert cache.check() == []


def test_a_replay_without_device_blocks_is_refused():
    with pytest.raises(ValueError, match=r"device\.num_blocks"):
        config(device=0)
