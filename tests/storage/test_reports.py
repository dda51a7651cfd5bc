"""Pages of a report on a whole store, and when its paths are read."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest

import kvactors
from kvactors.actor.context import State
from kvactors.actor.message import Control
from kvactors.flush_notifier.actor import FlushNotifier
from kvactors.flush_notifier.messages import BlocksAdded, BlocksRemoved, PathPart, PathsFound
from kvactors.identity import PLAIN
from kvactors.storage import actors as reports_module
from kvactors.storage.actors import StorageWriter
from kvactors.storage.guarded import GuardedBackend
from kvactors.storage.local_store import REMOVED_PAGE
from kvactors.storage.memory import MemoryBackend
from kvactors.storage.messages import BatchDone, NextPage, PathsRead, ReadPaths, Recheck, ReportLost
from kvactors.types import Reason, split_hashes
from tests.storage.helpers import after_each_message

# -- What the notifier is sent, and when, by a writer whose context the test plays.


A, B, C, D, E, ROOT = (bytes([letter]) * 32 for letter in b"abcder")


class Context:
    """Keeps what the writer sends, to the notifier and to itself, and its jobs."""

    answer = refuse = after = None
    incarnation = 0

    def __init__(self, *_: object) -> None:
        self.state = State.RUNNING
        self.outbox = SimpleNamespace(waiting=deque())
        self.told: list = []
        self.own: list = []
        self.jobs: list = []

    def tell(self, to, message) -> None:
        if to is NOTIFIER:
            self.told.append(message)

    def to_self(self, message) -> None:
        self.own.append(message)

    def start_job(self, work, done, failed) -> None:
        work.close()
        self.jobs.append((done, failed))


NOTIFIER = object()


class Bench:
    def __init__(self, *keys: bytes, paths: bool = False, root_of=lambda scope: ROOT) -> None:
        self.store = MemoryBackend(bytes(32), 8)
        self.store.catalog.admit(list(keys))
        checked = GuardedBackend(self.store, 60.0)
        checked.keeps_lineages = paths
        self.actor = StorageWriter(
            SimpleNamespace(name="storage-writer-0", make_context=Context),
            backend=checked,
            plane=None,
            evictor=None,
            notifier=NOTIFIER,
            root_of=root_of,
        )
        self.context = self.actor.context

    def page(self) -> list | None:
        """Handle one NextPage. Returns its reports, None if there is none."""
        if not self.context.own or not isinstance(self.context.own[-1], NextPage):
            return None
        before = len(self.context.told)
        self.context.own.pop()
        self.actor.next_page(NextPage())
        return [(type(one), one.hashes) for one in self.context.told[before:]]

    def pages(self) -> list:
        """Handle NextPage until there is none. Returns the reports."""
        while self.page() is not None:
            pass
        return [(type(one), one.hashes, one.reason) for one in self.context.told]

    def lag(self) -> None:
        """The notifier's lane is full from now on."""
        self.context.outbox.waiting.append(object())


async def test_a_delayed_report_is_checked_again_and_corrected():
    bench = Bench(A)
    bench.lag()
    bench.actor.batch_done(BatchDone(None, stored=A))
    ((done, failed),) = bench.context.jobs
    again = failed(None)
    assert (type(again), again.held, again.gone) == (Recheck, A, b"")
    assert done(again) is again
    bench.store.catalog.remove([A])
    bench.context.outbox.waiting.clear()
    bench.actor.recheck(again)
    assert (BlocksRemoved, A, Reason.STORAGE_EVICTION) in bench.pages()


async def test_a_batch_reports_the_changes_that_are_still_true():
    bench = Bench(A, D)
    bench.store.catalog.departed.update((C, D, E))
    bench.actor.batch_done(BatchDone(None, stored=A + B, evicted=C + D, corrupt=E))
    assert bench.pages() == [
        (BlocksRemoved, C, Reason.STORAGE_EVICTION),
        (BlocksRemoved, E, Reason.CORRUPT),
        (BlocksAdded, A, Reason.STORED),
    ]
    assert bench.context.jobs == []
    assert bench.store.catalog.departed == set(), "acknowledged"


async def test_paths_are_read_after_the_keys_and_end_the_report():
    bench = Bench(A, paths=True)
    bench.actor.started()
    assert bench.context.jobs == []
    bench.pages()
    (job,) = bench.context.jobs
    done, failed = job
    assert failed(None).parts is None
    assert bench.actor.reporting
    part = PathPart(ROOT, A, bytes(16), PLAIN)
    bench.actor.paths_read(done([part]))
    assert isinstance(bench.context.told[-1], PathsFound)
    assert [type(one) for one in bench.context.own] == [ReadPaths]
    bench.actor.paths_read(PathsRead(None))
    assert not bench.actor.reporting


async def test_a_message_has_the_roots_that_requests_have_now():
    bench = Bench(paths=True)
    parts = (PathPart(ROOT, A, b"1234", PLAIN), PathPart(B, C, b"1234", PLAIN))
    bench.actor.paths_read(PathsRead(parts))
    bench.actor.paths_read(PathsRead(()))
    (named,) = bench.context.told
    assert (named.parts, named.roots) == (parts, frozenset([ROOT]))


# -- A report on the whole store goes to the notifier in pages of one turn each, and is right although
# the store changes between two pages.


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
