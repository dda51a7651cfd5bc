"""Storage addressed by keys, from any thread."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from kvactors.errors import CacheClosed, StoreError
from kvactors.tier_cache.checks import checked_key, checked_keys, checked_limit, checked_views
from kvactors.tier_cache.known_objects import KnownObjects
from kvactors.tier_cache.storage_jobs import JobKind, StorageJob, StorageResult
from kvactors.tier_cache.views import ObjectViews

if TYPE_CHECKING:
    from kvactors.storage.slot_store import SlotStore
    from kvactors.tier_cache.loop_thread import LoopThread, Service
    from kvactors.tier_cache.storage_loop import JobEnd, StorageLoop

CLOSING = 3.0
"""Seconds beyond its limit that `close` may take."""


def fail_unseen(found: Sequence[StorageJob], jobs: dict[StorageJob, Any], ended: JobEnd) -> None:
    """Fail jobs that a loop took between its last turn and its end, each once: `close` and the
    thread that submits may both find one."""
    for job in found:
        if jobs.pop(job, job) is None:
            ended(job, [False] * len(job.keys), [])


class StorageTier:
    """Keeps objects of `block_bytes` bytes under keys of any length.

    `contains`, `submit_store`, `submit_load`, `submit_lookup` and `poll` return at once and may be
    called in any thread. The memory of a job belongs to the job until its result.

    Args:
        make: makes the back end. Called by `open`, in the thread that runs the store.
        digest: the identity that all objects share, 32 bytes. It is part of every object's name.
        block_bytes: bytes of an object.
        timeout: seconds a job may take. Keys that were not begun by then fail.
        event_fd: whether `fd` becomes readable when there are results.
        memory: where the objects of jobs are, for stores that register it. None if it is unknown.
        clock: the time of the jobs' deadlines.

    Attributes:
        known: the objects that it is known to hold since the last clear.
        beside: other services that run on the same event loop, before `open`.
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
        memory: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.block_bytes = block_bytes
        self.timeout = timeout
        self.clock = clock
        self.results: deque[StorageResult] = deque()
        self.fd: int | None = None
        self.stuck = False
        self._make = make
        self._digest = digest
        self._event_fd = event_fd
        self._memory = memory
        self.beside: list[Service] = []
        self.known = KnownObjects()
        self._jobs: dict[StorageJob, Any] = {}  # in flight
        self._closed = False
        self._thread: LoopThread | None = None
        self._loop: StorageLoop | None = None

    # -- opening and closing

    def open(self, limit: float = 60.0) -> None:
        """Start the thread, open the store and list its objects.

        Raises:
            StoreError: the store cannot be used, or was not open after `limit` seconds.
        """
        limit = checked_limit("limit", limit)
        from kvactors.threads import end_at_exit

        if self._closed or self._thread is not None:
            raise StoreError("a storage tier is opened once")
        thread = self._thread = self._make_thread()
        try:
            thread.open(limit)
        except BaseException:
            self.close(0.0)
            raise
        self.take_in_names()
        if self._event_fd:
            self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        end_at_exit(self)

    def _make_thread(self) -> LoopThread:
        from kvactors.tier_cache.loop_thread import LoopThread

        return LoopThread([self.make_loop(), *self.beside])

    def make_loop(self) -> StorageLoop:
        """The part that runs on the event loop."""
        from kvactors.tier_cache.storage_loop import StorageLoop

        self._loop = StorageLoop(
            self._make,
            self.timeout,
            self._ended,
            lambda: self.known,
            memory=self._memory,
            clock=self.clock,
        )
        return self._loop

    def take_in_names(self) -> None:
        """The store is open: learn which objects it holds."""
        assert self._loop is not None
        self.known = self._loop.known

    def close(self, limit: float = 5.0) -> None:
        """Let the jobs in flight end, for `limit` seconds at most, then close the store. Jobs that
        did not begin by then fail."""
        limit = checked_limit("limit", limit)
        thread, self._thread, self._closed = self._thread, None, True
        if thread is None:
            return
        thread.close(limit)
        fail_unseen([] if thread.alive else list(self._jobs), self._jobs, self._ended)
        store = None if self._loop is None else self._loop.store
        self.stuck = thread.alive or (store is not None and store.stuck)
        fd, self.fd = self.fd, None
        if fd is not None and not thread.alive:
            os.close(fd)

    def end(self, limit: float) -> None:
        """The interpreter exits. See `threads.Ending`."""
        self.close(max(0.0, limit - CLOSING))

    def abandon(self) -> None:
        """The process has forked: its child has neither the thread nor the jobs."""
        self._closed, self._thread = True, None
        self._jobs.clear()

    def call(self, work: Callable[..., object], *args: object) -> bool:
        """Run `work(*args)` on the event loop. Returns False if there is none (any more)."""
        thread = self._thread
        return not self._closed and thread is not None and thread.call(work, *args)

    # -- calls of any thread

    def name_of(self, key: bytes) -> bytes:
        """The 32-byte name of a key's object. ValueError for a key that is no bytes, or empty."""
        if type(key) is not bytes or not key:
            key = checked_key(key)
        return sha256(self._digest + key).digest()

    def contains(self, key: bytes) -> bool:
        """Whether the store holds a key, as far as is known now. Of a store that lists none, those
        are the keys that this process has stored or looked up."""
        return self.known.holds(self.name_of(key), key)

    @property
    def lists(self) -> bool:
        """Whether the store lists its objects, so that `contains` is exact. If not, `submit_lookup`
        asks it."""
        return self.known.lists

    def submit_store(
        self, job: Hashable, keys: Sequence[bytes], views: Sequence[ObjectViews]
    ) -> Future[StorageResult]:
        """Save memory under keys.

        Args:
            job: a name for the result.
            keys: of the objects.
            views: the memory of each: a view of `block_bytes` bytes, or a list of views with as
                many together. A region of another size is a failure of its key.

        Returns:
            The end of the job, for a caller that waits for it. `poll` returns it as well.

        Raises:
            ValueError: there are not as many views as keys, or a key is no bytes.
            CacheClosed: the tier is not open.
        """
        return self._submit(job, "store", keys, views)

    def submit_load(
        self, job: Hashable, keys: Sequence[bytes], views: Sequence[ObjectViews]
    ) -> Future[StorageResult]:
        """Read objects into memory, and verify them. The arguments are those of `submit_store`.
        The contents of memory whose key failed are undefined."""
        return self._submit(job, "load", keys, views)

    def submit_lookup(self, job: Hashable, keys: Sequence[bytes]) -> Future[StorageResult]:
        """Find out which keys the store holds. One that lists its objects answers from memory, any
        other is asked, and `contains` is true for the keys that it found.

        Args:
            job: a name for the result.
            keys: of the objects.

        Returns:
            The end of the job. See `submit_store`.

        Raises:
            CacheClosed: the tier is not open.
        """
        return self._submit(job, "lookup", keys, ())

    def _submit(
        self, name: Hashable, kind: JobKind, keys: Sequence[bytes], views: Sequence[ObjectViews]
    ) -> Future[StorageResult]:
        keys = checked_keys(keys)
        if kind != "lookup":
            views = checked_views(views, len(keys))
        loop, thread = self._loop, self._thread
        if self._closed or loop is None or thread is None:
            raise CacheClosed("the storage tier is not open")
        job = StorageJob(
            name,
            kind=kind,
            keys=keys,
            names=[self.name_of(key) for key in keys],
            regions=views,
            known=self.known,
            began=self.clock(),
            timeout=self.timeout,
        )
        self._jobs[job] = None
        if not thread.call(loop.accept, job):  # the loop has ended
            fail_unseen([job], self._jobs, self._ended)
        return job.done

    def poll(self) -> list[StorageResult]:
        """The jobs that have ended since the last call, in the order of their ends."""
        found = []
        with suppress(IndexError):  # other threads poll too
            while True:
                found.append(self.results.popleft())
        return found

    def drain(self, limit: float) -> bool:
        """Wait for the jobs in flight, at most `limit` seconds. Returns whether all have ended."""
        limit = checked_limit("limit", limit)
        return not wait([job.done for job in list(self._jobs)], limit).not_done

    @property
    def in_flight(self) -> int:
        """Jobs that have not ended."""
        return len(self._jobs)

    @property
    def objects(self) -> int:
        """Objects that can be read."""
        return len(self.known)

    @property
    def trouble(self) -> str:
        """Why no object can be loaded now, empty if objects can be."""
        if any(job.began < self.clock() - self.timeout - 1.0 for job in list(self._jobs)):
            return "a call to the store does not return"
        return "" if self._loop is None else self._loop.trouble

    @property
    def failing(self) -> tuple[str, ...]:
        """Kinds of calls that do not work, with reasons and remedies."""
        return () if self._loop is None else self._loop.failing

    @property
    def condition(self) -> str:
        """See `Backend.condition`."""
        return "" if self._loop is None else self._loop.condition

    def clear(self) -> list[bytes]:
        """Delete every object. Jobs that were submitted before bring none back.

        The objects are out of reach at once, and deleted in the background: until `clearing` is
        false a crash may leave some to be found by the next process.

        Returns:
            The keys that were stored, as far as this process has used them.
        """
        before, self.known = self.known, KnownObjects(lists=self.known.lists)
        if self._loop is not None:
            self.call(self._loop.clear)
        return before.remove(before.names())

    @property
    def clearing(self) -> bool:
        """Whether a clear has not ended."""
        loop = self._loop
        if loop is None or self._closed:
            return False
        return loop.known is not self.known or loop.clearing > 0

    def remove(self, keys: Sequence[bytes]) -> None:
        """Forget objects. They are erased in the background, before jobs that are submitted later.

        Objects that a job writes at this moment stay: remove them when the job has ended.
        """
        self._remove([self.name_of(key) for key in checked_keys(keys)])

    def retain(self, keys: Iterable[bytes]) -> int:
        """Remove every object whose key is not in `keys`. Returns the number of removed objects."""
        wanted = {self.name_of(key) for key in checked_keys(keys)}
        others = [name for name in self.known.names() if name not in wanted]
        self._remove(others)
        return len(others)

    def _remove(self, names: Sequence[bytes]) -> None:
        self.known.remove(names)
        if names and self._loop is not None:
            self.call(self._loop.remove, names)

    # -- the store's thread

    def _ended(self, job: StorageJob, ok: Sequence[bool], gone: Sequence[bytes]) -> None:
        nbytes = 0 if job.kind == "lookup" else sum(ok) * self.block_bytes
        moved = tuple(ok), tuple(gone), nbytes, self.clock() - job.began
        result = StorageResult(job.name, job.kind, job.keys, *moved)
        self.results.append(result)
        self._jobs.pop(job, None)
        job.done.set_result(result)
        if self.fd is not None:
            os.eventfd_write(self.fd, 1)
