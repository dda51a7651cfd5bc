"""Mooncake's client against a real master: what comes back, and the traps."""

from __future__ import annotations

import asyncio
import json
import time

import numpy as np
import pytest

from kvactors.errors import ConfigError, StoreError
from kvactors.settings.check import in_bytes
from kvactors.settings.mooncake import MooncakeConfig, resolve
from kvactors.storage.mooncake_client import NOT_FOUND, OK, RPC_FAILED, MooncakeClient
from tests.storage.pools import free_port, master

pytestmark = pytest.mark.full

SMALL = {
    "global_segment_size": "64MB",
    "local_buffer_size": "16MB",
    "local_hostname": "127.0.0.1",
    "connect_timeout_s": 60.0,
}


def pieces(*arrays: np.ndarray) -> tuple[list[int], list[int]]:
    return [int(a.ctypes.data) for a in arrays], [a.nbytes for a in arrays]


async def put(client, *more) -> list[int]:
    return await client.call(
        lambda store: list(store.batch_put_from_multi_buffers(*more)), [RPC_FAILED]
    )


async def get(client, *more) -> list[int]:
    return await client.call(
        lambda store: list(store.batch_get_into_multi_buffers(*more)), [RPC_FAILED]
    )


@pytest.fixture(scope="module")
def running():
    with master() as one:
        yield one


async def joined(address: str, **changes) -> MooncakeClient:
    client = MooncakeClient(MooncakeConfig(master_server_address=address, **{**SMALL, **changes}))
    await client.open()
    return client


async def test_objects_of_several_pieces_come_back_and_other_clients_see_them(running):
    one, other = await joined(running.address), await joined(running.address, global_segment_size=0)
    try:
        rng = np.random.default_rng(1)
        bodies = [rng.integers(0, 256, 100_000, np.uint8) for _ in range(3)]
        heads = [rng.integers(0, 256, 96, np.uint8) for _ in range(3)]
        names = [f"piece-{i}" for i in range(3)]
        pointers, sizes = zip(
            *(pieces(b, h) for b, h in zip(bodies, heads, strict=True)), strict=True
        )
        assert await put(one, names, pointers, sizes) == [OK] * 3
        assert await other.exist([*names, "nothing"]) == [1, 1, 1, 0]
        body, head = np.zeros(100_000, np.uint8), np.zeros(96, np.uint8)
        targets = [pieces(body, head), pieces(np.zeros(100_000, np.uint8), np.zeros(96, np.uint8))]
        got = await get(
            other, [names[1], "nothing"], [p for p, _ in targets], [s for _, s in targets]
        )
        assert got == [100_096, NOT_FOUND]
        assert np.array_equal(body, bodies[1])
        assert np.array_equal(head, heads[1])
        assert await one.remove(names) == [OK] * 3, (
            "although they were read just now, which gives a lease"
        )
        assert await other.exist(names) == [0, 0, 0]
    finally:
        await asyncio.gather(one.close(), other.close())


async def test_before_open_and_after_close_nothing_is_called(running):
    client = MooncakeClient(MooncakeConfig(master_server_address=running.address, **SMALL))
    assert await client.exist(["a", "b"]) == [RPC_FAILED] * 2, (
        "the bare client would end the process"
    )
    await client.open()
    await client.close()
    assert await client.exist(["a"]) == [RPC_FAILED]
    assert await put(client, ["a"], [[0]], [[1]]) == [RPC_FAILED]
    await client.close()


async def test_closing_waits_for_calls_in_flight(running):
    client = await joined(running.address)
    body = np.zeros(4 << 20, np.uint8)
    pointers, sizes = pieces(body)
    calls = [asyncio.create_task(put(client, [f"c{i}"], [pointers], [sizes])) for i in range(6)]
    await asyncio.sleep(0)
    await client.close()
    assert all(code[0] in (OK, RPC_FAILED) for code in await asyncio.gather(*calls))


async def test_a_master_that_is_not_there_is_an_error_within_its_time():
    client = MooncakeClient(
        MooncakeConfig(
            master_server_address=f"127.0.0.1:{free_port()}", **{**SMALL, "connect_timeout_s": 0.5}
        )
    )
    began = time.monotonic()
    with pytest.raises(StoreError, match="does not answer"):
        await client.open()
    assert time.monotonic() - began < 30.0


async def test_a_stopped_master_is_a_negative_code_not_an_exception():
    with master() as one:
        client = await joined(one.address, timeout_s=1.0)
        one.kill()
        codes = await client.exist(["a", "b"])
        assert len(codes) == 2
        assert all(code < 0 for code in codes)
        await client.close()


async def test_a_client_that_raises_is_a_failed_call(running):
    client = await joined(running.address)
    try:
        assert await client.call(lambda store: 1 // 0, -1) == -1
    finally:
        await client.close()


def test_a_missing_package_names_its_extra(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(StoreError, match=r"kvactors\[mooncake\]"):
        MooncakeClient._make()


# -- settings


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


@pytest.mark.parametrize(
    ("text", "size"),
    [("1024", 1024), ("512MB", 512 << 20), ("1.5 GiB", 3 << 29), ("2t", 2 << 40), (7, 7)],
)
def test_sizes(text, size):
    assert in_bytes(text, "x") == size
