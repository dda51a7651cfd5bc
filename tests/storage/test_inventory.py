"""Which keys a store lists."""

from __future__ import annotations

from kvactors.storage import catalog
from kvactors.storage.catalog import Inventory, OwnedInventory

A, B, C = (bytes([letter]) * 32 for letter in b"abc")


def test_a_shared_store_lists_no_keys():
    shared = Inventory()
    shared.take([A])
    shared.acknowledge_removed([A])
    assert (shared.keys(), list(shared.iter_keys()), shared.count()) == ([], [], 0)
    assert (shared.holds(A), shared.take_removed()) == (False, [])


def test_keys_that_are_being_written_are_not_listed():
    owned = OwnedInventory()
    owned.catalog.admit([A, B])
    owned.pending.add(B)
    assert owned.keys() == list(owned.iter_keys()) == [A]
    assert (owned.count(), owned.holds(A), owned.holds(B)) == (1, True, False)
    assert owned.readable_run([A, B]) == 1
    assert owned.readable_run([B, A]) == 0


def test_a_run_of_readable_keys_counts_as_used_now():
    owned = OwnedInventory(2)
    owned.catalog.admit([A, B])
    assert owned.readable_run([A]) == 1
    owned.catalog.admit([C])
    assert owned.keys() == [A, C]


def test_a_store_of_another_process_lists_no_keys():
    looker = OwnedInventory(answerable=False)
    looker.catalog.admit([A])
    assert (looker.keys(), list(looker.iter_keys()), looker.holds(A)) == ([], [], False)
    assert (looker.count(), looker.readable_run([A])) == (1, 1)


def test_removed_keys_are_returned_once_unless_they_are_back(monkeypatch):
    monkeypatch.setattr(catalog, "REMOVED_PAGE", 1)
    owned = OwnedInventory()
    owned.catalog.admit([A, B, C])
    owned.take([A, B, C])
    owned.catalog.admit([B])
    owned.acknowledge_removed([C])
    assert owned.take_removed() == [A]
    assert owned.take_removed() == []
