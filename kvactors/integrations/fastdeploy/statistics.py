"""Numbers of a manager, and FastDeploy's gauges."""

from __future__ import annotations

from numbers import Real
from typing import Any, NamedTuple

from kvactors.integrations.fastdeploy.device_cache import DeviceCache
from kvactors.integrations.fastdeploy.finish_writes import WriteCounters
from kvactors.integrations.fastdeploy.hit_rates import HitRates

PLAIN = Real | str | None
"""Types of fields that are labels of `cache_config_info`."""


class ManagerStatistics(NamedTuple):
    """Sizes of this moment, and counters since the start.

    Attributes:
        gpu_blocks, cpu_blocks: of the tiers.
        free_gpu_blocks: blocks on the free list.
        evictable_gpu_blocks: cached blocks that no request holds.
        requests: that hold blocks.
        hit_req_ratio, hit_token_ratio, gpu_hit_token_ratio, cpu_hit_token_ratio,
        storage_hit_token_ratio: rates, over the last requests (see `HitRates`).
        gpu_tokens, cpu_tokens, storage_tokens: matched tokens.
        written_blocks, present_blocks, failed_blocks: of finished requests: written to storage,
            stored before, not taken.
        config: labels of `cache_config_info`.
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
    present_blocks: int
    failed_blocks: int
    config: dict[str, str]

    @property
    def free_share(self) -> float:
        """Free device blocks, of all."""
        return self.free_gpu_blocks / self.gpu_blocks if self.gpu_blocks else 0.0


def statistics_of(
    cache: DeviceCache, rates: HitRates, cpu_blocks: int, cache_config: Any
) -> ManagerStatistics:
    """Statistics of a manager. Any thread may ask."""
    writes = None if cache.lower is None else cache.lower.writes
    counters = WriteCounters() if writes is None else writes.counters
    return ManagerStatistics(
        gpu_blocks=cache.blocks.total,
        cpu_blocks=cpu_blocks,
        free_gpu_blocks=cache.blocks.free,
        evictable_gpu_blocks=cache.index.unreferenced,
        requests=len(cache.requests),
        hit_req_ratio=rates.hit_req_ratio,
        hit_token_ratio=rates.hit_token_ratio,
        gpu_hit_token_ratio=rates.gpu_hit_token_ratio,
        cpu_hit_token_ratio=rates.cpu_hit_token_ratio,
        storage_hit_token_ratio=rates.storage_hit_token_ratio,
        gpu_tokens=rates.gpu_tokens,
        cpu_tokens=rates.cpu_tokens,
        storage_tokens=rates.storage_tokens,
        written_blocks=counters.written,
        present_blocks=counters.present,
        failed_blocks=counters.failed,
        config=_labels(cache_config),
    )


def _labels(cache_config: Any) -> dict[str, str]:
    """The plain fields of FastDeploy's cache config."""
    fields = vars(cache_config) if hasattr(cache_config, "__dict__") else {}
    return {
        name: str(value)
        for name, value in sorted(fields.items())
        if name.isidentifier() and isinstance(value, PLAIN)
    }


class EngineGauges:
    """FastDeploy's `main_process_metrics`, which its manager sets.

    Args:
        gauges: an object with FastDeploy's gauges as attributes. None: nothing is set.

    Raises:
        AttributeError: a gauge is missing.
    """

    NAMES = (
        "max_gpu_block_num",
        "max_cpu_block_num",
        "available_gpu_block_num",
        "free_gpu_block_num",
        "available_gpu_resource",
        "hit_req_rate",
        "hit_token_rate",
        "gpu_hit_token_rate",
        "cpu_hit_token_rate",
    )

    def __init__(self, gauges: Any) -> None:
        found = {} if gauges is None else {name: getattr(gauges, name) for name in self.NAMES}
        self._gauges: dict[str, Any] = found

    def _set(self, name: str, value: float) -> None:
        if self._gauges:
            self._gauges[name].set(value)

    def sized(self, gpu_blocks: int, cpu_blocks: int) -> None:
        """The tiers have these sizes."""
        self._set("max_gpu_block_num", gpu_blocks)
        self._set("max_cpu_block_num", cpu_blocks)

    def moved(self, free: int, evictable: int, total: int) -> None:
        """The free list has changed."""
        if self._gauges:
            self._set("free_gpu_block_num", free)
            self._set("available_gpu_block_num", free + evictable)
            self._set("available_gpu_resource", free / total if total else 0.0)

    def matched(self, rates: HitRates) -> None:
        """A request was matched."""
        if self._gauges:
            self._set("hit_req_rate", rates.hit_req_ratio)
            self._set("hit_token_rate", rates.hit_token_ratio)
            self._set("gpu_hit_token_rate", rates.gpu_hit_token_ratio)
            self._set("cpu_hit_token_rate", rates.cpu_hit_token_ratio)
