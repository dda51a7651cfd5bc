"""Storage of one pool's pages, for threads that wait."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from typing import NamedTuple

import numpy as np

from kvactors.errors import CacheClosed
from kvactors.integrations.sglang.host_pages import Region
from kvactors.tier_cache import StorageResult, StorageTier

BUFFER_BYTES = 32 << 20
"""Bytes of a buffer, at least one page."""
AT_ONCE = 2
"""Buffers that a call fills or empties while the store works on another one."""
KEPT = 4
"""Buffers kept for later calls."""


class _Batch(NamedTuple):
    """Pages in a buffer, in flight.

    Attributes:
        pages: their indices in the call.
        buffer: their bytes, one page after another.
        done: the result of the job.
    """

    pages: Sequence[int]
    buffer: np.ndarray
    done: Future[StorageResult]


class PageStore:
    """Saves and loads pages, each within a deadline.

    The store never reads or writes the engine's memory. Pages are copied to and from buffers by the
    calling thread, so that a call to the disk that outlives its deadline finds no page that the
    engine has given to another request.

    Args:
        tier: the store, open.
        page_bytes: bytes of a page.
        timeout: seconds that a call of `load` or `save` may take.
    """

    def __init__(self, tier: StorageTier, page_bytes: int, timeout: float) -> None:
        self._tier = tier
        self._page_bytes = page_bytes
        self._timeout = timeout
        self._batch_pages = max(1, BUFFER_BYTES // page_bytes)
        self._buffers: deque[np.ndarray] = deque()
        self._jobs = count()

    @property
    def trouble(self) -> str:
        """Why the store gets no work now, empty if it does."""
        return self._tier.trouble

    def look_up(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each page can be read. A store that lists its objects answers from memory, any
        other one is asked."""
        found = [self._tier.contains(key) for key in keys]
        unknown = [i for i, known in enumerate(found) if not known]
        if self._tier.lists or not unknown or self._tier.trouble:
            return found
        with suppress(CacheClosed, TimeoutError):
            asked = self._tier.submit_lookup(next(self._jobs), [keys[i] for i in unknown])
            for i, known in zip(unknown, asked.result(self._timeout).ok, strict=True):
                found[i] = known
        self._tier.poll()  # results are taken from the jobs
        return found

    def load(self, keys: Sequence[bytes], pages: Sequence[Sequence[Region]]) -> list[bool]:
        """Read pages into the engine's memory.

        Args:
            keys: of the pages.
            pages: the memory of each. That of a page that failed is unchanged.

        Returns:
            Whether each page was read. After a failure the pages of later buffers are not.
        """
        ok = [False] * len(keys)
        tier = self._tier
        wanted = [i for i, key in enumerate(keys) if not tier.lists or tier.contains(key)]
        self._move(wanted, keys, pages, ok, save=False)
        return ok

    def save(self, keys: Sequence[bytes], pages: Sequence[Sequence[Region]]) -> list[bool]:
        """Write pages from the engine's memory. Returns whether the store has each now."""
        ok = [self._tier.contains(key) for key in keys]
        wanted = [i for i, found in enumerate(ok) if not found]
        self._move(wanted, keys, pages, ok, save=True)
        return ok

    def _move(
        self,
        wanted: Sequence[int],
        keys: Sequence[bytes],
        pages: Sequence[Sequence[Region]],
        ok: list[bool],
        *,
        save: bool,
    ) -> None:
        """Fill in `ok` for the wanted pages."""
        until = time.monotonic() + self._timeout
        in_flight: deque[_Batch] = deque()
        for first in range(0, len(wanted), self._batch_pages):
            if len(in_flight) == AT_ONCE and not self._finish(in_flight, pages, ok, until, save):
                return
            if self._tier.trouble or time.monotonic() >= until:
                break
            batch = wanted[first : first + self._batch_pages]
            in_flight.append(self._begin(batch, keys, pages, save))
        while in_flight and self._finish(in_flight, pages, ok, until, save):
            pass

    def _begin(
        self,
        wanted: Sequence[int],
        keys: Sequence[bytes],
        pages: Sequence[Sequence[Region]],
        save: bool,
    ) -> _Batch:
        buffer = self._take_buffer()
        if save:
            self._copy(buffer, [pages[i] for i in wanted], range(len(wanted)), to_buffer=True)
        size, whole = self._page_bytes, buffer.data
        views = [whole[i * size : (i + 1) * size] for i in range(len(wanted))]
        submit = self._tier.submit_store if save else self._tier.submit_load
        try:
            done = submit(next(self._jobs), [keys[i] for i in wanted], views)
        except CacheClosed:
            done = Future()
            done.cancel()
        return _Batch(wanted, buffer, done)

    def _finish(
        self,
        in_flight: deque[_Batch],
        pages: Sequence[Sequence[Region]],
        ok: list[bool],
        until: float,
        save: bool,
    ) -> bool:
        """Wait for the oldest batch. Returns whether the call goes on."""
        batch = in_flight.popleft()
        self._tier.poll()  # results are taken from the jobs
        if batch.done.cancelled():
            return False
        try:
            result = batch.done.result(max(0.0, until - time.monotonic()))
        except TimeoutError:
            return False  # the job keeps its buffer
        self._tier.poll()
        good = [i for i, found in enumerate(result.ok) if found]
        if not save:
            self._copy(batch.buffer, [pages[batch.pages[i]] for i in good], good, to_buffer=False)
        for i in good:
            ok[batch.pages[i]] = True
        if len(self._buffers) < KEPT:
            self._buffers.append(batch.buffer)
        return save or len(good) == len(result.ok)

    def _take_buffer(self) -> np.ndarray:
        try:
            return self._buffers.pop()
        except IndexError:
            return np.empty(self._batch_pages * self._page_bytes, np.uint8)

    def _copy(
        self,
        buffer: np.ndarray,
        pages: Sequence[Sequence[Region]],
        places: Sequence[int],
        *,
        to_buffer: bool,
    ) -> None:
        """Copy pages to or from their places in a buffer. `memmove` lets other threads run."""
        for place, regions in zip(places, pages, strict=True):
            at = buffer.ctypes.data + place * self._page_bytes
            for region in regions:
                if to_buffer:
                    ctypes.memmove(at, region.address, region.nbytes)
                else:
                    ctypes.memmove(region.address, at, region.nbytes)
                at += region.nbytes

    def clear(self) -> None:
        """Forget every page, and delete the stored objects."""
        self._tier.clear()

    def close(self, limit: float) -> None:
        """Close the store. Later calls answer that there is nothing."""
        self._tier.close(limit)
        self._tier.poll()
