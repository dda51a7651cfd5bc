"""StoreReporter: what the notifier is sent, and when, by an actor that the test plays."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

from kvactors.actor.context import State
from kvactors.flush_notifier.messages import (
    PLAIN,
    BlocksAdded,
    BlocksRemoved,
    PathPart,
    PathsFound,
    TierCleared,
)
from kvactors.storage.actors import StoreReporter
from kvactors.storage.guarded import CheckedBackend
from kvactors.storage.memory import MemoryBackend
from kvactors.storage.messages import (
    BatchDone,
    NextPage,
    PathsRead,
    ReadPaths,
    Recheck,
    StoreCleared,
)
from kvactors.types import Reason

A, B, ROOT = (bytes([letter]) * 32 for letter in b"abr")
NOTIFIER = object()


class FakeActor:
    """Keeps what the reporter sends, to the notifier and to the actor itself, and its jobs."""

    def __init__(self) -> None:
        self.state = State.RUNNING
        self.context = SimpleNamespace(outbox=SimpleNamespace(waiting=deque()))
        self.told: list = []
        self.own: list = []
        self.jobs: list = []

    def tell(self, to, message) -> None:
        assert to is NOTIFIER
        self.told.append(message)

    def to_self(self, message) -> None:
        self.own.append(message)

    def start_job(self, work, done, failed) -> None:
        work.close()
        self.jobs.append((done, failed))


class Bench:
    def __init__(self, *keys: bytes, paths: bool = False) -> None:
        self.store = MemoryBackend(bytes(32), 8)
        self.store.catalog.admit(list(keys))
        self.actor = FakeActor()
        checked = CheckedBackend(self.store, 60.0)
        checked.keeps_lineages = paths
        root_of = (lambda scope: ROOT) if paths else None
        self.reporter = StoreReporter(self.actor, checked, NOTIFIER, root_of)

    def pages(self) -> list:
        """Handle NextPage until there is none. Returns the reports."""
        while self.actor.own and isinstance(self.actor.own[-1], NextPage):
            self.actor.own.pop()
            self.reporter.next_page()
        return [(type(one), one.hashes, one.reason) for one in self.actor.told]

    def lag(self) -> None:
        """The notifier's lane is full from now on."""
        self.actor.context.outbox.waiting.append(object())


def test_a_start_reports_the_keys_of_the_store():
    bench = Bench(A, B)
    bench.reporter.report_all()
    assert bench.pages() == [(BlocksAdded, A + B, Reason.STORED)]
    assert not bench.reporter.active


def test_keys_that_left_without_a_batch_are_reported_once():
    bench = Bench(A, B)
    bench.store.catalog.remove([A])
    bench.reporter.report_lost()
    bench.reporter.report_lost()
    assert bench.pages() == [(BlocksRemoved, A, Reason.RESTART)]
    bench.reporter.report_lost()
    assert len(bench.pages()) == 1


def test_a_page_waits_while_earlier_messages_have_not_entered_their_channels():
    bench = Bench(A)
    bench.lag()
    bench.reporter.report_all()
    assert (bench.actor.told, [type(one) for one in bench.actor.own]) == ([], [NextPage])
    bench.reporter.report_lost()
    assert len(bench.actor.own) == 1, "the report is in progress"


def test_a_starting_actor_counts_as_reporting():
    bench = Bench()
    bench.actor.state = State.STARTING
    assert bench.reporter.active


def test_a_delayed_report_is_checked_again_and_corrected():
    bench = Bench(A)
    bench.lag()
    bench.reporter.report_batch(BatchDone(None, stored=A))
    ((done, failed),) = bench.actor.jobs
    again = failed(None)
    assert (type(again), again.held, again.gone) == (Recheck, A, b"")
    assert done(again) is again
    bench.store.catalog.remove([A])
    bench.actor.context.outbox.waiting.clear()
    bench.reporter.recheck(again)
    assert (BlocksRemoved, A, Reason.STORAGE_EVICTION) in bench.pages()


def test_a_report_that_is_still_true_is_not_corrected():
    bench = Bench(A)
    bench.reporter.recheck(Recheck(A, B))
    assert bench.pages() == []


def test_a_batch_reports_what_it_stored_and_removed():
    bench = Bench(A)
    bench.reporter.report_batch(BatchDone(None, stored=A, evicted=B))
    assert bench.pages() == [
        (BlocksRemoved, B, Reason.STORAGE_EVICTION),
        (BlocksAdded, A, Reason.STORED),
    ]
    assert bench.actor.jobs == []


def test_after_a_clear_the_objects_written_since_are_reported():
    bench = Bench(A)
    bench.reporter.report_batch(BatchDone(StoreCleared(1)))
    cleared, added = (bench.actor.told.pop(0), bench.pages())
    assert isinstance(cleared, TierCleared)
    assert added == [(BlocksAdded, A, Reason.STORED)]


def test_paths_are_read_after_the_keys_and_end_the_report():
    bench = Bench(A, paths=True)
    bench.reporter.paths.restart()
    bench.reporter.report_all()
    bench.pages()
    (job,) = bench.actor.jobs
    done, failed = job
    assert failed(None).parts is None
    assert bench.reporter.active
    part = PathPart(ROOT, A, bytes(16), PLAIN)
    bench.reporter.paths_read(done([part]))
    assert isinstance(bench.actor.told[-1], PathsFound)
    assert [type(one) for one in bench.actor.own] == [ReadPaths]
    bench.reporter.paths_read(PathsRead(None))
    assert not bench.reporter.active


def test_a_stopped_actor_reports_nothing_more():
    bench = Bench(A)
    bench.lag()
    bench.reporter.report_all()
    bench.reporter.stop()
    assert not bench.reporter.active
