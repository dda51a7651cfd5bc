"""Loads and stores of an engine's device pages, over a `TierCache`, in the scheduler's thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvactors.errors import CacheClosed, DeviceError
from kvactors.tier_cache import CopyWorker, Lookup, TierCache

WAIT = 600.0
"""Seconds within which a copy must end. Only a hang takes as long."""
NOTHING = -1
"""The number of a batch without loads."""


class _Load(NamedTuple):
    """The pages of one request.

    Attributes:
        keys: of the pages, pinned.
        pages: their places on the device.
        slots: their host slots.
    """

    keys: Sequence[bytes]
    pages: Sequence[int]
    slots: Sequence[int]


@dataclass
class _Batch:
    """Loads that were started together.

    Attributes:
        jobs: their copies.
        keys: their pages.
        ok: whether every copy was submitted.
        ended: whether every copy has ended.
    """

    jobs: list[Hashable]
    keys: list[Sequence[bytes]]
    ok: bool = True
    ended: bool = False


@dataclass
class _Store:
    """A store.

    Attributes:
        pages: places on the device, by key, in the order of the path.
        parents: the key before each on the path.
        waiting: keys that have no slot yet.
        keys: of the pages that are copied now.
        whole: whether no page was refused a slot, and no copy has failed.
    """

    pages: Mapping[bytes, int]
    parents: Mapping[bytes, bytes | None]
    waiting: Sequence[bytes]
    keys: Sequence[bytes] = ()
    whole: bool = True

    @property
    def in_flight(self) -> bool:
        """Whether a page is copied, or waits for a slot."""
        return bool(self.keys or self.waiting)


class PageMoves:
    """Loads and stores of device pages. All calls come from one thread.

    A page is answered as found when its bytes are in host memory, verified. So a load is a copy
    from memory, which does not fail while the device works.

    Args:
        tiers: host slots and storage, open.
        copies: copies between device pages and the slots of `tiers`.
        fetch_wait_s: seconds that all calls of `find` in a step wait for pages from storage.
        stream: gives the handle of the stream of a GPU that a copy comes after, None for pages in
            host memory.
    """

    def __init__(
        self,
        tiers: TierCache,
        copies: CopyWorker,
        fetch_wait_s: float,
        stream: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._tiers = tiers
        self._copies = copies
        self._fetch_wait_s = self._wait_left_s = fetch_wait_s
        self._stream = stream
        self._queued: dict[str, _Load] = {}
        self._batches: dict[int, _Batch] = {}
        self._failed_loads: set[Hashable] = set()
        self._next_batch = 0
        self._stores: dict[Hashable, _Store] = {}  # by job, in the order of the calls
        self._next_store = 0
        self._closed = False

    # -- look-up

    def find(self, keys: Sequence[bytes]) -> int:
        """Pages from the start that can be loaded, until `end_step`.

        Waits while pages are on their way from storage. Those that arrive later serve later
        look-ups.
        """
        if self._closed:
            return 0
        keys = keys[: self._tiers.config.num_slots]
        until = time.monotonic() + self._wait_left_s
        while True:
            self._collect()
            found, waits = self._look_up(keys)
            now = time.monotonic()
            if not waits or now >= until:
                self._wait_left_s = max(0.0, until - now)
                return found
            self._tiers.end_step()  # begins fetches, and pauses

    def _look_up(self, keys: Sequence[bytes]) -> tuple[int, bool]:
        """Pages from the start that are in host memory, and whether the next one is on its way."""
        found, waits = 0, False
        for key in keys:
            answer = self._tiers.lookup(key)
            if answer is Lookup.MISS:
                break
            waits = waits or answer is Lookup.PENDING
            found += not waits
        return found, waits

    # -- loads

    def queue_load(self, request: str, keys: Sequence[bytes], pages: Sequence[int]) -> bool:
        """Have pages loaded by the next `start_loads`.

        Returns:
            Whether they will be. If not, nothing has changed.
        """
        if self._closed or request in self._queued:
            return False
        try:
            slots = self._tiers.prepare_load(keys)
        except ValueError:  # a page was evicted after its look-up
            return False
        self._queued[request] = _Load(keys, pages, slots)
        return True

    def cancel_load(self, request: str) -> bool:
        """Forget a queued load. Returns whether there was one."""
        load = self._queued.pop(request, None)
        if load is not None:
            self._tiers.complete_load(load.keys)
        return load is not None

    def start_loads(self) -> int:
        """Begin the queued loads. Returns the number of their batch, `NOTHING` without any."""
        if not self._queued:
            return NOTHING
        number, self._next_batch = self._next_batch, self._next_batch + 1
        loads, self._queued = self._queued, {}
        batch = _Batch([], [load.keys for load in loads.values()])
        for request, load in loads.items():
            job = ("load", number, request)
            try:
                self._copies.submit_load(job, load.pages, load.slots, stream=self._stream())
                batch.jobs.append(job)
            except (DeviceError, CacheClosed, ValueError):
                batch.ok = False
        self._batches[number] = batch
        return number

    def wait_for_batch(self, number: int) -> None:
        """Return when the copies of a batch have ended.

        Raises:
            DeviceError: a copy hangs. The engine would compute with a page that is not there.
        """
        batch = self._batches.get(number)
        if batch is not None and not batch.ended:
            if not self._copies.wait(batch.jobs, WAIT):
                raise DeviceError(f"a copy has not ended in {WAIT} s")
            batch.ended = True

    def finish_loads(self, number: int) -> bool:
        """Wait for a batch and let go of its pages. Returns whether all of them were loaded."""
        self.wait_for_batch(number)
        self._collect()
        batch = self._batches.pop(number, None)
        if batch is None:
            return True
        for keys in batch.keys:
            self._tiers.complete_load(keys)
        failed = self._failed_loads.intersection(batch.jobs)
        self._failed_loads -= failed
        return batch.ok and not failed

    # -- stores

    def queue_store(self, keys: Sequence[bytes], pages: Sequence[int]) -> bool:
        """Copy device pages to the host tier. Pages without a slot wait for one: SGLang keeps them
        until `stored` counts the store.

        Returns:
            Whether a store has begun, which `stored` counts when it has ended.
        """
        if self._closed:
            return False
        job, self._next_store = ("store", self._next_store), self._next_store + 1
        parents = dict(zip(keys, [None, *keys[:-1]], strict=True))
        store = _Store(dict(zip(keys, pages, strict=True)), parents, keys)
        self._go_on(job, store)
        if not (store.in_flight or store.whole):
            return False
        self._stores[job] = store
        return True

    def _go_on(self, job: Hashable, store: _Store) -> None:
        """Copy the pages of a store that get slots now."""
        parents = [store.parents[key] for key in store.waiting]
        found = self._tiers.prepare_store(store.waiting, parents)
        store.keys, store.waiting = found.keys, found.waiting
        store.whole = store.whole and not found.refused
        if not found.keys:
            return
        pages = [store.pages[key] for key in found.keys]
        try:
            self._copies.submit_store(job, pages, found.slots, stream=self._stream())
        except (DeviceError, CacheClosed, ValueError):
            self._tiers.complete_store(found.keys, success=False)
            store.keys = store.waiting = ()
            store.whole = False

    def stored(self) -> int:
        """Stores that have ended, up to the oldest that has not."""
        self._collect()
        return next(
            (i for i, store in enumerate(self._stores.values()) if store.in_flight),
            len(self._stores),
        )

    def take_stored(self) -> bool:
        """Forget the oldest store, which has ended. Returns whether all of its pages were stored.

        Raises:
            LookupError: none has ended.
        """
        if not self.stored():
            raise LookupError("no store has ended")
        return self._stores.pop(next(iter(self._stores))).whole

    # -- the rest

    def end_step(self) -> None:
        """A step of the scheduler has ended: pages that `find` counted may be evicted, and stores
        that wait for slots go on."""
        self._wait_left_s = self._fetch_wait_s
        if self._closed:
            return
        self._collect()
        self._tiers.end_step()
        for job, store in self._stores.items():
            if store.waiting and not store.keys:
                self._go_on(job, store)

    def _collect(self) -> None:
        for ended in self._copies.get_finished():
            if ended.stored:
                store = self._stores[ended.job]
                self._tiers.complete_store(store.keys, success=not ended.error)
                store.whole, store.keys = store.whole and not ended.error, ()
            elif ended.error:
                self._failed_loads.add(ended.job)

    def reset(self) -> None:
        """End all moves and forget the pages of the host tier. Stored objects stay."""
        self._end_moves()
        if not self._closed:
            self._tiers.reset()

    def _end_moves(self) -> None:
        """Wait for every copy, and let go of its pages.

        Raises:
            DeviceError: a copy hangs. The engine would reuse its pages.
        """
        for request in list(self._queued):
            self.cancel_load(request)
        for number in list(self._batches):
            self.finish_loads(number)
        for store in self._stores.values():
            store.waiting = ()
        if not self._copies.wait(self._stores, WAIT):
            raise DeviceError(f"a copy has not ended in {WAIT} s")
        self._collect()
        self._stores.clear()

    def close(self) -> None:
        """End all moves and close the tiers, any number of times."""
        if not self._closed:
            self._end_moves()
            self._closed = True
            self._copies.shutdown()
            self._tiers.shutdown()
