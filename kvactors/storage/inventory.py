"""Inventory of the keys that a store holds. Pure state, changed on the event loop only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from types import MappingProxyType

from kvactors.storage.catalog import Catalog

REMOVED_PAGE = 1024
"""Keys that one call of `take_removed` returns at most."""


Salts = Mapping[bytes, int | None]
"""Numbers of salts (`quotas.salt_id`) by key, None for one that is not known."""

_salts: ContextVar[Salts] = ContextVar("salts of a batch", default=MappingProxyType({}))


@contextmanager
def batch_salts(keys: Sequence[bytes], salts: Sequence[int | None]) -> Iterator[None]:
    """A batch is written inside, with these salts. They do not pass through `Backend.write`, whose
    arguments are those of stores of other packages.

    Args:
        keys: the batch.
        salts: one for each, or none at all.
    """
    token = _salts.set(dict(zip(keys, salts, strict=True)) if salts else {})
    try:
        yield
    finally:
        _salts.reset(token)


def salts_of_batch() -> Salts:
    """The salts of the batch that the present task writes."""
    return _salts.get()


class Inventory:
    """The inventory of a store that several nodes share: it answers for no keys, so nothing is
    reported to indexes."""

    @property
    def lists_keys(self) -> bool:
        """Whether `keys` returns every key of the store."""
        return type(self).keys is not Inventory.keys

    @property
    def capacity(self) -> int:
        """Objects at most, 0 without a limit or if it is not known."""
        return 0

    def keys(self) -> list[bytes]:
        """See `Backend.keys`."""
        return []

    def iter_keys(self) -> Iterator[bytes]:
        """See `Backend.iter_keys`."""
        return iter(self.keys())

    def count(self) -> int:
        """See `Backend.count`."""
        return len(self.keys())

    def holds(self, key: bytes) -> bool:
        """See `Backend.holds`."""
        return False

    def take(self, keys: Sequence[bytes]) -> None:
        """See `Backend.take`."""

    def take_removed(self) -> list[bytes]:
        """See `Backend.take_removed`."""
        return []

    def acknowledge_removed(self, keys: Iterable[bytes]) -> None:
        """See `Backend.acknowledge_removed`."""


class OwnedInventory(Inventory):
    """The inventory of a store that one process owns: a catalog, without the objects that are still
    being written.

    Attributes:
        catalog: every key, those being written included, in order of use.
        pending: keys in the catalog whose objects are being written.
        answerable: whether this process alone decides about the store's contents. If not, no key is
            listed.
        keeps_salts: whether salts reach the catalog, so that quotas of salts can be kept.
    """

    def __init__(self, capacity: int = 0, *, answerable: bool = True) -> None:
        self.catalog = Catalog(capacity)
        self.pending: set[bytes] = set()
        self.answerable = answerable
        self.keeps_salts = False

    @property
    def capacity(self) -> int:
        """See `Inventory.capacity`."""
        return self.catalog.capacity

    @property
    def lists_keys(self) -> bool:
        """See `Inventory.lists_keys`."""
        return self.answerable

    def keys(self) -> list[bytes]:
        """See `Backend.keys`."""
        keys = self.catalog.keys() if self.answerable else []
        return [key for key in keys if key not in self.pending] if self.pending else keys

    def iter_keys(self) -> Iterator[bytes]:
        """See `Backend.iter_keys`."""
        pending = self.pending
        return (key for key in self.catalog if key not in pending) if self.answerable else iter(())

    def key_slices(self) -> Iterator[list[bytes]]:
        """`keys` in parts. The store may change between two of them: a key that it holds all the
        time is in one."""
        if not self.answerable:
            return iter(())
        pending = self.pending
        parts = self.catalog.slices()
        return ([key for key in part if key not in pending] for part in parts)

    def count(self) -> int:
        """See `Backend.count`. Keys of a store that is not answerable count as well."""
        return len(self.catalog) - sum(key in self.catalog for key in self.pending)

    def holds(self, key: bytes) -> bool:
        """See `Backend.holds`."""
        return self.answerable and key in self.catalog and key not in self.pending

    def readable_run(self, keys: Sequence[bytes]) -> int:
        """Length of the leading run of keys whose objects can be read. They count as used now."""
        ready = next((i for i, key in enumerate(keys) if key in self.pending), len(keys))
        return self.catalog.run(keys[:ready])

    def take(self, keys: Sequence[bytes]) -> None:
        """See `Backend.take`."""
        self.catalog.remove(key for key in keys if key not in self.pending)

    def take_removed(self) -> list[bytes]:
        """See `Backend.take_removed`. Returns a page of them."""
        departed, removed = self.catalog.departed, list[bytes]()
        while departed and not removed:
            page = list(islice(departed, REMOVED_PAGE))
            departed.difference_update(page)
            removed = [key for key in page if not self.holds(key)]
        return removed

    def acknowledge_removed(self, keys: Iterable[bytes]) -> None:
        """See `Backend.acknowledge_removed`."""
        self.catalog.departed.difference_update(keys)
