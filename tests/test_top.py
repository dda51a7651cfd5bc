"""`kvactors top`: addresses, metrics, the values of a frame, and the command."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
from contextlib import asynccontextmanager

import msgspec
import pytest
from rich.console import Console

from kvactors.errors import ConfigError
from kvactors.observe.http_endpoint import HttpEndpoint
from kvactors.observe.prometheus import CacheMetrics
from kvactors.testing.loop import simulate
from kvactors.top import (
    BadMetrics,
    Metrics,
    Reading,
    Readings,
    ShownHealth,
    ShownReason,
    Unreachable,
    fetch,
    frame,
    parse_url,
    quantile,
    watch,
)
from tests.cache.test_degraded import HOST, STORE, requests
from tests.support.cache import opened, prompt, serve

# -- requests to a process


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9464", "http://127.0.0.1:9464/metrics"),
        ("node-3:9464", "http://node-3:9464/metrics"),
        ("[::1]:9464", "http://[::1]:9464/metrics"),
        ("http://10.0.0.5", "http://10.0.0.5/metrics"),
        ("https://node/", "https://node/metrics"),
        ("http://node:1/engine/metrics", "http://node:1/engine/metrics"),
    ],
)
def test_addresses(text, address):
    assert parse_url(text) == address


@pytest.mark.parametrize(
    "text", [*("", "0", "70000", "node:x", "ftp://node/", "http://", "http://:80", "http://[::1")]
)
def test_other_texts_are_refused_by_name(text):
    with pytest.raises(ConfigError, match="is no address: give a port"):
        parse_url(text)


@asynccontextmanager
async def serving(answer):
    """A server that does one thing with every connection. Yields its address."""

    async def connected(reader, writer):
        try:
            await reader.readuntil(b"\r\n\r\n")
            await answer(writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield parse_url(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    finally:
        server.close()


def sending(*pieces):
    """Send some bytes and close."""

    async def answer(writer):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()

    return answer


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", "cannot be read"),
        (b"SSH-2.0-OpenSSH\r\n", "cannot be read"),
        (b"HTTP/1.1 many OK\r\n\r\n", "cannot be read"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nall", "cannot be read"),
    ],
)
async def test_nonsense_is_a_named_error(data, error):
    async with serving(sending(data)) as target:
        with pytest.raises(Unreachable, match=error):
            await asyncio.to_thread(fetch, target, 20)


async def test_an_address_without_a_server():
    async with serving(sending(b"")) as target:
        pass
    with pytest.raises(Unreachable, match="connection refused"):
        fetch(target, 20)


async def test_a_server_that_does_not_answer():
    async with serving(lambda _: asyncio.sleep(60)) as target:
        with pytest.raises(Unreachable, match=r"did not answer within 0\.2 s"):
            await asyncio.to_thread(fetch, target, 0.2)


# -- metrics


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# only a comment\n",
        "<html>404</html>",
        "other_metric 1\n",
        "kvactors:up\n",
        "kvactors:up one\n",
        'kvactors:up{tier="device} 1\n',
        "kvactors:up{tier=device} 1\n",
        '{"status": "ok"}',
        "\x00\x01",
    ],
)
def test_other_metrics_are_refused(text):
    with pytest.raises(BadMetrics):
        Metrics(text)


def test_values_that_are_not_finite_are_left_out():
    found = Metrics('kvactors:up NaN\nkvactors:tier_blocks{tier="host"} +Inf\nkvactors:a 1\n')
    assert found.value("up") is None
    assert found.value("tier_blocks") is None
    assert found.value("a") == 1


def test_quantiles_are_interpolated_as_prometheus_does():
    buckets = [(0.1, 10.0), (1.0, 30.0), (math.inf, 40.0)]
    assert quantile(buckets, 0.25) == pytest.approx(0.1)
    assert quantile(buckets, 0.5) == pytest.approx(0.55)
    assert quantile(buckets, 0.99) == 1.0  # above the last finite bound
    assert quantile([], 0.5) is None
    assert quantile([(1.0, 0.0), (math.inf, 0.0)], 0.5) is None


# -- values and frames

OK = ShownHealth("ok")

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
    return Reading(at, Metrics(text), health or OK)


def test_rates_are_those_of_the_interval():
    readings = Readings()
    readings.add(reading(10.0, requests=10, queries=100, hits=0, turns=5))
    first = readings.view("u", 60.0)
    assert (
        first["requests"]["per_s"]
        is first["tiers"][0]["hit_rate"]
        is first["actors"][0]["messages_per_s"]
        is None
    )
    assert first["latencies"][0]["p50_s"] is None
    assert first["latencies"][0]["p50_since_start_s"] == 0.5
    readings.add(reading(12.0, requests=20, queries=200, hits=50, turns=45))
    view = readings.view("u", 62.0)
    assert (view["interval_s"], view["uptime_s"], view["status"]) == (2.0, 12.0, "ok")
    assert view["requests"]["per_s"] == 5.0
    (tier,) = view["tiers"]
    assert (tier["hit_rate"], tier["hit_rate_since_start"]) == (0.5, 0.25)
    assert (tier["blocks"], tier["capacity_blocks"]) == (4, 8)
    assert view["actors"][0]["messages_per_s"] == 20.0
    assert view["latencies"][0]["p50_s"] == 0.5


@pytest.mark.parametrize("gap", [False, True])
def test_a_restart_begins_anew_and_is_counted(gap):
    after = {"start": 61.0, "requests": 99, "queries": 999, "hits": 99, "turns": 99}
    readings = Readings()
    readings.add(reading(10.0, requests=10, queries=100))
    readings.add(reading(12.0, requests=20, queries=200))
    if gap:
        assert readings.unreachable("u", 63.0, "gone")["restarts_seen"] == 0
    readings.add(reading(14.0, **after))
    view = readings.view("u", 64.0)
    assert view["restarts_seen"] == 1
    assert view["interval_s"] is view["requests"]["per_s"] is view["tiers"][0]["hit_rate"] is None
    readings.add(reading(16.0, **{**after, "requests": after["requests"] + 4}))
    view = readings.view("u", 66.0)
    assert (view["restarts_seen"], view["requests"]["per_s"]) == (1, 2.0)


def test_a_real_cache_fills_every_part():
    async def main():
        async with opened(inline=True, host=HOST, storage=STORE, device=8) as cache:
            metrics = CacheMetrics(cache)
            readings = Readings()
            await requests(cache, 1)
            readings.add(Reading(0.0, Metrics(metrics.render().decode()), OK))
            for number in (1, 2, 1, 3, 1):
                await serve(cache, f"r{number}", prompt(number, 6, tail=1))
                await cache.wait_idle()
            await asyncio.sleep(1.0)
            readings.add(Reading(1.0, Metrics(metrics.render().decode()), OK))
            return readings.view("http://x", 0.0)

    view = simulate(main, 1)
    assert [tier["name"] for tier in view["tiers"]] == ["device", "host", "storage"]
    assert sum(tier["hit_rate"] for tier in view["tiers"]) > 0
    assert view["tiers"][0]["evicted_per_s"] > 0
    assert {
        one["route"] for one in view["transfers"] if one["bytes_per_s"] and one["p99_s"] is not None
    } >= {"device_to_host", "host_to_device"}
    assert {one["operation"] for one in view["latencies"]} == {
        *("acquire", "ready", "load", "offload", "save", "request")
    }
    assert view["loop_lag"]["per_s"] > 10
    assert [sink["name"] for sink in view["sinks"]] == ["memory"]
    assert all(actor["up"] and actor["messages_per_s"] is not None for actor in view["actors"])
    assert view["breaker_open"] is False
    assert msgspec.json.decode(msgspec.json.encode(view))["requests"]["leases_open"] == 0


def shown(view, width, **options):
    console = Console(width=width, **options)
    with console.capture() as capture:
        console.print(frame(view))
    return capture.get()


@pytest.mark.parametrize("width", [1, 20, 80, 160])
def test_a_frame_fits_any_width_and_has_no_control_characters_of_the_process(width):
    evil = "bad\\x1b[31m\x1b]0;t\x07[bold]"
    text = TEXT.format(start=50.0, requests=1e300, queries=1, hits=1e-300, turns=1)
    text = text.replace('"index"', f'"{evil}"').replace('model="m"', f'model="{evil}"')
    health = ShownHealth(
        "degraded" + evil, (ShownReason(evil, evil, 1e300), ShownReason("a", "b", -1e300))
    )
    readings = Readings()
    readings.add(Reading(0.0, Metrics(text), health))
    readings.add(Reading(2.0, Metrics(text), health))
    page = shown(readings.view("http://x", 100.0), width, force_terminal=True, color_system=None)
    assert "\x1b" not in page
    assert "\x07" not in page
    assert max(map(len, page.splitlines())) <= width
    if width == 160:
        assert "[bold]" in page, "labels are no markup"


# -- the command

LIMIT = 60.0
"""Seconds that only bound a hang."""


async def watched(url, views, *, once=False):
    """Watch a process in a thread, until a view is the text "end"."""

    def show(view):
        views.append(view)
        if views[0] == "end":
            raise EOFError

    return await asyncio.to_thread(watch, url, show, 0.3, 20.0, once=once)


async def test_reasons_come_from_the_health_of_the_process(monkeypatch):
    endpoint = HttpEndpoint()
    async with opened(host=HOST) as cache, endpoint.attached("127.0.0.1", 0, cache):
        monkeypatch.setattr(type(cache.system.plane), "trouble", "the copy engine is broken")
        view = await watched(parse_url(str(endpoint.port)), [], once=True)
    (reason,) = view["reasons"]
    assert (view["status"], reason["component"]) == ("degraded", "copies")
    assert reason["since"] > 1e9


async def test_a_process_that_goes_away_and_another_one_in_its_place_are_shown():
    endpoint, views = HttpEndpoint(), []
    async with opened(host=HOST) as cache, endpoint.observing(cache):
        async with endpoint.serving("127.0.0.1", 0):
            port = endpoint.port
            task = asyncio.create_task(watched(parse_url(str(port)), views))
            while not views:
                await asyncio.sleep(0.001)
        while views[-1]["status"] != "unreachable":
            await asyncio.sleep(0.001)
    assert "connection refused" in views[-1]["error"]
    async with (
        opened(host=HOST) as cache,
        endpoint.observing(cache),
        endpoint.serving("127.0.0.1", port),
    ):
        while views[-1]["status"] != "ok":
            await asyncio.sleep(0.001)
    assert views[-1]["restarts_seen"] == 1
    views.insert(0, "end")
    with pytest.raises(EOFError):
        await task


@pytest.mark.parametrize(
    ("answer", "error", "kind"),
    [
        (b"HTTP/1.0 404 Not Found\r\n\r\n", "answers with status 404", Unreachable),
        (b"HTTP/1.0 200 OK\r\n\r\n<html>", "no metrics of a kvactors cache: ", BadMetrics),
        (b"HTTP/1.0 200 OK\r\n\r\n\xff\xfe", "no metrics of a kvactors cache", BadMetrics),
        (b"HTTP/1.0 200 OK\r\n\r\nx 1\n", "no metric begins with kvactors:", BadMetrics),
    ],
)
async def test_another_server_is_a_named_error_at_the_start(answer, error, kind):
    async with serving(sending(answer)) as target:
        with pytest.raises(kind, match=error):
            await watched(target, [])


@pytest.mark.parametrize("health", [b"OK", b"[]", b'{"status": 5}', b"\xff"])
async def test_a_health_path_of_another_kind_leaves_the_status_of_the_metrics(health):
    head = b"HTTP/1.0 200 OK\r\n\r\n"
    metrics = b'kvactors:up 1\nkvactors:health{status="degraded"} 1\n'
    metrics += b'kvactors:degraded{component="store"} 1\n'

    async def answer(writer):
        answer.calls += 1
        writer.write(head + (metrics if answer.calls % 2 else health))
        await writer.drain()

    answer.calls = 0
    async with serving(answer) as target:
        view = await watched(target, [], once=True)
    assert view["status"] == "degraded"
    assert [one["component"] for one in view["reasons"]] == ["store"]
    assert answer.calls == 4


# -- the command in its process


def run(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "kvactors", "top", *map(str, arguments)], **options
    )


def finished(process):
    """The exit status and the texts of a process."""
    out, err = process.communicate(timeout=LIMIT)
    return process.returncode, out, err


async def test_one_plain_frame_and_json_in_a_pipe():
    endpoint = HttpEndpoint()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    async with opened(host=HOST) as cache, endpoint.attached("127.0.0.1", 0, cache):
        await requests(cache, 1)
        arguments = (endpoint.port, "--once", "--interval", 0.25)
        plain = run(*arguments, **pipes, env=environment)
        lines = run(*arguments, "--json", "-", **pipes)
        status, out, err = await asyncio.to_thread(finished, plain)
        assert (status, err) == (0, "")
        assert out.isascii()
        assert "health: ok" in out
        assert "\nacquire " in out
        assert out.count("kvactors top") == 1
        assert "\x1b" not in out
        status, out, err = await asyncio.to_thread(finished, lines)
        assert (status, err) == (0, "")
        (line,) = out.splitlines()
        assert json.loads(line)["tiers"][0]["capacity_blocks"] == cache.system.device.num_blocks
