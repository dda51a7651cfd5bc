"""Metrics of a `TierCache`."""

from __future__ import annotations

from types import SimpleNamespace

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvactors.observe.metrics import FAMILIES, TIER_FAMILIES
from kvactors.observe.prometheus import TierMetrics
from kvactors.tier_cache import Lookup, TierStatistics
from kvactors.tier_cache.cache import OK
from kvactors.tier_cache.settings import checked_config
from kvactors.top import Process, ShownHealth, parse_metrics
from tests.tier_cache.helpers import KEYS, answer, load, make, payload, settle, store


def test_the_collector_has_the_names_of_a_caches_metrics():
    """Names of both collectors have the same kind, and labels that a query of one cache can use."""
    ours = {one.name: (one.kind, one.labels) for one in TIER_FAMILIES}
    caches = {one.name: (one.kind, one.labels) for one in FAMILIES}
    info = "cache_config_info"
    assert set(ours.pop(info)[1]) < set(caches.pop(info)[1])
    assert all(caches[name] == kind for name, kind in ours.items())


def test_every_statistic_is_a_metric():
    """Each field of the statistics changes a sample."""
    config, health = checked_config({"model": "m", "block_bytes": 96, "num_slots": 4}), OK
    samples = []
    for field in (None, *TierStatistics._fields):
        values = {name: 7 if name == field else 1 for name in TierStatistics._fields}
        cache = SimpleNamespace(
            statistics=lambda values=values: TierStatistics(**values),
            health=lambda: health,
            config=config,
            groups={},
        )
        samples.append(
            [
                (one.name, one.value)
                for family in TierMetrics(cache).collect()
                for one in family.samples
            ]
        )
    first, *others = samples
    same = [f for f, found in zip(TierStatistics._fields, others, strict=True) if found == first]
    assert same == ["fetched", "saved"], "blocks, which are shown in bytes"


def test_the_collector_can_be_parsed_and_shown_and_ends_with_the_cache():
    cache = make(4, storage={"backend": "memory"})
    metrics = TierMetrics(cache)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    store(cache, KEYS[:2])
    settle(cache)
    cache.reset()
    assert answer(cache, KEYS[0]) is Lookup.HIT
    assert load(cache, KEYS[0]) == payload(KEYS[0])
    text = generate_latest(registry).decode()
    names = [family.name for family in text_string_to_metric_families(text)]
    assert len(names) == len(set(names))
    shown = parse_metrics("u", 200, text.encode())
    view = Process("u", 1.0).view(0.0, shown, ShownHealth("ok"))
    assert {tier["name"]: (tier["blocks"], tier["bytes"]) for tier in view["tiers"]} == {
        "host": (1, 96),
        "storage": (2, 192),
    }
    moved = shown["kv_offload_total_bytes_total"]
    assert {labels["transfer_type"]: value for labels, value in moved} == {
        "device_to_host": 192,
        "host_to_device": 96,
        "host_to_storage": 192,
        "storage_to_host": 96,
    }
    cache.shutdown()
    assert [one.value for family in metrics.collect() for one in family.samples] == [0.0]


def test_groups_are_in_the_metrics_of_their_cache():
    cache = make(4, groups={"state": {"block_bytes": 96, "num_slots": 2}})
    store(cache, KEYS[:1])
    store(cache.groups["state"], KEYS[:3])
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in TierMetrics(cache).collect()
        for sample in family.samples
    }
    assert found["kvactors:tier_blocks", "host"] == 1
    assert found["kvactors:group_blocks", "state", "host"] == 2
    assert found["kvactors:group_capacity_blocks", "state", "host"] == 2
    cache.shutdown()
