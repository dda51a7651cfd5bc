"""Values of `kvactors top` from two readings: rates, hit rates, restarts."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from rich.console import Console

from kvactors.metrics import CacheMetrics
from kvactors.testing.loop import simulate
from kvactors.top.exposition import read_metrics
from kvactors.top.screen import frame
from kvactors.top.view import Health, Reading, Readings, Reason
from tests.cache.test_degraded import HOST, STORE, requests
from tests.support.cache import opened, prompt, serve

TEXT = """\
kvactors:up 1
kvactors:health{{status="ok"}} 1
kvactors:start_time_seconds {start}
kvactors:cache_config_info{{model="m",store="none"}} 1
kvactors:requests_total {requests}
kvactors:kv_block_queries_total {queries}
kvactors:kv_block_hits_total{{tier="device"}} {hits}
kvactors:tier_blocks{{tier="device"}} 4
kvactors:tier_capacity_blocks{{tier="device"}} 8
kvactors:actor_turns_total{{actor="index"}} {turns}
kvactors:acquire_seconds_count {requests}
kvactors:acquire_seconds_bucket{{le="1.0"}} {requests}
kvactors:acquire_seconds_bucket{{le="+Inf"}} {requests}
"""


def reading(at, health=None, *, start=50.0, requests=0, queries=0, hits=0, turns=0):
    text = TEXT.format(start=start, requests=requests, queries=queries, hits=hits, turns=turns)
    return Reading(at, read_metrics(text), health)


def test_rates_are_those_of_the_interval():
    readings = Readings()
    readings.add(reading(10.0, requests=10, queries=100, hits=0, turns=5))
    first = readings.view("u", 60.0)
    assert first.requests.per_s is first.tiers[0].hit_rate is first.actors[0].messages_per_s is None
    assert first.latencies[0].p50_s is None
    assert first.latencies[0].p50_since_start_s == 0.5
    readings.add(reading(12.0, requests=20, queries=200, hits=50, turns=45))
    view = readings.view("u", 62.0)
    assert (view.interval_s, view.uptime_s, view.status) == (2.0, 12.0, "ok")
    assert view.requests.per_s == 5.0
    (tier,) = view.tiers
    assert (tier.hit_rate, tier.hit_rate_since_start) == (0.5, 0.25)
    assert (tier.blocks, tier.capacity_blocks) == (4, 8)
    assert view.actors[0].messages_per_s == 20.0
    assert view.latencies[0].p50_s == 0.5


@pytest.mark.parametrize(
    "after",
    [
        {"start": 61.0, "requests": 99, "queries": 999, "hits": 99, "turns": 99},  # all have grown
        {"requests": 3, "queries": 999, "hits": 99, "turns": 99},  # one has fallen
    ],
)
@pytest.mark.parametrize("gap", [False, True])
def test_a_restart_begins_anew_and_is_counted(after, gap):
    readings = Readings()
    readings.add(reading(10.0, requests=10, queries=100))
    readings.add(reading(12.0, requests=20, queries=200))
    if gap:
        readings.lost()
        assert readings.unreachable("u", 63.0, "gone").restarts_seen == 0
    readings.add(reading(14.0, **after))
    view = readings.view("u", 64.0)
    assert view.restarts_seen == 1
    assert view.interval_s is view.requests.per_s is view.tiers[0].hit_rate is None
    readings.add(reading(16.0, **{**after, "requests": after["requests"] + 4}))
    view = readings.view("u", 66.0)
    assert (view.restarts_seen, view.requests.per_s) == (1, 2.0)


def test_a_cache_that_closes_and_opens_again_is_a_restart():
    readings = Readings()
    readings.add(reading(10.0, requests=10))
    readings.add(Reading(12.0, read_metrics("kvactors:up 0.0\n"), None))
    assert readings.view("u", 62.0).status == "closed"
    readings.add(reading(14.0, requests=10_000, start=63.0))
    view = readings.view("u", 64.0)
    assert (view.restarts_seen, view.requests.per_s) == (1, None)


def test_an_actor_that_is_gone_is_no_restart():
    readings = Readings()
    readings.add(reading(10.0, requests=10, turns=5))
    text = TEXT.format(start=50.0, requests=12, queries=0, hits=0, turns=5)
    text = "".join(line for line in text.splitlines(True) if "actor_turns" not in line)
    readings.add(Reading(12.0, read_metrics(text), None))
    view = readings.view("u", 62.0)
    assert (view.restarts_seen, view.actors, view.requests.per_s) == (0, (), 1.0)


def test_a_real_cache_fills_every_part():
    async def main():
        async with opened(inline=True, host=HOST, storage=STORE, device=8) as cache:
            metrics = CacheMetrics(cache)
            readings = Readings()
            await requests(cache, 1)
            readings.add(Reading(0.0, read_metrics(metrics.render().decode()), None))
            for number in (1, 2, 1, 3, 1):
                await serve(cache, f"r{number}", prompt(number, 6, tail=1))
                await cache.wait_idle()
            await asyncio.sleep(1.0)
            readings.add(Reading(1.0, read_metrics(metrics.render().decode()), None))
            return readings.view("http://x", 0.0)

    view = simulate(main, 1)
    assert [tier.name for tier in view.tiers] == ["device", "host", "storage"]
    assert sum(tier.hit_rate for tier in view.tiers) > 0
    assert view.tiers[0].evicted_per_s > 0
    assert {one.route for one in view.transfers if one.bytes_per_s and one.p99_s is not None} >= {
        "device_to_host",
        "host_to_device",
    }
    assert {one.operation for one in view.latencies} == {
        *("acquire", "ready", "load", "offload", "save", "request")
    }
    assert view.loop_lag.per_s > 10
    assert [sink.name for sink in view.sinks] == ["memory"]
    assert all(actor.up and actor.messages_per_s is not None for actor in view.actors)
    assert view.breaker_open is False
    assert msgspec.json.decode(msgspec.json.encode(view))["requests"]["leases_open"] == 0


def shown(view, width, **options):
    console = Console(width=width, **options)
    with console.capture() as capture:
        console.print(frame(view, console))
    return capture.get()


@pytest.mark.parametrize("width", [1, 20, 80, 160])
def test_a_frame_fits_any_width_and_has_no_control_characters_of_the_process(width):
    evil = "bad\\x1b[31m\x1b]0;t\x07[bold]"
    text = TEXT.format(start=50.0, requests=1e300, queries=1, hits=1e-300, turns=1)
    text = text.replace('"index"', f'"{evil}"').replace('model="m"', f'model="{evil}"')
    health = Health("degraded" + evil, (Reason(evil, evil, 1e300), Reason("a", "b", -1e300)))
    readings = Readings()
    readings.add(Reading(0.0, read_metrics(text), health))
    readings.add(Reading(2.0, read_metrics(text), health))
    page = shown(readings.view("http://x", 100.0), width, force_terminal=True, color_system=None)
    assert "\x1b" not in page
    assert "\x07" not in page
    assert max(map(len, page.splitlines())) <= width
    if width == 160:
        assert "[bold]" in page, "labels are no markup"


def test_colours_name_the_states():
    readings = Readings()
    readings.add(reading(0.0, Health("degraded", (Reason("store", "is full", 90.0),))))
    page = shown(readings.view("http://x", 100.0), 100, force_terminal=True)
    assert "\x1b[" in page
    plain = shown(readings.view("http://x", 100.0), 100, no_color=True)
    assert "health: degraded" in plain
    assert "store: is full for 10 s" in plain
    assert "\x1b" not in plain
    gone = shown(readings.unreachable("http://x", 100.0, "connection refused"), 100)
    assert "unreachable" in gone
    assert "connection refused" in gone
