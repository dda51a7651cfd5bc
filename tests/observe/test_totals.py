"""Counters of `cache.statistics()` go on across restarts of actors, and have names in JSON."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from kvactors.actor import Instrument, counters_of
from kvactors.data_plane.base import Direction
from kvactors.gpu_swapper.messages import CopyFinished
from kvactors.prefix_index.messages import Acquire
from kvactors.testing.loop import simulate
from tests.cache.test_degraded import HOST, STORE, fail, requests
from tests.support.cache import opened

VICTIMS = ("index", "evictor", "swapper", "notifier", "reader", "writer")


class Model(Instrument):
    """Counts messages and turns by itself, across restarts."""

    def __init__(self):
        self.seen = Counter()
        self.turns = Counter()

    def answered(self, receiver, envelope, value, error):
        if isinstance(envelope.message, Acquire) and error is None:
            self.seen["requests"] += 1

    def finished(self, receiver, envelope):
        self.turns[receiver.name] += 1
        if isinstance(envelope.message, CopyFinished):
            to_host = envelope.message.direction is Direction.TO_HOST
            name = "blocks_to_host" if to_host else "blocks_to_device"
            self.seen[name] += envelope.message.pairs - len(envelope.message.failed)


def counters(statistics, where=""):
    """Every counter of a record and of the records in it, by its path."""
    for name, value in zip(statistics._fields, statistics, strict=True):
        path = f"{where}.{name}"
        if name in counters_of(type(statistics)):
            yield path, value
        elif hasattr(value, "_fields"):
            yield from counters(value, path)
        elif isinstance(value, tuple):
            for item in value:
                yield from counters(item, f"{path}.{item.name}")


@pytest.mark.parametrize("seed", range(3))
def test_counters_never_fall_back_and_add_up_over_restarts(seed):
    async def main():
        model = Model()
        async with opened(
            inline=True, host=HOST, storage=STORE, actors={"max_restarts_per_minute": 50}
        ) as cache:
            cache.system.supervisor.instruments.add(model)
            before = Counter(
                {actor.ref.name: actor.turns for actor in cache.system.supervisor.actors()}
            )
            last: dict[str, float] = {}
            stop = False

            def look():
                for path, value in counters(cache.statistics()):
                    assert value >= last.get(path, 0), path
                    last[path] = value

            async def watch():
                while not stop:
                    look()
                    await asyncio.sleep(0)

            watcher = asyncio.create_task(watch())
            for round_ in range(2):
                for victim in VICTIMS:
                    await requests(cache, 2 * round_, 2 * round_ + 1)
                    await fail(cache, victim, 1)
            await requests(cache, 9)
            await cache.wait_idle()
            stop = True
            await watcher
            found = cache.statistics()
            assert found.requests == found.prefix.requests == model.seen["requests"] >= 25
            assert found.swapper.blocks_to_host == model.seen["blocks_to_host"] > 0
            assert found.swapper.blocks_to_device == model.seen["blocks_to_device"]
            turns = {actor.name: actor.turns for actor in found.actors}
            failed = Counter(actor.name for actor in found.actors for _ in range(actor.restarts))
            assert failed  # the turn of the message that fails an actor does not finish
            for name, count in turns.items():
                missing = count - before[name] - model.turns[name]
                assert 0 <= missing <= failed[name], name

    simulate(main, seed)


def test_the_counters_of_sinks_stay_while_the_notifier_is_switched_off():
    async def main():
        async with opened(
            inline=True, host=HOST, storage=STORE, actors={"max_restarts_per_minute": 0}
        ) as cache:
            await requests(cache, 1)
            await cache.wait_flushed()
            (before,) = cache.statistics().flush
            assert before.delivered > 0
            await fail(cache, "notifier", 1)
            assert cache.system.supervisor.switched_off
            (after,) = cache.statistics().flush
            assert (after.name, after.delivered) == (before.name, before.delivered)
            assert after.pending == 0
            await asyncio.sleep(100)  # until it is switched on again
            (again,) = cache.statistics().flush
            assert again.delivered > before.delivered

    simulate(main, 1)
