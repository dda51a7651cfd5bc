"""Metrics of a `TierCache`."""

from __future__ import annotations

from kvactors.tier_cache import Lookup
from kvactors.tier_cache.metrics import COUNTERS, tier_metrics
from tests.tier_cache.helpers import KEYS, answer, load, make, payload, settle, store


def test_metrics_follow_the_statistics():
    cache = make(4, storage={"backend": "memory"})
    store(cache, KEYS[:2])
    settle(cache)
    cache.reset()
    assert answer(cache, KEYS[0]) is Lookup.HIT
    assert load(cache, KEYS[0]) == payload(KEYS[0])
    found = tier_metrics(cache.statistics(), cache.health())
    values = {(one.name.partition("kv_offload_")[2], one.labels): one.value for one in found}
    assert len(values) == len(found), "two samples have the same name and labels"
    assert values["tiering_chunk_hits", (("tier", "storage"),)] == 1
    assert values["tiering_chunk_hits", (("tier", "host"),)] == 0
    assert values["tiering_read_bytes", (("tier", "storage"),)] == 96
    assert values["tiering_write_bytes", (("tier", "storage"),)] == 192
    assert values["cpu_cache_fill_perc", ()] == 0.25
    assert values["healthy", ()] == 1
    assert {field for _, _, field, _ in COUNTERS} <= set(cache.statistics()._fields)
    cache.shutdown()
    assert tier_metrics(cache.statistics(), cache.health())[-1].value == 0
