"""The names of the ranks' stores: pages and slices of bounded size, at a million names, and against
a model."""

from __future__ import annotations

import asyncio
import hashlib
from itertools import chain, count, islice, repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvactors.data_plane.ranks.connection import MemoryConnection
from kvactors.data_plane.ranks.leader import Link, Violation
from kvactors.data_plane.ranks.names import RankNames, in_slices, pages
from kvactors.data_plane.ranks.plane import RankStore
from kvactors.data_plane.ranks.protocol import PAGE_NAMES, Names, SendNames
from kvactors.testing.loop import simulate
from tests.ranks.manual import authenticated, come, group_at, identity, settle

MILLION = 1_000_000


def name(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def test_one_page_is_taken_ahead():
    taken = count()

    def source():
        for _ in range(1000):
            next(taken)
            yield b"n" * 32

    made = pages(source(), 10)
    for sent in range(1, 5):
        keys, last = next(made)
        assert (len(keys), last) == (320, False)
        assert next(taken) <= 10 * (sent + 1) + sent


def test_a_million_names_join_a_small_set_in_slices():
    names, held = RankNames(2), [name(i) for i in range(5000)]
    for rank, found in ((0, held), (1, held)):
        joining = names.join(rank, 0)
        joining.page(b"".join(found))
        assert max(joining.merge()) <= 2 * PAGE_NAMES
    again = names.join(1, 0)
    page, filler = b"".join(held[:100]), b"x" * 32 * PAGE_NAMES
    for keys in chain([page], repeat(filler, MILLION // PAGE_NAMES)):
        again.page(keys)
        assert len(again.seen) <= 100, "what the others do not hold is not kept"
    assert sum(again.merge()) == len(held) + 100
    assert set(names.held) == set(held[:100])
    lost = set()
    while page := names.lost():
        assert len(page) <= PAGE_NAMES
        lost |= set(page)
    assert lost == set(held[100:])


def test_slices_give_the_loop_back_after_so_many_names():
    async def main() -> None:
        turns = [0]

        async def other() -> None:
            while True:
                turns[0] += 1
                await asyncio.sleep(0)

        beside = asyncio.ensure_future(other())
        await in_slices(repeat(100, 100), 500)
        assert turns[0] in (19, 20, 21)
        beside.cancel()

    simulate(main)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sets(st.integers(0, 40)),
            st.sets(st.integers(0, 40)),
            st.booleans(),
        ),
        max_size=12,
    )
)
def test_names_against_a_model(steps):
    """Ranks join in any order, with pages of any size, while names are taken. Some leave before
    their last page."""
    names, model, joined, told = RankNames(3), None, set(), set()
    for rank, stored, taken, abandoned in steps:
        joining = names.join(rank, 0)
        keys = [name(one) for one in sorted(stored)]
        for start in range(0, len(keys), 7):
            joining.page(b"".join(keys[start : start + 7]))
        names.take([name(one) for one in taken])
        model = model - taken if model is not None else None
        if abandoned:
            joining.abandon()
            continue
        merging = joining.merge()
        for _ in islice(merging, 100):
            pass
        for _ in merging:
            pass
        everything = len(joined) == 3
        after = (stored if model is None else model & stored) - taken
        if everything and model is not None:
            told |= model - after
        model, joined = after, joined | {rank}
        assert set(names.held) == {name(one) for one in model}
        assert len(names) == len(model)
    lost = set()
    while page := names.lost(3):
        lost |= set(page)
    assert lost >= {name(one) for one in told if model is None or one not in model}
    assert not lost & set(names.held)


# -- a rank that joins


def linked(objects: int) -> tuple[Link, MemoryConnection]:
    ours, theirs = MemoryConnection.pair()
    return Link(ours, identity(0, objects=objects)), theirs


def test_pages_that_cannot_be_are_violations():
    async def main() -> None:
        link, _ = linked(5)
        with pytest.raises(Violation, match="not asked for"):
            link.names(Names(name(1)))
        asking = asyncio.ensure_future(link.next_page())
        await settle()
        for keys, word in (
            (b"x" * 31, "31 bytes"),
            (b"", "0 bytes"),
            (b"x" * 32 * (PAGE_NAMES + 1), "bytes of names"),
        ):
            with pytest.raises(Violation, match=word):
                link.names(Names(keys))
        with pytest.raises(Violation, match="6 names, 5 were announced"):
            link.names(Names(b"".join(map(name, range(6)))))
        asking.cancel()

    simulate(main)


def test_a_rank_that_stalls_while_it_joins_lets_the_others_join():
    async def main() -> None:
        group = group_at(startup_timeout_s=200.0)
        RankStore(group, 64, 1.0, exclusive=False)
        opening = asyncio.ensure_future(group.open())
        await settle()
        stalled = await authenticated()
        stalled.send(identity(0, objects=5))
        assert isinstance(await stalled.receive(), SendNames)
        assert group.statistics()[0].health == "joining"
        other = await come(1, name(1))
        assert [one.health for one in group.statistics()] == ["away", "healthy"]
        assert "no page of names" in group.statistics()[0].reason
        await come(0, name(1))
        await opening
        other.close()
        await group.close()

    simulate(main)
