"""Rules of the Mooncake back end, on a strict stand-in for the client: the warm-up object,
registration in pieces, addresses of elected masters, and leaving a pool without a master."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from kvactors.device.arena import Arena
from kvactors.errors import ConfigError, StoreError
from kvactors.identity import StoreIdentity
from kvactors.settings.mooncake import (
    MooncakeConfig,
    PoolServer,
    endpoints,
    largest_registration,
    metadata_endpoints,
)
from kvactors.storage.messages import Outcome
from kvactors.storage.mooncake import HEADER, MooncakeBackend
from kvactors.storage.mooncake_client import NO_SPACE, PREFIX, MooncakeClient, defaults, pieces
from tests.storage.mooncake_standin import FAILED, UNREACHABLE, StandIn

SIZE = 4096
IDENTITY = StoreIdentity("m", "n", bytes(range(32)))


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn()
    monkeypatch.setattr(MooncakeClient, "_make", staticmethod(lambda: made))
    monkeypatch.setattr("kvactors.storage.mooncake_client.RETRY", 0.001)
    return made


@asynccontextmanager
async def listening() -> AsyncIterator[int]:
    """A server that accepts connections, as a master does."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def config(address: str, **changes: Any) -> MooncakeConfig:
    return MooncakeConfig(
        master_server_address=address, **{"connect_timeout_s": 30.0, "timeout_s": 1.0, **changes}
    )


@pytest.mark.parametrize("closes", [2, 3])
async def test_calls_of_close_at_the_same_time_leave_the_pool_once(standin, closes):
    async with listening() as port:
        client = MooncakeClient(config(f"127.0.0.1:{port}"))
        await client.open()
        await asyncio.gather(*(client.close() for _ in range(closes)))
        assert standin.calls.count("close") == 1
        await client.close()
        assert standin.calls.count("close") == 1


# -- the warm-up object


async def test_the_first_object_is_put_read_and_removed(standin):
    async with listening() as port:
        client = MooncakeClient(config(f"127.0.0.1:{port}"))
        await client.open()
        assert standin.calls == ["setup", "put_from", "get_into", "remove"]
        assert standin.objects == {}
        await client.close()
        assert standin.calls[-2:] == ["batch_is_exist", "close"]


@pytest.mark.parametrize("users", [{}, {"MC_TCP_SLICE_SIZE": "4096"}])
async def test_the_client_finds_its_variables_and_those_of_the_user_stay(
    standin, monkeypatch, users
):
    found: dict[str, str] = {}
    for name in defaults(1.0):
        monkeypatch.setenv(name, "")  # restored behind the test
        monkeypatch.delenv(name)
    for name, value in users.items():
        monkeypatch.setenv(name, value)
    setup = standin.setup
    monkeypatch.setattr(standin, "setup", lambda *more: found.update(os.environ) or setup(*more))
    async with listening() as port:
        client = MooncakeClient(config(f"127.0.0.1:{port}", timeout_s=2.5))
        await client.open()
        await client.close()
    assert {name: value for name, value in found.items() if name in defaults(1.0)} == {
        "MC_RPC_TIMEOUT_MS": "2500",
        "MC_RPC_CONNECT_TIMEOUT_MS": "2500",
        "MC_TCP_STATUS_TIMEOUT_SEC": "2",
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "16384",
        "MC_TCP_SLICE_SIZE": "1048576",
    } | users


async def test_a_pool_that_stores_nothing_fails_at_start_and_is_left(standin):
    standin.put_codes = [FAILED] * 1000
    async with listening() as port:
        client = MooncakeClient(config(f"127.0.0.1:{port}", connect_timeout_s=1.0))
        with pytest.raises(StoreError, match=rf"127\.0\.0\.1:{port} stores nothing.* code -800"):
            await client.open()
        assert standin.calls[-1] == "close"
        assert await client.exist(["a"]) == [-900]


async def test_a_put_that_reaches_a_node_that_has_ended_is_tried_again(standin):
    standin.put_codes = [FAILED, FAILED]
    async with listening() as port:
        client = MooncakeClient(config(f"127.0.0.1:{port}"))
        await client.open()
        assert standin.calls.count("put_from") == 3
        await client.close()


@pytest.mark.parametrize("evicted", [False, True])
async def test_a_full_pool_does_not_keep_a_node_from_starting(standin, evicted):
    standin.evicts = evicted
    standin.put_codes = [] if evicted else [NO_SPACE]
    async with listening() as port:
        client = MooncakeClient(config(f"127.0.0.1:{port}"))
        await client.open()
        assert standin.calls.count("put_from") == 1
        assert await client.exist([PREFIX]) == [0]
        await client.close()


