"""A Mooncake pool below a `TierCache`, with a real master: nodes that share it, and restarts."""

from __future__ import annotations

import pytest

from kvactors import ConfigError, StoreError
from kvactors.tier_cache import Lookup, open_storage
from tests.storage.pools import master
from tests.tier_cache.helpers import BLOCK, KEYS, LIMIT, answer, load, make, payload, settle, store

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def pool():
    with master() as one:
        yield {
            "backend": "mooncake",
            "timeout_s": 20.0,
            "mooncake": {
                "master_server_address": one.address,
                "local_hostname": "127.0.0.1",
                "global_segment_size": "32MB",
                "local_buffer_size": "16MB",
                "connect_timeout_s": 60.0,
            },
        }


@pytest.mark.parametrize("given", [False, True], ids=["new memory", "given memory"])
def test_nodes_share_a_pool_and_a_restarted_one_finds_its_blocks(pool, given):
    settings = {"storage": pool, "identity": {"given": given}}
    memories = [bytearray(8 * BLOCK) if given else None for _ in range(3)]
    first, second = (make(8, memory=memory, **settings) for memory in memories[:2])
    store(first, KEYS[:3])
    settle(first)
    assert first.statistics().saved == 3
    assert [answer(second, key) for key in KEYS[:4]] == [Lookup.HIT] * 3 + [Lookup.MISS]
    assert [load(second, key) for key in KEYS[:3]] == [payload(key) for key in KEYS[:3]]
    second.shutdown()
    second = make(8, memory=memories[2], **settings)
    assert answer(second, KEYS[1]) is Lookup.HIT
    assert load(second, KEYS[1]) == payload(KEYS[1])
    first.reset(storage=True)
    settle(first)
    second.reset()
    assert answer(second, KEYS[1]) is Lookup.MISS
    for cache in (first, second):
        cache.check()
        cache.shutdown()


def test_a_storage_tier_moves_memory_that_is_not_registered(pool):
    table = {"model": "m", "block_bytes": BLOCK, "num_slots": 1, "storage": pool}
    memory = bytearray(payload(KEYS[7]) + bytes(BLOCK))
    view = memoryview(memory)
    for registered in (None, memory):
        tier = open_storage(table, memory=registered)
        parts = [view[:40], view[40:BLOCK]]
        assert tier.submit_store("s", KEYS[7:8], [parts]).result(LIMIT).ok == (True,)
        assert tier.submit_lookup("f", KEYS[6:8]).result(LIMIT).ok == (False, True)
        view[BLOCK:] = bytes(BLOCK)
        assert tier.submit_load("l", KEYS[7:8], [view[BLOCK:]]).result(LIMIT).ok == (True,)
        assert bytes(view[BLOCK:]) == payload(KEYS[7])
        tier.close()


def test_wrong_settings_are_named_before_anything_starts():
    with pytest.raises(ConfigError, match="colour"):
        make(storage={"backend": "mooncake", "mooncake": {"colour": 1}})
    with pytest.raises(ConfigError, match="mooncake"):
        make(storage={"backend": "memory", "mooncake": {"protocol": "tcp"}})


def test_a_pool_without_a_master_is_an_os_error():
    table = {"master_server_address": "127.0.0.1:1", "connect_timeout_s": 2.0}
    cache = make(storage={"backend": "mooncake", "mooncake": table})
    with pytest.raises(StoreError, match="127"):
        cache.start()
    cache.shutdown()
