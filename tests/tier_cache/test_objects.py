"""A bucket and a shared folder below a `TierCache`: nodes that share one, restarts, and a server
that is gone."""

from __future__ import annotations

import pytest

from kvactors import StoreError
from kvactors.tier_cache import Lookup
from tests.support.s3 import CREDENTIALS, s3_server
from tests.tier_cache.helpers import KEYS, LIMIT, alone, answer, load, make, payload, settle, store

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def server():
    with s3_server() as one:
        yield one


@pytest.fixture(params=["bucket", "folder"])
def storage(request, tmp_path, monkeypatch):
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    if request.param == "folder":
        return {"backend": "object", "url": f"file://{tmp_path}"}
    return request.getfixturevalue("server").storage(tmp_path.name)


def test_nodes_share_a_store_and_a_restarted_one_finds_its_blocks(storage):
    first, second = make(8, storage=storage), make(8, storage=storage)
    store(first, KEYS[:3])
    settle(first)
    assert first.statistics().saved == 3
    assert [answer(second, key) for key in KEYS[:4]] == [Lookup.HIT] * 3 + [Lookup.MISS]
    assert [load(second, key) for key in KEYS[:3]] == [payload(key) for key in KEYS[:3]]
    second.shutdown()
    second = make(8, storage=storage)
    assert answer(second, KEYS[1]) is Lookup.HIT
    assert load(second, KEYS[1]) == payload(KEYS[1])
    first.reset(storage=True)
    settle(first)
    second.reset()
    assert answer(second, KEYS[1]) is Lookup.MISS
    for cache in (first, second):
        cache.check()
        cache.shutdown()


def test_groups_of_layers_keep_their_objects_apart(storage):
    cache = make(8, storage=storage, groups={"window": {"block_bytes": 32, "num_slots": 8}})
    store(cache, KEYS[:1])
    settle(cache)
    group = cache.groups["window"]
    assert answer(group, KEYS[0]) is Lookup.MISS
    store(group, KEYS[:1])
    settle(cache)
    assert load(group, KEYS[0]) == payload(KEYS[0], 32)
    cache.shutdown()


def test_a_storage_tier_moves_parts_of_memory(storage):
    data = bytearray(payload(KEYS[7]))
    view, tier = memoryview(data), alone(**storage)
    parts = [view[:40], view[40:]]
    assert tier.submit_store("s", KEYS[7:8], [parts]).result(LIMIT).ok == (True,)
    assert tier.submit_lookup("f", KEYS[6:8]).result(LIMIT).ok == (False, True)
    view[:] = bytes(len(data))
    assert tier.submit_load("l", KEYS[7:8], [parts]).result(LIMIT).ok == (True,)
    assert data == payload(KEYS[7])
    tier.close()


def test_a_server_that_is_gone_costs_misses_and_comes_back(monkeypatch):
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with s3_server() as server:
        cache = make(8, storage=server.storage(timeout_s=20.0))
        store(cache, KEYS[:2])
        settle(cache)
        cache.reset()
        server.kill()
        assert answer(cache, KEYS[0]) is Lookup.MISS
        assert store(cache, KEYS[2:3])
        settle(cache)
        server.start()
        assert store(cache, KEYS[3:4])
        settle(cache)
        cache.reset()
        assert answer(cache, KEYS[3]) is Lookup.HIT
        assert load(cache, KEYS[3]) == payload(KEYS[3])
        cache.check()
        cache.shutdown()


def test_a_store_that_cannot_be_used_is_found_at_the_start(tmp_path):
    cache = make(storage={"backend": "object", "url": f"file://{tmp_path}/missing"})
    with pytest.raises(StoreError, match="Mount the folder"):
        cache.start()
    cache.shutdown()