async def test_a_pool_that_returns_other_bytes_fails_at_start(standin):
    standin.lies = True
    async with listening() as port:
        client = MooncakeClient(config(f"127.0.0.1:{port}"))
        with pytest.raises(StoreError, match="other bytes"):
            await client.open()
        assert standin.objects == {}
        assert standin.calls[-1] == "close"


# -- leaving


async def test_a_pool_whose_master_is_gone_is_not_left(standin):
    """With an election its servers answer, and closing would block the interpreter all the same."""
    async with listening() as port:
        client = MooncakeClient(config(f"etcd://127.0.0.1:{port}"))
        await client.open()
        standin.health = UNREACHABLE
        await client.close()
        assert "close" not in standin.calls
        assert await client.exist(["a"]) == [-900]


async def test_any_server_of_an_election_will_do(standin):
    async with listening() as port:
        client = MooncakeClient(config(f"etcd://127.0.0.1:1;127.0.0.1:{port}"))
        await client.open()
        await client.close()
        assert standin.calls[-1] == "close"


# -- addresses


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("10.0.0.1:50051", [PoolServer("10.0.0.1", 50051)]),
        ("[fd00::1]:50051", [PoolServer("fd00::1", 50051)]),
        ("etcd://a:2379;b:2380", [PoolServer("a", 2379), PoolServer("b", 2380)]),
        ("redis://r:6379", [PoolServer("r", 6379)]),
    ],
)
def test_addresses(address, found):
    assert endpoints(address) == found
    config(address).check()


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("master", "no port"),
        ("master:", "no port"),
        ("master:port", "no port"),
        ("master:70000", "no port"),
        ("etcd://a:1;b", "'b' has no port"),
        ("etcd://a:1;", "'' has no port"),
        ("etcd://http://a:1", "etcd://host:port"),
        ("http://a:1", "etcd://host:port or redis://host:port"),
        ("a/b:1", "no host"),
        ("fd00::1:50051", "no host"),
    ],
)
def test_an_address_of_another_form_is_named(address, complaint):
    with pytest.raises(ConfigError, match=complaint):
        config(address).check()


@pytest.mark.parametrize(
    ("server", "found"),
    [
        ("P2PHANDSHAKE", []),
        ("http://m:8080/metadata", [PoolServer("m", 8080)]),
        ("http://user:word@m/metadata", [PoolServer("m", 80)]),
        ("https://[fd00::1]/metadata", [PoolServer("fd00::1", 443)]),
        ("etcd://a:2379;b:2380", [PoolServer("a", 2379), PoolServer("b", 2380)]),
        ("a:2379", [PoolServer("a", 2379)]),
    ],
)
def test_metadata_servers(server, found):
    assert list(metadata_endpoints(server)) == found
    config("m:1", metadata_server=server).check()


@pytest.mark.parametrize(
    ("server", "complaint"),
    [
        ("redis://r:6379", "would abort the process"),
        ("zookeeper://z:1", "P2PHANDSHAKE, http://host:port/metadata or etcd://host:port, not"),
        ("etcd://http://a:1", "etcd://host:port, not"),
        ("p2phandshake", "'p2phandshake' has no port"),
        ("", "'' has no port"),
        ("http://", "'' has no port"),
        ("http://m:port/metadata", "no port"),
        ("etcd://a:1;b", "'b' has no port"),
        ("http://[::1/metadata", "metadata_server 'http://.*Invalid IPv6"),
    ],
)
def test_a_metadata_server_that_mooncake_would_abort_or_wait_for_is_named(server, complaint):
    with pytest.raises(ConfigError, match=complaint):
        config("m:1", metadata_server=server).check()


@pytest.mark.parametrize("scheme", ["etcd", "http"])
async def test_a_metadata_server_that_does_not_answer_fails_the_start(standin, scheme):
    """Mooncake's `setup` would block the process for minutes."""
    async with listening() as port:
        server = f"{scheme}://127.0.0.1:1"
        client = MooncakeClient(config(f"127.0.0.1:{port}", metadata_server=server))
        with pytest.raises(StoreError, match=rf"metadata server at {server} does not answer"):
            await client.open()
        assert standin.calls == []


async def test_a_pool_whose_master_is_slow_to_answer_is_not_left(standin, monkeypatch):
    """The client's own `health_check` was of use neither here nor for a master that ended just
    now: it returns what the last ping found."""
    monkeypatch.setattr("kvactors.storage.mooncake_client.ANSWER_LIMIT", 0.01)
    answered = threading.Event()

    def slow(keys: list[str]) -> list[int]:
        answered.wait(30.0)
        return [0] * len(keys)

    async with listening() as port:
        client = MooncakeClient(config(f"127.0.0.1:{port}"))
        await client.open()
        monkeypatch.setattr(standin, "batch_is_exist", slow)
        await client.close()
    answered.set()
    assert "close" not in standin.calls


