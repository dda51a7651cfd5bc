"""Numbers of a manager, as FastDeploy counts them, and its gauges."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

WINDOW = 10_000  # requests after which the ratios start from zero

RATES = (
    "hit_req_ratio",
    "hit_token_ratio",
    "gpu_hit_token_ratio",
    "cpu_hit_token_ratio",
    "storage_hit_token_ratio",
    "gpu_tokens",
    "cpu_tokens",
    "storage_tokens",
)
"""Of `HitRates`, in the statistics too."""


class HitRates:
    """Counters of matches. Ratios are over the requests since the last multiple of `WINDOW`, sums
    of tokens over all."""

    def __init__(self) -> None:
        self.gpu_tokens = self.cpu_tokens = self.storage_tokens = 0
        self.reset_metrics()

    def reset_metrics(self) -> None:
        self.req_count = self.hit_req_count = 0
        self._sums = [0, 0, 0, 0]
        self._set_ratios()

    def matched(self, gpu: int, cpu: int, storage: int, total: int) -> None:
        """A request of `total` tokens was matched, with so many on device, host and storage."""
        self.req_count += 1
        self.hit_req_count += gpu + cpu + storage > 0
        self.gpu_tokens += gpu
        self.cpu_tokens += cpu
        self.storage_tokens += storage
        found = (gpu, cpu, storage, total)
        self._sums = [sum(pair) for pair in zip(self._sums, found, strict=True)]
        if self.req_count % WINDOW == 0:
            self.reset_metrics()
        else:
            self._set_ratios()

    def _set_ratios(self) -> None:
        *hits, total = self._sums
        shares = [tokens / total if total else 0.0 for tokens in (*hits, sum(hits))]
        self.gpu_hit_token_ratio, self.cpu_hit_token_ratio = shares[:2]
        self.storage_hit_token_ratio, self.hit_token_ratio = shares[2:]
        self.hit_req_ratio = self.hit_req_count / self.req_count if self.req_count else 0.0


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


GAUGES: dict[str, tuple[Callable[[ManagerStatistics], float], str]] = {
    "hit_req_rate": (lambda s: s.hit_req_ratio, "Requests with cached blocks, of all requests."),
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
    "available_gpu_resource": (
        lambda s: s.free_gpu_blocks / s.gpu_blocks if s.gpu_blocks else 0.0,
        "Free device blocks, of all.",
    ),
}
"""FastDeploy's gauges that its manager sets, by name: value and explanation."""
