"""Tables of very many keys grow and are freed a little at a time, and checks use them."""

from __future__ import annotations

import hashlib

import pytest

from kvactors import tables
from kvactors.observe.invariants import check_steps
from kvactors.tables import FREED_SHARDS, SHARDS, ShardedDict, ShardedSet
from tests.support.cache import opened, prompt, serve

MANY = 20_000


def violations(cache, found):
    """The steps of a check, whose result is added to a list."""
    found += yield from check_steps(cache.system)


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


@pytest.mark.parametrize("kind", [ShardedSet, ShardedDict])
def test_a_step_frees_few_keys(kind):
    table = filled(kind, names(MANY))
    left = MANY
    for _ in table.free():
        assert left - len(table) < 4 * FREED_SHARDS * MANY / SHARDS
        left = len(table)
    assert left == 0


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
        cache.system.notifier_actor.ledger.tree.step = 4
        violated, largest = [], 0
        for _ in violations(cache, violated):
            largest = max(largest, sum(map(len, made)))
    assert violated == []
    assert largest > 0
    assert [len(table) for table in made] == [0] * len(made)
    assert len({type(table) for table in made}) == 2
