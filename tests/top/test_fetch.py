"""Addresses of `kvactors top`, and servers that are slow, gone or hostile."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from kvactors.errors import ConfigError
from kvactors.top import fetch as fetch_module
from kvactors.top.fetch import Unreachable, fetch, parse_target


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9464", "http://127.0.0.1:9464/metrics"),
        ("node-3:9464", "http://node-3:9464/metrics"),
        ("[::1]:9464", "http://[::1]:9464/metrics"),
        ("http://10.0.0.5", "http://10.0.0.5:80/metrics"),
        ("https://node/", "https://node:443/metrics"),
        ("http://node:1/engine/metrics", "http://node:1/engine/metrics"),
    ],
)
def test_addresses(text, address):
    assert str(parse_target(text)) == address


def test_the_health_is_beside_the_metrics():
    assert str(parse_target("node:1/engine/metrics").beside("health")) == (
        "http://node:1/engine/health"
    )


@pytest.mark.parametrize(
    "text",
    [
        *("", "0", "70000", "node:x", "ftp://node/", "http://", "http://:80", "node 1:80"),
        *("http://user:pw@node/", "http://node/?a=1", "http://node/#a", "http://[::1", "nöde:1"),
        *("node:80\r\nX: y", "9464.0:x"),
    ],
)
def test_other_texts_are_refused_by_name(text):
    with pytest.raises(ConfigError, match="is no address: give a port"):
        parse_target(text)


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
        yield parse_target(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
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
    ("data", "body"),
    [
        (b"HTTP/1.0 200 OK\r\n\r\nall", b"all"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nall", b"al"),
        (b"HTTP/1.1 204 No Content\r\ncontent-length: 0\r\n\r\n", b""),
    ],
)
async def test_answers(data, body):
    async with serving(sending(data)) as target:
        assert (await fetch(target, 20)).body == body


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", "does not answer with HTTP"),
        (b"SSH-2.0-OpenSSH\r\n", "does not answer with HTTP"),
        (b"HTTP/1.1 200", "does not answer with HTTP"),
        (b"HTTP/1.1 many OK\r\n\r\n", "cannot be read"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", "cannot be read"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nall", "before the end of its answer"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "transfer encoding"),
    ],
)
async def test_nonsense_is_a_named_error(data, error):
    async with serving(sending(data)) as target:
        with pytest.raises(Unreachable, match=error):
            await fetch(target, 20)


async def test_an_answer_without_an_end_is_cut_at_a_size(monkeypatch):
    monkeypatch.setattr(fetch_module, "MOST_BYTES", 1 << 20)

    async def endless(writer):
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n")
        while not writer.transport.is_closing():
            writer.write(b"x" * 65536)
            await writer.drain()

    async with serving(endless) as target:
        with pytest.raises(Unreachable, match="more than 1 MiB"):
            await fetch(target, 20)


async def test_a_server_that_sends_a_byte_now_and_then_meets_the_deadline_of_the_request():
    async def drip(writer):
        while not writer.transport.is_closing():
            writer.write(b"H")
            await asyncio.sleep(0.01)

    async with serving(drip) as target:
        with pytest.raises(Unreachable, match=r"did not answer within 0\.2 s"):
            await fetch(target, 0.2)


async def test_an_address_without_a_server():
    async with serving(sending(b"")) as target:
        pass
    with pytest.raises(Unreachable, match="connection refused"):
        await fetch(target, 20)
