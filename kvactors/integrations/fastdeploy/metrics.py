"""Numbers of a manager, and the values of FastDeploy's gauges."""

from __future__ import annotations

from typing import NamedTuple

WINDOW = 10_000  # requests after which the ratios start from zero


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
    gpu_tokens: int
    cpu_tokens: int
    storage_tokens: int
    written_blocks: int
    failed_blocks: int

    def gauges(self) -> dict[str, float]:
        """The values of the gauges that FastDeploy's manager sets, by name."""
        return {
            "hit_req_rate": self.hit_req_ratio,
            "hit_token_rate": self.hit_token_ratio,
            "gpu_hit_token_rate": self.gpu_hit_token_ratio,
            "cpu_hit_token_rate": self.cpu_hit_token_ratio,
            "available_gpu_block_num": self.free_gpu_blocks + self.evictable_gpu_blocks,
            "free_gpu_block_num": self.free_gpu_blocks,
            "max_gpu_block_num": self.gpu_blocks,
            "max_cpu_block_num": self.cpu_blocks,
            "available_gpu_resource": _share(self.free_gpu_blocks, self.gpu_blocks),
        }
