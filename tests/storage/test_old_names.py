"""A back end that was written against the old names of the contract keeps working."""

from __future__ import annotations

import warnings

import pytest

from kvactors.storage.backends import Backend, MemoryBackend
from kvactors.storage.backends.checked import CheckedBackend
from kvactors.testing.store_contract import StoreContract, key

PRINT = bytes(32)

with pytest.warns(DeprecationWarning, match="is called"):

    class Old(MemoryBackend):
        """Overrides and uses every old name."""

        trailer = 64
        uncleared = False

        def __init__(self, *args):
            super().__init__(*args)
            self.calls = []

        def told(self, keys):
            keys = list(keys)
            self.calls.append(("told", keys))
            super().told(keys)

        def lost(self):
            self.calls.append(("lost", []))
            return super().lost()

        def saw(self, outcomes):
            self.calls.append(("saw", outcomes))
            super().saw(outcomes)

        def names(self):
            self.calls.append(("names", []))
            return super().names()


class TestOldNames(StoreContract):
    async def make(self, folder, capacity):
        return Old(PRINT, self.block_bytes, capacity)


async def test_the_package_calls_old_methods_under_their_new_names():
    inner = Old(PRINT, 8, 1)
    store = CheckedBackend(inner, 60.0)
    await store.write([key(1)], [memoryview(b"12345678")], lambda: False)
    await store.write([key(2)], [memoryview(b"12345678")], lambda: False)
    assert store.inventory.take_removed() == [key(1)]
    store.inventory.acknowledge_removed([key(1)])
    assert list(store.iter_keys()) == [key(2)]
    assert [name for name, _ in inner.calls] == ["lost", "told", "names"]
    assert (store.faults, inner.statistics().writes) == (0, 2)


def test_old_attributes_are_the_new_ones():
    old = Old(PRINT, 8)
    assert (old.slot_trailer_bytes, old.trailer, old.clear_pending) == (64, 64, False)
    old.trailer, old.uncleared = 8, True
    assert (old.slot_trailer_bytes, old.clear_pending) == (8, True)
    assert CheckedBackend(old, 60.0).needs_clear()
    old.reads += 3
    old.evicted += 1
    assert old.statistics()[2] == old.counters.reads == 3
    assert old.counts is old.counters.outcomes
    assert Old.trailer == 64


def test_new_names_warn_of_nothing_and_have_old_aliases():
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        class New(MemoryBackend):
            def take_removed(self):
                return [key(7)]

    assert New(PRINT, 8).lost() == [key(7)]
    assert Backend.told is Backend.acknowledge_removed


def test_a_deprecated_class_name_is_the_new_class():
    import kvactors.storage.backends as backends

    with pytest.warns(DeprecationWarning, match="DeviceStore"):
        assert backends.DirectBackend is backends.DeviceStore
    with pytest.raises(AttributeError, match="Nothing"):
        _ = backends.Nothing
