"""A part that fails too often is switched off, visibly, and comes back. A failed cache raises in
every call and at its end."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

import kvactors
from kvactors.actor import Control, State
from kvactors.actor.supervisor import SWITCHED_OFF
from kvactors.testing import Sim
from kvactors.testing.loop import simulate
from kvactors.types import Tier
from tests.support.cache import opened, prompt, serve, settings

HOST = {"slots": 8, "transit_slots": 16}
STORE = {"backend": "memory", "write_policy": "write_through", "readers": 1, "writers": 1}


class Unwelcome(Control, frozen=True, eq=False):
    """A message that no actor handles: its receiver fails."""


def ref_of(cache, victim):
    system = cache.system
    refs = {"reader": system.readers, "writer": system.writers}
    return refs[victim][0] if victim in refs else getattr(system, victim)


async def fail(cache, victim, times):
    """Each time after the restart from the time before."""
    ref = ref_of(cache, victim)
    for _ in range(times):
        before = ref.incarnation
        ref.try_tell(Unwelcome())
        while ref.incarnation == before:
            await asyncio.sleep(0)
        while cache.system.supervisor.failed is None and not all(
            runs(actor) for actor in cache.system.supervisor.actors()
        ):
            await asyncio.sleep(0)


def runs(actor):
    return actor.state is State.RUNNING and actor.incarnation == actor.ref.incarnation


async def requests(cache, *seeds):
    """More blocks than the device has, so that they are offloaded, saved and loaded."""
    for seed in seeds:
        await serve(cache, f"request {seed}", prompt(seed, 6, tail=1))


@pytest.mark.parametrize("restarts", [0, 1, 3])
@pytest.mark.parametrize("victim", ["notifier", "reader", "writer"])
def test_an_optional_actor_that_fails_too_often_is_switched_off_and_comes_back(victim, restarts):
    async def main():
        async with opened(
            inline=True, host=HOST, storage=STORE, actors={"max_restarts_per_minute": restarts}
        ) as cache:
            await requests(cache, 1, 2, 3)
            assert cache.health() == ("ok", ())
            await fail(cache, victim, restarts)
            assert cache.health().status == "ok"
            await fail(cache, victim, 1)
            name = ref_of(cache, victim).name
            for seeds in ((1, 2, 3), (4, 5, 6), (1, 4)):  # the cache still serves
                await requests(cache, *seeds)
                health = cache.health()
                assert health.status == "degraded"
                assert [(one.component, "Unwelcome" in one.why) for one in health.reasons] == [
                    (name, True)
                ]
                assert any(name in line for line in cache.check())
            await cache.wait_idle()
            if victim == "notifier":
                with pytest.raises(kvactors.SinkError, match="switched off"):
                    await cache.wait_flushed()
            else:  # indexes still list what the store holds: docs/health.md
                await cache.wait_flushed()
                assert cache.count_divergent_blocks() == 0
                (sink,) = cache.sinks.values()
                assert sink.view()[Tier.STORAGE] == set(cache.system.backend.keys()) != set()
            await asyncio.sleep(SWITCHED_OFF + 1)
            assert cache.health() == ("ok", ())
            await requests(cache, 1, 2, 3)
            # `opened` checks at the end: every sink's view equals the tiers again

    simulate(main)


@pytest.mark.parametrize("victim", ["reader", "writer"])
def test_one_of_a_pool_that_is_switched_off_is_not_asked_while_another_works(victim):
    """Storage loses nothing: every block is saved, and found again."""

    async def main():
        storage = {**STORE, "readers": 2, "writers": 2}
        async with opened(
            inline=True,
            host={"slots": 2, "transit_slots": 16},
            storage=storage,
            actors={"max_restarts_per_minute": 0},
        ) as cache:
            await requests(cache, 1, 2)
            await fail(cache, victim, 1)
            assert [one.component for one in cache.health().reasons] == [ref_of(cache, victim).name]
            await requests(cache, 3, 4, 5, 1)
            await cache.wait_idle()
            host = cache.statistics().host
            assert host.write_failures == 0
            assert (
                host.fetched >= 4
            )  # of the six blocks of prompt 1, which were saved by the first request
            assert len(cache.system.backend.keys()) == 5 * 6
            await asyncio.sleep(SWITCHED_OFF + 1)

    simulate(main)


def test_an_actor_that_fails_again_soon_is_switched_off_for_longer():
    async def main():
        async with opened(
            inline=True, host=HOST, storage=STORE, actors={"max_restarts_per_minute": 2}
        ) as cache:
            await fail(cache, "reader", 3)
            for seconds in (SWITCHED_OFF, 2 * SWITCHED_OFF, 4 * SWITCHED_OFF):
                (off,) = cache.system.supervisor.switched_off.values()
                assert off.again_at - off.since == pytest.approx(seconds)
                await asyncio.sleep(seconds + 0.1)
                assert cache.health().status == "ok"
                await fail(cache, "reader", 1)
                assert cache.health().status == "degraded"
            await asyncio.sleep(8 * SWITCHED_OFF + 0.1)
            await asyncio.sleep(120)  # a long time without a failure
            await fail(cache, "reader", 2)
            assert cache.health().status == "ok"

    simulate(main)


def test_a_substitute_that_fails_ends_the_cache():
    async def main():
        async with kvactors.open(
            settings(host=HOST, storage=STORE, actors={"max_restarts_per_minute": 1}),
            inline_copies=True,
        ) as cache:
            await fail(cache, "notifier", 2)
            assert cache.health().status == "degraded"
            for _ in range(2):
                await fail(cache, "notifier", 1)
            assert cache.health().status == "failed"

    with pytest.raises(kvactors.CacheFailed, match="flush_notifier"):
        simulate(main)


CALLS = {
    "acquire": lambda cache: cache.acquire("a", [1, 2, 3]),
    "prefetch": lambda cache: cache.prefetch([1, 2, 3]),
    "clear": lambda cache: cache.clear(),
    "pause": lambda cache: cache.pause(),
    "resume": lambda cache: cache.resume(),
    "set_namespace": lambda cache: cache.set_namespace("n"),
    "wait_idle": lambda cache: cache.wait_idle(),
    "wait_flushed": lambda cache: cache.wait_flushed(),
}


@pytest.mark.parametrize("restarts", [0, 2])
@pytest.mark.parametrize("victim", ["index", "swapper", "evictor"])
def test_a_failed_cache_raises_in_every_call_and_at_its_end(victim, restarts):
    """The plane's budget is used up before the core's: an actor of it may fail more often."""

    async def main():
        async with kvactors.open(
            settings(host=HOST, storage=STORE, actors={"max_restarts_per_minute": restarts}),
            inline_copies=True,
        ) as cache:
            lease = await cache.acquire("held", prompt(1, 2))
            await lease.wait_ready()
            while cache.system.supervisor.failed is None:
                await fail(cache, victim, 1)
            name = ref_of(cache, victim).name
            for call in CALLS.values():
                with pytest.raises(kvactors.CacheFailed, match=name) as caught:
                    await call(cache)
                assert "Unwelcome" in str(caught.value.__cause__)
                assert caught.value.component == name
            for call in (lease.wait_ready(), lease.extend([1]), lease.commit(1)):
                with pytest.raises(kvactors.CacheFailed):
                    await call
            with pytest.raises(kvactors.CacheFailed):
                await asyncio.wrap_future(start_in_thread(cache))
            health = cache.health()
            assert health.status == "failed"
            assert [one.component for one in health.reasons] == [name]
            assert len(cache.check()) == 1
            assert name in cache.check()[0]

    with pytest.raises(kvactors.CacheFailed, match=r"TypeError"):
        asyncio.run(main())


def start_in_thread(cache):
    pool = ThreadPoolExecutor(1)
    future = pool.submit(cache.from_thread.acquire, "thread", [1, 2, 3])
    pool.shutdown(wait=False)
    return future


def test_the_blocks_own_exception_passes_with_a_note():
    async def main():
        async with kvactors.open(
            settings(actors={"max_restarts_per_minute": 0}), inline_copies=True
        ) as cache:
            await fail(cache, "index", 1)
            raise LookupError("engine")

    with pytest.raises(LookupError, match="engine") as caught:
        simulate(main)
    assert any("the cache has failed: prefix_index" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_request_in_flight_is_given_the_root_cause(restarts):
    """PrefixIndex is cancelled because CpuEvictor failed too often: the asker is given that, not a
    CancelledError."""

    async def main():
        async with kvactors.open(
            settings(host=HOST, actors={"max_restarts_per_minute": restarts}), inline_copies=True
        ) as cache:
            await cache.pause()
            waiting = asyncio.ensure_future(cache.acquire("waiting", prompt(1, 2), deadline=600.0))
            await asyncio.sleep(0.01)
            while not waiting.done():
                await fail(cache, "evictor", 1)
            error = waiting.exception()
            assert isinstance(error, kvactors.ActorFailed | kvactors.CacheFailed)
            assert "cpu_evictor" in str(error)
            assert "Unwelcome" in str(error)

    if restarts:
        simulate(main)
    else:
        with pytest.raises(kvactors.CacheFailed):
            simulate(main)


def test_a_copy_that_hangs_is_a_miss_with_default_deadlines():
    """The lease's next calls are beyond the time at which a late load is given up."""
    sim = Sim(1)

    async def main():
        async with sim.open(device={"num_blocks": 8}, storage={"backend": "none"}) as cache:
            async with await cache.acquire("r", [1] * 48) as lease:
                await lease.wait_ready()
                await lease.commit(48)
            async with await cache.acquire("moves them to the host", [2] * 64):
                pass
            await cache.wait_idle()
            sim.faults.copies.gate.close()
            async with await cache.acquire("again", [1] * 17) as lease:
                assert lease.pending
                await lease.wait_ready()
                assert lease.cached_tokens == 0
            sim.faults.copies.gate.open()

    sim.run(main)
