"""A manager over a Mooncake pool, on the strict stand-in for the client: registration of the host
slots, and the objects of blocks."""

from __future__ import annotations

import random
import socket
from typing import Any

import pytest

from kvactors.errors import ConfigError, StoreError
from kvactors.storage.mooncake_client import MooncakeClient
from tests.integrations.fastdeploy.config import Request
from tests.integrations.fastdeploy.test_scheduler import drive
from tests.storage.mooncake_standin import FAILED, StandIn

A = list(range(12))
PLAIN = ("key_caches", "value_caches")
SCALED = (*PLAIN, "key_cache_scales", "value_cache_scales")


class Pool:
    """A pool whose clients are stand-ins.

    Attributes:
        clients: of every manager, in the order of their starts.
        address: of a master that accepts connections.
        largest: bytes that a client registers at most.
        make: makes a client.
    """

    def __init__(self, server: socket.socket) -> None:
        self.address = f"127.0.0.1:{server.getsockname()[1]}"
        self.clients: list[StandIn] = []
        self.objects: dict[str, bytes] = {}
        self.largest = 1 << 62
        self.make: Any = StandIn

    def join(self) -> StandIn:
        made = self.make()
        made.objects, made.largest = self.objects, self.largest
        self.clients.append(made)
        return made

    def manager(self, engine: Any, *, variables: Any = None, **settings: Any) -> Any:
        environ = {
            "MOONCAKE_MASTER_SERVER_ADDR": self.address,
            "MOONCAKE_METADATA_SERVER": "P2PHANDSHAKE",
            "MOONCAKE_LOCAL_HOSTNAME": "127.0.0.1",
            "MOONCAKE_PROTOCOL": "tcp",
            **(variables or {}),
        }
        options = {"staging_slots": 2, "storage": {"timeout_s": 20.0}}
        return engine(backend="mooncake", environ=environ, options=options, **settings)


@pytest.fixture
def pool(monkeypatch):
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        made = Pool(server)
        monkeypatch.setattr(MooncakeClient, "_make", staticmethod(made.join))
        yield made


def memory_of(one: Any) -> Any:
    return one.manager._cache.lower.memory


@pytest.mark.parametrize("roles", [PLAIN, SCALED], ids=["plain", "scales"])
@pytest.mark.parametrize("cpu", [0, 3])
def test_all_host_slots_are_one_registration(engine, pool, roles, cpu):
    """FastDeploy registers a buffer to read into and one to write from, and as many for scales."""
    one = pool.manager(engine, gpu=4, cpu=cpu, roles=roles)
    (client,) = pool.clients
    memory = memory_of(one)
    assert client.registered == {memory.address: memory.nbytes}
    assert memory.num_slots == (cpu or 64) + 2
    one.manager.close()
    assert client.registered == {}


def test_slots_are_registered_in_pieces_of_the_limit(engine, pool, monkeypatch):
    pool.largest = 3 * 4096 + 100
    monkeypatch.setenv("MC_MAX_MR_SIZE", str(pool.largest))
    one = pool.manager(engine, gpu=6, cpu=5)
    (client,) = pool.clients
    start = memory_of(one).address
    assert client.registered == {start: 12288, start + 12288: 12288, start + 24576: 4096}
    one.serve("a", A)
    one.manager.reset()
    request = Request("b", A)
    assert one.match(request)[1] == 12
    assert not one.wrong(request, 12)


def test_variables_of_the_process_do_not_count_beside_those_given(engine, pool, monkeypatch):
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "rdma")
    monkeypatch.setenv("MOONCAKE_RDMA_DEVICES", "mlx5_0")
    monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", "3gb")
    monkeypatch.setenv("MOONCAKE_MASTER_SERVER_ADDR", "10.255.255.1:1")
    pool.manager(engine, gpu=4)
    (client,) = pool.clients
    _, _, segment, _, protocol, devices, address = client.joined[:7]
    assert (segment, protocol, devices, address) == (1 << 30, "tcp", "", pool.address)


