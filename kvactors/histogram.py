"""Histograms with fixed bounds, as Prometheus counts them."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np
from numpy.typing import NDArray

SECONDS = (
    *(1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
"""Bounds for durations of operations, in seconds."""

AGES = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
    *(10, 20, 30, 60, 120, 300, 600, 1200, 1800),
)
"""Bounds for ages of blocks, in seconds: those of vLLM's histograms of blocks."""

BYTES = tuple(4**power * 1024 for power in range(12))
"""Bounds for sizes of transfers: 1 KiB to 4 GiB."""


class Histogram:
    """Counts of values up to each bound, and their sum.

    Attributes:
        bounds: ascending. Values above the last one are counted in a further bucket.
        counts: values of each bucket, not cumulative.
    """

    __slots__ = ("_array", "bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self._array = np.array(bounds)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, values: NDArray[Any]) -> None:
        buckets = np.bincount(
            np.searchsorted(self._array, values, side="left"), minlength=len(self.counts)
        )
        self.counts = [old + int(new) for old, new in zip(self.counts, buckets, strict=True)]
        self.total += float(values.sum())

    @property
    def count(self) -> int:
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, int]]:
        """Cumulative counts by upper bound, the last one `+Inf`."""
        found, below = list[tuple[str, int]](), 0
        for bound, count in zip((*self.bounds, None), self.counts, strict=True):
            below += count
            found.append(("+Inf" if bound is None else repr(float(bound)), below))
        return found
