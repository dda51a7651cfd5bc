"""Rules of the Mooncake back end, on a strict stand-in for the client: the warm-up object,
registration in pieces, addresses of elected masters, and leaving a pool without a master."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvactors.device.arena import Arena, slot_stride
from kvactors.errors import ConfigError, StoreError, StoreUnavailable
from kvactors.identity import StoreIdentity
from kvactors.settings.check import in_bytes
from kvactors.settings.mooncake import (
    MooncakeConfig,
    PoolServer,
    endpoints,
    largest_registration,
    metadata_endpoints,
    resolve,
)
from kvactors.storage.header import HEADER, NO_SPACE, NOT_FOUND, RPC_FAILED
from kvactors.storage.messages import Outcome
from kvactors.storage.mooncake import MooncakeBackend
from kvactors.storage.mooncake_client import PREFIX, MooncakeClient, defaults, pieces
from kvactors.testing.store_contract import Bench, key, never
from tests.storage.mooncake_standin import FAILED, UNREACHABLE, StandIn

SIZE = 4096
IDENTITY = StoreIdentity("m", "n", bytes(range(32)))
OK, MISS = Outcome.OK, Outcome.MISS


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


@asynccontextmanager
async def opened(scheme: str = "", **changes: Any) -> AsyncIterator[MooncakeClient]:
    """A client that has joined the pool of the stand-in. The test closes it."""
    async with listening() as port:
        client = MooncakeClient(config(f"{scheme}127.0.0.1:{port}", **changes))
        await client.open()
        yield client


@asynccontextmanager
async def joined(identity: StoreIdentity = IDENTITY, **changes: Any) -> AsyncIterator[Bench]:
    """A back end that has joined the pool of the stand-in, and host slots."""
    async with listening() as port:
        client = MooncakeClient(config(f"127.0.0.1:{port}", **changes))
        backend = MooncakeBackend(client, identity, SIZE)
        arena = Arena(16, SIZE, trailer=HEADER.size)
        await backend.open()
        await backend.attach(arena)
        yield Bench(backend, arena)
        await backend.close()
        arena.close()


async def test_calls_of_close_at_the_same_time_leave_the_pool_once(standin):
    async with opened() as client:
        await asyncio.gather(*(client.close() for _ in range(3)))
        assert standin.calls.count("close") == 1
        await client.close()
        assert standin.calls.count("close") == 1


# -- the set-up


@pytest.mark.parametrize(("rank", "device"), [(0, "mlx5_0"), (1, "mlx5_1"), (5, "mlx5_1")])
async def test_a_rank_joins_with_its_device_and_the_pools_settings(
    standin, monkeypatch, rank, device
):
    given, setup = [], standin.setup
    monkeypatch.setattr(standin, "setup", lambda *more: given.append(more) or setup(*more))
    settings = {
        "local_hostname": "10.0.0.7",
        "global_segment_size": "4 MiB",
        "local_buffer_size": "2 MiB",
        "protocol": "rdma",
        "rdma_devices": "mlx5_0, mlx5_1",
    }
    async with listening() as port:
        master = f"127.0.0.1:{port}"
        client = MooncakeClient(config(master, **settings), rank)
        await client.open()
        await client.close()
    pool = ("10.0.0.7", "P2PHANDSHAKE", 4 << 20, 2 << 20, "rdma", device, master)
    assert given == [pool]


async def test_a_set_up_that_the_client_refuses_is_an_error_with_its_code(standin, monkeypatch):
    monkeypatch.setattr(standin, "setup", lambda *_: FAILED)
    async with listening() as port:
        client = MooncakeClient(config(f"127.0.0.1:{port}"))
        with pytest.raises(StoreError, match=rf"127\.0\.0\.1:{port} refused to be joined.* -800"):
            await client.open()
        assert await client.exist(["a"]) == [RPC_FAILED]
        await client.close()
    assert standin.calls == []


def test_a_missing_package_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(StoreError, match=r"kvactors\[mooncake\]"):
        MooncakeClient._make()


# -- the warm-up object


async def test_the_first_object_is_put_read_and_removed(standin):
    async with opened() as client:
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
    async with opened(timeout_s=2.5) as client:
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
    async with opened() as client:
        assert standin.calls.count("put_from") == 3
        await client.close()


@pytest.mark.parametrize("evicted", [False, True])
async def test_a_full_pool_does_not_keep_a_node_from_starting(standin, evicted):
    standin.evicts = evicted
    standin.put_codes = [] if evicted else [NO_SPACE]
    async with opened() as client:
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
    async with opened("etcd://") as client:
        standin.health = UNREACHABLE
        await client.close()
        assert "close" not in standin.calls
        assert await client.exist(["a"]) == [-900]


async def test_any_server_of_an_election_will_do(standin):
    async with opened("etcd://127.0.0.1:1;") as client:
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


@pytest.mark.parametrize("how", ["slow", "raises"])
async def test_a_pool_whose_master_does_not_answer_is_not_left(standin, monkeypatch, how):
    """The client's own `health_check` was of use neither here nor for a master that ended just
    now: it returns what the last ping found."""
    monkeypatch.setattr("kvactors.storage.mooncake_client.ANSWER_LIMIT", 0.01)
    answered = threading.Event()

    def ask(keys: list[str]) -> list[int]:
        if how == "raises":
            raise RuntimeError("no client")
        answered.wait(30.0)
        return [0] * len(keys)

    async with opened() as client:
        monkeypatch.setattr(standin, "batch_is_exist", ask)
        await client.close()
    answered.set()
    assert "close" not in standin.calls


async def test_a_pool_whose_metadata_server_is_gone_is_not_left(standin):
    async with listening() as port:
        async with listening() as metadata:
            server = f"etcd://127.0.0.1:{metadata}"
            client = MooncakeClient(config(f"127.0.0.1:{port}", metadata_server=server))
            await client.open()
        await client.close()
        assert "close" not in standin.calls


# -- settings


def resolved(environ: dict[str, str], **changes: Any) -> MooncakeConfig:
    return resolve(MooncakeConfig(master_server_address="m:1", **changes), environ)


@pytest.mark.parametrize(
    ("limit", "changes"),
    [
        ("0", {"local_buffer_size": "1 GiB"}),
        ("2097152", {"local_buffer_size": "2 MiB"}),
        ("1024", {"local_buffer_size": "2 MiB", "protocol": "tcp"}),
    ],
)
def test_a_local_buffer_that_fits_in_a_registration(limit, changes):
    found = resolved({"MC_MAX_MR_SIZE": limit}, **{"protocol": "rdma", **changes})
    assert found.local_buffer_size == changes["local_buffer_size"]


def test_a_local_buffer_larger_than_a_registration_is_named():
    complaint = r"local_buffer_size is 2097152 bytes, and MC_MAX_MR_SIZE .* 2097151"
    with pytest.raises(ConfigError, match=complaint):
        resolved({"MC_MAX_MR_SIZE": "2097151"}, local_buffer_size="2 MiB", protocol="rdma")


def test_toml_comes_before_the_file_and_the_file_before_variables(tmp_path):
    path = tmp_path / "mooncake.json"
    path.write_text(
        json.dumps(
            {
                "master_server_addr": "file:1",
                "protocol": "rdma",
                "device_name": "mlx5_0,mlx5_1",
                "mode": "x",
            }
        )
    )
    environ = {
        "MOONCAKE_CONFIG_PATH": str(path),
        "MOONCAKE_MASTER_SERVER_ADDR": "variable:1",
        "MOONCAKE_METADATA_SERVER": "http://variable/metadata",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": "4gb",
    }
    found = resolve(MooncakeConfig(protocol="tcp", timeout_s=2.0), environ)
    assert (found.master_server_address, found.metadata_server) == (
        "file:1",
        "http://variable/metadata",
    )
    assert in_bytes(found.global_segment_size, "") == 4 << 30
    assert [found.devices_of(rank) for rank in range(3)] == ["mlx5_0", "mlx5_1", "mlx5_0"]
    assert found.timeout_s == 2.0
    assert (
        resolve(MooncakeConfig(master_server_address="toml:1"), environ).master_server_address
        == "toml:1"
    )


@pytest.mark.parametrize(
    ("changes", "environ", "complaint"),
    [
        ({}, {}, "master_server_address is missing"),
        ({"master_server_address": "m:1", "local_hostname": "localhost"}, {}, "not 'localhost'"),
        ({"master_server_address": "m:1", "protocol": "udp"}, {}, "there are tcp, rdma"),
        ({"master_server_address": "m:1", "timeout_s": 0.0}, {}, "timeout_s must be above 0"),
        (
            {"master_server_address": "m:1", "global_segment_size": "much"},
            {},
            "global_segment_size must be a size",
        ),
        (
            {"master_server_address": "m:1"},
            {"MOONCAKE_LOCAL_BUFFER_SIZE": "-3"},
            "local_buffer_size must be a size",
        ),
        ({}, {"MOONCAKE_CONFIG_PATH": "/no/such/file"}, "MOONCAKE_CONFIG_PATH: /no/such/file"),
        ({}, {"MOONCAKE_CONFIG_PATH": "/dev/zero"}, "/dev/zero has more than 16 MiB"),
    ],
)
def test_settings_that_cannot_be_are_named(changes, environ, complaint):
    with pytest.raises(ConfigError, match=complaint):
        resolve(MooncakeConfig(**changes), environ)


# -- registration


def test_2500_bytes_are_registered_in_pieces_of_1024():
    assert pieces(5000, 2500, 1, 1024) == [(5000, 1024), (6024, 1024), (7048, 452)]
    assert pieces(5000, 1000, 1, 1024) == [(5000, 1000)]


async def test_a_client_that_raises_at_a_registration_fails_the_start(standin, monkeypatch):
    def refuse(_address: int, _size: int) -> int:
        raise TypeError("incompatible function arguments")

    monkeypatch.setattr(standin, "register_buffer", refuse)
    with pytest.raises(StoreError, match="would not register"):
        async with joined():
            pass


def test_pieces_hold_whole_slots():
    found = pieces(1000, 10 * 48, 48, 100)
    assert found == [(1000 + start, 96) for start in range(0, 480, 96)]
    assert pieces(1000, 480, 48, None) == pieces(1000, 480, 48, 480) == [(1000, 480)]
    assert pieces(1000, 480, 48, 479) == [(1000, 432), (1432, 48)]
    assert pieces(1000, 0, 48, 100) == []
    with pytest.raises(StoreError, match=r"MC_MAX_MR_SIZE 47 is less than a slot .* \(48 bytes\)"):
        pieces(1000, 480, 48, 47)


STRIDE = slot_stride(SIZE, HEADER.size)


@pytest.mark.parametrize("slots", [1, 3, 7, 16])
async def test_an_arena_is_registered_in_pieces_and_moves_whole(standin, monkeypatch, slots):
    standin.largest = slots * STRIDE + 100
    monkeypatch.setenv("MC_MAX_MR_SIZE", str(standin.largest))
    async with joined() as bench:
        assert sum(standin.registered.values()) == bench.arena.nbytes
        assert len(standin.registered) == -(-16 // slots)
        assert await bench.put(*range(16)) == [OK] * 16
        assert await bench.get(*range(16)) == [OK] * 16
    assert standin.registered == {}


async def test_a_refused_piece_is_an_error_and_the_others_are_taken_back(standin, monkeypatch):
    monkeypatch.setenv("MC_MAX_MR_SIZE", str(8 * STRIDE))
    register, sizes = standin.register_buffer, list[int]()

    def second_refused(address: int, size: int) -> int:
        sizes.append(size)
        return register(address, size) if len(sizes) == 1 else -600

    monkeypatch.setattr(standin, "register_buffer", second_refused)
    with pytest.raises(StoreError, match=rf"{8 * STRIDE} bytes .* code -600.*MC_MAX_MR"):
        async with joined():
            pass
    assert (sizes, standin.registered) == ([8 * STRIDE] * 2, {})


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


# -- batches


async def test_each_object_of_a_batch_has_its_own_result(standin, monkeypatch):
    """A failure costs one object and not its neighbours."""
    monkeypatch.setattr("kvactors.storage.mooncake.RETRY", 0.0)
    put = standin.batch_put_from_multi_buffers
    codes = {2: NO_SPACE, 4: FAILED}

    def some(keys: Any, pointers: Any, sizes: Any) -> list[int]:
        found = put(keys, pointers, sizes)
        for number, code in codes.items():
            name = bench.store.name(key(number))
            if name in keys:
                standin.objects.pop(name, None)
                found[keys.index(name)] = code
        return found

    async with joined() as bench:
        monkeypatch.setattr(standin, "batch_put_from_multi_buffers", some)
        wrote = await bench.put(*range(6))
        assert wrote == [OK, OK, Outcome.NO_SPACE, OK, Outcome.UNAVAILABLE, OK]
        assert await bench.get(*range(6)) == [OK, OK, MISS, OK, MISS, OK]
        get = standin.batch_get_into_multi_buffers
        assert get(["absent"], [[0]], [[0]]) == [NOT_FOUND]


async def test_empty_batches_reach_no_pool(standin):
    async with joined() as bench:
        before = list(standin.calls)
        assert list((await bench.store.read([], [], never)).outcomes) == []
        assert list((await bench.store.write([], [], never)).outcomes) == []
        assert await bench.found() == 0
        await bench.store.remove([])
        assert standin.calls == before


@pytest.mark.parametrize(
    ("stored", "run"), [((0, 1, 2), 3), ((0, 1, 3), 2), ((0, 2, 3), 1), ((1, 2, 3), 0), ((), 0)]
)
async def test_a_query_counts_the_leading_run(standin, stored, run):
    async with joined() as bench:
        await bench.put(*stored)
        keys = [key(number) for number in range(4)]
        assert await bench.store.ask(keys, never) == run
        assert await bench.store.exists_many(keys, never) == [n in stored for n in range(4)]


async def test_a_client_that_raises_costs_misses(standin, monkeypatch):
    def fail(*_: Any) -> Any:
        raise RuntimeError("the connection is gone")

    async with joined() as bench:
        await bench.put(1)
        for name in ("batch_is_exist", "batch_get_into_multi_buffers"):
            monkeypatch.setattr(standin, name, fail)
        for ask in (bench.store.ask, bench.store.exists_many):
            with pytest.raises(StoreUnavailable, match="master does not answer"):
                await ask([key(1)], never)
        assert await bench.get(1) == [Outcome.UNAVAILABLE]
        assert bench.store.statistics().unavailable == 2


async def test_an_object_in_use_is_removed_with_the_first_call(standin, monkeypatch):
    """The removal is forced, so no lease of a reader makes it wait."""
    forced, remove = [], standin.remove
    monkeypatch.setattr(standin, "remove", lambda *more: forced.append(more[1]) or remove(*more))
    async with joined() as bench:
        await bench.put(1, 2)
        await bench.get(1)
        forced.clear()
        await bench.store.remove([key(1), key(7)])
        assert forced == [True, True]
        assert await bench.get(1, 2) == [MISS, OK]


@pytest.mark.parametrize("change", [{"rank": 1, "ranks": 2}, {"namespace": "RL-STEP02"}])
async def test_ranks_and_versions_have_their_own_objects(monkeypatch, change):
    """One pool, two clients: what one has written, the other neither finds nor removes."""
    pool: dict[str, bytes] = {}

    def client() -> StandIn:
        made = StandIn()
        made.objects = pool
        return made

    monkeypatch.setattr(MooncakeClient, "_make", staticmethod(client))
    first = IDENTITY._replace(ranks=change.get("ranks", 1))
    async with joined(first) as one, joined(first._replace(**change)) as other:
        await one.put(1)
        assert await other.found(1) == 0
        await other.put(1, 2)
        await other.store.remove([key(1)])
        assert await one.get(1, 2) == [OK, MISS]
        assert len(pool) == 2


@pytest.mark.parametrize(("removed", "complaint"), [(3, ""), (-5, "did not remove")])
async def test_a_clear_is_done_or_an_error(standin, removed, complaint):
    patterns = []
    standin.remove_by_regex = lambda pattern, _forced: patterns.append(pattern) or removed
    async with joined() as bench:
        if complaint:
            with pytest.raises(StoreError, match=complaint):
                await bench.store.clear()
        else:
            await bench.store.clear()
        assert bench.store.generation == (0 if complaint else 1)
        assert patterns == [f"^{IDENTITY.pool_prefix}"]
