"""Moves pages between an engine's memory and a store, through buffers of kvactors."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from typing import NamedTuple

import numpy as np

from kvactors.errors import CacheClosed
from kvactors.tier_cache import StorageResult, StorageTier


class PageRegion(NamedTuple):
    """Contiguous memory."""

    address: int
    nbytes: int


AT_ONCE = 2  # buffers of a call: one is filled while the store works on the other one
KEPT = 8  # buffers kept for later calls


class PageBatch(NamedTuple):
    """Pages of a call, by number, and the job that moves them between a buffer and the store."""

    pages: Sequence[int]
    buffer: np.ndarray
    done: Future[StorageResult]


class PageStore:
    """Saves and loads pages, each within a deadline.

    The store never reads or writes the engine's memory. Pages are copied to and from buffers by the
    calling thread, so that a call to the disk that outlives its deadline finds no page that the
    engine has given to another request.

    Args:
        timeout: seconds of a call.
        buffer_bytes: of a buffer, which has one page at least.

    Attributes:
        stopped: once it is true, a call that is in flight writes no memory of the engine any more.
        ended: called with the result of every job, that of a call whose time was over included.
    """

    def __init__(
        self, tier: StorageTier, page_bytes: int, timeout: float, *, buffer_bytes: int = 32 << 20
    ) -> None:
        self.tier = tier
        self.stopped = False
        self.ended: Callable[[StorageResult], object] = lambda _: None
        self._page_bytes = page_bytes
        self._timeout = timeout
        self._batch_pages = max(1, buffer_bytes // page_bytes)
        self._buffers: deque[np.ndarray] = deque()
        self._jobs = count()

    def look_up(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each page can be read. A store that lists no objects is asked."""
        found = [self.tier.contains(key) for key in keys]
        unknown = [i for i, known in enumerate(found) if not known]
        if self.tier.lists or not unknown or self.tier.trouble:
            return found
        with suppress(CacheClosed, TimeoutError):
            asked = self.tier.submit_lookup(next(self._jobs), [keys[i] for i in unknown])
            for i, known in zip(unknown, asked.result(self._timeout).ok, strict=True):
                found[i] = known
        self.tier.poll()  # results are taken from the jobs
        return found

    def load(
        self,
        keys: Sequence[bytes],
        pages: Sequence[Sequence[PageRegion]],
        until: float | None = None,
    ) -> list[bool]:
        """Read pages into the engine's memory. Returns whether each was read: the memory of one
        that failed is unchanged, and after a failure the pages of later buffers are not read.
        `until`: a deadline on the monotonic clock, in place of the time-out."""
        tier = self.tier
        wanted = [i for i, key in enumerate(keys) if not tier.lists or tier.contains(key)]
        return self._move(keys, pages, wanted, [False] * len(keys), until, save=False)

    def save(
        self,
        keys: Sequence[bytes],
        pages: Sequence[Sequence[PageRegion]],
        until: float | None = None,
    ) -> list[bool]:
        """Write pages from the engine's memory. Returns whether the store has each now."""
        ok = [self.tier.contains(key) for key in keys]
        wanted = [i for i, found in enumerate(ok) if not found]
        return self._move(keys, pages, wanted, ok, until, save=True)

    def _move(
        self,
        keys: Sequence[bytes],
        pages: Sequence[Sequence[PageRegion]],
        wanted: Sequence[int],
        ok: list[bool],
        until: float | None,
        *,
        save: bool,
    ) -> list[bool]:
        """Move the wanted pages by buffers, and mark those that were moved in `ok`."""
        end = until or time.monotonic() + self._timeout
        in_flight: deque[PageBatch] = deque()
        for first in range(0, len(wanted), self._batch_pages):
            if len(in_flight) == AT_ONCE and not self._end(in_flight.popleft(), pages, ok, end):
                return ok
            if self.tier.trouble or time.monotonic() >= end:
                break
            some = wanted[first : first + self._batch_pages]
            try:
                in_flight.append(self._begin(keys, pages, some, save=save))
            except CacheClosed:
                break
        while in_flight and self._end(in_flight.popleft(), pages, ok, end):
            pass
        return ok

    def _begin(
        self,
        keys: Sequence[bytes],
        pages: Sequence[Sequence[PageRegion]],
        some: Sequence[int],
        *,
        save: bool,
    ) -> PageBatch:
        """Begin to move some of the pages. CacheClosed."""
        buffer, size = self._buffer(), self._page_bytes
        if save:
            self._copy(buffer, enumerate(pages[i] for i in some), to_buffer=True)
        views = [buffer.data[i * size : (i + 1) * size] for i in range(len(some))]
        submit = self.tier.submit_store if save else self.tier.submit_load
        done = submit(next(self._jobs), [keys[i] for i in some], views)
        done.add_done_callback(lambda job: self.ended(job.result()))
        return PageBatch(some, buffer, done)

    def _end(
        self, batch: PageBatch, pages: Sequence[Sequence[PageRegion]], ok: list[bool], until: float
    ) -> bool:
        """Wait for a batch, and mark its pages in `ok`. Returns whether the call goes on."""
        self.tier.poll()  # results are taken from the jobs
        try:
            result = batch.done.result(max(0.0, until - time.monotonic()))
        except TimeoutError:
            return False  # the job keeps its buffer
        self.tier.poll()
        if self.stopped:
            return False
        good = [i for i, found in enumerate(result.ok) if found]
        if not result.saved:
            read = ((i, pages[batch.pages[i]]) for i in good)
            self._copy(batch.buffer, read, to_buffer=False)
        for i in good:
            ok[batch.pages[i]] = True
        if len(self._buffers) < KEPT:
            self._buffers.append(batch.buffer)
        return result.saved or len(good) == len(result.ok)

    def _buffer(self) -> np.ndarray:
        try:
            return self._buffers.pop()
        except IndexError:  # other threads take buffers too
            return np.empty(self._batch_pages * self._page_bytes, np.uint8)

    def _copy(
        self,
        buffer: np.ndarray,
        pages: Iterable[tuple[int, Sequence[PageRegion]]],
        *,
        to_buffer: bool,
    ) -> None:
        """Copy pages to or from their places in a buffer. `memmove` lets other threads run."""
        for place, regions in pages:
            at = buffer.ctypes.data + place * self._page_bytes
            end = at + self._page_bytes
            for region in regions:
                if to_buffer:
                    ctypes.memmove(at, region.address, region.nbytes)
                else:
                    ctypes.memmove(region.address, at, region.nbytes)
                at += region.nbytes
            if to_buffer and at < end:
                ctypes.memset(at, 0, end - at)  # the end of an object, which is no whole page

    def close(self, limit: float) -> None:
        """Close the store. Later calls answer that there is nothing."""
        self.stopped = True
        self.tier.close(limit)
        self.tier.poll()
