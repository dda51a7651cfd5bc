"""Numbers of a manager, and its metrics for Prometheus under FastDeploy's names."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from kvactors.integrations.fastdeploy.manager import PrefixCacheManager

WINDOW = 10_000  # requests after which the ratios start from zero

GAUGES = (
    "hit_req_rate",
    "hit_token_rate",
    "gpu_hit_token_rate",
    "cpu_hit_token_rate",
    "available_gpu_block_num",
    "free_gpu_block_num",
    "max_gpu_block_num",
    "max_cpu_block_num",
    "available_gpu_resource",
)
"""FastDeploy's gauges that its manager sets."""


class HitRates:
    """Counters of matches: sums of tokens, and the requests and tokens since the last multiple of
    `WINDOW` requests."""

    def __init__(self) -> None:
        self.gpu_tokens = self.cpu_tokens = self.storage_tokens = 0
        self.reset_metrics()

    def reset_metrics(self) -> None:
        self.req_count = self.hit_req_count = 0
        self._window = (0, 0, 0, 0)

    def matched(self, gpu: int, cpu: int, storage: int, total: int) -> None:
        """A request of `total` tokens was matched, with so many on device, host and storage."""
        self.gpu_tokens += gpu
        self.cpu_tokens += cpu
        self.storage_tokens += storage
        self.req_count += 1
        self.hit_req_count += gpu + cpu + storage > 0
        before = self._window
        self._window = (before[0] + gpu, before[1] + cpu, before[2] + storage, before[3] + total)
        if self.req_count % WINDOW == 0:
            self.reset_metrics()

    def ratios(self) -> dict[str, float]:
        gpu, cpu, storage, total = self._window
        return {
            "hit_req_ratio": _share(self.hit_req_count, self.req_count),
            "hit_token_ratio": _share(gpu + cpu + storage, total),
            "gpu_hit_token_ratio": _share(gpu, total),
            "cpu_hit_token_ratio": _share(cpu, total),
            "storage_hit_token_ratio": _share(storage, total),
        }


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


class ManagerStatistics(NamedTuple):
    """Sizes of this moment, ratios over the last 10,000 requests at most, and counters since the
    start.

    Attributes:
        written_blocks, failed_blocks: of finished requests: written to storage, not taken.
    """

    gpu_blocks: int
    cpu_blocks: int
    free_gpu_blocks: int
    evictable_gpu_blocks: int
    requests: int
    hit_req_ratio: float
    hit_token_ratio: float
    gpu_hit_token_ratio: float
    cpu_hit_token_ratio: float
    storage_hit_token_ratio: float
    gpu_tokens: int
    cpu_tokens: int
    storage_tokens: int
    written_blocks: int
    failed_blocks: int

    def metrics(self) -> dict[str, float]:
        """The values of FastDeploy's metrics."""
        return {
            "hit_req_rate": self.hit_req_ratio,
            "hit_token_rate": self.hit_token_ratio,
            "gpu_hit_token_rate": self.gpu_hit_token_ratio,
            "cpu_hit_token_rate": self.cpu_hit_token_ratio,
            "prefix_cache_token_num": self.gpu_tokens + self.cpu_tokens + self.storage_tokens,
            "prefix_gpu_cache_token_num": self.gpu_tokens,
            "prefix_cpu_cache_token_num": self.cpu_tokens,
            "prefix_ssd_cache_token_num": self.storage_tokens,
            "available_gpu_block_num": self.free_gpu_blocks + self.evictable_gpu_blocks,
            "free_gpu_block_num": self.free_gpu_blocks,
            "max_gpu_block_num": self.gpu_blocks,
            "max_cpu_block_num": self.cpu_blocks,
            "available_gpu_resource": _share(self.free_gpu_blocks, self.gpu_blocks),
            "gpu_cache_usage_perc": _share(self.gpu_blocks - self.free_gpu_blocks, self.gpu_blocks),
        }


class FastDeployMetrics:
    """A collector over one manager, for any registry of Prometheus. `collect` may be called in any
    thread. Needs the extra `metrics`."""

    def __init__(self, manager: PrefixCacheManager) -> None:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        self._manager = manager
        self._kinds: dict[str, Any] = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}

    def collect(self) -> Iterator[Metric]:
        from kvactors.observe.metrics import FASTDEPLOY, FASTDEPLOY_FAMILIES

        values = self._manager.statistics().metrics()
        for one in FASTDEPLOY_FAMILIES:
            yield self._kinds[one.kind](FASTDEPLOY + one.name, one.text, values[one.name])
        labels = config_labels(self._manager.cache_config)
        info = self._kinds["gauge"](
            f"{FASTDEPLOY}cache_config_info", "FastDeploy's cache config.", labels=list(labels)
        )
        info.add_metric(list(labels.values()), 1.0)
        yield info

    def describe(self) -> list[Metric]:
        return []  # the names at registration: nothing is read


def config_labels(cache_config: Any) -> dict[str, str]:
    """The plain fields of FastDeploy's cache config."""
    fields = vars(cache_config) if hasattr(cache_config, "__dict__") else {}
    return {
        name: str(value)
        for name, value in sorted(fields.items())
        if name.isidentifier() and isinstance(value, Real | str | None)
    }
