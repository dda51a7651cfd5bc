"""Metrics of a manager for Prometheus, under FastDeploy's names. Needs the extra `metrics`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvactors.integrations.fastdeploy.manager import PrefixCacheManager
from kvactors.integrations.fastdeploy.statistics import ManagerStatistics

PREFIX = "fastdeploy:"


def gauges(s: ManagerStatistics) -> dict[str, tuple[float, str]]:
    """Values of now, by name, with explanations."""
    available = s.free_gpu_blocks + s.evictable_gpu_blocks
    used = s.gpu_blocks - s.free_gpu_blocks
    return {
        "hit_req_rate": (s.hit_req_ratio, "Requests with cached blocks, of all requests."),
        "hit_token_rate": (s.hit_token_ratio, "Cached tokens, of all."),
        "gpu_hit_token_rate": (s.gpu_hit_token_ratio, "Tokens cached on the device, of all."),
        "cpu_hit_token_rate": (s.cpu_hit_token_ratio, "Tokens cached in host memory, of all."),
        "available_gpu_block_num": (available, "Device blocks that are free or evictable."),
        "free_gpu_block_num": (s.free_gpu_blocks, "Free device blocks."),
        "max_gpu_block_num": (s.gpu_blocks, "Device blocks."),
        "max_cpu_block_num": (s.cpu_blocks, "Blocks of the host tier."),
        "available_gpu_resource": (s.free_share, "Free device blocks, of all."),
        "gpu_cache_usage_perc": (
            used / s.gpu_blocks if s.gpu_blocks else 0.0,
            "Device blocks that are not free, of all.",
        ),
    }


def counters(s: ManagerStatistics) -> dict[str, tuple[float, str]]:
    """Values that only grow, by name, with explanations."""
    tokens = s.gpu_tokens + s.cpu_tokens + s.storage_tokens
    return {
        "prefix_cache_token_num": (tokens, "Cached tokens."),
        "prefix_gpu_cache_token_num": (s.gpu_tokens, "Tokens cached on the device."),
        "prefix_cpu_cache_token_num": (s.cpu_tokens, "Tokens cached in host memory."),
        "prefix_ssd_cache_token_num": (s.storage_tokens, "Tokens cached in storage."),
    }


class FastDeployMetrics(Collector):
    """A collector over one manager, for any registry. `collect` may be called in any thread.

    Args:
        manager: not closed.
    """

    def __init__(self, manager: PrefixCacheManager) -> None:
        self._manager = manager

    def collect(self) -> Iterator[Metric]:
        """See `prometheus_client.registry.Collector`."""
        found = self._manager.statistics()
        for name, (value, text) in gauges(found).items():
            yield GaugeMetricFamily(PREFIX + name, text, value)
        for name, (value, text) in counters(found).items():
            yield CounterMetricFamily(PREFIX + name, text, value)
        info = GaugeMetricFamily(
            f"{PREFIX}cache_config_info", "FastDeploy's cache config.", labels=list(found.config)
        )
        info.add_metric(list(found.config.values()), 1.0)
        yield info

    def describe(self) -> Iterable[Metric]:
        """See `prometheus_client.registry.Collector`. Nothing is read."""
        return []
