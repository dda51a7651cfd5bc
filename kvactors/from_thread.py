"""The public API for other threads: the calls of `KVCache` and `Lease`, each blocking its thread
until the loop has answered."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Self, TypeVar

from kvactors.arguments import Media, check_seconds
from kvactors.cache import KVCache
from kvactors.errors import CacheClosed, DeadlineExceeded, WrongLoop
from kvactors.lease import Hits, Lease
from kvactors.observe.health import Health
from kvactors.observe.statistics import CacheStatistics
from kvactors.types import Tokens

T = TypeVar("T")

MARGIN = 1.0
"""Seconds that a thread waits beyond an operation's own deadline before it gives up on the loop."""


class FromThread:
    """`KVCache` for a thread that is not the loop's. Raises what the awaited call would,
    CacheClosed if the loop has ended, DeadlineExceeded if the loop does not answer in time (then
    the call did not happen, or the lease it was about has ended), and WrongLoop in the loop's
    thread.
    """

    def __init__(self, cache: KVCache, loop: asyncio.AbstractEventLoop) -> None:
        self._cache = cache
        self._loop = loop

    def _call(
        self,
        work: Callable[[], Coroutine[Any, Any, T]],
        deadline: float | None,
        lost: Callable[[T], object] | None = None,
    ) -> T:
        """Run a coroutine function on the loop and wait. lost: called on the loop with a result
        that came too late for this thread."""
        limit = (
            self._cache.config.cache.deadline
            if deadline is None
            else check_seconds("deadline", deadline)
        )
        self._check_thread()
        self._cache.system.check_usable()  # in a forked child there is no loop to answer
        result: concurrent.futures.Future[T] = concurrent.futures.Future()
        task: asyncio.Task[T] | None = None

        def begin() -> None:
            nonlocal task
            if not result.cancelled():
                task = self._loop.create_task(work())
                task.add_done_callback(deliver)

        def deliver(done: asyncio.Task[T]) -> None:
            error = None if done.cancelled() else done.exception()
            if not result.set_running_or_notify_cancel():
                if not done.cancelled() and error is None and lost is not None:
                    lost(done.result())
            elif done.cancelled():
                result.set_exception(CacheClosed("the loop cancelled this call"))
            elif error is not None:
                result.set_exception(error)
            else:
                result.set_result(done.result())

        def give_up() -> None:
            if task is not None:
                task.cancel()

        self._schedule(begin)
        try:
            return result.result(limit + MARGIN)
        except concurrent.futures.TimeoutError:
            if not result.cancel():  # it was answered just now, perhaps with an error of this type
                return result.result()
        self._schedule(give_up)
        raise DeadlineExceeded(f"the loop did not answer in {limit + MARGIN} s")

    def _check_thread(self) -> None:
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self._loop:
            raise WrongLoop("from_thread is for other threads: await the cache's own methods here")

    def _schedule(self, callback: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            raise CacheClosed("the loop of this cache has ended") from None

    async def _now(self, call: Callable[[], T]) -> T:
        return call()

    def acquire(
        self,
        request_id: str,
        tokens: Tokens,
        *,
        extra_keys: Sequence[Media] = (),
        salt: str | None = None,
        lora: str | None = None,
        lora_id: int | None = None,
        deadline: float | None = None,
        wait: bool = True,
    ) -> ThreadLease:
        """See `KVCache.acquire`."""
        acquire = partial(
            self._cache.acquire,
            request_id,
            tokens,
            extra_keys=extra_keys,
            salt=salt,
            lora=lora,
            lora_id=lora_id,
            deadline=deadline,
            wait=wait,
        )
        return ThreadLease(self, self._call(acquire, deadline, Lease.abandon))

    def prefetch(
        self,
        tokens: Tokens,
        *,
        extra_keys: Sequence[Media] = (),
        salt: str | None = None,
        lora: str | None = None,
        deadline: float | None = None,
    ) -> int:
        """See `KVCache.prefetch`."""
        prefetch = partial(
            self._cache.prefetch,
            tokens,
            extra_keys=extra_keys,
            salt=salt,
            lora=lora,
            deadline=deadline,
        )
        return self._call(prefetch, deadline)

    def clear(self, *, storage: bool = False, deadline: float | None = None) -> int:
        """See `KVCache.clear`."""
        return self._call(partial(self._cache.clear, storage=storage, deadline=deadline), deadline)

    def pause(self, *, deadline: float | None = None) -> None:
        """See `KVCache.pause`."""
        self._call(partial(self._cache.pause, deadline=deadline), deadline)

    def resume(self, *, deadline: float | None = None) -> None:
        """See `KVCache.resume`."""
        self._call(partial(self._cache.resume, deadline=deadline), deadline)

    def set_namespace(self, namespace: str, *, deadline: float | None = None) -> None:
        """See `KVCache.set_namespace`."""
        self._call(partial(self._cache.set_namespace, namespace, deadline=deadline), deadline)

    def resync(self, sink: str, *, deadline: float | None = None) -> None:
        """See `KVCache.resync`."""
        self._call(partial(self._cache.resync, sink, deadline=deadline), deadline)

    def settled(self, deadline: float = 30.0) -> None:
        """See `KVCache.settled`."""
        check_seconds("deadline", deadline)
        self._call(partial(self._cache.settled, deadline), deadline)

    def flush_settled(
        self, deadline: float = 30.0, *, at_rest: bool = True, sinks: Collection[str] | None = None
    ) -> None:
        """See `KVCache.flush_settled`."""
        check_seconds("deadline", deadline)
        self._call(
            partial(self._cache.flush_settled, deadline, at_rest=at_rest, sinks=sinks), deadline
        )

    @property
    def namespace(self) -> str:
        """See `KVCache.namespace`."""
        return self._cache.namespace

    def statistics(self, *, deadline: float | None = None) -> CacheStatistics:
        """See `KVCache.statistics`. This and the others that look in wait for the loop for
        `deadline` seconds."""
        return self._call(partial(self._now, self._cache.statistics), deadline)

    def health(self, *, deadline: float | None = None) -> Health:
        """See `KVCache.health`."""
        return self._call(partial(self._now, self._cache.health), deadline)

    def check(self, *, deadline: float | None = None) -> list[str]:
        """See `KVCache.check`."""
        return self._call(partial(self._now, self._cache.check), deadline)

    def check_slices(self, *, deadline: float | None = None) -> list[str]:
        """See `KVCache.check_slices`."""
        return self._call(self._cache.check_slices, deadline)

    def divergence_slices(
        self, sinks: Collection[str] | None = None, *, deadline: float | None = None
    ) -> int:
        """See `KVCache.divergence_slices`."""
        return self._call(partial(self._cache.divergence_slices, sinks), deadline)

    def divergence(
        self, sinks: Collection[str] | None = None, *, deadline: float | None = None
    ) -> int:
        """See `KVCache.divergence`."""
        return self._call(partial(self._now, partial(self._cache.divergence, sinks)), deadline)


class ThreadLease:
    """`Lease` for a thread that is not the loop's; a context manager as well."""

    def __init__(self, owner: FromThread, lease: Lease) -> None:
        self._owner = owner
        self._lease = lease

    @property
    def request_id(self) -> str:
        """See `KVCache.acquire`."""
        return self._lease.request_id

    @property
    def block_table(self) -> tuple[int, ...]:
        """See `Lease`."""
        return self._lease.block_table

    @property
    def cached_tokens(self) -> int:
        """See `Lease`."""
        return self._lease.cached_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of the request, those of `extend` included."""
        return self._lease.num_tokens

    @property
    def pending(self) -> bool:
        """See `Lease`."""
        return self._lease.pending

    @property
    def hits(self) -> Hits:
        """See `Lease`."""
        return self._lease.hits

    def ready(self, *, deadline: float | None = None) -> None:
        """See `Lease.ready`."""
        self._owner._call(partial(self._lease.ready, deadline=deadline), deadline)

    def layer_ready(self, layer: int, *, deadline: float | None = None) -> int:
        """See `Lease.layer_ready`."""
        return self._owner._call(
            partial(self._lease.layer_ready, layer, deadline=deadline), deadline
        )

    def extend(self, tokens: Tokens, *, deadline: float | None = None) -> tuple[int, ...]:
        """See `Lease.extend`. If the loop's answer comes too late for this thread, the lease has
        ended."""
        return self._owner._call(
            partial(self._lease.extend, tokens, deadline=deadline), deadline, self._lost
        )

    def commit(self, computed_tokens: int, *, deadline: float | None = None) -> int:
        """See `Lease.commit`. If the loop's answer comes too late for this thread, the lease has
        ended."""
        return self._owner._call(
            partial(self._lease.commit, computed_tokens, deadline=deadline), deadline, self._lost
        )

    def finish(self, computed_tokens: int | None = None, *, deadline: float | None = None) -> None:
        """See `Lease.finish`."""
        self._owner._call(partial(self._lease.finish, computed_tokens, deadline=deadline), deadline)

    def preempt(self, computed_tokens: int = 0, *, deadline: float | None = None) -> None:
        """See `Lease.preempt`."""
        self._owner._call(
            partial(self._lease.preempt, computed_tokens, deadline=deadline), deadline
        )

    def keys(self, start: int, stop: int, *, deadline: float | None = None) -> bytes:
        """See `Lease.keys`."""
        return self._owner._call(
            partial(self._owner._now, partial(self._lease.keys, start, stop)), deadline
        )

    def abandon(self) -> None:
        """See `Lease.abandon`; does not wait."""
        self._owner._check_thread()
        self._owner._schedule(self._lease.abandon)

    def _lost(self, reply: object) -> None:
        self._lease.abandon()

    def __enter__(self) -> Self:
        self._owner._call(self._lease.__aenter__, None)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self._owner._call(partial(self._lease.__aexit__, None, None, None), None)
        else:
            with suppress(CacheClosed):  # what was raised in the block goes on
                self.abandon()