async def test_a_client_that_raises_when_asked_is_not_closed(standin, monkeypatch):
    def broken(keys: list[str]) -> list[int]:
        raise RuntimeError("no client")

    async with listening() as port:
        client = MooncakeClient(config(f"127.0.0.1:{port}"))
        await client.open()
        monkeypatch.setattr(standin, "batch_is_exist", broken)
        await client.close()
    assert "close" not in standin.calls


async def test_a_pool_whose_metadata_server_is_gone_is_not_left(standin):
    async with listening() as port:
        async with listening() as metadata:
            server = f"etcd://127.0.0.1:{metadata}"
            client = MooncakeClient(config(f"127.0.0.1:{port}", metadata_server=server))
            await client.open()
        await client.close()
        assert "close" not in standin.calls


# -- registration


def test_pieces_hold_whole_slots():
    found = pieces(1000, 10 * 48, 48, 100)
    assert found == [(1000 + start, 96) for start in range(0, 480, 96)]
    assert pieces(1000, 480, 48, None) == pieces(1000, 480, 48, 480) == [(1000, 480)]
    assert pieces(1000, 480, 48, 479) == [(1000, 432), (1432, 48)]
    assert pieces(1000, 0, 48, 100) == []
    with pytest.raises(StoreError, match=r"MC_MAX_MR_SIZE 47 is less than a slot .* \(48 bytes\)"):
        pieces(1000, 480, 48, 47)


@pytest.mark.parametrize("slots", [1, 2, 3, 7])
async def test_an_arena_is_registered_in_pieces_and_moves_whole(standin, monkeypatch, slots):
    arena = Arena(7, SIZE, trailer=HEADER.size)
    largest = slots * arena.stride + 100
    monkeypatch.setenv("MC_MAX_MR_SIZE", str(largest))
    standin.largest = largest
    async with listening() as port:
        backend = MooncakeBackend(config(f"127.0.0.1:{port}"), IDENTITY, SIZE)
        await backend.open()
        await backend.attach(arena)
        assert sum(standin.registered.values()) == arena.nbytes
        assert len(standin.registered) == -(-7 // slots)
        keys = [bytes([number]) * 32 for number in range(7)]
        views = [arena.view(slot) for slot in range(7)]
        bodies = [np.random.default_rng(n).bytes(SIZE) for n in range(7)]
        for view, body in zip(views, bodies, strict=True):
            view[:] = body
        wrote = await backend.write(keys, views, lambda: False)
        assert list(wrote.outcomes) == [Outcome.OK] * 7
        for view in views:
            view[:] = bytes(SIZE)
        read = await backend.read(keys, views, lambda: False)
        assert list(read.outcomes) == [Outcome.OK] * 7
        assert [bytes(view) for view in views] == bodies
        await backend.close()
        assert standin.registered == {}
    arena.close()


async def test_a_refused_piece_is_an_error_and_the_others_are_taken_back(standin, monkeypatch):
    arena = Arena(4, SIZE)
    monkeypatch.setenv("MC_MAX_MR_SIZE", str(3 * arena.stride))
    standin.largest = 2 * arena.stride
    standin.registered[1] = 0
    async with listening() as port:
        backend = MooncakeBackend(config(f"127.0.0.1:{port}"), IDENTITY, SIZE)
        await backend.open()
        with pytest.raises(StoreError, match=rf"{3 * arena.stride} bytes .* code -600.*MC_MAX_MR"):
            await backend.attach(arena)
        monkeypatch.setattr(standin, "largest", 1 << 40)
        refuse = iter([0, -600])
        monkeypatch.setattr(standin, "register_buffer", register(standin, refuse))
        with pytest.raises(StoreError, match="would not register"):
            await backend.attach(arena)
        assert standin.registered == {1: 0}
        await backend.close()
    arena.close()


def register(standin: StandIn, codes: Any) -> Any:
    """`register_buffer` with given results."""

    def call(address: int, size: int) -> int:
        code: int = next(codes)
        if code == 0:
            standin.registered[address] = size
        return code

    return call


@pytest.mark.parametrize(
    ("text", "size"), [("", None), ("0", None), ("4096", 4096), ("0x1000", 4096)]
)
def test_the_largest_registration(text, size):
    assert largest_registration({"MC_MAX_MR_SIZE": text}) == size


@pytest.mark.parametrize("text", ["-1", "1g"])
def test_a_wrong_largest_registration_is_named(text):
    with pytest.raises(
        ConfigError, match="MC_MAX_MR_SIZE must be a number of bytes, 0 for no limit"
    ):
        largest_registration({"MC_MAX_MR_SIZE": text})
