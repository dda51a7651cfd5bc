"""Announcements: the messages to the notifier and their order."""

from __future__ import annotations

import pytest

from kvactors.flush_notifier.messages import BlocksAdded, TierCleared
from kvactors.identity import PLAIN, RequestScope
from kvactors.prefix_index import reports as module
from kvactors.prefix_index.reports import Announcements
from kvactors.prefix_index.settings import IndexSettings, Roots
from kvactors.prefix_index.work import NextSlice
from kvactors.types import Reason
from tests.prefix_index.objects import RecordedIndexEffects, block_index, effects_of, path, work_of

ROOT, OTHER = b"r" * 32, b"o" * 32


@pytest.fixture
def index():
    return block_index(16, part=2)


def made(index, *, enabled=True, whole=False):
    settings = IndexSettings(exclusive=True, host_tier=True, announce=enabled, announce_whole=whole)
    roots = Roots("model", "a", bytes(32))
    return Announcements(index, RecordedIndexEffects(), roots, settings)


def cached(index, blocks, *, root=ROOT, first=0):
    """A path of committed blocks."""
    one = path(blocks, first=first, root=root)
    index.tree.pin(one)
    one.assign(0, index.take(blocks))
    index.tree.commit(one, blocks)
    return one


def whole_walk(news, effects):
    """Every message of a walk, in order. effects: of its first turn."""
    found = []
    while effects and isinstance(effects[-1], NextSlice):
        *done, last = effects
        found += done
        effects = work_of(news._out, last.work)
    return found + effects


def test_blocks_below_a_forgotten_root_are_reported_by_their_hashes(index, monkeypatch):
    monkeypatch.setattr(module, "REMEMBERED_SCOPES", 2)
    news = made(index)
    for root in (ROOT, OTHER, ROOT, b"x" * 32):
        news.remember(root, RequestScope(salt=root.hex()))
    assert list(news.scopes) == [ROOT, b"x" * 32], "the least recently used is forgotten"
    [gained] = effects_of(news.cached, cached(index, 2, root=OTHER), 0, 2, Reason.COMMIT)
    assert isinstance(gained, BlocksAdded)


def test_the_number_of_an_adapter_stays_until_another_is_given(index):
    news = made(index)
    for number, expected in ((7, 7), (None, 7), (8, 8)):
        news.remember(ROOT, RequestScope(lora="a", lora_id=number))
        assert news.scopes[ROOT].lora_id == expected
        news.remember(OTHER, PLAIN)


def test_a_walk_does_not_announce_blocks_of_a_forgotten_root_as_others(index):
    news = made(index)
    news.remember(ROOT, RequestScope(salt="a"))
    one = cached(index, 2, root=OTHER)
    sent = whole_walk(news, effects_of(news.announce_all))
    assert {type(each) for each in sent} == {BlocksAdded}
    assert b"".join(each.hashes for each in sent) == one.hashes(0, 2)


def test_a_walk_ends_where_the_notifier_restarts_again(index):
    news = made(index)
    news.remember(ROOT, PLAIN)
    cached(index, 5)
    first = effects_of(news.announce_all)[-1].work
    news.cleared(Reason.CLEAR)
    second = effects_of(news.announce_all)
    assert work_of(news._out, first) == []
    assert not any(isinstance(each, TierCleared) for each in whole_walk(news, second)), (
        "the second walk has what changed before it"
    )
    assert news._walk is None
