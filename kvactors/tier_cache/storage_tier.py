"""Storage addressed by keys, from any thread."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from hashlib import sha256
from typing import TYPE_CHECKING

from kvactors.errors import CacheClosed, StoreError
from kvactors.tier_cache.storage_jobs import StorageJob, StorageResult
from kvactors.tier_cache.views import ObjectViews

if TYPE_CHECKING:
    from kvactors.storage.slot_store import SlotStore
    from kvactors.tier_cache.storage_loop import StorageLoop

CLOSING = 3.0
"""Seconds beyond its limit that `close` waits for the thread: a file store abandons threads that
hang after one second."""


class StorageTier:
    """Keeps objects of `block_bytes` bytes under keys of any length.

    `contains`, `submit_store`, `submit_load` and `poll` return at once and may be called in any
    thread. The memory of a job belongs to the job until its result.

    Args:
        make: makes the back end. Called by `open`, in the thread that runs the store.
        digest: the identity that all objects share, 32 bytes. It is part of every object's name.
        block_bytes: bytes of an object.
        timeout: seconds a job may take. Keys that were not begun by then fail.
        event_fd: whether `fd` becomes readable when there are results.

    Attributes:
        results: ended jobs that `poll` has not returned.
        fd: file descriptor for `select`, None without `event_fd`. Read its 8 bytes before `poll`.
        stuck: whether a call to the store still ran when `close` returned. The memory of its job
            must then stay mapped.
    """

    def __init__(
        self,
        make: Callable[[], SlotStore],
        digest: bytes,
        block_bytes: int,
        timeout: float = 10.0,
        *,
        event_fd: bool = False,
    ) -> None:
        self.block_bytes = block_bytes
        self.timeout = timeout
        self.results: deque[StorageResult] = deque()
        self.fd: int | None = None
        self.stuck = False
        self._make = make
        self._digest = digest
        self._event_fd = event_fd
        self._names: set[bytes] = set()  # of objects that can be read
        self._keys: dict[bytes, bytes] = {}  # by name, those used in this process
        self._jobs: dict[StorageJob, None] = {}  # in flight
        self._generation = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        self._loop: StorageLoop | None = None

    # -- opening and closing

    def open(self, limit: float = 60.0) -> None:
        """Start the thread, open the store and list its objects.

        Raises:
            StoreError: the store cannot be used, or was not open after `limit` seconds.
        """
        from kvactors.threads import end_at_exit
        from kvactors.tier_cache.storage_loop import StorageLoop

        if self._closed or self._thread is not None:
            raise StoreError("a storage tier is opened once")
        self._loop = StorageLoop(self._make, self.timeout, self._ended)
        opened: Future[list[bytes]] = Future()
        self._thread = threading.Thread(
            target=self._loop.run, args=(opened, limit), name="kvactors-storage", daemon=True
        )
        self._thread.start()
        try:
            self._names = set(opened.result(limit + CLOSING))
        except TimeoutError:
            self.close(0.0)
            raise StoreError(f"the store was not open after {limit} seconds") from None
        except BaseException:
            self.close(0.0)
            raise
        if self._event_fd:
            self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        end_at_exit(self)

    def close(self, limit: float = 5.0) -> None:
        """Let the jobs in flight end, for `limit` seconds at most, then close the store. Jobs that
        did not begin by then fail."""
        self._closed = True
        thread, self._thread = self._thread, None
        if thread is None:
            return
        loop = self._loop
        if loop is not None and loop.loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                loop.loop.call_soon_threadsafe(loop.stop, limit)
        thread.join(limit + CLOSING)
        store = None if loop is None else loop.store
        self.stuck = thread.is_alive() or (store is not None and store.stuck)
        fd, self.fd = self.fd, None
        if fd is not None and not thread.is_alive():
            os.close(fd)

    def end(self, limit: float) -> None:
        """The interpreter exits. See `threads.Ending`."""
        self.close(max(0.0, limit - CLOSING))

    def abandon(self) -> None:
        """The process has forked: its child has neither the thread nor the jobs."""
        self._closed, self._thread = True, None
        self._jobs.clear()

    # -- calls of any thread

    def name_of(self, key: bytes) -> bytes:
        """The 32-byte name of a key's object."""
        return sha256(self._digest + key).digest()

    def contains(self, key: bytes) -> bool:
        """Whether the store holds a key, as far as is known now."""
        name = sha256(self._digest + key).digest()
        if name not in self._names:
            return False
        self._keys[name] = key
        return True

    def submit_store(
        self, job: Hashable, keys: Sequence[bytes], views: Sequence[ObjectViews]
    ) -> None:
        """Save memory under keys.

        Args:
            job: a name for the result.
            keys: of the objects.
            views: the memory of each: a view of `block_bytes` bytes, or a list of views with as
                many together. A region of another size is a failure of its key.

        Raises:
            ValueError: there are not as many views as keys.
            CacheClosed: the tier is not open.
        """
        self._submit(job, True, keys, views)

    def submit_load(
        self, job: Hashable, keys: Sequence[bytes], views: Sequence[ObjectViews]
    ) -> None:
        """Read objects into memory, and verify them. The arguments are those of `submit_store`.
        The contents of memory whose key failed are undefined."""
        self._submit(job, False, keys, views)

    def _submit(
        self, name: Hashable, save: bool, keys: Sequence[bytes], views: Sequence[ObjectViews]
    ) -> None:
        if len(keys) != len(views):
            raise ValueError(f"{len(views)} views of {len(keys)} keys")
        if self._closed or self._loop is None or self._loop.loop is None:
            raise CacheClosed("the storage tier is not open")
        names = [self.name_of(key) for key in keys]
        self._keys.update(zip(names, keys, strict=True))
        job = StorageJob(
            name,
            save=save,
            keys=keys,
            names=names,
            regions=views,
            generation=self._generation,
            timeout=self.timeout,
        )
        self._jobs[job] = None
        try:
            self._loop.loop.call_soon_threadsafe(self._loop.accept, job)
        except RuntimeError:  # the loop has ended
            self._ended(job, [False] * len(names), ())

    def poll(self) -> list[StorageResult]:
        """The jobs that have ended since the last call, in the order of their ends."""
        found = []
        while self.results:
            found.append(self.results.popleft())
        return found

    def drain(self, limit: float) -> bool:
        """Wait for the jobs in flight, at most `limit` seconds. Returns whether all have ended."""
        return not wait([job.done for job in list(self._jobs)], limit).not_done

    @property
    def in_flight(self) -> int:
        """Jobs that have not ended."""
        return len(self._jobs)

    @property
    def objects(self) -> int:
        """Objects that can be read."""
        return len(self._names)

    @property
    def trouble(self) -> str:
        """Why the store gets no work now, empty if it does."""
        store = None if self._loop is None else self._loop.store
        if store is None:
            return ""
        late = time.monotonic() - self.timeout - 1.0
        if any(job.began < late for job in list(self._jobs)):
            return "a call to the store does not return"
        counters = getattr(store.inner, "counters", None)
        return store.breaker.reason or ("" if counters is None else counters.breaker.reason)

    def clear(self) -> list[bytes]:
        """Forget every object. Jobs that were submitted before bring none back.

        Returns:
            The keys that were stored, as far as this process has used them.
        """
        names, self._names = self._names, set()
        self._generation += 1
        removed = [self._keys.pop(name) for name in names if name in self._keys]
        loop = self._loop
        if loop is not None and loop.loop is not None and not self._closed:
            with suppress(RuntimeError):  # the loop has ended
                loop.loop.call_soon_threadsafe(loop.clear, self._generation)
        return removed

    # -- the store's thread

    def _ended(self, job: StorageJob, ok: Sequence[bool], removed: Sequence[bytes]) -> None:
        if job.generation == self._generation:
            results = zip(job.names, ok, strict=True)
            self._names.update(name for name, good in results if good and job.save)
            self._names.difference_update(removed)
        gone = [self._keys.pop(name) for name in removed if name in self._keys]
        for name in job.names:
            if name not in self._names:
                self._keys.pop(name, None)
        nbytes = sum(ok) * self.block_bytes
        seconds = time.monotonic() - job.began
        result = StorageResult(
            job.name, job.save, job.keys, tuple(ok), tuple(gone), nbytes, seconds
        )
        self.results.append(result)
        self._jobs.pop(job, None)
        job.done.set_result(None)
        if self.fd is not None:
            os.eventfd_write(self.fd, 1)
