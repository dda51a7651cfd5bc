"""A manager over a Mooncake pool, on the strict stand-in for the client: registration of the host
slots, and the objects of blocks."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from kvactors.errors import StoreError
from kvactors.storage.mooncake_client import MooncakeClient
from tests.integrations.fastdeploy.config import Request
from tests.storage.mooncake_standin import StandIn

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
