"""`storage.mooncake.payload_checksums`: objects with and without a checksum of their payload, and
nodes of both kinds in one pool."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from kvactors.errors import ConfigError
from kvactors.mooncake_config import MooncakeConfig, resolve
from kvactors.storage.messages import Outcome
from kvactors.storage.mooncake import HEADER, MAGIC, VERSION
from kvactors.storage.mooncake_client import MooncakeClient
from kvactors.testing.store_contract import key, never
from tests.storage.mooncake_standin import StandIn
from tests.storage.test_mooncake_answers import joined
from tests.storage.test_mooncake_objects import DIGEST, SIZE, Bench, header

OK, MISS, CORRUPT = Outcome.OK, Outcome.MISS, Outcome.CORRUPT


def bare(name: bytes, size: int = SIZE, digest: bytes = DIGEST) -> bytes:
    """The header of an object without a checksum."""
    return HEADER.pack(MAGIC, VERSION, 1, digest, name, size, 0)


@pytest.fixture
def bench():
    one = Bench()
    yield one
    one.close()


@pytest.fixture
def plain():
    one = Bench(checksums=False)
    yield one
    one.close()


async def test_objects_without_checksums_have_headers_of_the_format(plain):
    assert await plain.objects.write(plain.keys, plain.views, never) == bytes([OK] * 8)
    assert [plain.pool.objects[plain.objects.name(one)] for one in plain.keys] == [
        bytes(view) + bare(one) for one, view in zip(plain.keys, plain.views, strict=True)
    ]
    assert await plain.objects.read(plain.keys, plain.views, never) == bytes([OK] * 8)
    assert plain.objects.take_without_checksum() == 0


async def test_a_node_that_verifies_misses_objects_without_checksums_and_counts_them(bench):
    for one, view in zip(bench.keys[:5], bench.views, strict=False):
        bench.pool.objects[bench.objects.name(one)] = bytes(view) + bare(one)
    await bench.objects.write(bench.keys[5:7], bench.views[5:7], never)
    found = await bench.objects.read(bench.keys, bench.views, never)
    assert list(found) == [MISS] * 5 + [OK] * 2 + [MISS]
    assert bench.objects.take_without_checksum() == 5, "not the one that is not there"


async def test_a_node_that_does_not_verify_reads_both_kinds(plain):
    stored = plain.pool.objects
    for i, (one, view) in enumerate(zip(plain.keys, plain.views, strict=True)):
        payload = bytes(view)
        stored[plain.objects.name(one)] = payload + (header(one, payload), bare(one))[i % 2]
    wanted = [bytes(view) for view in plain.views]
    for view in plain.views:
        view[:] = bytes(SIZE)
    assert await plain.objects.read(plain.keys, plain.views, never) == bytes([OK] * 8)
    assert [bytes(view) for view in plain.views] == wanted


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
        bench.pool.objects[bench.objects.name(key(0))] = stored
        found = await bench.objects.read(bench.keys[:1], bench.views[:1], never)
        assert list(found) == [CORRUPT], what
    assert bench.objects.take_without_checksum() == 0
    bench.close()


@given(st.integers(0, SIZE + HEADER.size - 1), st.integers(0, 7))
@settings(max_examples=60)
async def test_a_changed_bit_without_checksums_is_found_in_the_header_only(place, bit):
    """But for the checksum of an object that has one, which is not compared."""
    for checksum in (False, True):
        bench = Bench(slots=1, checksums=False)
        payload = bytes(bench.views[0])
        whole = bytearray(payload + (header(key(0), payload) if checksum else bare(key(0))))
        whole[place] ^= 1 << bit
        bench.pool.objects[bench.objects.name(key(0))] = bytes(whole)
        found = await bench.objects.read(bench.keys, bench.views, never)
        unseen = place < SIZE or (checksum and place >= SIZE + 88)
        assert list(found) == [OK if unseen else CORRUPT]
        bench.close()


@given(st.integers(0, SIZE + HEADER.size - 1), st.integers(0, 7))
@settings(max_examples=60)
async def test_no_changed_bit_makes_a_verified_object_one_without_a_checksum(place, bit):
    bench = Bench(slots=1)
    await bench.objects.write(bench.keys, bench.views, never)
    name = bench.objects.name(key(0))
    data = bytearray(bench.pool.objects[name])
    data[place] ^= 1 << bit
    bench.pool.objects[name] = bytes(data)
    assert list(await bench.objects.read(bench.keys, bench.views, never)) == [CORRUPT]
    bench.close()


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


async def test_without_checksums_an_object_under_another_name_is_corrupt_and_goes(pool):
    async with joined(payload_checksums=False) as plain:
        await plain.put(1, 2)
        one, two = (plain.store.objects.name(key(number)) for number in (1, 2))
        pool[one] = pool[two]
        assert await plain.get(1, 2) == [CORRUPT, OK]
        assert set(pool) == {two}


async def test_a_pool_over_tcp_is_logged_once_with_the_setting_for_rdma(pool):
    for protocol in ("tcp", "rdma"):
        with structlog.testing.capture_logs() as logs:
            async with joined(protocol=protocol) as bench:
                await bench.put(1)
        told = [one["rdma"] for one in logs if one["event"] == "pool over TCP"]
        assert told == ["storage.mooncake.protocol = 'rdma'"] * (protocol == "tcp")


async def test_a_node_without_checksums_is_logged(pool):
    for off in (False, True):
        with structlog.testing.capture_logs() as logs:
            async with joined(payload_checksums=not off) as bench:
                await bench.put(1)
        assert ("payload checksums are off" in [one["event"] for one in logs]) == off


# -- the setting


def config_of(**changes: Any) -> dict[str, Any]:
    pool = {"master_server_address": "10.0.0.1:1", **changes}
    return {
        "cache": {"model": "m"},
        "layout": {"num_layers": 2, "num_kv_heads": 2, "head_dim": 32},
        "storage": {"backend": "mooncake", "mooncake": pool},
    }


def test_checksums_are_on_unless_they_are_turned_off():
    assert Config.from_mapping(config_of()).storage.mooncake.payload_checksums
    off = Config.from_mapping(config_of(payload_checksums=False))
    assert not off.storage.mooncake.payload_checksums


@pytest.mark.parametrize("value", ["false", "", 0, 1, 0.0, None, [], {}, "no", float("nan")])
def test_a_value_that_is_no_boolean_is_named(value):
    with pytest.raises(ConfigError, match=r"storage\.mooncake\.payload_checksums"):
        Config.from_mapping(config_of(payload_checksums=value))


@pytest.mark.parametrize("value", ["false", 0, None, []])
def test_a_value_in_mooncakes_file_that_is_no_boolean_is_named(tmp_path, value):
    path = tmp_path / "mooncake.json"
    path.write_bytes(msgspec.json.encode({"payload_checksums": value}))
    with pytest.raises(ConfigError, match="payload_checksums"):
        resolve(
            MooncakeConfig(master_server_address="10.0.0.1:1"),
            {"MOONCAKE_CONFIG_PATH": str(path)},
        )
