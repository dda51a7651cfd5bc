"""Hostile callers: reused buffers, cancelled waits, forks and shutdowns at bad moments."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from kvactors import CacheClosed
from kvactors.flush_notifier.sinks.memory import MemorySink
from kvactors.settings.sinks import MemorySinkConfig
from kvactors.tier_cache import Lookup, SlotMemory, TierCache
from kvactors.tier_cache.settings import checked_config
from tests.tier_cache.helpers import BLOCK, KEYS, LIMIT, on_disk, store


class HangingSink(MemorySink):
    """Never returns from a delivery."""

    async def deliver(self, tasks):
        import asyncio

        await asyncio.Future()


def with_sink(sink: MemorySink, **storage: object) -> TierCache:
    table = {
        "model": "m",
        "block_bytes": BLOCK,
        "num_slots": 4,
        "tokens_per_block": 2,
        "storage": {"close_timeout_s": 1.0, **storage},
    }
    return TierCache(checked_config(table), SlotMemory(4, BLOCK), sinks=[sink])


def hanging() -> HangingSink:
    return HangingSink(MemorySinkConfig(tiers=("host",)), 2)


@pytest.mark.parametrize("backend", ["none", "memory"])
def test_a_shutdown_with_a_sink_that_hangs_is_bounded(backend):
    cache = with_sink(hanging(), backend=backend)
    assert cache.sinks is not None
    cache.sinks.describe(KEYS[:1], [1, 2])
    store(cache, KEYS[:1])
    cache.end_step()
    assert not cache.sinks.wait_flushed(0.05)
    began = time.monotonic()
    cache.shutdown()
    assert time.monotonic() - began < LIMIT
    assert not cache.sinks.wait_flushed(1.0)
    cache.sinks.describe(KEYS[:1], [1, 2])
    cache.shutdown()


def serve_without_end(cache: TierCache) -> None:
    for key in itertools.cycle(KEYS[:40]):
        if cache.lookup(key) is Lookup.MISS:
            cache.complete_store(cache.prepare_store([key]).keys)
        cache.end_step()


def test_shutdown_at_any_moment_of_a_busy_owner(tmp_path):
    """The owner gets CacheClosed from one call on, and nothing else."""
    for i in range(12):
        cache = on_disk(tmp_path / str(i), num_slots=4, close_timeout_s=2.0)
        cache.start()
        closer = threading.Timer(0.002 * i, cache.shutdown)
        closer.start()
        with pytest.raises(CacheClosed):
            serve_without_end(cache)
        closer.join(LIMIT)
        assert not closer.is_alive()
