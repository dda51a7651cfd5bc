"""Calls of the Mooncake back end and the answers of its client, on the strict stand-in: the
arguments of the set-up, and batches with a separate result for each object."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvactors.device.arena import Arena
from kvactors.errors import ConfigError, StoreError, StoreUnavailable
from kvactors.identity import StoreIdentity
from kvactors.settings.mooncake import MooncakeConfig, resolve
from kvactors.storage.messages import Outcome
from kvactors.storage.mooncake import HEADER, MooncakeBackend
from kvactors.storage.mooncake_client import NO_SPACE, NOT_FOUND, RPC_FAILED, MooncakeClient, pieces
from kvactors.testing.store_contract import Bench, key, never
from tests.storage.mooncake_standin import FAILED, StandIn
from tests.storage.test_mooncake_rules import config, listening
from tests.storage.test_mooncake_rules import standin as standin  # a fixture

SIZE = 4096
IDENTITY = StoreIdentity("m", "n", bytes(range(32)))
OK, MISS = Outcome.OK, Outcome.MISS


@asynccontextmanager
async def joined(identity: StoreIdentity = IDENTITY, **changes: Any) -> AsyncIterator[Bench]:
    """A back end that has joined the pool of the stand-in, and host slots."""
    async with listening() as port:
        backend = MooncakeBackend(config(f"127.0.0.1:{port}", **changes), identity, SIZE)
        arena = Arena(16, SIZE, trailer=HEADER.size)
        await backend.open()
        await backend.attach(arena)
        yield Bench(backend, arena)
        await backend.close()
        arena.close()


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


# -- registration


def test_2500_bytes_are_registered_in_pieces_of_1024():
    assert pieces(5000, 2500, 1, 1024) == [(5000, 1024), (6024, 1024), (7048, 452)]
    assert pieces(5000, 1000, 1, 1024) == [(5000, 1000)]


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64))
def test_pieces_cover_every_slot_once(slots, stride, extra):
    """Of any sizes of 1 to 64: no piece is larger than it may be, and none ends inside a slot."""
    largest = stride + extra
    found = pieces(4096, slots * stride, stride, largest)
    covered = [byte for start, size in found for byte in range(start, start + size)]
    assert covered == list(range(4096, 4096 + slots * stride))
    assert all(size <= largest and size % stride == 0 for _, size in found)


async def test_a_client_that_raises_at_a_registration_fails_the_start(standin, monkeypatch):
    def refuse(_address: int, _size: int) -> int:
        raise TypeError("incompatible function arguments")

    monkeypatch.setattr(standin, "register_buffer", refuse)
    with pytest.raises(StoreError, match="would not register"):
        async with joined():
            pass


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
