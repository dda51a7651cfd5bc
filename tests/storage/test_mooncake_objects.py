"""Objects of a Mooncake pool over a stand-in client: headers, checksums beside transfers, and memory
that is lent until a call has ended."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import numpy as np
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from kvactors.actor.uncancelled import wait_uncancelled
from kvactors.device.arena import Arena
from kvactors.identity import StoreIdentity
from kvactors.settings.mooncake import MooncakeConfig
from kvactors.storage.backend import SlotViews
from kvactors.storage.header import HEADER, MAGIC, NO_SPACE, VERSION, PoolHeaders
from kvactors.storage.messages import Outcome
from kvactors.storage.mooncake import (
    LEAST_OBJECTS,
    TRANSFER_BYTES,
    TRANSFER_OBJECTS,
    MooncakeBackend,
    transfers_of,
)
from kvactors.storage.mooncake_client import MooncakeClient
from kvactors.testing.store_contract import key, never
from tests.storage.mooncake_standin import StandIn
from tests.storage.test_header import DIGEST, SIZE, header
from tests.storage.test_mooncake_rules import joined

OK, CORRUPT = Outcome.OK, Outcome.CORRUPT


class Pool(StandIn):
    """A client that has joined the pool of the stand-in, and the pool.

    Attributes:
        refused: codes to return in place of results, by name.
        sizes: objects of each transfer.
        during: called in each transfer.
    """

    def __init__(self) -> None:
        super().__init__()
        self._open = True
        self.refused: dict[str, int] = {}
        self.sizes: list[int] = []
        self.during = lambda: None

    async def remove(self, names) -> None:
        """See `MooncakeClient.remove`. Kept, to be read again."""

    async def call(self, work, _failed):
        """See `MooncakeClient.call`. Returns even if the caller is cancelled."""

        async def run():
            await asyncio.sleep(0)
            return work(self)

        return await wait_uncancelled(asyncio.ensure_future(run()))

    def batch_put_from_multi_buffers(self, names, pointers, sizes) -> list[int]:
        codes = super().batch_put_from_multi_buffers(names, pointers, sizes)
        for i, name in enumerate(names):
            if name in self.refused:
                codes[i] = self.refused.pop(name)
                del self.objects[name]
        return self._moved(codes)

    def batch_get_into_multi_buffers(self, names, pointers, sizes) -> list[int]:
        return self._moved(super().batch_get_into_multi_buffers(names, pointers, sizes))

    def _moved(self, codes: list[int]) -> list[int]:
        self.sizes.append(len(codes))
        self.during()
        return codes


class Bench:
    def __init__(
        self, trailer: int = HEADER.size, slots: int = 8, step: int = 3, checksums: bool = True
    ) -> None:
        self.pool = Pool()
        self.pool.config = MooncakeConfig(payload_checksums=checksums)
        self.store = MooncakeBackend(self.pool, StoreIdentity("m", "n", bytes(32)), SIZE)
        self.store.headers = PoolHeaders(DIGEST, SIZE, checksums)
        self.store.most_objects = step
        self.name = self.store.name
        self.arena = Arena(slots, SIZE, trailer=trailer)
        self.store.arena = self.arena if trailer else None
        for slot in range(slots):
            self.arena.view(slot)[:] = np.random.default_rng(slot).bytes(SIZE)
        self.keys = [key(slot) for slot in range(slots)]
        self.views = [self.arena.view(slot) for slot in range(slots)]

    async def write(self, keys, views, expired) -> bytes:
        return (await self.store.write(keys, views, expired)).outcomes

    async def read(self, keys, views, expired) -> bytes:
        return (await self.store.read(keys, views, expired)).outcomes


@pytest.fixture
def bench():
    return Bench()


@pytest.mark.parametrize("trailer", [HEADER.size, 0])
async def test_objects_are_payloads_and_headers_of_the_format(trailer):
    bench = Bench(trailer)
    assert await bench.write(bench.keys, bench.views, never) == bytes([OK] * 8)
    assert bench.pool.sizes == [2, 3, 3]
    wanted = [bytes(view) for view in bench.views]
    assert [bench.pool.objects[bench.name(one)] for one in bench.keys] == [
        payload + header(one, payload) for one, payload in zip(bench.keys, wanted, strict=True)
    ]
    for view in bench.views:
        view[:] = bytes(SIZE)
    assert await bench.read(bench.keys, bench.views, never) == bytes([OK] * 8)
    assert [bytes(view) for view in bench.views] == wanted


async def test_an_object_without_space_is_tried_once_more_with_its_own_header(bench, monkeypatch):
    monkeypatch.setattr("kvactors.storage.mooncake.RETRY", 0.0)
    bench.pool.refused[bench.name(key(1))] = NO_SPACE
    assert await bench.write(bench.keys, bench.views, never) == bytes([OK] * 8)
    assert bench.pool.sizes == [2, 3, 3, 1]
    assert await bench.read(bench.keys, bench.views, never) == bytes([OK] * 8)


async def test_a_deadline_ends_a_batch(bench):
    found = await bench.write(bench.keys, bench.views, lambda: bool(bench.pool.sizes))
    assert list(found) == [OK] * 2 + [Outcome.LATE] * 6


async def test_a_cancelled_write_ends_after_its_transfer(bench):
    task = asyncio.ensure_future(bench.write(bench.keys, bench.views, never))
    bench.pool.during = task.cancel
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.pool.sizes == [2]


class Fault(NamedTuple):
    """A change of a stored object."""

    removed: bool = False
    at: int = -1  # of a byte that changes


FAULTS = st.one_of(
    st.just(Fault()),
    st.just(Fault(removed=True)),
    st.integers(0, SIZE + 95).map(lambda at: Fault(at=at)),
)


@pytest.mark.parametrize("by_slot", [False, True])
@settings(max_examples=40)
@given(st.lists(FAULTS, min_size=1, max_size=20), st.integers(1, 64), st.randoms())
async def test_every_object_of_a_batch_is_verified(by_slot, faults, step, random):
    """The model: an object is a hit if no byte of it changed, corrupt if one did, and else missing.
    Slots are in any order."""
    count = len(faults)
    bench = Bench(slots=count, step=step)
    slots = random.sample(range(count), count)
    views = [bench.views[slot] for slot in slots]
    where = SlotViews(bench.arena, slots) if by_slot else views
    stored, names = bench.pool.objects, [bench.name(one) for one in bench.keys]
    assert await bench.write(bench.keys, where, never) == bytes([OK]) * count
    payloads = [bytes(view) for view in views]
    for name, payload, one, fault in zip(names, payloads, bench.keys, faults, strict=True):
        assert stored[name] == payload + header(one, payload)
        if fault.removed:
            del stored[name]
        elif fault.at >= 0:
            data = bytearray(stored[name])
            data[fault.at] ^= 0x10
            stored[name] = bytes(data)
    for view in views:
        view[:] = bytes(SIZE)
    wanted = [
        Outcome.MISS if fault.removed else CORRUPT if fault.at >= 0 else OK for fault in faults
    ]
    assert list(await bench.read(bench.keys, where, never)) == wanted
    for view, payload, outcome in zip(views, payloads, wanted, strict=True):
        assert outcome != OK or bytes(view) == payload
    assert max(bench.pool.sizes) <= step


def test_only_slots_of_the_registered_arena_are_moved_without_views(bench):
    def has(slots, arena=bench.arena):
        return bench.store._has_slots(SlotViews(arena, slots))

    assert has([7, 0])
    for slots in ([7, 8], [-1, 0], []):
        assert not has(slots)
    assert not has([0], Arena(8, SIZE, trailer=HEADER.size))


# -- `storage.mooncake.payload_checksums`: objects with and without a checksum of their payload, and
# nodes of both kinds in one pool.


OK, MISS, CORRUPT = Outcome.OK, Outcome.MISS, Outcome.CORRUPT


def bare(name: bytes, size: int = SIZE, digest: bytes = DIGEST) -> bytes:
    """The header of an object without a checksum."""
    return HEADER.pack(MAGIC, VERSION, 1, digest, name, size, 0)


@pytest.fixture
def plain():
    return Bench(checksums=False)


async def test_objects_without_checksums_have_headers_of_the_format(plain):
    assert await plain.write(plain.keys, plain.views, never) == bytes([OK] * 8)
    assert [plain.pool.objects[plain.name(one)] for one in plain.keys] == [
        bytes(view) + bare(one) for one, view in zip(plain.keys, plain.views, strict=True)
    ]
    assert await plain.read(plain.keys, plain.views, never) == bytes([OK] * 8)
    assert plain.store.counters.without_checksum == 0


async def test_a_node_that_verifies_misses_objects_without_checksums_and_counts_them(bench):
    for one, view in zip(bench.keys[:5], bench.views, strict=False):
        bench.pool.objects[bench.name(one)] = bytes(view) + bare(one)
    await bench.write(bench.keys[5:7], bench.views[5:7], never)
    found = await bench.read(bench.keys, bench.views, never)
    assert list(found) == [MISS] * 5 + [OK] * 2 + [MISS]
    assert bench.store.counters.without_checksum == 5, "not the one that is not there"


@pytest.mark.parametrize("verifies", [True, False])
async def test_an_object_without_checksum_of_another_identity_is_corrupt(verifies):
    bench = Bench(checksums=verifies)
    payload = bytes(bench.views[0])
    wrong = {
        "digest": payload + bare(key(0), digest=bytes(32)),
        "key": payload + bare(key(1)),
        "length": payload + bare(key(0), SIZE - 1),
        "magic": payload + b"X" + bare(key(0))[1:],
        "kind": payload + HEADER.pack(MAGIC, VERSION, 2, DIGEST, key(0), SIZE, 0),
        "both": payload + HEADER.pack(MAGIC, VERSION, 1, DIGEST, key(0), SIZE, 9),
        "short": (payload + bare(key(0)))[1:],
    }
    for what, stored in wrong.items():
        bench.pool.objects[bench.name(key(0))] = stored
        found = await bench.read(bench.keys[:1], bench.views[:1], never)
        assert list(found) == [CORRUPT], what
    assert bench.store.counters.without_checksum == 0


# -- a pool with nodes of both kinds


@pytest.fixture
def pool(monkeypatch) -> dict[str, bytes]:
    """Objects of a pool that every client of the test shares."""
    objects: dict[str, bytes] = {}

    def client() -> StandIn:
        made = StandIn()
        made.objects = objects
        return made

    monkeypatch.setattr(MooncakeClient, "_make", staticmethod(client))
    return objects


async def test_nodes_of_both_kinds_in_a_pool_remove_nothing_and_agree_in_the_end(pool):
    """The node that verifies misses the other's objects, and its writes do not replace them: the
    pool reports an object that it has as written. No node removes one. Once the pool has evicted
    the object, the copy with a checksum is served to both."""
    async with joined() as verifying, joined(payload_checksums=False) as plain:
        await plain.put(1, 2)
        await verifying.put(3)
        assert await plain.get(1, 2, 3) == [OK] * 3
        before = dict(pool)
        for round_ in (1, 2):
            assert await verifying.get(1, 2, 3) == [MISS, MISS, OK]
            assert await verifying.put(1) == [OK]
            assert pool == before
            assert verifying.store.statistics().without_checksum == 2 * round_
        assert plain.store.statistics().without_checksum == 0
        pool.clear()
        await verifying.put(1)
        assert await plain.put(1) == [OK], "the object stays as it is"
        assert await verifying.get(1) == await plain.get(1) == [OK]


@pytest.mark.parametrize("protocol", ["tcp", "rdma"])
@pytest.mark.parametrize("checksums", [True, False])
async def test_what_a_pool_costs_is_logged(pool, protocol, checksums):
    with structlog.testing.capture_logs() as logs:
        async with joined(protocol=protocol, payload_checksums=checksums):
            pass
    told = [one["event"] for one in logs]
    assert ("pool over TCP" in told) == (protocol == "tcp")
    assert ("payload checksums are off" in told) == (not checksums)


@given(st.integers(0, 3000), st.integers(1, 1 << 26), st.integers(1, TRANSFER_OBJECTS))
def test_each_object_is_in_one_transfer_within_the_limits(count, block_bytes, most):
    parts = list(transfers_of(count, block_bytes, most))
    assert [i for some in parts for i in range(count)[some]] == list(range(count))
    lengths = [some.stop - some.start for some in parts]
    for length in lengths:
        assert 0 < length <= most
        assert length <= LEAST_OBJECTS or length * block_bytes <= TRANSFER_BYTES
    assert not lengths or max(lengths) - min(lengths) <= 1
