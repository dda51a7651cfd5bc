"""`clear(storage=True)`: when it returns no earlier block can be hit, with any number of writers,
restarted or killed. Otherwise it raises."""

from __future__ import annotations

import asyncio

import pytest

import kvactors
from kvactors.actor import Control
from kvactors.errors import DeadlineExceeded, StoreError
from kvactors.layout import make_layout
from kvactors.storage.guarded import GuardedBackend
from kvactors.storage.memory import MemoryBackend
from kvactors.storage.messages import Outcome
from kvactors.testing.fakes import SimBackend
from kvactors.testing.loop import simulate
from kvactors.testing.store_contract import key as key_of
from kvactors.testing.store_contract import never
from tests.storage.helpers import cached_config, serve


def store_for(settings, **options):
    layout = make_layout(settings.layout, settings.cache.block_size)
    return SimBackend(layout.fingerprint, layout.block_bytes, **options)


def test_a_failed_clear_raises_and_nothing_is_hit_until_one_succeeds():
    settings = cached_config(backend="memory", writers=2)
    store = store_for(settings)

    async def main():
        async with kvactors.open(settings, backend=store, inline_copies=True) as cache:
            for seed in range(4):
                await serve(cache, seed)
            await cache.wait_idle()
            clear = store.clear

            async def refuse(_generation=0):
                raise OSError(5, "Input/output error")

            store.clear = refuse
            with pytest.raises(StoreError, match=r"could not be cleared.*Input/output error"):
                await cache.clear(storage=True)
            assert cache.health().status == "degraded"
            assert sum(await serve(cache, 1)) == 0
            await cache.wait_idle()
            store.clear = clear
            await cache.clear(storage=True)
            assert store.objects == {}
            await serve(cache, 9)
            await cache.wait_idle()
            assert len(store.objects) == 4

    simulate(main, seed=1)


def test_a_clear_that_takes_longer_than_its_deadline_raises_and_is_completed_later():
    settings = cached_config(backend="memory", writers=2)
    store = store_for(settings)

    async def main():
        async with kvactors.open(settings, backend=store, inline_copies=True) as cache:
            await serve(cache, 1)
            await cache.wait_idle()
            store.latency = lambda: 10.0
            with pytest.raises(DeadlineExceeded):
                await cache.clear(storage=True, deadline=1.0)
            assert sum(await serve(cache, 1, save=False)) == 0
            await cache.wait_idle()
            store.latency = lambda: 0.0
            assert sum(await serve(cache, 1, save=False)) == 0
            assert store.objects == {}

    simulate(main, seed=1)


@pytest.mark.parametrize("victim", ["writers", "evictor"])
def test_a_clear_outlives_an_actor_that_fails_in_between(victim):
    settings = cached_config(backend="memory", writers=2)
    store = store_for(settings)

    class Unwelcome(Control, frozen=True, eq=False):
        pass

    async def main():
        async with kvactors.open(settings, backend=store, inline_copies=True) as cache:
            for seed in range(4):
                await serve(cache, seed)
            await cache.wait_idle()
            store.latency = lambda: 0.2
            clearing = asyncio.create_task(cache.clear(storage=True))
            await asyncio.sleep(0.1)
            ref = cache.system.evictor if victim == "evictor" else cache.system.writers[0]
            ref.try_tell(Unwelcome())
            await clearing
            assert store.objects == {}
            for seed in range(4):
                assert sum(await serve(cache, seed, save=False)) == 0

    simulate(main, seed=1)


@pytest.mark.parametrize("second", ["in progress", "ended", "failed"])
async def test_a_write_that_repeats_a_failed_clear_is_not_written_if_another_clear_began(second):
    """The write is not registered while it clears, so the other clear does not wait for it."""
    inner = MemoryBackend(bytes(32), 16)
    store = GuardedBackend(inner, 60.0)
    release, results = [], []

    async def clear(_generation=0):
        answer = asyncio.get_running_loop().create_future()
        release.append(answer)
        await answer

    inner.clear = clear

    def start(work):
        results.append(asyncio.create_task(work))
        return results[-1]

    async def begun(count):
        while len(release) < count:
            await asyncio.sleep(0)

    failed = start(store.clear())
    await begun(1)
    release[0].set_exception(OSError("no"))
    with pytest.raises(StoreError):
        await failed
    writing = start(store.write([key_of(1)], [memoryview(bytes(16))], never))
    await begun(2)
    clearing = start(store.clear())
    await begun(3)
    if second != "in progress":
        if second == "ended":
            release[2].set_result(None)
        else:
            release[2].set_exception(OSError("no"))
        await asyncio.wait([clearing])
    release[1].set_result(None)
    assert list((await writing).outcomes) == [Outcome.LATE]
    if second == "in progress":
        release[2].set_result(None)
    await asyncio.wait([clearing])
    assert isinstance(clearing.exception(), StoreError if second == "failed" else type(None))
    assert inner.objects == {}
    assert store.probe([key_of(1)]) == 0
