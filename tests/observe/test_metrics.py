"""The collector: names, values, restarts, threads, and no cost when it is not used."""

from __future__ import annotations

import asyncio
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvactors.observe.metrics import FAMILIES, FASTDEPLOY_FAMILIES
from kvactors.observe.prometheus import CacheMetrics
from kvactors.testing.loop import simulate
from tests.cache.test_degraded import HOST, STORE, requests
from tests.support.cache import opened, prompt, serve


def parsed(text):
    """Every sample of an exposition by name and labels."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_names_are_unique_and_every_family_can_be_parsed():
    async def main():
        async with opened(inline=True, host=HOST, storage=STORE) as cache:
            metrics = CacheMetrics(cache, fastdeploy_names=True)
            await requests(cache, 1, 2, 1)
            families = list(text_string_to_metric_families(metrics.render().decode()))
            found = [family.name for family in families]
            assert len(found) == len(set(found))
            expected = {f"kvactors:{one.name}" for one in FAMILIES} | {"kvactors:up"}
            expected |= {f"fastdeploy:{one.name}" for one in FASTDEPLOY_FAMILIES}
            assert set(found) == expected
            kinds = {f"kvactors:{one.name}": one.kind for one in FAMILIES}
            for family in families:
                assert family.documentation.endswith((".", ". ")), family.name
                wanted = kinds.get(family.name, family.type)
                assert family.type == ("gauge" if wanted == "info" else wanted)

    simulate(main, 1)


def test_values_agree_with_what_happened():
    async def main():
        async with opened(inline=True, host=HOST, storage=STORE, device=8) as cache:
            metrics = CacheMetrics(cache, fastdeploy_names=True)
            await serve(cache, "a", prompt(1, 6, tail=1))
            await asyncio.sleep(2.0)
            await serve(cache, "b", prompt(1, 6, tail=1))  # on the device
            await asyncio.sleep(3.0)
            await serve(cache, "c", prompt(2, 6, tail=1))  # evicts it
            await cache.wait_idle()
            await serve(cache, "d", prompt(1, 6, tail=1))  # from the host tier
            await cache.wait_idle()
            found = parsed(metrics.render())

            def value(name, **labels):
                return found[(f"kvactors:{name}", *sorted(labels.items()))]

            host = cache.statistics().host
            assert "less than a huge page" in host.small_pages  # a few slots of some bytes
            assert value("host_small_pages") == 1
            assert value("requests_total") == 4
            assert value("prefix_cache_queries_total") == 4 * 6 * 4
            hits = {
                tier: value("kv_block_hits_total", tier=tier)
                for tier in ("device", "host", "storage")
            }
            assert value("prefix_cache_hits_total", tier="device") == hits["device"] * 4 >= 24
            assert hits["host"] > 0
            assert sum(hits.values()) == 6 + 6  # those of b and d
            assert value("acquire_seconds_count", tier="device") == 1
            assert value("ready_seconds_count", tier="host") == 1
            gaps = 6 * 2.0 + (hits["device"] - 6) * 3.0
            assert value("kv_block_reuse_gap_seconds_sum") == pytest.approx(gaps, abs=0.5)
            lifetimes = value("kv_block_lifetime_seconds_sum")
            evicted = value("kv_block_lifetime_seconds_count")
            idle = value("kv_block_idle_before_evict_seconds_sum")
            assert evicted == value("blocks_evicted_total", tier="device")
            # blocks of `a` were used again by `b`, two seconds after they were taken
            assert lifetimes - idle == pytest.approx(2.0 * 6, abs=2.5)
            block = cache.system.layout.block_bytes
            loads = "host_to_device"
            moved = value("kv_offload_total_bytes_total", transfer_type=loads)
            assert moved == value("kv_offload_size_sum", transfer_type=loads)
            assert moved == block * (hits["host"] + hits["storage"])
            assert value("flush_pending", sink="memory") == cache.statistics().flush[0].pending
            assert value("health", status="ok") == 1
            tokens = found["fastdeploy:prefix_cache_token_num_total",]
            assert tokens == 4 * 12
            assert found["fastdeploy:hit_req_rate",] == 2 / 4

    simulate(main, 1)


def test_gauges_of_a_condition_disappear_with_it():
    async def main():
        async with opened(inline=True, host=HOST, storage=STORE) as cache:
            metrics = CacheMetrics(cache)
            for _ in range(10):
                cache.system.store.attempts.writes.failed("no")
            found = parsed(metrics.render())
            assert found["kvactors:store_breaker_open",] == 1
            assert found["kvactors:degraded", ("component", "store")] == 1
            assert found["kvactors:health", ("status", "degraded")] == 1
            cache.system.store.attempts.writes.worked()
            found = parsed(metrics.render())
            assert found["kvactors:store_breaker_open",] == 0
            assert ("kvactors:degraded", ("component", "store")) not in found
            assert found["kvactors:health", ("status", "degraded")] == 0

    simulate(main, 1)


async def test_a_scrape_in_another_thread_reads_on_the_loop_and_ends_with_the_cache():
    async with opened(host=HOST) as cache:
        metrics = CacheMetrics(cache)
        await requests(cache, 1)
        found = parsed(await asyncio.to_thread(metrics.render))
        assert found["kvactors:requests_total",] == 1
    assert parsed(metrics.render()) == {("kvactors:up",): 0}
    assert parsed(await asyncio.to_thread(metrics.render)) == {("kvactors:up",): 0}


async def test_a_loop_that_does_not_respond_is_waited_for_no_longer_than_allowed(monkeypatch):
    monkeypatch.setattr("kvactors.observe.prometheus.SCRAPE_LIMIT_S", 0.01)
    async with opened(host=HOST) as cache:
        metrics = CacheMetrics(cache)
        rendered = ThreadPoolExecutor(1).submit(metrics.render)
        assert parsed(rendered.result(60)) == {("kvactors:up",): 0}  # the loop is blocked


def test_without_metrics_no_function_of_them_is_called():
    """One branch is left for each message and for each operation on blocks."""
    called = set()

    def profile(frame, event, _arg):
        if event == "call":
            called.add(frame.f_code.co_filename.rpartition("kvactors/")[2])

    async def main(observed):
        async with opened(inline=True, host=HOST, storage=STORE) as cache:
            metrics = CacheMetrics(cache)
            if not observed:
                metrics.close()
            await requests(cache, 1)
            sys.setprofile(profile)
            try:
                await requests(cache, 2, 1)
            finally:
                sys.setprofile(None)

    parts = {"actor/instrument.py", "observe/operations.py", "histogram.py"}
    simulate(lambda: main(observed=True), 1)
    assert parts <= called
    called.clear()
    simulate(lambda: main(observed=False), 1)
    assert not parts & called


async def test_the_lag_of_the_loop_is_measured_while_the_cache_is_observed():
    async with opened(host=HOST) as cache:
        metrics = CacheMetrics(cache)
        lags = metrics._watch.histograms.loop_lag
        while not lags.count:
            await asyncio.sleep(0.01)
        time.sleep(0.3)  # noqa: ASYNC251  # blocks the loop
        seen = lags.count
        while lags.count == seen:
            await asyncio.sleep(0.001)
        found = parsed(metrics.render())
        assert found["kvactors:loop_lag_seconds_sum",] > 0.2
        assert found["kvactors:start_time_seconds",] == cache.system.opened_at
        metrics.close()
        assert metrics._lag._handle is None
        other = CacheMetrics(cache)
    handle = other._lag._handle
    while not handle.cancelled() and handle.when() > asyncio.get_running_loop().time():
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.01)
    assert other._lag._handle is handle, "no further timer after the end of the cache"
    assert abs(cache.system.opened_at - time.time()) < 3600