def test_a_client_that_does_not_register_the_slots_fails_the_start(engine, pool):
    pool.largest = 4096
    one = pool.manager(engine, gpu=4, cpu=2, attach=False)
    with pytest.raises(StoreError, match="would not register"):
        one.manager.attach()
    assert pool.clients[0].registered == {}
    assert one.manager.can_allocate_gpu_blocks(4), "the manager is left without tiers"
    one.manager.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_block_is_one_object_of_all_ranks(engine, pool, ranks):
    one = pool.manager(engine, gpu=6, ranks=ranks, roles=SCALED)
    one.serve("a", A)
    assert len(pool.objects) == 3
    (size,) = {len(body) for body in pool.objects.values()}
    assert size >= ranks * 2 * len(SCALED) * 32, "of 2 layers, 32 bytes for each role"
    prefixes = {name.rpartition("/")[0] for name in pool.objects}
    assert len(prefixes) == 1
    other = pool.manager(engine, gpu=6, ranks=ranks, roles=SCALED)
    request = Request("b", [*A, 5])
    assert other.match(request)[1] == 12
    assert not other.wrong(request, 12)
    other.serve("c", [*A, 5, 6, 7, 8])
    assert len(pool.objects) == 4, "the others are in the pool"


@pytest.mark.parametrize(("missing", "found"), [(0, 0), (1, 4), (2, 8)])
def test_blocks_behind_a_missing_object_are_not_taken(engine, pool, missing, found):
    one = pool.manager(engine, gpu=6)
    one.serve("a", A)
    one.manager.reset()
    del pool.objects[list(pool.objects)[missing]]
    other = pool.manager(engine, gpu=6)
    request = Request("b", A)
    assert other.match(request)[:2] == (list(range(found // 4)), found)
    assert not other.wrong(request, found)
    assert len(other.free_blocks) == 6 - found // 4


class FaultyClient(StandIn):
    """A client that raises, gives error codes or too few of them, returns other bytes, or loses
    objects, as drawn for each call."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng
        self.works = True

    def _faulty(self, codes: list[int]) -> list[int]:
        fault = "" if self.works else self.rng.choice(["", "", "raise", "codes", "short", "lose"])
        if fault == "raise":
            raise RuntimeError("injected")
        if fault == "lose" and self.objects:
            del self.objects[self.rng.choice(list(self.objects))]
        if fault == "codes":
            return [FAILED if self.rng.random() < 0.5 else code for code in codes]
        return codes[:-1] if fault == "short" else codes

    def batch_put_from_multi_buffers(self, keys: Any, pointers: Any, sizes: Any) -> list[int]:
        return self._faulty(super().batch_put_from_multi_buffers(keys, pointers, sizes))

    def batch_get_into_multi_buffers(self, keys: Any, pointers: Any, sizes: Any) -> list[int]:
        if not self.works and self.objects and self.rng.random() < 0.2:
            name = self.rng.choice(list(self.objects))
            body = bytearray(self.objects[name])
            body[self.rng.randrange(len(body))] ^= 4
            self.objects[name] = bytes(body)
        return self._faulty(super().batch_get_into_multi_buffers(keys, pointers, sizes))

    def batch_is_exist(self, keys: Any) -> list[int]:
        return self._faulty(super().batch_is_exist(keys))


@pytest.mark.parametrize("seed", range(4))
def test_faults_of_a_pool_cost_no_byte_and_no_block(engine, pool, monkeypatch, seed):
    """`drive` compares every byte, and asserts that no block is lost."""
    monkeypatch.setattr("kvactors.tier_cache.storage_moves.RETRY", 0.001)
    monkeypatch.setattr("kvactors.storage.mooncake.RETRY", 0.0)
    pool.make = lambda: FaultyClient(random.Random(seed))
    one = pool.manager(engine, gpu=6, cpu=2 * (seed % 2))
    (client,) = pool.clients
    options = random.Random(seed)

    def fault(rng: Any) -> None:
        client.works = rng is None or options.random() < 0.3

    drive(one, seed, fault=fault)


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"MOONCAKE_MASTER_SERVER_ADDR": ""}, "master_server_address is missing"),
        ({"MOONCAKE_LOCAL_HOSTNAME": "localhost"}, "not 'localhost'"),
        ({"MOONCAKE_CONFIG_PATH": "/no/such/file.json"}, "MOONCAKE_CONFIG_PATH: /no/such/file"),
        (
            {
                "MOONCAKE_PROTOCOL": "rdma",
                "MOONCAKE_LOCAL_BUFFER_SIZE": str(1 << 30),
                "MC_MAX_MR_SIZE": str((1 << 30) - 1),
            },
            "local_buffer_size is 1073741824 bytes",
        ),
    ],
    ids=["master", "localhost", "file", "local buffer"],
)
def test_settings_that_cannot_be_are_named_before_anything_starts(engine, pool, variables, text):
    with pytest.raises(ConfigError, match=text):
        pool.manager(engine, gpu=4, variables=variables)
    assert pool.clients == []
