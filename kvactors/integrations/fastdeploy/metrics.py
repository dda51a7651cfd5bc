"""Metrics of a manager for Prometheus, under FastDeploy's names. Needs the extra `metrics`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from numbers import Real
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvactors.integrations.fastdeploy.manager import PrefixCacheManager
from kvactors.integrations.fastdeploy.statistics import GAUGES

PREFIX = "fastdeploy:"


def config_labels(cache_config: Any) -> dict[str, str]:
    """The plain fields of FastDeploy's cache config."""
    fields = vars(cache_config) if hasattr(cache_config, "__dict__") else {}
    return {
        name: str(value)
        for name, value in sorted(fields.items())
        if name.isidentifier() and isinstance(value, Real | str | None)
    }


class FastDeployMetrics(Collector):
    """A collector over one manager, for any registry. `collect` may be called in any thread."""

    def __init__(self, manager: PrefixCacheManager) -> None:
        self._manager = manager

    def collect(self) -> Iterator[Metric]:
        found = self._manager.statistics()
        used = found.gpu_blocks - found.free_gpu_blocks
        share = used / found.gpu_blocks if found.gpu_blocks else 0.0
        for name, (of, text) in GAUGES.items():
            yield GaugeMetricFamily(PREFIX + name, text, of(found))
        yield GaugeMetricFamily(PREFIX + "gpu_cache_usage_perc", "Device blocks in use.", share)
        gpu, cpu, storage = found.gpu_tokens, found.cpu_tokens, found.storage_tokens
        for kind, text, tokens in (
            ("", "Cached tokens.", gpu + cpu + storage),
            ("gpu_", "Tokens cached on the device.", gpu),
            ("cpu_", "Tokens cached in host memory.", cpu),
            ("ssd_", "Tokens cached in storage.", storage),
        ):
            yield CounterMetricFamily(f"{PREFIX}prefix_{kind}cache_token_num", text, tokens)
        labels = config_labels(self._manager.cache_config)
        info = GaugeMetricFamily(
            f"{PREFIX}cache_config_info", "FastDeploy's cache config.", labels=list(labels)
        )
        info.add_metric(list(labels.values()), 1.0)
        yield info

    def describe(self) -> Iterable[Metric]:
        return []  # the names at registration: nothing is read
