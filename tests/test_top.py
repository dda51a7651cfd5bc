"""`kvactors top`: addresses, metrics, the values of a frame, and the command."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from contextlib import asynccontextmanager

import msgspec
import pytest
from rich.console import Console

from kvactors.errors import ConfigError
from kvactors.observe.http_endpoint import serve_metrics
from kvactors.observe.prometheus import CacheMetrics
from kvactors.testing.loop import simulate
from kvactors.top import (
    Process,
    ShownHealth,
    ShownReason,
    Unreachable,
    fetch,
    frame,
    parse_metrics,
    parse_url,
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
    "text", ["", "0", "70000", "node:x", "ftp://node/", "http://", "http://:80", "http://[::1"]
)
def test_other_texts_are_refused_by_name(text):
    with pytest.raises(ConfigError, match="is no address: give a port"):
        parse_url(text)


@asynccontextmanager
async def serving(*answers):
    """A server that sends the answers in turn, None for no answer. Yields its address."""
    left = list(answers)

    async def connected(reader, writer):
        try:
            await reader.readuntil(b"\r\n\r\n")
            answer = left.pop(0)
            left.append(answer)
            if answer is None:
                await asyncio.sleep(60)
            writer.write(answer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield parse_url(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    finally:
        server.close()


@pytest.mark.parametrize(
    ("answer", "seconds", "error"),
    [
        (b"", 20, "cannot be read"),
        (b"SSH-2.0-OpenSSH\r\n", 20, "cannot be read"),
        (b"HTTP/1.1 many OK\r\n\r\n", 20, "cannot be read"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nall", 20, "cannot be read"),
        (None, 0.2, "timed out"),
    ],
)
async def test_nonsense_is_a_named_error(answer, seconds, error):
    async with serving(answer) as target:
        with pytest.raises(Unreachable, match=error):
            await asyncio.to_thread(fetch, target, seconds)
    with pytest.raises(Unreachable, match="Connection refused"):
        fetch(target, 20)


# -- metrics


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (404, b"", "answers with status 404"),
        (200, b"", "none begins with kvactors:"),
        (200, b"other_metric 1\n", "none begins with kvactors:"),
        (200, b"<html>404</html>", "no metrics of a kvactors cache"),
        (200, b"kvactors:up\n", "no metrics of a kvactors cache"),
        (200, b"kvactors:up one\n", "no metrics of a kvactors cache"),
        (200, b'kvactors:up{tier="device} 1\n', "no metrics of a kvactors cache"),
        (200, b"\xff\xfe", "no metrics of a kvactors cache"),
    ],
)
def test_other_answers_are_refused(status, body, error):
    with pytest.raises(Unreachable, match=error):
        parse_metrics("url", status, body)


def metrics_of(text):
    return parse_metrics("url", 200, text.encode())


def test_values_that_are_not_finite_are_left_out():
    text = 'kvactors:up NaN\nkvactors:tier_blocks{tier="host"} +Inf\nkvactors:a 1\n'
    assert metrics_of(text) == {"a": [({}, 1.0)]}


# -- values and frames

OK = ShownHealth("ok")

TEXT = """\
kvactors:up 1
kvactors:health{{status="ok"}} 1
kvactors:start_time_seconds {start}
kvactors:requests_total {requests}
kvactors:kv_block_queries_total {queries}
kvactors:kv_block_hits_total{{tier="device"}} {hits}
kvactors:tier_blocks{{tier="device"}} 4
kvactors:tier_capacity_blocks{{tier="device"}} 8
kvactors:actor_turns_total{{actor="index"}} {turns}
kvactors:acquire_seconds_count{{tier="none"}} {requests}
kvactors:acquire_seconds_sum{{tier="none"}} {hits}
"""


def metrics(*, start=50.0, requests=0, queries=0, hits=0, turns=0):
    values = {"start": start, "requests": requests, "queries": queries, "hits": hits}
    return metrics_of(TEXT.format(**values, turns=turns))


def test_rates_are_those_of_the_interval():
    process, start = Process("u", 1.0), time.time() - 20
    view = process.view(10.0, metrics(start=start, requests=10, queries=100, hits=5), OK)
    assert view["uptime_s"] == view["interval_s"] == pytest.approx(20, abs=5)
    assert view["requests"][0]["requests_per_s"] == pytest.approx(0.5, abs=0.2)
    assert (view["tiers"][0]["hit_rate"], view["requests"][0]["acquire"]) == (0.05, 0.5)
    later = metrics(start=start, requests=20, queries=200, hits=50, turns=40)
    view = process.view(12.0, later, OK)
    assert (view["interval_s"], view["status"]) == (2.0, "ok")
    (tier,), (requests,), (actor,) = view["tiers"], view["requests"], view["actors"]
    assert requests["requests_per_s"] == 5.0
    assert requests["acquire"] == 4.5
    assert (tier["hit_rate"], tier["used"]) == (0.45, 0.5)
    assert (tier["blocks"], tier["capacity_blocks"]) == (4, 8)
    assert actor["messages_per_s"] == 20.0


@pytest.mark.parametrize("gap", [False, True])
def test_another_process_begins_anew(gap):
    process = Process("u", 1.0)
    process.view(10.0, metrics(requests=10, queries=100), OK)
    if gap:
        process.unreachable("gone")
    start = time.time() - 100
    view = process.view(14.0, metrics(start=start, requests=99, queries=999, hits=99), OK)
    assert view["interval_s"] == pytest.approx(100, abs=5)
    assert view["requests"][0]["requests_per_s"] == pytest.approx(0.99, abs=0.1)
    assert view["tiers"][0]["hit_rate"] == pytest.approx(99 / 999)
    view = process.view(16.0, metrics(start=start, requests=103, queries=999), OK)
    assert view["requests"][0]["requests_per_s"] == 2.0


def test_an_interval_reaches_over_readings_that_failed():
    process, start = Process("u", 1.0), time.time() - 1000
    process.view(10.0, metrics(start=start, requests=10), OK)
    process.unreachable("gone")
    view = process.view(18.0, metrics(start=start, requests=410), OK)
    assert (view["interval_s"], view["requests"][0]["requests_per_s"]) == (8.0, 50.0)


def test_a_real_cache_fills_every_part():
    async def main():
        async with opened(inline=True, host=HOST, storage=STORE, device=8) as cache:
            collector, process = CacheMetrics(cache), Process("http://x", 1.0)
            await requests(cache, 1)
            process.view(0.0, metrics_of(collector.render().decode()), OK)
            for number in (1, 2, 1, 3, 1):
                await serve(cache, f"r{number}", prompt(number, 6, tail=1))
                await cache.wait_idle()
            await asyncio.sleep(1.0)
            return process.view(1.0, metrics_of(collector.render().decode()), OK)

    view = simulate(main, 1)
    assert [tier["name"] for tier in view["tiers"]] == ["device", "host", "storage"]
    assert sum(tier["hit_rate"] for tier in view["tiers"]) > 0
    assert view["tiers"][0]["evicted_per_s"] > 0
    moved = {one["name"] for one in view["transfers"] if one["bytes_per_s"]}
    assert moved >= {"device_to_host", "host_to_device"}
    assert None not in view["requests"][0].values()
    assert [sink["name"] for sink in view["sinks"]] == ["memory"]
    assert all(actor["up"] and actor["messages_per_s"] is not None for actor in view["actors"])
    assert msgspec.json.decode(msgspec.json.encode(view))["requests"][0]["open"] == 0
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(frame(view))
    assert "loop lag" in capture.get()
    assert "…" not in capture.get(), "the columns fit a terminal of the usual width"


@pytest.mark.parametrize("width", [1, 20, 80, 160])
def test_a_frame_fits_any_width_and_has_no_control_characters_of_the_process(width):
    evil = "bad\\x1b[31m\x1b]0;t\x07[bold]"
    text = TEXT.format(start=50.0, requests=1e300, queries=1, hits=1e-300, turns=1)
    found = metrics_of(text.replace('"index"', f'"{evil}"'))
    reasons = (ShownReason(evil, evil, 1e300), ShownReason("a", "b", -1e300))
    process = Process(f"http://{evil}", 1.0)
    for at in (0.0, 2.0):
        view = process.view(at, found, ShownHealth("degraded" + evil, reasons))
    console = Console(width=width, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(frame(view))
    page = capture.get()
    assert not {"\x1b", "\x07"} & set(page)
    assert max(map(len, page.splitlines())) <= width
    if width == 160:
        assert "[bold]" in page, "labels are no markup"


# -- the command


async def watched(url, views, *, once=False):
    """Watch a process in a thread, until a view is the text "end"."""

    def show(view):
        views.append(view)
        if views[0] == "end":
            raise EOFError

    return await asyncio.to_thread(watch, url, show, 0.3, 20.0, once=once)


async def test_reasons_come_from_the_health_of_the_process(monkeypatch):
    async with opened(host=HOST) as cache, serve_metrics(cache, 0) as endpoint:
        monkeypatch.setattr(type(cache.system.plane), "trouble", "the copy engine is broken")
        view = await watched(parse_url(str(endpoint.port)), [], once=True)
    (reason,) = view["reasons"]
    assert (view["status"], reason["component"]) == ("degraded", "copies")
    assert reason["since"] > 1e9


async def test_a_process_that_goes_away_and_comes_back_is_shown():
    views = []
    async with opened(host=HOST) as cache:
        async with serve_metrics(cache, 0) as endpoint:
            port = endpoint.port
            task = asyncio.create_task(watched(parse_url(str(port)), views))
            while not views:
                await asyncio.sleep(0.001)
        while "Connection refused" not in (views[-1].get("error") or ""):
            await asyncio.sleep(0.001)
        assert views[-1]["status"] == "unreachable"
        async with serve_metrics(cache, port):
            while views[-1]["status"] != "ok":
                await asyncio.sleep(0.001)
            views.insert(0, "end")
            with pytest.raises(EOFError):
                await task


async def test_another_server_is_a_named_error_at_the_start():
    async with serving(b"HTTP/1.0 200 OK\r\n\r\nx 1\n") as target:
        with pytest.raises(Unreachable, match="no metrics of a kvactors cache"):
            await watched(target, [])


@pytest.mark.parametrize("health", [b"OK", b"[]", b'{"status": 5}', b"\xff"])
async def test_a_health_path_of_another_kind_leaves_the_status_of_the_metrics(health):
    head = b"HTTP/1.0 200 OK\r\n\r\n"
    text = b'kvactors:up 1\nkvactors:health{status="degraded"} 1\n'
    async with serving(head + text, head + health) as target:
        view = await watched(target, [], once=True)
    assert (view["status"], view["reasons"]) == ("ok", [])


async def test_one_plain_frame_and_json_in_a_pipe():
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

    def run(*options, env=None):
        words = (sys.executable, "-m", "kvactors", "top", str(endpoint.port), "--once", *options)
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=env)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    async with opened(host=HOST) as cache, serve_metrics(cache, 0) as endpoint:
        await requests(cache, 1)
        out = await asyncio.to_thread(run, env=ascii_only)
        assert out.isascii()
        assert all(text in out for text in ("health: ok", "\ntier "))
        assert (out.count("kvactors top"), out.count("\x1b")) == (1, 0)
        (line,) = (await asyncio.to_thread(run, "--json", "-")).splitlines()
        assert json.loads(line)["tiers"][0]["capacity_blocks"] == cache.system.device.num_blocks
