"""The door for other threads: the calls of `KVCache` and `Lease`, each blocking its thread until the loop has answered."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

from kvactors.cache import KVCache
from kvactors.errors import CacheClosed, DeadlineExceeded
from kvactors.lease import Hits, Lease

T = TypeVar("T")

MARGIN = 1.0
"""Seconds a thread waits beyond an operation's own deadline before it gives the loop up for stuck."""


class FromThread:
    """`KVCache` for a thread that is not the loop's. Raises what the awaited call would, and CacheClosed if the loop has ended."""

    def __init__(self, cache: KVCache, loop: asyncio.AbstractEventLoop) -> None:
        self._cache = cache
        self._loop = loop

    def call(self, work: Coroutine[Any, Any, T], deadline: float | None) -> T:
        """Run one coroutine on the loop and wait. RuntimeError on the loop's own thread, where waiting would never end."""
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self._loop or self._loop.is_closed():
            work.close()
            if running is self._loop:
                raise RuntimeError("from_thread is for other threads; await the cache's own methods here")
            raise CacheClosed("the loop of this cache has ended")
        try:
            self._cache.system.check_usable()  # in a forked child no loop would answer
        except BaseException:
            work.close()
            raise
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        seconds = self._cache.config.cache.deadline if deadline is None else deadline
        try:
            return future.result(seconds + MARGIN)
        except concurrent.futures.TimeoutError as error:
            if future.done() and not future.cancelled():
                raise
            future.cancel()
            raise DeadlineExceeded(f"the loop did not answer in {seconds + MARGIN} s") from error

    def abandon(self, lease: Lease) -> None:
        """See `Lease.abandon`; does not wait."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(lease.abandon)

    def acquire(self, request_id: str, tokens: Any, *, deadline: float | None = None, **options: Any) -> ThreadLease:
        """See `KVCache.acquire`."""
        lease = self.call(self._cache.acquire(request_id, tokens, deadline=deadline, **options), deadline)
        return ThreadLease(self, lease)

    def clear(self, *, storage: bool = False, deadline: float | None = None) -> int:
        """See `KVCache.clear`."""
        return self.call(self._cache.clear(storage=storage, deadline=deadline), deadline)

    def pause(self, *, deadline: float | None = None) -> None:
        """See `KVCache.pause`."""
        self.call(self._cache.pause(deadline=deadline), deadline)

    def resume(self, *, deadline: float | None = None) -> None:
        """See `KVCache.resume`."""
        self.call(self._cache.resume(deadline=deadline), deadline)

    def set_namespace(self, namespace: str, *, deadline: float | None = None) -> None:
        """See `KVCache.set_namespace`."""
        self.call(self._cache.set_namespace(namespace, deadline=deadline), deadline)

    def settled(self, deadline: float = 30.0) -> None:
        """See `KVCache.settled`."""
        self.call(self._cache.settled(deadline), deadline)

    def flush_settled(self, deadline: float = 30.0) -> None:
        """See `KVCache.flush_settled`."""
        self.call(self._cache.flush_settled(deadline), deadline)


class ThreadLease:
    """`Lease` for a thread that is not the loop's; a context manager as well."""

    def __init__(self, door: FromThread, lease: Lease) -> None:
        self._door = door
        self._lease = lease

    @property
    def block_table(self) -> tuple[int, ...]:
        """See `Lease`."""
        return self._lease.block_table

    @property
    def cached_tokens(self) -> int:
        """See `Lease`."""
        return self._lease.cached_tokens

    @property
    def hits(self) -> Hits:
        """See `Lease`."""
        return self._lease.hits

    def ready(self, *, deadline: float | None = None) -> None:
        """See `Lease.ready`."""
        self._door.call(self._lease.ready(deadline=deadline), deadline)

    def extend(self, tokens: Any, *, deadline: float | None = None) -> tuple[int, ...]:
        """See `Lease.extend`."""
        return self._door.call(self._lease.extend(tokens, deadline=deadline), deadline)

    def commit(self, computed_tokens: int, *, deadline: float | None = None) -> int:
        """See `Lease.commit`."""
        return self._door.call(self._lease.commit(computed_tokens, deadline=deadline), deadline)

    def finish(self, *, deadline: float | None = None) -> None:
        """See `Lease.finish`."""
        self._door.call(self._lease.finish(deadline=deadline), deadline)

    def preempt(self, computed_tokens: int = 0, *, deadline: float | None = None) -> None:
        """See `Lease.preempt`."""
        self._door.call(self._lease.preempt(computed_tokens, deadline=deadline), deadline)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self._door.call(self._lease.__aexit__(None, None, None), None)
        else:
            self._door.abandon(self._lease)
