"""Metrics of a cache for Prometheus, which need the extra `metrics`. Register a `CacheMetrics`, or
for a `TierCache` a `TierMetrics`, with a registry of `prometheus_client`. `http_endpoint` serves
those of a cache.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError
from typing import Any

try:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.exposition import generate_latest
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError("metrics need: pip install '/path/to/kvactors[metrics]'") from error

from kvactors.actor.sliced import Sliced, finish
from kvactors.errors import KVActorsError
from kvactors.observe import OpenCache
from kvactors.observe.invariants import in_slices
from kvactors.observe.lag import LagTimer
from kvactors.observe.metrics import (
    FAMILIES,
    FASTDEPLOY,
    FASTDEPLOY_FAMILIES,
    OFFLOAD_FAMILIES,
    PREFIX,
    TIER_FAMILIES,
    Family,
    MetricsWatch,
    Snapshot,
    TierSnapshot,
    take_snapshot,
)
from kvactors.tier_cache import TierCache

SCRAPE_LIMIT_S = 5.0  # seconds that a scrape from another thread waits for the loop

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class CacheMetrics(Collector):
    """A collector over one open cache, for any registry.

    `collect` may be called in any thread: the values are read on the cache's loop, in slices unless
    it is called there. If the loop does not respond within SCRAPE_LIMIT_S seconds, and once the
    cache is closed, there is only `kvactors:up 0`.
    """

    def __init__(self, cache: OpenCache, *, fastdeploy_names: bool = False) -> None:
        self.cache = cache
        self._fastdeploy = fastdeploy_names
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._watch = MetricsWatch(cache.system)
        self._watch.attach()
        self._lag = LagTimer(self._watch.histograms.loop_lag, self.is_open)

    def close(self) -> None:
        self._lag.stop()
        self._watch.detach()

    def collect(self) -> Iterator[Metric]:
        snapshot = self._snapshot()
        up = snapshot is not None and snapshot.health.status != "failed"
        yield GaugeMetricFamily(f"{PREFIX}up", "1 while the cache serves requests.", float(up))
        if snapshot is None:
            return
        yield from _exposed(PREFIX, FAMILIES, snapshot)
        if self._fastdeploy:
            yield from _exposed(FASTDEPLOY, FASTDEPLOY_FAMILIES, snapshot)

    def describe(self) -> Iterable[Metric]:
        return []  # nothing is read

    def render(self) -> bytes:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def _snapshot(self) -> Snapshot | None:
        if threading.get_ident() == self._thread:
            return finish(self._read())
        reading: Coroutine[Any, Any, Snapshot | None] = in_slices(self._read())
        try:
            answer = asyncio.run_coroutine_threadsafe(reading, self._loop)
        except RuntimeError:  # the loop is closed
            reading.close()
            return None
        try:
            return answer.result(SCRAPE_LIMIT_S)
        except (KVActorsError, RuntimeError, CancelledError, TimeoutError):
            answer.cancel()
            return None

    def is_open(self) -> bool:
        return self.cache.system.is_open and not self.cache.system.forked

    def _read(self) -> Sliced[Snapshot | None]:
        if not self.is_open():
            return None
        return (yield from take_snapshot(self.cache.system, self._watch))


class TierMetrics(Collector):
    """A collector over a `TierCache`, for any registry. `collect` may be called in any thread.

    Names are those of `CacheMetrics` where the meaning is the same, and those of vLLM's tiers. A
    registry takes one cache: names of two would be the same. Once the cache is shut down, there is
    only `kvactors:up 0`.
    """

    def __init__(self, cache: TierCache) -> None:
        self.cache = cache

    def collect(self) -> Iterator[Metric]:
        statistics, health = self.cache.statistics(), self.cache.health()
        up = health.status != "closed"
        yield GaugeMetricFamily(f"{PREFIX}up", "1 while the cache serves requests.", float(up))
        if not up:
            return
        groups = {name: one.statistics() for name, one in self.cache.groups.items()}
        snapshot = TierSnapshot(self.cache.config, statistics, health, groups)
        yield from _exposed(PREFIX, (*TIER_FAMILIES, *OFFLOAD_FAMILIES), snapshot)

    def describe(self) -> Iterable[Metric]:
        return []  # nothing is read


def _exposed(prefix: str, families: Iterable[Family], snapshot: Any) -> Iterator[Metric]:
    for family in families:
        name, text, labels = prefix + family.name, family.text, family.labels
        if family.kind == "histogram":
            found = HistogramMetricFamily(name, text, labels=labels)
            for values, one in family.read(snapshot):
                found.add_metric(values, buckets=one.buckets(), sum_value=one.total)
            yield found
        else:
            kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            metric = kind(name, text, labels=labels)
            for values, value in family.read(snapshot):
                metric.add_metric(values, float(value))
            yield metric
