"""The objects that a store is known to hold, by name."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from kvactors.errors import CacheClosed, ConfigError, StoreError
from kvactors.identity import StoreIdentity
from kvactors.settings.check import convert
from kvactors.tier_cache.checks import checked_key, checked_keys, checked_limit, checked_views
from kvactors.tier_cache.settings import TierConfig, checked_config

if TYPE_CHECKING:
    from kvactors.storage.backend import Backend
    from kvactors.storage.guarded import GuardedBackend
    from kvactors.tier_cache.slots import SlotMemory
    from kvactors.tier_cache.storage_loop import LoopThread, Service, StorageLoop

KNOWN = 65_536
"""Objects at most that are known to be in a store that lists none. Beyond that the oldest is
forgotten, and the store is asked again."""


class KnownObjects:
    """Names of the objects between two clears, and the keys of those that this process has used.

    The store's event loop adds names, any thread looks and removes, each by one operation on a
    dict. A clear puts a new `KnownObjects` in the place of this one, so a job of before the clear
    adds its names to one that no thread asks any more.
    """

    def __init__(self, names: Iterable[bytes] = (), *, lists: bool = True) -> None:
        self.lists = lists
        self._names = dict.fromkeys(names)
        self._keys: dict[bytes, bytes] = {}
        self._added: deque[bytes] = deque()  # the loop's, of a store that lists none

    def __len__(self) -> int:
        return len(self._names)

    def names(self) -> Iterable[bytes]:
        return self._names.copy()

    def remove(self, names: Iterable[bytes]) -> list[bytes]:
        """Objects are erased. Returns the keys of those that this process has used."""
        gone = []
        for name in names:
            self._names.pop(name, None)
            key = self._keys.pop(name, None)
            if key is not None:
                gone.append(key)
        return gone

    def holds(self, name: bytes, key: bytes) -> bool:
        if name not in self._names:
            return False
        self._keys[name] = key
        return True

    def ended(self, job: StorageJob, ok: Sequence[bool], removed: Sequence[bytes]) -> list[bytes]:
        """A job has ended: called on the event loop. Returns the keys that left the store."""
        found = job.kind == "store" or (job.kind == "lookup" and not self.lists)
        for name, key, good in zip(job.names, job.keys, ok, strict=True):
            if good and found:
                self._add(name)
            elif not (good or self.lists or job.kind == "store"):
                self._names.pop(name, None)  # it could not be read, and may be gone
            if name in self._names:
                self._keys[name] = key
        while len(self._added) > KNOWN:
            self.remove([self._added.popleft()])
        return self.remove(removed)

    def _add(self, name: bytes) -> None:
        if not self.lists and name not in self._names:
            self._added.append(name)
        self._names[name] = None


ObjectViews: TypeAlias = "memoryview | Sequence[memoryview]"
"""A contiguous view of bytes, or several views, in the order of the object's bytes."""


JobKind = Literal["store", "load", "lookup"]


class StorageResult(NamedTuple):
    """The end of a job.

    Attributes:
        ok: one bool a key: stored now or before, loaded and verified, or found.
        removed: keys that left the store meanwhile, as far as this process has used them.
        nbytes: bytes of the keys that are ok. 0 for a look-up.
    """

    job: Hashable
    kind: JobKind
    keys: tuple[bytes, ...]
    ok: tuple[bool, ...]
    removed: tuple[bytes, ...]
    nbytes: int
    seconds: float

    @property
    def saved(self) -> bool:
        """Whether it was a store."""
        return self.kind == "store"


@dataclass(eq=False, slots=True)
class StorageJob:
    """A batch for the store.

    Attributes:
        regions: memory of each object. Empty for a look-up.
        known: the objects known at the submission. A clear has put others in their place.
        deadline: keys that were not begun by then fail.
    """

    name: Hashable
    kind: JobKind
    keys: tuple[bytes, ...]
    names: tuple[bytes, ...]
    regions: tuple[ObjectViews, ...]
    known: KnownObjects
    began: float
    deadline: float
    done: Future[StorageResult]


