"""A Valkey server below a `TierCache`: nodes that share it, and evictions that the engine gets to know."""

from __future__ import annotations

import time

import pytest

from kvactors import ConfigError, StoreError
from kvactors.tier_cache import Lookup, open_storage
from tests.support.valkey import MISSING, PROGRAM, valkey_server
from tests.tier_cache.helpers import BLOCK, KEYS, LIMIT, answer, load, make, payload, settle, store

pytestmark = [pytest.mark.full, pytest.mark.skipif(PROGRAM is None, reason=MISSING)]


@pytest.fixture
def server():
    with valkey_server("--notify-keyspace-events", "Eex") as one:
        yield one


def table(server, **settings):
    return {"backend": "valkey", "valkey": {"url": server.url, **settings}}


def test_nodes_share_a_server_and_a_restarted_one_finds_its_blocks(server):
    first, second = (make(8, storage=table(server)) for _ in range(2))
    store(first, KEYS[:3])
    settle(first)
    assert first.statistics().saved == 3
    assert [answer(second, key) for key in KEYS[:4]] == [Lookup.HIT] * 3 + [Lookup.MISS]
    assert [load(second, key) for key in KEYS[:3]] == [payload(key) for key in KEYS[:3]]
    second.shutdown()
    second = make(8, storage=table(server))
    assert answer(second, KEYS[1]) is Lookup.HIT
    assert load(second, KEYS[1]) == payload(KEYS[1])
    first.reset(storage=True)
    settle(first)
    second.reset()
    assert answer(second, KEYS[1]) is Lookup.MISS
    for cache in (first, second):
        cache.check()
        cache.shutdown()


def test_keys_that_expired_are_reported_by_the_next_job(server):
    tier = open_storage(
        {"model": "m", "block_bytes": BLOCK, "num_slots": 1, "storage": table(server, ttl_s=1)}
    )
    view = memoryview(bytearray(payload(KEYS[0])))
    assert tier.submit_store("s", KEYS[:1], [view]).result(LIMIT).ok == (True,)
    assert tier.contains(KEYS[0])
    until, removed = time.monotonic() + LIMIT, ()
    while not removed and time.monotonic() < until:
        time.sleep(0.05)
        removed = tier.submit_store("t", KEYS[1:2], [view]).result(LIMIT).removed
    assert KEYS[0] in removed
    assert not tier.contains(KEYS[0])
    tier.close()


def test_wrong_settings_are_named_before_anything_starts():
    for wrong, name in (({"colour": 1}, "colour"), ({"url": "http://h"}, "storage.valkey.url")):
        with pytest.raises(ConfigError, match=name):
            make(storage={"backend": "valkey", "valkey": wrong})
    with pytest.raises(ConfigError, match=r"storage\.valkey is for"):
        make(storage={"backend": "memory", "valkey": {"ttl_s": 1}})
    cache = make(storage={"backend": "valkey", "valkey": {"url": "valkey://127.0.0.1:1"}})
    with pytest.raises(StoreError, match="127"):
        cache.start()
