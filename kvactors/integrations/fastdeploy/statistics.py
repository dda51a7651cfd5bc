"""Numbers of a manager, as FastDeploy counts them, and its gauges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kvactors.integrations.fastdeploy.device_cache import DeviceCache
from kvactors.integrations.fastdeploy.lower_tiers import WriteCounters

WINDOW = 10_000
"""Requests after which the rates start from zero."""


class HitTokens(NamedTuple):
    """Tokens of a request, by the tier that had them."""

    gpu: int
    cpu: int
    storage: int
    total: int


class HitRates:
    """Counters of matches. Rates are over the requests since the last multiple of `WINDOW`, sums of
    tokens over all.
    """

    def __init__(self) -> None:
        self.gpu_tokens = self.cpu_tokens = self.storage_tokens = 0
        self.reset_metrics()

    def reset_metrics(self) -> None:
        """Rates start from zero."""
        self.req_count = self.hit_req_count = 0
        self._hits = HitTokens(0, 0, 0, 0)

    def matched(self, hit: HitTokens) -> None:
        """A request was matched."""
        self.req_count += 1
        self.hit_req_count += bool(hit.gpu + hit.cpu + hit.storage)
        self.gpu_tokens += hit.gpu
        self.cpu_tokens += hit.cpu
        self.storage_tokens += hit.storage
        self._hits = HitTokens(*(a + b for a, b in zip(self._hits, hit, strict=True)))
        if self.req_count % WINDOW == 0:
            self.reset_metrics()

    @property
    def hit_req_ratio(self) -> float:
        """Requests with a hit, of all."""
        return self.hit_req_count / self.req_count if self.req_count else 0.0

    @property
    def hit_token_ratio(self) -> float:
        """Matched tokens, of all."""
        return self._share(self._hits.gpu + self._hits.cpu + self._hits.storage)

    @property
    def gpu_hit_token_ratio(self) -> float:
        """Tokens matched on the device, of all."""
        return self._share(self._hits.gpu)

    @property
    def cpu_hit_token_ratio(self) -> float:
        """Tokens matched in host memory, of all."""
        return self._share(self._hits.cpu)

    @property
    def storage_hit_token_ratio(self) -> float:
        """Tokens matched in storage, of all."""
        return self._share(self._hits.storage)

    def _share(self, tokens: int) -> float:
        return tokens / self._hits.total if self._hits.total else 0.0


class ManagerStatistics(NamedTuple):
    """Sizes of this moment, and counters since the start.

    Attributes:
        written_blocks, present_blocks, failed_blocks: of finished requests: written to storage,
            stored before, not taken.
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

    @property
    def free_share(self) -> float:
        """Free device blocks, of all."""
        return self.free_gpu_blocks / self.gpu_blocks if self.gpu_blocks else 0.0


GAUGES: dict[str, tuple[Callable[[ManagerStatistics], float], str]] = {
    "hit_req_rate": (
        lambda s: s.hit_req_ratio,
        "Requests with cached blocks, of all requests.",
    ),
    "hit_token_rate": (lambda s: s.hit_token_ratio, "Cached tokens, of all."),
    "gpu_hit_token_rate": (lambda s: s.gpu_hit_token_ratio, "Tokens cached on the device, of all."),
    "cpu_hit_token_rate": (
        lambda s: s.cpu_hit_token_ratio,
        "Tokens cached in host memory, of all.",
    ),
    "available_gpu_block_num": (
        lambda s: s.free_gpu_blocks + s.evictable_gpu_blocks,
        "Device blocks that are free or evictable.",
    ),
    "free_gpu_block_num": (lambda s: s.free_gpu_blocks, "Free device blocks."),
    "max_gpu_block_num": (lambda s: s.gpu_blocks, "Device blocks."),
    "max_cpu_block_num": (lambda s: s.cpu_blocks, "Blocks of the host tier."),
    "available_gpu_resource": (lambda s: s.free_share, "Free device blocks, of all."),
}
"""FastDeploy's gauges that its manager sets, by name: value and explanation."""


def statistics_of(cache: DeviceCache, rates: HitRates, cpu_blocks: int) -> ManagerStatistics:
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
    )


class EngineGauges:
    """FastDeploy's `main_process_metrics`, which its manager sets.

    Args:
        gauges: an object with FastDeploy's gauges as attributes. None: nothing is set.
    """

    def __init__(self, gauges: Any) -> None:
        self._gauges: dict[str, Any] = (
            {} if gauges is None else {name: getattr(gauges, name) for name in GAUGES}
        )

    def set(self, statistics: Callable[[], ManagerStatistics]) -> None:
        """A call of the manager has ended."""
        if self._gauges:
            now = statistics()
            for name, gauge in self._gauges.items():
                gauge.set(GAUGES[name][0](now))
