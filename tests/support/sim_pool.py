"""A simulated pool."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import xxhash

from kvactors.errors import StoreUnavailable
from kvactors.storage.backend import Expired
from kvactors.testing.fakes import SimBackend

OTHERS = {"": 12, "evict": 2, "expire": 1, "delete": 1, "write": 2}
"""What others do to a pool during a call, and the weights: nothing, the server evicts its oldest
object and reports that, or drops it after its time to live without a report, another process
deletes an object, or writes one that had left."""


class SimPool(SimBackend):
    """A pool that other processes use as well, as a bucket, a shared folder, a Valkey server and a
    Mooncake pool are: only `ask` finds out which objects it has, which takes time, and no object
    belongs to this process. Others take objects away at any time, also between a look-up and its
    read, and bring them back.

    Attributes:
        others: draws what others do, None while they do nothing.
        acted: how often they did what.
    """

    exclusive = False
    is_complete = False
    keeps_lineages = False
    shares = None
    others: random.Random | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.acted = Counter[str]()
        self._left: dict[bytes, tuple[bytes, int]] = {}  # whole objects that another process has

    def heal(self) -> None:
        super().heal()
        self.others = None

    async def delay(self) -> None:
        await super().delay()
        if self.others is not None:
            self._others_act(self.others)

    def _others_act(self, rng: random.Random) -> None:
        [what] = rng.choices(list(OTHERS), list(OTHERS.values()))
        found = [key for key in self.objects if key not in self.pending]
        if what == "write" and self._left:
            key = rng.choice(list(self._left))
            if key not in self.catalog:
                self.objects[key] = self._left[key]
                for gone in self.catalog.admit([key]).evicted:
                    self.objects.pop(gone, None)
        elif what not in ("", "write") and found:
            key = rng.choice(found) if what == "delete" else found[0]
            data, checksum = self.objects.pop(key)
            if xxhash.xxh3_64_intdigest(data) == checksum:
                self._left[key] = (data, checksum)
            self.catalog.remove([key])
            if what == "evict":
                self.catalog.departed.add(key)
                self.removed_outside = True
        else:
            return
        self.acted[what] += 1

    async def clear(self, generation: int = 0) -> None:
        """See `Backend.clear`."""
        self._left.clear()
        await super().clear(generation)

    def take_removed(self) -> list[bytes]:
        """See `Backend.take_removed`."""
        self.removed_outside = False
        return super().take_removed()

    def keys(self) -> list[bytes]:
        """See `Backend.keys`."""
        return []

    def key_slices(self) -> Iterator[list[bytes]]:
        """See `Backend.key_slices`."""
        return iter(())

    def holds(self, key: bytes) -> bool:
        """See `Backend.holds`."""
        return False

    def probe(self, keys: Sequence[bytes]) -> None:
        """See `Backend.probe`."""

    async def ask(self, keys: Sequence[bytes], expired: Expired) -> int:
        await self.delay()
        if self.down:
            raise StoreUnavailable("the pool is down")
        return 0 if expired() else super().probe(keys) or 0
