"""A Mooncake pool as a store, with a real master: two nodes that share it, and what can go
wrong."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from pathlib import Path
from typing import Self

import numpy as np
import pytest

import kvactors
from kvactors.device.arena import Arena
from kvactors.errors import StoreError, StoreUnavailable
from kvactors.identity import StoreIdentity
from kvactors.settings import Config
from kvactors.settings.mooncake import MooncakeConfig
from kvactors.storage.header import OK, RPC_FAILED
from kvactors.storage.messages import Outcome
from kvactors.storage.mooncake import MooncakeBackend
from kvactors.storage.mooncake_client import MooncakeClient
from kvactors.testing.store_contract import Bench, StoreContract, key, never
from tests.storage.pools import free_port, master
from tests.support import cache as support

pytestmark = pytest.mark.full

SIZE = 40_000
SMALL = {
    "global_segment_size": "64MB",
    "local_buffer_size": "16MB",
    "local_hostname": "127.0.0.1",
    "connect_timeout_s": 60.0,
}
IDENTITY = StoreIdentity("m", "n", bytes(range(32)))


@pytest.fixture(scope="module")
def running():
    with master() as one:
        yield one


class Node(Bench):
    """A back end that joins the pool, and its arena."""

    def __init__(self, address, slots=200, identity=IDENTITY, **changes) -> None:
        settings = {**SMALL, "timeout_s": 1.0, **changes}
        client = MooncakeClient(MooncakeConfig(master_server_address=address, **settings))
        super().__init__(MooncakeBackend(client, identity, SIZE), Arena(slots, SIZE))

    async def __aenter__(self) -> Self:
        await self.store.open()
        await self.store.attach(self.arena)
        return self

    async def __aexit__(self, *error) -> None:
        await self.store.close()
        self.arena.close()


async def test_blocks_written_by_one_node_are_loaded_by_the_other(running):
    async with Node(running.address) as one, Node(running.address, global_segment_size=0) as other:
        numbers = range(100)
        assert await one.put(*numbers) == [Outcome.OK] * 100
        assert await other.store.ask([key(n) for n in numbers], never) == 100
        assert await other.get(3, 999, 70) == [Outcome.OK, Outcome.MISS, Outcome.OK]
        assert await other.store.ask([key(5), key(999), key(6)], never) == 1
        await one.store.remove([key(5)])
        assert await other.get(5) == [Outcome.MISS]
        await one.store.clear()
        assert await other.store.ask([key(3)], never) == 0
        assert one.store.keys() == []


async def test_a_bad_object_is_corrupt_and_goes(running):
    async with Node(running.address) as one:
        await one.put(1, 2)
        name = one.store.name(key(1))
        good = await one.store.client.call(lambda store: bytes(store.get(name)), b"")
        assert len(good) == SIZE + 96
        for bad in (
            good[:-97] + bytes([good[-97] ^ 1]) + good[-96:],
            good[: SIZE // 2],
            good + b"x",
        ):
            assert await one.store.client.remove([name]) == [0]
            assert (
                await one.store.client.call(lambda store, bad=bad: int(store.put(name, bad)), -1)
                == 0
            )
            outcome = (await one.get(1))[0]
            assert outcome in (Outcome.CORRUPT, Outcome.UNAVAILABLE)
            if outcome == Outcome.CORRUPT:
                assert await one.get(1) == [Outcome.MISS]
                await one.put(1)
            else:
                await one.store.remove([key(1)])
                await one.put(1)
        assert await one.get(2) == [Outcome.OK]
        await one.store.clear()


async def test_a_full_pool_is_no_space_and_no_exception(running):
    async with Node(running.address, slots=600, global_segment_size="16MB") as one:
        for start in range(0, 1200, 300):
            outcomes = await one.put(*range(start, start + 300))
            assert set(outcomes) <= {Outcome.OK, Outcome.NO_SPACE}
        await one.store.clear()


async def test_a_failed_master_is_unavailable_and_a_restarted_one_serves_again():
    with master() as one:
        async with Node(one.address) as node:
            assert await node.put(1) == [Outcome.OK]
            one.kill()
            assert await node.get(1) == [Outcome.UNAVAILABLE]
            with pytest.raises(StoreUnavailable):
                await node.store.ask([key(1)], never)
            one.start()
            for _ in range(100):
                if await node.put(2) == [Outcome.OK]:
                    break
                await asyncio.sleep(0.2)
            assert await node.get(2) == [Outcome.OK]
            assert await node.get(1) == [Outcome.MISS], "its memory went with the master's index"


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().split()[2] == "T"


async def test_a_master_that_hangs_costs_its_time_out_and_the_loop_nothing():
    with master() as one:
        async with Node(one.address) as node:
            await node.put(1)
            assert one.process is not None
            one.process.send_signal(signal.SIGSTOP)
            while not stopped(one.process.pid):
                await asyncio.sleep(0.01)
            loop, turns = asyncio.get_running_loop(), 0
            asked = asyncio.create_task(node.get(1))
            began = loop.time()
            while not asked.done():
                await asyncio.sleep(0.005)
                turns += 1
            assert await asked == [Outcome.UNAVAILABLE]
            assert loop.time() - began < 20.0
            assert turns > 5
            one.process.send_signal(signal.SIGCONT)
            await asyncio.sleep(0.5)


# -- the client, and the contract


def client_at(address: str, **changes) -> MooncakeClient:
    return MooncakeClient(MooncakeConfig(master_server_address=address, **{**SMALL, **changes}))


async def test_before_open_and_after_close_nothing_is_called(running):
    client = client_at(running.address)
    assert await client.exist(["a", "b"]) == [RPC_FAILED] * 2, (
        "the bare client would end the process"
    )
    await client.open()
    await client.close()
    assert await client.exist(["a"]) == [RPC_FAILED]
    await client.close()


async def test_closing_waits_for_calls_in_flight(running):
    client = client_at(running.address)
    await client.open()
    body = np.zeros(4 << 20, np.uint8)
    where, sizes = [[int(body.ctypes.data)]], [[body.nbytes]]

    def put(name: str):
        return client.call(
            lambda store: list(store.batch_put_from_multi_buffers([name], where, sizes)),
            [RPC_FAILED],
        )

    calls = [asyncio.create_task(put(f"c{i}")) for i in range(6)]
    await asyncio.sleep(0)
    await client.close()
    assert all(code[0] in (OK, RPC_FAILED) for code in await asyncio.gather(*calls))


async def test_a_master_that_is_not_there_is_an_error_within_its_time():
    client = client_at(f"127.0.0.1:{free_port()}", connect_timeout_s=0.5)
    began = time.monotonic()
    with pytest.raises(StoreError, match="does not answer"):
        await client.open()
    assert time.monotonic() - began < 30.0


async def test_a_client_that_raises_is_a_failed_call(running):
    client = client_at(running.address)
    await client.open()
    try:
        assert await client.call(lambda store: 1 // 0, -1) == -1
    finally:
        await client.close()


class TestMooncake(StoreContract):
    evicts = False
    numbers = itertools.count()

    @pytest.fixture(autouse=True)
    def _at(self, running):
        self.address = running.address

    async def make(self, folder, capacity):
        client = MooncakeClient(MooncakeConfig(master_server_address=self.address, **SMALL))
        fingerprint = next(self.numbers).to_bytes(32, "big")
        return MooncakeBackend(client, StoreIdentity("m", "n", fingerprint), self.block_bytes)


# -- a whole cache on each of two nodes


def config(address: str) -> Config:
    return Config.from_mapping(
        {
            "cache": {"model": "m", "block_size": 16},
            "device": {"num_blocks": 32},
            "host": {"slots": 16},
            "layout": {"num_layers": 2, "num_kv_heads": 2, "head_dim": 32},
            "storage": {
                "backend": "mooncake",
                "write_policy": "write_through",
                "mooncake": {"master_server_address": address, **SMALL},
            },
            "flush": {"sinks": [{"kind": "memory", "tiers": ["device", "host", "storage"]}]},
        }
    )


async def request(cache, seed: int) -> int:
    return (await support.serve(cache, f"r{seed}", [seed] * 129)).hits.storage


async def test_two_caches_share_a_pool(running):
    async with (
        kvactors.open(config(running.address)) as one,
        kvactors.open(config(running.address)) as other,
    ):
        for seed in range(6):
            assert await request(one, seed) == 0
        await one.wait_idle()
        assert [await request(other, seed) for seed in range(6)] == [8] * 6
        await other.wait_flushed()
        for cache in (one, other):
            assert cache.count_divergent_blocks() == 0
            assert cache.check() == []
