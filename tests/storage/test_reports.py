"""Reports on a whole store go to the notifier in pages of one turn each, and are right although the
store changes between two pages."""

from __future__ import annotations

import pytest

import kvactors
from kvactors.actor.message import Control
from kvactors.flush_notifier.actor import FlushNotifier
from kvactors.flush_notifier.messages import BlocksAdded, BlocksRemoved
from kvactors.storage import actors as reports_module
from kvactors.storage.actors import StorageWriter
from kvactors.storage.local_store import REMOVED_PAGE
from kvactors.storage.memory import MemoryBackend
from kvactors.storage.messages import ReportLost
from kvactors.types import split_hashes
from tests.storage.helpers import after_each_message

BLOCK = 4


def config(**tables) -> kvactors.Config:
    return kvactors.Config.from_mapping(
        {
            "cache": {"model": "m", "block_size": BLOCK},
            "device": {"num_blocks": 16},
            "layout": {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8, "dtype": "uint8"},
            "host": {"transit_slots": 32},
            "storage": {"backend": "memory", "write_policy": "write_through"},
            "flush": {"sinks": [{"kind": "memory", "tiers": ["storage"]}]},
            **tables,
        }
    )


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


class Filled(MemoryBackend):
    """Holds `count` names from the start."""

    def __init__(self, count: int) -> None:
        layout = kvactors.GQALayout(1, 1, 8, BLOCK, "uint8")
        super().__init__(layout.fingerprint, layout.block_bytes)
        self.catalog.admit([key(number) for number in range(count)])


class Reports:
    """Records the reports of all writers, and the turn of each. between: called after each page
    with the number of pages so far."""

    def __init__(self, monkeypatch, between=lambda _: None) -> None:
        self.told: list[tuple[int, str, list[bytes]]] = []
        self.untrue: list[bytes] = []
        self.between = between

        def recording(one, to, message):
            if isinstance(message, BlocksAdded | BlocksRemoved):
                names, held = split_hashes(message.hashes), isinstance(message, BlocksAdded)
                self.untrue += [name for name in names if one.backend.holds(name) != held]
                self.told.append((one.turns, type(message).__name__, names))
                self.between(len(self.told))

        after_each_message(monkeypatch, StorageWriter, recording)

    def names(self, kind: str) -> list[bytes]:
        return [name for _, what, names in self.told if what == kind for name in names]


async def test_a_large_store_is_reported_in_pages_of_one_turn_each(monkeypatch):
    reports = Reports(monkeypatch)
    async with kvactors.open(config(), backend=Filled(20_000)) as cache:
        await cache.wait_idle()
        assert {len(names) for _, _, names in reports.told[:-1]} == {reports_module.REPORT_PAGE}
        assert (
            len({turn for turn, _, _ in reports.told})
            == len(reports.told)
            == -(-20_000 // reports_module.REPORT_PAGE)
        )
        assert sorted(reports.names("BlocksAdded")) == [key(number) for number in range(20_000)]


async def test_lost_names_are_reported_in_pages_of_one_turn_each(monkeypatch):
    store = Filled(10_000)
    reports = Reports(monkeypatch)
    async with kvactors.open(config(), backend=store) as cache:
        await cache.wait_idle()
        reports.told.clear()
        store.catalog.departed.update(key(number) for number in range(5_000))
        store.catalog.remove([key(number) for number in range(5_000)])
        cache.system.writers[0].try_tell(ReportLost())
        await cache.wait_idle()
        assert max(len(names) for _, _, names in reports.told) <= REMOVED_PAGE
        assert len({turn for turn, _, _ in reports.told}) == len(reports.told)
        assert sorted(reports.names("BlocksRemoved")) == [key(number) for number in range(5_000)]


async def test_names_removed_between_two_pages_are_not_reported(monkeypatch):
    store = Filled(5 * reports_module.REPORT_PAGE)
    removed = []

    def between(pages: int) -> None:
        if pages == 2:
            reported = set(reports.names("BlocksAdded"))
            removed.extend(set(store.keys()) - reported)
            del removed[100:]
            store.catalog.remove(removed)
            store.catalog.admit([key(1 << 40)])

    reports = Reports(monkeypatch, between)
    async with kvactors.open(config(), backend=store) as cache:
        await cache.wait_idle()
    assert len(removed) == 100
    assert reports.untrue == []
    assert not set(removed) & set(reports.names("BlocksAdded"))


@pytest.mark.parametrize("at_rest", [True, False])
async def test_a_flush_waits_for_every_page_of_the_report_at_the_start(monkeypatch, at_rest):
    monkeypatch.setattr(reports_module, "REPORT_PAGE", 1)
    store = Filled(100)
    async with kvactors.open(config(actors={"channel_bound": 1}), backend=store) as cache:
        await cache.wait_flushed(at_rest=at_rest)
        assert len(cache.system.notifier_actor.ledger.orphans.tiers) == 100


class Unknown(Control, frozen=True, eq=False):
    """No actor handles it."""


@pytest.mark.parametrize("when", [1, 3, 7])
async def test_a_notifier_that_restarts_between_two_pages_gets_all_of_them(monkeypatch, when):
    received: dict[int, set[bytes]] = {}
    apply = FlushNotifier.fact

    def recording(notifier, fact):
        if isinstance(fact, BlocksAdded):
            received.setdefault(notifier.incarnation, set()).update(split_hashes(fact.hashes))
        apply(notifier, fact)

    monkeypatch.setattr(FlushNotifier, "fact", recording)
    monkeypatch.setattr(reports_module, "REPORT_PAGE", 3)
    store, reports = Filled(30), Reports(monkeypatch)
    async with kvactors.open(config(actors={"channel_bound": 1}), backend=store) as cache:
        await cache.wait_idle()

        def between(pages: int) -> None:
            if pages == when:
                cache.system.notifier.try_tell(Unknown())

        reports.told.clear()
        reports.between = between
        cache.system.notifier.try_tell(Unknown())
        await cache.wait_idle()
        assert cache.system.notifier.incarnation == 2
        assert len(reports.told) >= 10 + when
        assert received[2] == set(store.keys())
