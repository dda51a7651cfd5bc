"""Pages of a report on a whole store, and when its paths are read."""

from __future__ import annotations

from kvactors.flush_notifier.messages import PLAIN, PathPart
from kvactors.storage import actors
from kvactors.storage.actors import PathReport, ReportPages
from kvactors.storage.guarded import CheckedBackend
from kvactors.storage.memory import MemoryBackend

A, B, C, ROOT = (bytes([letter]) * 32 for letter in b"abcr")


def holding(*keys: bytes) -> tuple[MemoryBackend, ReportPages]:
    inner = MemoryBackend(bytes(32), 8)
    inner.catalog.admit(list(keys))
    return inner, ReportPages(CheckedBackend(inner, 60.0).inventory)


def test_lost_keys_come_before_held_ones():
    inner, pages = holding(A, B)
    inner.catalog.remove([A])
    pages.restart()
    assert pages.next() == (b"", A)
    assert pages.next() == (B, b"")
    assert pages.next() is None


def test_only_lost_keys_are_reported_without_a_restart():
    _, pages = holding(A)
    assert pages.next() is None


def test_a_page_leaves_out_keys_that_left_after_the_snapshot(monkeypatch):
    monkeypatch.setattr(actors, "REPORT_PAGE", 2)
    keys = {bytes([1, number]) * 16 for number in range(3)}  # listed together
    inner, pages = holding(*keys)
    pages.restart()
    first = pages.next().held
    (last,) = keys - {first[:32], first[32:]}
    inner.catalog.remove([last])
    assert pages.next() == (b"", last)
    assert pages.next() == (b"", b"")
    assert pages.next() is None


def test_a_restart_begins_with_the_first_key(monkeypatch):
    monkeypatch.setattr(actors, "REPORT_PAGE", 1)
    _, pages = holding(A, B)
    pages.restart()
    assert pages.next() == (A, b"")
    pages.restart()
    assert [pages.next(), pages.next(), pages.next()] == [(A, b""), (B, b""), None]


def test_paths_begin_once_after_the_keys():
    paths = PathReport(lambda scope: ROOT)
    assert not paths.begins()
    paths.restart()
    assert (paths.begins(), paths.active, paths.begins()) == (True, True, False)


def test_a_restart_during_a_reading_starts_it_over():
    paths = PathReport(lambda scope: ROOT)
    paths.restart()
    paths.begins()
    paths.restart()
    assert not paths.begins()
    assert (paths.begins_again(), paths.begins_again()) == (True, False)


def test_without_sinks_no_paths_are_read():
    paths = PathReport(None)
    paths.restart()
    assert (paths.begins(), paths.named((PathPart(ROOT, A, b"1234"),))) == (False, None)


def test_a_message_has_the_roots_that_requests_have_now():
    paths = PathReport(lambda scope: ROOT)
    parts = (PathPart(ROOT, A, b"1234", PLAIN), PathPart(B, C, b"1234", PLAIN))
    named = paths.named(parts)
    assert (named.parts, named.roots) == (parts, frozenset([ROOT]))
    assert paths.named(()) is None