CLOSING = 3.0
"""Seconds beyond its limit that `close` waits for the thread: a file store abandons threads that
hang after one second."""


class StorageTier:
    """Keeps objects of `block_bytes` bytes under keys of any length.

    `contains`, `submit_store`, `submit_load`, `submit_lookup` and `poll` return at once and may be
    called in any thread. The memory of a job belongs to the job until its result.

    Args:
        make: makes the back end. Called by `open`, in the thread that runs the store. None for a
            tier that holds nothing.
        digest: the identity that all objects share, 32 bytes. It is part of every object's name.
        memory: where the objects of jobs are, for stores that register it. None if it is unknown.

    Attributes:
        beside: other services that run on the same event loop, before `open`.
        stuck: whether a call still ran when `close` returned. Its memory must then stay mapped.
    """

    def __init__(
        self,
        make: Callable[[], Backend] | None,
        digest: bytes,
        block_bytes: int,
        timeout: float = 10.0,
        *,
        memory: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.make = make
        self.memory = memory
        self.block_bytes = block_bytes
        self.timeout = timeout
        self.clock = clock
        self.results: deque[StorageResult] = deque()
        self.stuck = False
        self.beside: list[Service] = []
        self.known = KnownObjects()
        self._digest = digest
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
        from kvactors.threads import atexit_close
        from kvactors.tier_cache.storage_loop import StorageLoop

        if self._closed or self._thread is not None:
            raise StoreError("a storage tier is opened once")
        loop = self._loop = None if self.make is None else StorageLoop(self, self.make)
        services = [*self.beside] if loop is None else [loop, *self.beside]
        if not services:
            return
        thread = self._thread = self._make_thread(services)
        try:
            thread.open(limit)
        except BaseException:
            self.close(0.0)
            raise
        if loop is not None:
            self.known = loop.known
        atexit_close(self)

    def _make_thread(self, services: Sequence[Service]) -> LoopThread:
        from kvactors.tier_cache.storage_loop import LoopThread

        return LoopThread(services)

    def close(self, limit: float = 5.0) -> None:
        """Let jobs end, for `limit` seconds at most, and fail the others. Close the store."""
        limit = checked_limit("limit", limit)
        thread, self._thread, self._closed = self._thread, None, True
        if thread is None:
            return
        thread.close(limit)
        self._fail_unseen([] if thread.alive else list(self._jobs))
        self.stuck = thread.alive or (self._store is not None and self._store.stuck)

    def end(self, limit: float) -> None:
        self.close(max(0.0, limit - CLOSING))

    def abandon(self) -> None:
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
        """Whether the store lists its objects: `contains` is exact. Else `submit_lookup` asks."""
        return self.known.lists

    def submit_store(
        self, job: Hashable, keys: Sequence[bytes], views: Sequence[ObjectViews]
    ) -> Future[StorageResult]:
        """Save memory under keys.

        Args:
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
        other is asked, and `contains` is true for the keys that it found."""
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
        names, now = tuple(map(self.name_of, keys)), self.clock()
        done: Future[StorageResult] = Future()
        done.set_running_or_notify_cancel()  # the caller cannot cancel it
        moved = (tuple(keys), names, tuple(views), self.known)
        job = StorageJob(name, kind, *moved, now, now + self.timeout, done)
        self._jobs[job] = None
        if not thread.call(loop.accept, job):  # the loop has ended
            self._fail_unseen([job])
        return done

    def _fail_unseen(self, jobs: Sequence[StorageJob]) -> None:
        """Fail jobs that the loop took between its last turn and its end, each once: `close` and
        the thread that submits may both find one."""
        for job in jobs:
            if self._jobs.pop(job, job) is None:
                self.ended(job, [False] * len(job.keys), [])

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
        return len(self._jobs)

    @property
    def objects(self) -> int:
        return len(self.known)

    @property
    def trouble(self) -> str:
        """Why no object can be loaded now, empty if objects can be."""
        if any(job.deadline < self.clock() - 1.0 for job in list(self._jobs)):
            return "a call to the store does not return"
        store = self._store
        if store is None:
            return ""
        if store.clear_pending and not store.clears.running:
            return "the last clear failed, and is tried again with the next write"
        return store.attempts.loads_paused(self.clock)

    @property
    def failing(self) -> tuple[str, ...]:
        """Kinds of calls that do not work, with reasons and remedies."""
        store = self._store
        return () if store is None else tuple(one.why for one in store.attempts.failing())

    @property
    def condition(self) -> str:
        return "" if self._store is None else self._store.condition()

    @property
    def _store(self) -> GuardedBackend | None:
        return None if self._loop is None else self._loop.store

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

    def ended(self, job: StorageJob, ok: Sequence[bool], gone: Sequence[bytes]) -> None:
        """A job has ended, with whether each key is ok, and the keys that left the store."""
        nbytes = 0 if job.kind == "lookup" else sum(ok) * self.block_bytes
        moved = tuple(ok), tuple(gone), nbytes, self.clock() - job.began
        result = StorageResult(job.name, job.kind, job.keys, *moved)
        self.results.append(result)
        self._jobs.pop(job, None)
        job.done.set_result(result)


def make_storage(
    config: TierConfig,
    *,
    memory: SlotMemory | None = None,
    clock: Callable[[], float] = time.monotonic,
    environ: Mapping[str, str] | None = None,
) -> StorageTier:
    """The storage tier of a config. `StorageTier.open` opens it."""
    storage = config.storage
    identity = StoreIdentity(
        config.model, storage.namespace, config.fingerprint, storage.rank, storage.ranks
    )
    pool: dict[str, Any] = {}
    environ = os.environ if environ is None else environ
    if storage.backend == "mooncake":  # a wrong setting is found here, not in the store's thread
        from kvactors.settings.mooncake import MooncakeConfig, resolve

        given = convert(storage.mooncake, MooncakeConfig, "storage.mooncake")
        pool = {"mooncake": resolve(given, environ)}
    if storage.backend == "valkey":
        from kvactors.settings.valkey import ValkeyConfig, with_variables

        server = convert(storage.valkey, ValkeyConfig, "storage.valkey")
        pool = {"valkey": with_variables(server, environ)}

    def make() -> Backend:
        from kvactors.settings.tables import StorageConfig, StoreSettings
        from kvactors.storage.factory import make_backend

        fields = {name: getattr(storage, name) for name in StoreSettings.__struct_fields__}
        settings = StorageConfig(**fields, **pool, keep_tokens=False)
        made = make_backend(settings, config.model, config.fingerprint, config.block_bytes)
        if made is None:
            raise ConfigError(f"storage.backend {storage.backend!r} makes no store")
        return made

    return StorageTier(
        None if storage.backend == "none" else make,
        identity.digest,
        config.block_bytes,
        storage.timeout_s,
        memory=memory if pool else None,
        clock=clock,
    )


def open_storage(config: TierConfig | Mapping[str, Any], *, memory: Any = None) -> StorageTier:
    """Open storage for an engine that has host memory and its bookkeeping already.

    Args:
        config: settings. `num_slots`, `policy`, `events` and `storage.write_policy` are not used.
        memory: the engine's memory with the views of all jobs. A pool over RDMA registers it.

    Raises:
        ConfigError: a setting is unknown, malformed or out of range.
        StoreError: the store cannot be used (an OSError).
    """
    checked = checked_config(config)
    if checked.groups:
        raise ConfigError("a StorageTier has blocks of one size: open one with config.group(name)")
    if checked.storage.backend == "none":
        raise ConfigError("storage.backend is needed: file, memory, or package.module:Class")
    if memory is not None:
        from kvactors.tier_cache.slots import SlotMemory

        memory = SlotMemory(1, memoryview(memory).nbytes, memory)  # all of it as one slot
    tier = make_storage(checked, memory=memory)
    tier.open(checked.storage.open_timeout_s)
    return tier
