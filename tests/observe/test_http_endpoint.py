"""The HTTP endpoint: its answers, and clients that are slow or hostile."""

from __future__ import annotations

import asyncio
import json
import socket
import threading

import anyio
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvactors.errors import ConfigError
from kvactors.observe import http_endpoint
from kvactors.observe.http_endpoint import HttpEndpoint, serve_metrics
from tests.cache.test_degraded import HOST, STORE, fail, requests
from tests.support.cache import opened, settings


async def call(port, request):
    """Send bytes and read the whole answer: status, headers and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    await writer.drain()
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    return int(lines[0].split(" ")[1]), dict(x.split(": ", 1) for x in lines[1:]), body


def get(path, method="GET"):
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


async def test_metrics_and_health():
    async with opened(host=HOST) as cache, serve_metrics(cache, 0) as endpoint:
        await requests(cache, 1)
        status, headers, body = await call(endpoint.port, get("/metrics"))
        assert status == 200
        assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert int(headers["Content-Length"]) == len(body)
        found = {family.name for family in text_string_to_metric_families(body.decode())}
        assert "kvactors:requests" in found
        status, headers, body = await call(endpoint.port, get("/health?full=1"))
        assert (status, json.loads(body)) == (200, {"status": "ok", "reasons": []})
        status, headers, body = await call(endpoint.port, get("/health", "HEAD"))
        assert (status, body) == (200, b"")
        assert int(headers["Content-Length"]) > 0


async def test_statistics_as_json_have_the_names_of_the_records():
    async with opened(host=HOST, storage=STORE) as cache, serve_metrics(cache, 0) as endpoint:
        await requests(cache, 1, 2)
        await cache.wait_idle()
        status, headers, body = await call(endpoint.port, get("/statistics"))
        assert (status, headers["Content-Type"]) == (200, "application/json")
        found, wanted = json.loads(body), cache.statistics().as_dict()
        assert set(found) == {*wanted, "tenants"}
        assert found["tenants"] == {}
        assert found["prefix"] == wanted["prefix"]
        assert found["requests"] == 2
    answer = await endpoint.answer(get("/statistics"))
    assert (answer.status, answer.body) == (503, b"no cache is open\n")


async def test_requests_that_are_refused():
    async with opened() as cache, serve_metrics(cache, 0) as endpoint:
        for request, status in (
            (get("/"), 404),
            (get("/metrics", "POST"), 405),
            (b"\r\n\r\n", 400),
            (b"\xff\x00 / HTTP/1.1\r\n\r\n", 405),
            (b"GET /metrics SPDY/3\r\n\r\n", 400),
        ):
            assert (await call(endpoint.port, request))[0] == status


async def test_health_is_503_when_the_cache_has_failed_and_when_it_is_closed():
    import kvactors

    with pytest.raises(kvactors.CacheFailed):  # noqa: PT012
        async with (
            kvactors.open(settings(actors={"max_restarts_per_minute": 0})) as cache,
            serve_metrics(cache, 0) as endpoint,
        ):
            await fail(cache, "index", 1)
            while cache.system.supervisor.failed is None:
                await asyncio.sleep(0.001)
            status, _, body = await call(endpoint.port, get("/health"))
            assert (status, json.loads(body)["status"]) == (503, "failed")
            assert b"kvactors:up 0.0" in (await call(endpoint.port, get("/metrics")))[2]
            assert (await call(endpoint.port, get("/statistics")))[0] == 200
    answer = await endpoint.answer(get("/health"))
    assert (answer.status, json.loads(answer.body)["status"]) == (503, "closed")
    assert b"kvactors:up 0.0" in (await endpoint.answer(get("/metrics"))).body


async def test_it_listens_on_the_loopback_by_default_and_names_an_address_that_it_cannot_bind():
    async with opened() as cache, serve_metrics(cache, 0) as endpoint:
        assert (await call(endpoint.port, get("/health")))[0] == 200
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.2", endpoint.port))
        with pytest.raises(ConfigError, match=f"cannot bind 127.0.0.1:{endpoint.port}"):
            async with serve_metrics(cache, endpoint.port):
                pass


async def test_half_open_and_slow_clients_end_after_their_time_and_block_nothing(monkeypatch):
    monkeypatch.setattr(http_endpoint, "EXCHANGE_LIMIT_S", 1.0)
    async with opened(host=HOST, storage=STORE) as cache, serve_metrics(cache, 0) as endpoint:
        silent = [await asyncio.open_connection("127.0.0.1", endpoint.port) for _ in range(5)]
        for _, writer in silent:
            writer.write(b"GET /metrics HT")  # and nothing more
        await requests(cache, 1, 2)
        assert (await call(endpoint.port, get("/health")))[0] == 200
        for reader, writer in silent:
            assert await reader.read() == b""
            writer.close()
        assert not len(endpoint._connections)


async def test_a_client_that_never_reads_its_answer_is_dropped(monkeypatch):
    monkeypatch.setattr(http_endpoint, "EXCHANGE_LIMIT_S", 0.2)

    async def large(self):
        return http_endpoint.HttpAnswer(200, b"x" * 50_000_000)

    monkeypatch.setattr(HttpEndpoint, "_metrics", large)
    async with opened(host=HOST) as cache, serve_metrics(cache, 0) as endpoint:
        with socket.create_connection(("127.0.0.1", endpoint.port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(get("/metrics"))
            while not len(endpoint._connections):
                await asyncio.sleep(0.001)
            await requests(cache, 1)
            while len(endpoint._connections):
                await asyncio.sleep(0.001)


async def test_the_oldest_silent_connection_is_closed_for_a_new_one(monkeypatch):
    monkeypatch.setattr(http_endpoint, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(http_endpoint, "EXCHANGE_LIMIT_S", 1000.0)
    async with opened() as cache, serve_metrics(cache, 0) as endpoint:
        held = []
        for _ in range(4):
            held.append(await asyncio.open_connection("127.0.0.1", endpoint.port))
            while len(endpoint._connections) < len(held):
                await asyncio.sleep(0.001)
        assert (await call(endpoint.port, get("/health")))[0] == 200
        with anyio.fail_after(20):
            assert await held[0][0].read() == b""
        for _, writer in held:
            writer.close()


@pytest.mark.parametrize("path", ["/metrics", "/statistics"])
async def test_an_answer_about_many_quotas_does_not_hold_the_loop(path, monkeypatch):
    """One salt is read in a pass of the loop, and the text of the metrics is made elsewhere."""
    from kvactors.observe import invariants, prometheus, statistics

    passes, read, threads = 0, list[int](), set[int]()

    async def others():
        nonlocal passes
        while True:
            passes += 1
            await asyncio.sleep(0)

    def read_salt(*arguments, real=statistics._of_salt):
        read.append(passes)
        return real(*arguments)

    def text(registry, real=prometheus.generate_latest):
        threads.add(threading.get_ident())
        return real(registry)

    monkeypatch.setattr(invariants, "SLICE_S", 0.0)
    monkeypatch.setattr(statistics, "_of_salt", read_salt)
    monkeypatch.setattr(prometheus, "generate_latest", text)
    salts = {f"tenant-{number}": {"device": 3} for number in range(40)}
    async with opened(quota={"salts": salts}) as cache, serve_metrics(cache, 0) as endpoint:
        task = asyncio.create_task(others())
        assert b"tenant-39" in (await call(endpoint.port, get(path)))[2]
        task.cancel()
    assert len(read) == len(set(read)) == 40
    assert threading.get_ident() not in threads


@pytest.mark.parametrize(
    ("path", "name"), [("/metrics", "_metrics"), ("/statistics", "_statistics")]
)
async def test_many_requests_render_once(path, name, monkeypatch):
    monkeypatch.setattr(http_endpoint, "FRESH_S", 3600.0)
    rendered, real = [], getattr(HttpEndpoint, name)

    def render(self):
        rendered.append(1)
        return real(self)

    monkeypatch.setattr(HttpEndpoint, name, render)
    async with opened() as cache, serve_metrics(cache, 0) as endpoint:
        together = await asyncio.gather(*(call(endpoint.port, get(path)) for _ in range(3)))
        one = await call(endpoint.port, get(path))
    assert [answer[0] for answer in (*together, one)] == [200] * 4
    assert len(rendered) == 1
