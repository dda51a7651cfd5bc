"""Python's cyclic garbage collector, whose passes stop the loop: which objects it visits, and that
the cache leaves it nothing to free."""

from __future__ import annotations

import gc
from contextlib import contextmanager

import pytest

from tests.support.cache import opened, prompt, serve


@contextmanager
def collector_off():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def fill(cache, seeds) -> None:
    for seed in seeds:
        await serve(cache, f"r{seed}", prompt(seed, 40))
    await cache.wait_idle()


def store(folder, blocks):
    return {
        "backend": "file",
        "directory": str(folder),
        "capacity_blocks": blocks,
        "write_policy": "write_through",
    }


def visited() -> int:
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.parametrize(
    ("stored", "parts", "most"),
    [(False, {"sinks": ()}, 0), (True, {"sinks": ()}, 0), (True, {}, 2)],
    ids=["host", "store", "sink"],
)
async def test_the_collector_visits_few_objects_a_block(stored, parts, most, tmp_path):
    """A block of the memory sink has an object in the ledger and one in the sink. Without a sink
    there is none."""
    storage = store(tmp_path, 4000) if stored else {}
    host = {"slots": 2000, "transit_slots": 80}
    async with opened(device=80, host=host, storage=storage, **parts) as cache:
        await fill(cache, range(10))
        with collector_off():
            before, resident = visited(), cache.statistics().host.resident
            await fill(cache, range(10, 30))
            blocks = cache.statistics().host.resident - resident
            assert blocks >= 700
            assert visited() - before <= (most + 0.5) * blocks


async def test_requests_leave_no_cyclic_garbage(tmp_path):
    host = {"slots": 200, "transit_slots": 80}
    async with opened(device=80, host=host, storage=store(tmp_path, 100)) as cache:
        await fill(cache, range(4))
        with collector_off():
            await fill(cache, [*range(4), *range(4, 8), *range(4)])
            assert gc.collect() == 0
            assert cache.statistics().host.loaded > 0
