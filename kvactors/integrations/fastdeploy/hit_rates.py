"""Hits of requests, as FastDeploy counts them."""

from __future__ import annotations

from typing import NamedTuple

WINDOW = 10_000
"""Requests after which the rates start from zero."""


class HitTokens(NamedTuple):
    """Tokens of a request, by the tier that had them.

    Attributes:
        total: tokens of the request.
    """

    gpu: int
    cpu: int
    storage: int
    total: int


class HitRates:
    """Counters of matches. Rates are over the requests since the last multiple of `WINDOW`, sums of
    tokens over all.

    Attributes:
        req_count, hit_req_count: requests, and those with a hit.
        gpu_tokens, cpu_tokens, storage_tokens: tokens matched since the start.
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
