"""The keys that a back end of any origin lists, checked."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kvactors.storage.clears import Clears
from kvactors.storage.containment import Containment, is_key
from kvactors.storage.inventory import OwnedInventory
from kvactors.storage.slot_store import SlotStore


class CheckedInventory:
    """Lists nothing while a clear is pending."""

    def __init__(self, inner: SlotStore, calls: Containment, clears: Clears) -> None:
        self._inner = inner
        self._calls = calls
        self._clears = clears

    def keys(self) -> list[bytes]:
        """See `Backend.keys`."""
        if self._clears.pending:
            return []
        return self._calls.keys("keys", self._calls.call("keys", self._inner.keys, []))

    def snapshot(self) -> Iterator[bytes]:
        """The keys that the store holds from now until they are taken, and perhaps others. They are
        listed in parts as they are taken, and each is checked."""
        if self._clears.pending:
            return
        parts = self._calls.call("keys", self._parts, iter(()))
        while (part := self._calls.call("keys", lambda: next(parts, None), None)) is not None:
            yield from self._calls.keys("keys", part)

    def _parts(self) -> Iterator[Any]:
        """The parts that the store lists its keys in. One of another package lists them at once."""
        inventory: Any = getattr(self._inner, "inventory", None)
        owner = inventory if isinstance(inventory, OwnedInventory) else self._inner
        slices: Any = getattr(owner, "key_slices", None)
        return iter([self._inner.keys()]) if slices is None else slices()

    def iter_keys(self) -> Iterator[bytes]:
        """See `Backend.iter_keys`."""
        if self._clears.pending:
            return
        key: Any
        try:
            for key in self._inner.iter_keys():
                if not is_key(key):
                    self._calls.fault("iter_keys", "answered a key that is not 32 bytes")
                    return
                yield key
        except RuntimeError:
            raise  # the store changed: the caller begins again
        except BaseException as error:
            if not self._calls.contains("iter_keys", error):
                raise

    def count(self) -> int:
        """See `Backend.count`."""
        if self._clears.pending:
            return 0
        count = self._calls.call("count", self._inner.count, 0)
        return self._calls.number("count", count, sys.maxsize)

    def holds(self, key: bytes) -> bool:
        """See `Backend.holds`."""
        return not self._clears.pending and self._calls.call(
            "holds", lambda: bool(self._inner.holds(key)), False
        )

    def holding(self, keys: Iterable[bytes]) -> list[bytes]:
        """The keys that the store holds, in order. None of them if the store raises."""
        if self._clears.pending:
            return []
        holds = self._inner.holds
        found: list[bytes] = self._calls.call(
            "holds", lambda: [key for key in keys if holds(key)], []
        )
        return found

    @property
    def is_complete(self) -> bool:
        """Whether `held_run` finds every object that can be read. It does not in a store whose
        contents other processes decide about."""
        inventory: Any = getattr(self._inner, "inventory", None)
        if isinstance(inventory, OwnedInventory):
            return inventory.answerable
        complete = self._calls.call(
            "is_complete", lambda: getattr(self._inner, "is_complete", False), False
        )
        return complete is True

    def held_run(self, keys: Sequence[bytes]) -> int:
        """Length of the leading run of keys that `probe` would find now. None of them counts as
        used. 0 for a store that lists no keys."""
        calls = self._calls
        if self._clears.closed or calls.attempts.reads.paused or calls.overdue():
            return 0
        holds = self._inner.holds

        def run() -> int:
            return next((i for i, key in enumerate(keys) if not holds(key)), len(keys))

        return calls.number("holds", calls.call("holds", run, 0), len(keys))

    def take_removed(self) -> list[bytes]:
        """See `Backend.take_removed`."""
        removed = self._calls.call("take_removed", self._inner.take_removed, [])
        return self._calls.keys("take_removed", removed)

    def acknowledge_removed(self, keys: Iterable[bytes]) -> None:
        """See `Backend.acknowledge_removed`."""
        self._calls.call("acknowledge_removed", lambda: self._inner.acknowledge_removed(keys), None)
