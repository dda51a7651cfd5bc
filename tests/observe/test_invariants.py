"""check() and its form for production: the same findings, in small steps, and no finding that is
none."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict

import pytest

from kvactors import tables
from kvactors.errors import NoRoom
from kvactors.observe.invariants import (
    PAGE_KEYS,
    _between_actors,
    _unfinished,
    check_steps,
    residency_steps,
)
from kvactors.tables import SHARDS, ShardedDict, ShardedSet
from kvactors.types import Tier
from tests.support.cache import opened, prompt, serve

HOST = {"slots": 8, "transit_slots": 16, "mode": "inclusive"}
STORE = {"backend": "memory", "write_policy": "write_through"}


def violations(cache, found):
    """The steps of a check, whose result is added to a list."""
    found += yield from check_steps(cache.system)


async def test_a_violation_is_found_in_both_forms():
    async with opened(host=HOST, storage=STORE) as cache:
        await serve(cache, "a", prompt(1, 4))
        await cache.wait_flushed()
        assert cache.check() == await cache.check_slices() == []
        assert cache.count_divergent_blocks() == 0
        entries = cache.system.evictor_actor.host.blocks
        key, entry = entries.popitem()
        assert cache.check() != []
        assert await cache.check_slices() == cache.check()
        entries[key] = entry


async def test_a_comparison_ends_when_the_system_is_not_at_rest_any_more():
    async with opened(host=HOST, storage=STORE) as cache:
        await serve(cache, "a", prompt(1, 4))
        await cache.wait_flushed()
        held = cache.sinks["memory"].live_view[Tier.DEVICE]
        key = next(iter(held))
        for in_between in (True, False):
            violated: list[str] = []
            for i, _ in enumerate(_between_actors(cache.system, violated)):
                if not i:  # the sink's view changes, with messages or without
                    held.discard(key)
                    cache.system.in_flight.begin(in_between)
                    cache.system.in_flight.end(in_between)
            assert bool(violated) is not in_between
        held.add(key)


async def test_a_comparison_ends_after_an_inline_turn():
    """It sends no message."""
    async with opened(sinks=()) as cache:
        await asyncio.sleep(0.05)
        violated: list[str] = []
        steps = _between_actors(cache.system, violated)
        next(steps)
        begun = cache.system.in_flight.begun
        lease = await cache.acquire("a", prompt(1, 2))
        assert cache.system.in_flight.begun == begun
        assert list(steps) == []
        await lease.finish()
        assert cache.system.index_actor.turns == 2


async def test_an_actor_that_changed_between_two_steps_is_checked_again():
    async with opened() as cache:
        actor = cache.system.index_actor
        broken = False

        def steps():
            yield
            actor.mailbox.turns += 1
            raise AssertionError("seen in passing")

        def check():
            if broken:
                raise AssertionError("really so")

        actor.check_steps, actor.check = steps, check
        assert await cache.check_slices() == []
        broken = True
        assert await cache.check_slices() == ["prefix_index: really so"]
        broken = False


def counting(table: type) -> type:
    """A table that counts the names that are looked at."""

    class Counting(table):
        looked = 0

        def __iter__(self):
            for name in super().__iter__():
                Counting.looked += 1
                yield name

        def items(self):
            return ((name, self[name]) for name in self)

    return Counting


async def test_no_step_looks_at_more_names_of_a_tier_than_a_page():
    blocks = 3 * PAGE_KEYS + 1
    host = {"slots": blocks, "transit_slots": 16, "mode": "inclusive"}
    async with opened(device=blocks, host=host, storage=STORE) as cache:
        await serve(cache, "long", prompt(1, blocks), verify=False)
        await cache.wait_flushed()
        tier, catalog = cache.system.evictor_actor.host, cache.system.backend.catalog
        entries = tier.blocks = counting(dict)(tier.blocks)
        names = catalog._names = counting(OrderedDict)(catalog._names)
        where, before, most = {}, 0, 0
        for _ in residency_steps(cache.system, where):
            looked = type(entries).looked + type(names).looked
            most, before = max(most, looked - before), looked
        assert {tier: len(found) for tier, found in where.items()} == dict.fromkeys(Tier, blocks)
        assert 0 < most <= PAGE_KEYS
        tier.blocks, catalog._names = dict(entries), OrderedDict(names)


@pytest.mark.parametrize("times", [1, 10])
async def test_names_that_change_while_they_are_gathered_are_gathered_again(times):
    blocks = 3 * PAGE_KEYS + 1
    async with opened(
        device=blocks, host={"slots": 2 * blocks, "transit_slots": 16, "mode": "inclusive"}
    ) as cache:
        await serve(cache, "long", prompt(1, blocks), verify=False)
        await cache.wait_flushed()
        entries = cache.system.evictor_actor.host.blocks
        kept, where = set(entries), {}
        for _ in residency_steps(cache.system, where):
            if where[Tier.HOST] and times:
                times -= 1
                entries[bytes([times]) * 32] = next(iter(entries.values()))
        assert where[Tier.HOST] >= kept
        for number in range(10):
            entries.pop(bytes([number]) * 32, None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nodes_referenced": 2}, "2 blocks are referenced"),
        ({"blocks_free": 0, "evictable": 0}, "0 free and 0 evictable"),
    ],
)
async def test_a_block_in_use_without_a_lease_is_found_at_rest(change, words, monkeypatch):
    async with opened() as cache:
        await serve(cache, "a", prompt(1, 3))
        await cache.wait_idle(10)
        core = cache.system.index_actor
        statistics = core.index_statistics()
        with monkeypatch.context() as patch:
            patch.setattr(type(core), "index_statistics", lambda _: statistics._replace(**change))
            [found] = cache.check()
        assert words in found


@pytest.mark.parametrize(
    ("leave", "words"),
    [
        (lambda index, _: index.index.loading.update({0: None}), "1 blocks are loading"),
        (lambda _, evictor: evictor.memory.loads.update({9: None}), "1 loads have not ended"),
        (lambda index, _: setattr(index.ref, "_asks", [None]), "1 calls have no answer"),
    ],
    ids=["block", "load", "call"],
)
async def test_work_that_no_actor_will_end_is_found_at_rest(leave, words):
    async with opened(host=HOST) as cache:
        await serve(cache, "a", prompt(1, 3))
        await cache.wait_idle(10)
        index, evictor = cache.system.index_actor, cache.system.evictor_actor
        asks = index.ref._asks
        leave(index, evictor)
        found = list(_unfinished(cache.system))
        index.index.loading.clear()
        evictor.memory.loads.clear()
        index.ref._asks = asks
        assert [words in one for one in found] == [True]
        assert cache.check() == []


async def test_nothing_is_reported_in_any_iteration_of_the_loop():
    """One cache and one caller at a time, so that the loop is idle between an answer and the
    caller that takes it: every such moment is checked."""
    found: list[str] = []

    async def look(cache):
        while True:
            found.extend(cache.check())
            await asyncio.sleep(0)

    async with opened(device=4, host=HOST, storage=STORE) as cache:
        looker = asyncio.create_task(look(cache))
        for round_ in range(8):
            await serve(cache, f"client {round_}", prompt(round_ % 3, 3, tail=1))
            with pytest.raises(NoRoom):
                await cache.acquire("large", prompt(9, 12), deadline=1)
            await cache.prefetch(prompt(round_ % 3, 3))
            await cache.pause(deadline=10)
            await cache.set_namespace(f"weights {round_ // 4}")
            await cache.resume()
            await cache.clear(storage=round_ % 2 == 1)
        looker.cancel()
    assert found == []


# -- tables that grow and are freed a little at a time


MANY = 20_000


def names(count):
    return [hashlib.sha256(number.to_bytes(4, "big")).digest() for number in range(count)]


def filled(kind, keys):
    table = kind()
    if isinstance(table, ShardedSet):
        table.update(keys)
    else:
        for key in keys:
            table.of(key)[key] = 1
    return table


@pytest.mark.parametrize("kind", [ShardedSet, ShardedDict])
def test_no_small_table_has_many_keys(kind):
    table = filled(kind, names(MANY))
    assert len(table) == MANY
    assert max(map(len, table.shards)) < 4 * MANY / SHARDS


async def test_a_check_frees_what_it_made_in_steps(monkeypatch):
    """Nothing that has an entry for each block is left for the end of a check."""
    made = []

    def noted(kind):
        init = kind.__init__

        def note(self, *arguments):
            init(self, *arguments)
            made.append(self)

        monkeypatch.setattr(kind, "__init__", note)

    noted(ShardedSet)
    noted(ShardedDict)
    monkeypatch.setattr(tables, "FREED_SHARDS", 1)
    async with opened(device=32, host={"slots": 8, "transit_slots": 16}) as cache:
        for number in range(4):
            await serve(cache, f"{number}", prompt(number, 5))
        await cache.wait_flushed()
        violated, largest = [], 0
        for _ in violations(cache, violated):
            largest = max(largest, sum(map(len, made)))
    assert violated == []
    assert largest > 0
    assert [len(table) for table in made] == [0] * len(made)
    assert len({type(table) for table in made}) == 2
