"""Attempts of a store's calls: what is one, when calls of a kind fail, and when they pause."""

from __future__ import annotations

import pytest
import structlog

from kvactors.layout import make_layout
from kvactors.settings import LayoutConfig, StorageConfig
from kvactors.settings.valkey import ValkeyConfig
from kvactors.storage import attempts
from kvactors.storage.attempts import FAILURES, PAUSE_S, Attempts, StoreAttempts
from kvactors.storage.factory import make_store
from kvactors.storage.guarded import GuardedBackend
from kvactors.storage.messages import Outcome

VALKEY = {"backend": "valkey", "valkey": ValkeyConfig(url="valkey://h:1")}
OK, EXISTS, MISS, CORRUPT, NO_SPACE, UNAVAILABLE, LATE, REFUSED = Outcome


@pytest.fixture
def clock(monkeypatch):
    found = [100.0]
    monkeypatch.setattr(attempts, "now", lambda: found[0])
    return found


def writes(*batches):
    found = Attempts("here", "write")
    for batch in batches:
        found.record(bytes(batch), "disk gone")
    return found


@pytest.mark.parametrize(
    ("batch", "why", "state"),
    [
        (
            [UNAVAILABLE],
            "disk gone. Repair the disk, folder, service or access rights. The next call that works ends this",
            "open",
        ),
        ([UNAVAILABLE, EXISTS, MISS, LATE, NO_SPACE], "disk gone. Repair", "open"),
        ([NO_SPACE, EXISTS], "no space. Free space", "closed"),
        ([CORRUPT, MISS], "every object was corrupt. Check the disk", "closed"),
        ([UNAVAILABLE, OK], None, "closed"),
        ([EXISTS], None, "closed"),
        ([MISS], None, "closed"),
        ([LATE], None, "closed"),
        ([REFUSED], None, "closed"),
        ([], None, "closed"),
    ],
)
def test_calls_fail_after_several_attempts_of_which_nothing_worked(clock, batch, why, state):
    assert writes(*[batch] * (FAILURES - 1)).failing is None
    found = writes(*[batch] * FAILURES)
    assert (found.failing is None) == (why is None)
    assert why is None or f"no write has worked in the last 5 attempts or more: {why}" in (
        found.failing.why
    )
    assert found.state == state


@pytest.mark.parametrize("batch", [[EXISTS], [LATE], [REFUSED], [MISS], []])
def test_an_answer_from_memory_neither_fails_nor_ends_a_failure(clock, batch):
    failing = writes(*[[UNAVAILABLE], batch] * FAILURES)
    assert failing.failing is not None
    clock[0] += PAUSE_S
    assert failing.allow()
    failing.record(bytes(batch))
    assert failing.failing is not None
    failing.record(bytes([OK]))
    assert (failing.failing, failing.state) == (None, "closed")


def test_the_breaker_opens_waits_and_tries_once(clock):
    found = writes(*[[UNAVAILABLE]] * FAILURES)
    assert (found.allow(), found.paused, found.state) == (False, True, "open")
    clock[0] += PAUSE_S
    assert (found.paused, found.state) == (False, "half open")
    assert found.allow()
    assert (found.allow(), found.state) == (False, "open")
    found.failed("still gone")
    clock[0] += PAUSE_S / 2
    assert not found.allow()
    clock[0] += PAUSE_S / 2
    assert found.allow()
    assert found.failing.since == 100.0
    found.worked()
    assert (found.allow(), found.state) == (True, "closed")


def test_a_store_on_the_edge_of_its_space_is_logged_once(clock):
    with structlog.testing.capture_logs() as logs:
        found = Attempts("here", "write")
        for _ in range(100):
            for _ in range(FAILURES):
                found.record(bytes([NO_SPACE]))
            assert found.failing.since == 100.0
            clock[0] += 0.1
            found.record(bytes([OK]))
            assert found.failing is None
        assert [one["event"] for one in logs] == ["store fails"]
        clock[0] += PAUSE_S
        for _ in range(FAILURES):
            found.record(bytes([NO_SPACE]))
        assert found.failing.since == clock[0]
        clock[0] += PAUSE_S
        found.record(bytes([OK]))
    assert [one["event"] for one in logs[1:]] == ["store fails", "store works again"]
    assert logs[-1]["failed_for"] == PAUSE_S


def test_each_change_is_logged_once(clock):
    with structlog.testing.capture_logs() as logs:
        found = writes(*[[UNAVAILABLE]] * (FAILURES + 3))
        clock[0] += 7.0
        found.record(bytes([EXISTS]))
        assert len(logs) == 1
        for _ in range(3):
            found.worked()
    assert logs == [
        {
            "event": "store fails",
            "log_level": "warning",
            "store": "here",
            "call": "write",
            "reason": "disk gone",
        },
        {
            "event": "store works again",
            "log_level": "info",
            "store": "here",
            "call": "write",
            "failed_for": 7.0,
        },
    ]


@pytest.mark.parametrize(
    ("storage", "remedy"),
    [
        ({"backend": "memory"}, "no space. Free space in the store"),
        ({"backend": "file", "directory": "/nowhere"}, "lower storage.capacity_bytes"),
        (VALKEY, "no space. Raise the server's maxmemory"),
        ({"backend": "mooncake"}, "no space. Give the pool more memory"),
        ({"backend": "object", "url": "s3://b"}, "no space. Free space on the folder's disk, or"),
        ({"backend": "object", "url": "s3://b", "head_ranges": 2}, "the quota of the disk or the"),
    ],
)
def test_a_full_store_has_the_remedy_of_its_kind(clock, storage, remedy):
    made = make_store(StorageConfig(**storage), "m", make_layout(LayoutConfig(), 16))
    store = GuardedBackend(made, 60.0)
    for _ in range(FAILURES):
        store.attempts.writes.record(bytes([NO_SPACE]))
    (fault,) = store.attempts.failing()
    assert remedy in fault.why
    assert ("capacity_bytes" in fault.why) == (storage["backend"] == "file")


def test_kinds_are_judged_apart(clock):
    store = StoreAttempts("here")
    for _ in range(FAILURES):
        store.writes.failed("read-only")
        store.reads.worked()
    assert [one.why.split(":")[0] for one in store.failing()] == [
        "no write has worked in the last 5 attempts or more"
    ]
    assert (store.state, store.loads_paused(lambda: clock[0])) == ("open", "")
    for _ in range(FAILURES):
        store.lookups.failed("no master")
    assert "no look-up has worked in the last 5 attempts or more: no master" in store.loads_paused(
        lambda: clock[0]
    )
    assert store.loads_paused(lambda: clock[0] + PAUSE_S) == "", "one look-up may try"
