"""Objects of a Mooncake pool over a stand-in client: headers, checksums beside transfers, and memory
that is lent until a call has ended."""

from __future__ import annotations

import asyncio
import ctypes
from typing import NamedTuple

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvactors.device.arena import Arena
from kvactors.storage.messages import Outcome
from kvactors.storage.mooncake import HEADER, MAGIC, VERSION, MooncakeObjects, PoolHeaders
from kvactors.storage.mooncake_client import NO_SPACE, NOT_FOUND
from kvactors.testing.store_contract import key, never

SIZE, DIGEST = 5000, bytes(range(32))
OK, CORRUPT = Outcome.OK, Outcome.CORRUPT


class Pool:
    """A client whose objects are bytes in a dictionary.

    Attributes:
        put_codes: codes to return in place of results, by name.
        during: called in each transfer.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.put_codes: dict[str, int] = {}
        self.calls: list[int] = []
        self.during = lambda: None

    def begin(self, work, _failed) -> asyncio.Task:
        """See `MooncakeClient.begin`."""

        async def run():
            await asyncio.sleep(0)
            return work(self)

        return asyncio.create_task(run())

    def batch_put_from_multi_buffers(self, names, pointers, sizes) -> list[int]:
        self.calls.append(len(names))
        codes = []
        for name, where, lengths in zip(names, pointers, sizes, strict=True):
            pieces = zip(where, lengths, strict=True)
            code = self.put_codes.pop(name, 0)
            if not code:
                self.objects[name] = b"".join(ctypes.string_at(*piece) for piece in pieces)
            codes.append(code)
        self.during()
        return codes

    def batch_get_into_multi_buffers(self, names, pointers, sizes) -> list[int]:
        self.calls.append(len(names))
        codes = []
        for name, where, lengths in zip(names, pointers, sizes, strict=True):
            data = self.objects.get(name)
            codes.append(NOT_FOUND if data is None else len(data))
            at = 0
            for address, length in zip(where, lengths, strict=True):
                if data is not None:
                    ctypes.memmove(address, data[at : at + length], len(data[at : at + length]))
                at += length
        self.during()
        return codes


class Bench:
    def __init__(
        self, trailer: int = HEADER.size, slots: int = 8, step: int = 3, checksums: bool = True
    ) -> None:
        self.pool = Pool()
        headers = PoolHeaders(DIGEST, SIZE, checksums)
        self.objects = MooncakeObjects(self.pool, "p/", headers, SIZE)
        self.objects.calls.most_objects = step
        self.arena = self.objects.arena = Arena(slots, SIZE, trailer=trailer)
        for slot in range(slots):
            self.arena.view(slot)[:] = np.random.default_rng(slot).bytes(SIZE)
        self.keys = [key(slot) for slot in range(slots)]
        self.views = [self.arena.view(slot) for slot in range(slots)]

    def close(self) -> None:
        self.objects.close()


@pytest.fixture
def bench():
    one = Bench()
    yield one
    one.close()


def header(name: bytes, payload: bytes) -> bytes:
    checksum = xxhash.xxh3_64_intdigest(payload)
    return HEADER.pack(MAGIC, VERSION, 0, DIGEST, name, len(payload), checksum)


@pytest.mark.parametrize("trailer", [HEADER.size, 0])
async def test_objects_are_payloads_and_headers_of_the_format(trailer):
    bench = Bench(trailer)
    assert await bench.objects.write(bench.keys, bench.views, never) == bytes([OK] * 8)
    assert bench.pool.calls == [3, 3, 2]
    wanted = [bytes(view) for view in bench.views]
    assert [bench.pool.objects[bench.objects.name(one)] for one in bench.keys] == [
        payload + header(one, payload) for one, payload in zip(bench.keys, wanted, strict=True)
    ]
    for view in bench.views:
        view[:] = bytes(SIZE)
    assert await bench.objects.read(bench.keys, bench.views, never) == bytes([OK] * 8)
    assert [bytes(view) for view in bench.views] == wanted
    bench.close()


@pytest.mark.parametrize("place", [0, SIZE - 1, SIZE, SIZE + 8, SIZE + 20, SIZE + 50, SIZE + 90])
async def test_a_changed_bit_of_payload_or_header_is_corrupt(bench, place):
    await bench.objects.write(bench.keys, bench.views, never)
    name = bench.objects.name(key(4))
    data = bytearray(bench.pool.objects[name])
    data[place] ^= 1
    bench.pool.objects[name] = bytes(data)
    found = await bench.objects.read(bench.keys, bench.views, never)
    assert list(found) == [CORRUPT if i == 4 else OK for i in range(8)]


async def test_objects_of_other_keys_short_ones_and_missing_ones_are_no_hits(bench):
    await bench.objects.write(bench.keys, bench.views, never)
    stored, names = bench.pool.objects, [bench.objects.name(one) for one in bench.keys]
    stored[names[1]], stored[names[2]] = stored[names[2]], stored[names[1]]
    stored[names[3]] = stored[names[3]][:-1]
    stored[names[5]] += b"x"
    del stored[names[6]]
    found = await bench.objects.read(bench.keys, bench.views, never)
    assert list(found) == [OK, CORRUPT, CORRUPT, CORRUPT, OK, CORRUPT, Outcome.MISS, OK]


async def test_an_object_without_space_is_tried_once_more_with_its_own_header(bench, monkeypatch):
    monkeypatch.setattr("kvactors.storage.mooncake.RETRY", 0.0)
    bench.pool.put_codes[bench.objects.name(key(1))] = NO_SPACE
    assert await bench.objects.write(bench.keys, bench.views, never) == bytes([OK] * 8)
    assert bench.pool.calls == [3, 1, 3, 2]
    assert await bench.objects.read(bench.keys, bench.views, never) == bytes([OK] * 8)


async def test_a_deadline_ends_a_batch_and_no_checksum_reads_the_views_any_more(bench):
    found = await bench.objects.write(bench.keys, bench.views, lambda: bool(bench.pool.calls))
    assert list(found) == [OK] * 3 + [Outcome.LATE] * 5
    assert bench.objects._checksums.busy == 0


async def test_a_cancelled_write_ends_after_its_checksums(bench):
    task = asyncio.ensure_future(bench.objects.write(bench.keys, bench.views, never))
    bench.pool.during = task.cancel
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.objects._checksums.busy == 0


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
    write, read = bench.objects.write, bench.objects.read
    where: list[int] | list[memoryview] = views
    if by_slot:
        write, read = bench.objects.write_slots, bench.objects.read_slots
        where = slots
    stored, names = bench.pool.objects, [bench.objects.name(one) for one in bench.keys]
    assert await write(bench.keys, where, never) == bytes([OK]) * count
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
    assert list(await read(bench.keys, where, never)) == wanted
    for view, payload, outcome in zip(views, payloads, wanted, strict=True):
        assert outcome != OK or bytes(view) == payload
    assert max(bench.pool.calls) <= step
    bench.close()


def test_only_slots_of_the_registered_arena_are_moved_without_views(bench):
    has, arena = bench.objects.has_slots, bench.arena
    assert has(arena, [7, 0], 2)
    for slots, count in (([7, 8], 2), ([-1, 0], 2), ([1], 2), ([1, 2], 1), ([], 0)):
        assert not has(arena, slots, count)
    other = Arena(8, SIZE, trailer=HEADER.size)
    assert not has(other, [0], 1)
    for arena in (Arena(8, SIZE), Arena(8, 2 * SIZE, trailer=HEADER.size)):
        bench.objects.arena = arena
        assert not has(arena, [0], 1)
