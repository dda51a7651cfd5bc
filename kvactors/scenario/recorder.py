"""Time series of a run: what the page of a report draws.

The recorder reads `KVCache.statistics()` at a fixed interval of the loop's time. It keeps at most
`POINTS` samples: when they are full, every second one is dropped and the interval doubles.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import numpy as np

from kvactors.cache import KVCache
from kvactors.cpu_evictor.memory import NOT_FETCHED, NOT_STORED
from kvactors.observe.lag import LagMonitor, Tick
from kvactors.observe.metrics import Histograms, watch_of
from kvactors.observe.statistics import CacheStatistics

POINTS = 400
"""Samples kept at most."""

WINDOWS = 60
"""Windows of time for which rates are computed, at most. Shorter ones show mostly noise."""

INTERVAL = 0.05
"""Seconds between samples at the start."""

WORST = ("lag_ms", "own_lag_ms")
"""Series of the worst value since the sample before: the loop's lag, and the lag without waits for
a core."""


class Recording(msgspec.Struct):
    """Samples of a run.

    Attributes:
        host_slots: size of the host tier, without slots for blocks in transit.
    """

    seconds: list[float]
    series: dict[str, list[float]]
    device_blocks: int = 0
    host_slots: int = 0
    histograms: Histograms | None = None

    def rates(self, name: str) -> tuple[list[float], list[float]]:
        """Increase of a counter a second, in windows of about equal length."""
        count = len(self.seconds)
        ends = np.unique(np.linspace(0, count - 1, min(count, WINDOWS + 1)).astype(np.int64))
        seconds = np.asarray(self.seconds)[ends]
        rates = np.diff(np.asarray(self.series[name])[ends]) / np.diff(seconds)
        return seconds[1:].tolist(), rates.tolist()

    def shares(self, name: str, of: str) -> tuple[list[float], list[float]]:
        """Increase of a counter divided by that of another, in windows of about equal increase of
        the other.
        """
        whole = np.asarray(self.series[of])
        steps = np.linspace(whole[0], whole[-1], min(len(whole), WINDOWS // 2 + 1))
        ends = np.unique(np.searchsorted(whole, steps))
        below = np.diff(whole[ends])
        shares = np.diff(np.asarray(self.series[name])[ends]) / np.maximum(below, 1)
        return np.asarray(self.seconds)[ends[1:]].tolist(), shares.tolist()


class Recorder:
    """Samples a cache while `observing`. interval: seconds between samples at the start."""

    def __init__(self, interval: float = INTERVAL) -> None:
        self.recording = Recording([], {})
        self._interval = interval
        self._lag = LagMonitor()
        self._begin = 0.0

    @asynccontextmanager
    async def observing(self, cache: KVCache) -> AsyncIterator[Recorder]:
        """Sample a cache until the block ends, and once more then."""
        loop = asyncio.get_running_loop()
        self._begin = loop.time()
        self._sample(cache)
        watch = watch_of(cache.system)
        self.recording.histograms = watch.histograms
        watch.attach(cache.system)
        async with self._lag.running():
            task = loop.create_task(self._run(cache))
            try:
                yield self
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                watch.detach(cache.system)
                self._lag.take()  # what came last is the lag of making the report
                self._sample(cache)

    async def _run(self, cache: KVCache) -> None:
        while True:
            await asyncio.sleep(self._interval)
            self._sample(cache)

    def _sample(self, cache: KVCache) -> None:
        statistics, recording = cache.statistics(), self.recording
        recording.seconds.append(asyncio.get_running_loop().time() - self._begin)
        recording.device_blocks = statistics.prefix.blocks_total
        recording.host_slots = statistics.host.capacity
        for name, value in values_of(statistics, self._lag.take()).items():
            recording.series.setdefault(name, []).append(value)
        if len(recording.seconds) >= POINTS:
            self._thin_out()

    def _thin_out(self) -> None:
        recording = self.recording
        recording.seconds = recording.seconds[::2]
        for name, values in recording.series.items():
            pairs = (values[i : i + 2] for i in range(0, len(values), 2))
            recording.series[name] = list(map(max, pairs)) if name in WORST else values[::2]
        self._interval *= 2


def values_of(statistics: CacheStatistics, ticks: list[Tick]) -> dict[str, float]:
    """The values of a sample: counters, which only rise, and the present state. ticks: since the
    sample before."""
    prefix, host = statistics.prefix, statistics.host
    swapper, store = statistics.swapper, statistics.store
    return {
        "looked_up": statistics.blocks_looked_up,
        "device_hits": statistics.device_hits,
        "host_hits": statistics.host_hits,
        "storage_hits": statistics.storage_hits,
        "bytes_to_host": swapper.bytes_to_host,
        "bytes_to_device": swapper.bytes_to_device,
        "bytes_written": store.writes * store.object_bytes if store is not None else 0,
        "bytes_read": store.reads * store.object_bytes if store is not None else 0,
        "messages": statistics.messages,
        "tasks": sum(sink.delivered for sink in statistics.flush),
        **{name: getattr(host, name) for name in (*NOT_FETCHED, *NOT_STORED)},
        "device_used": prefix.blocks_total - prefix.blocks_free,
        "host_used": host.resident,
        "stored": store.objects if store is not None else 0,
        "leases": prefix.leases,
        "waiting": prefix.waiting,
        "pending": sum(sink.pending for sink in statistics.flush),
        "pending_age_s": max((sink.oldest_pending_age for sink in statistics.flush), default=0.0),
        "lag_ms": max((tick.lag for tick in ticks), default=0.0) * 1e3,
        "own_lag_ms": max((tick.own for tick in ticks), default=0.0) * 1e3,
    }
