"""The public API for other threads: blocking calls with the signatures of `KVCache` and `Lease`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import msgspec

from kvactors.arguments import Media, check_seconds
from kvactors.calls import CacheCalls
from kvactors.device_events import Completion, Stream
from kvactors.errors import CacheClosed, DeadlineExceeded, WrongLoop
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.lease import Hits, Lease
from kvactors.lease_hold import AFTER_LOADS
from kvactors.lookup import FreeBlocks, PromptHits
from kvactors.observe.health import Health
from kvactors.observe.statistics import CacheStatistics, Tenants
from kvactors.settings import Config
from kvactors.steps import Step, Stepped, SteppedLease
from kvactors.types import Tokens

P = ParamSpec("P")
T = TypeVar("T")
Work = Callable[[], Coroutine[Any, Any, T]]
"""Begins a call of the cache or of a lease, on the loop."""

MARGIN = AFTER_LOADS + 1.0
"""Seconds that a thread waits beyond an operation's own deadline before it gives up on the loop."""


def _deadline_of(method: Callable[..., object]) -> Callable[..., float | None]:
    """The deadline that a call of an awaited method is given."""
    signature = inspect.signature(method)

    def deadline(*args: object, **kwargs: object) -> float | None:
        bound = signature.bind(None, *args, **kwargs)
        bound.apply_defaults()
        found: float | None = bound.arguments["deadline"]
        return found

    return deadline


def _blocking(
    method: Callable[Concatenate[CacheCalls, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[FromThread, P], T]:
    """A method of `KVCache` that blocks its thread until the loop has answered."""
    deadline_of = _deadline_of(method)

    @functools.wraps(method)
    def call(self: FromThread, /, *args: P.args, **kwargs: P.kwargs) -> T:
        deadline = deadline_of(*args, **kwargs)
        work: Work[T] = partial(getattr(self._cache, method.__name__), *args, **kwargs)
        return self._call(work, deadline)

    return call


def _leased(
    acquire: Callable[Concatenate[CacheCalls, P], Coroutine[Any, Any, Lease]],
) -> Callable[Concatenate[FromThread, P], ThreadLease]:
    """`KVCache.acquire`. A lease that is granted too late for the thread is released."""
    deadline_of = _deadline_of(acquire)

    @functools.wraps(acquire)
    def call(self: FromThread, /, *args: P.args, **kwargs: P.kwargs) -> ThreadLease:
        deadline = deadline_of(*args, **kwargs)
        work: Work[Lease] = partial(getattr(self._cache, acquire.__name__), *args, **kwargs)
        return ThreadLease(self, self._call(work, deadline, Lease.abandon))

    return call


def _blocking_lease(
    method: Callable[Concatenate[Lease, P], Coroutine[Any, Any, T]], *, ends_lease: bool = False
) -> Callable[Concatenate[ThreadLease, P], T]:
    """A method of `Lease` that blocks its thread until the loop has answered.

    Args:
        method: of `Lease`.
        ends_lease: whether an answer that comes too late for the thread ends the lease, because
            the call has changed it.
    """
    deadline_of = _deadline_of(method)

    @functools.wraps(method)
    def call(self: ThreadLease, /, *args: P.args, **kwargs: P.kwargs) -> T:
        deadline = deadline_of(*args, **kwargs)
        work: Work[T] = partial(getattr(self._lease, method.__name__), *args, **kwargs)
        return self._owner._call(work, deadline, self._lost if ends_lease else None)

    return call


def _forks(
    method: Callable[Concatenate[Lease, P], Coroutine[Any, Any, Any]],
) -> Callable[Concatenate[ThreadLease, P], Any]:
    """`Lease.fork` and `Lease.fork_many`. Forks that are made too late for the thread are
    released."""
    deadline_of = _deadline_of(method)

    def abandon(made: Lease | tuple[Lease, ...]) -> None:
        for lease in made if isinstance(made, tuple) else (made,):
            lease.abandon()

    @functools.wraps(method)
    def call(self: ThreadLease, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        deadline, owner = deadline_of(*args, **kwargs), self._owner
        work: Work[Any] = partial(getattr(self._lease, method.__name__), *args, **kwargs)
        made = owner._call(work, deadline, abandon)
        if isinstance(made, tuple):
            return tuple(ThreadLease(owner, lease) for lease in made)
        return ThreadLease(owner, made)

    return call


def _own_step(step: Step) -> Step:
    """A step with the loop's own lease."""
    if type(step) is Step and isinstance(step.lease, ThreadLease):
        return msgspec.structs.replace(step, lease=step.lease._lease)
    return step


class FromThread:
    """`KVCache` for threads other than the loop's. Each call blocks its thread until the loop has
    answered, for `deadline` seconds and a margin, and raises the errors of the awaited call.

    Raises:
        CacheClosed: the loop has ended.
        DeadlineExceeded: the loop did not answer in time. The call did not happen, or its lease has
            ended.
        WrongLoop: the call is from the loop's thread.
    """

    def __init__(self, cache: CacheCalls, loop: asyncio.AbstractEventLoop) -> None:
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
            self._cache.config.cache.default_deadline_s
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
            if not result.cancel():  # it was answered just now, possibly with an error of this type
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

    acquire = _leased(CacheCalls.acquire)
    prefetch = _blocking(CacheCalls.prefetch)
    set_num_blocks = _blocking(CacheCalls.set_num_blocks)
    sleep = _blocking(CacheCalls.sleep)
    wake = _blocking(CacheCalls.wake)
    clear = _blocking(CacheCalls.clear)
    set_quota = _blocking(CacheCalls.set_quota)
    unpin = _blocking(CacheCalls.unpin)
    pause = _blocking(CacheCalls.pause)
    resume = _blocking(CacheCalls.resume)
    set_namespace = _blocking(CacheCalls.set_namespace)
    resync = _blocking(CacheCalls.resync)
    wait_idle = _blocking(CacheCalls.wait_idle)
    wait_flushed = _blocking(CacheCalls.wait_flushed)

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self._cache.block_size

    @property
    def config(self) -> Config:
        """The settings."""
        return self._cache.config

    @property
    def device(self) -> Any:
        """The device blocks."""
        return self._cache.device

    @property
    def sinks(self) -> dict[str, Sink]:
        """See `KVCache.sinks`."""
        return self._cache.sinks

    @property
    def namespace(self) -> str:
        """See `KVCache.namespace`."""
        return self._cache.namespace

    def lookup(
        self,
        tokens: Tokens,
        *,
        extra_keys: Sequence[Media] = (),
        salt: str | None = None,
        lora: str | None = None,
        deadline: float | None = None,
    ) -> PromptHits:
        """See `KVCache.lookup_slices`."""
        work = self._cache.lookup_slices
        call = partial(work, tokens, extra_keys=extra_keys, salt=salt, lora=lora)
        return self._call(call, deadline)

    lookup_slices = lookup

    def step(
        self,
        steps: Sequence[Step],
        *,
        event: Completion | None = None,
        stream: Stream | None = None,
        deadline: float | None = None,
    ) -> list[Stepped]:
        """See `KVCache.step`. The leases are those of `FromThread.acquire`."""
        own = [_own_step(step) for step in steps] if isinstance(steps, (list, tuple)) else steps

        def lost(outcomes: list[Stepped]) -> None:
            for step, outcome in zip(own, outcomes, strict=True):
                if outcome.error is None and isinstance(step.lease, Lease):
                    step.lease.abandon()

        return self._call(
            partial(self._cache.step, own, event=event, stream=stream, deadline=deadline),
            deadline,
            lost,
        )

    def record_pass(
        self,
        leases: Sequence[SteppedLease],
        *,
        event: Completion | None = None,
        stream: Stream | None = None,
        deadline: float | None = None,
    ) -> None:
        """See `KVCache.record_pass`. The leases are those of `FromThread.acquire`."""
        own: Any = leases
        if isinstance(leases, list | tuple):
            own = [one._lease if isinstance(one, ThreadLease) else one for one in leases]
        call = partial(self._cache.record_pass, own, event=event, stream=stream)
        self._call(partial(self._now, call), deadline)

    def free_blocks(self, *, deadline: float | None = None) -> FreeBlocks:
        """See `KVCache.free_blocks`."""
        return self._call(partial(self._now, self._cache.free_blocks), deadline)

    def statistics(self, *, deadline: float | None = None) -> CacheStatistics:
        """See `KVCache.statistics`."""
        return self._call(partial(self._now, self._cache.statistics), deadline)

    def tenants(self, *, deadline: float | None = None) -> Tenants:
        """See `KVCache.tenants`."""
        return self._call(partial(self._now, self._cache.tenants), deadline)

    def health(self, *, deadline: float | None = None) -> Health:
        """See `KVCache.health`."""
        return self._call(partial(self._now, self._cache.health), deadline)

    def check(self, *, deadline: float | None = None) -> list[str]:
        """See `KVCache.check`."""
        return self._call(partial(self._now, self._cache.check), deadline)

    def check_slices(self, *, deadline: float | None = None) -> list[str]:
        """See `KVCache.check_slices`."""
        return self._call(self._cache.check_slices, deadline)

    def count_divergent_blocks_slices(
        self, sinks: Collection[str] | None = None, *, deadline: float | None = None
    ) -> int:
        """See `KVCache.count_divergent_blocks_slices`."""
        return self._call(partial(self._cache.count_divergent_blocks_slices, sinks), deadline)

    def count_divergent_blocks(
        self, sinks: Collection[str] | None = None, *, deadline: float | None = None
    ) -> int:
        """See `KVCache.count_divergent_blocks`."""
        return self._call(
            partial(self._now, partial(self._cache.count_divergent_blocks, sinks)), deadline
        )


class ThreadLease:
    """`Lease` for threads other than the loop's, with the same methods. A context manager."""

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
    def covered_tokens(self) -> int:
        """See `Lease`."""
        return int(self._lease.covered_tokens)

    @property
    def pending(self) -> bool:
        """See `Lease`."""
        return self._lease.pending

    @property
    def pinned_blocks(self) -> int:
        """See `Lease`."""
        return self._lease.pinned_blocks

    @property
    def hits(self) -> Hits:
        """See `Lease`."""
        return self._lease.hits

    wait_ready = _blocking_lease(Lease.wait_ready)
    wait_layer = _blocking_lease(Lease.wait_layer)
    extend = _blocking_lease(Lease.extend, ends_lease=True)
    next_chunk = _blocking_lease(Lease.next_chunk, ends_lease=True)
    reserve = _blocking_lease(Lease.reserve, ends_lease=True)
    truncate = _blocking_lease(Lease.truncate, ends_lease=True)
    fork = _forks(Lease.fork)
    fork_many = _forks(Lease.fork_many)
    commit = _blocking_lease(Lease.commit, ends_lease=True)
    finish = _blocking_lease(Lease.finish)
    preempt = _blocking_lease(Lease.preempt)

    def hashes(self, start: int, stop: int, *, deadline: float | None = None) -> bytes:
        """See `Lease.hashes`."""
        return self._owner._call(
            partial(self._owner._now, partial(self._lease.hashes, start, stop)), deadline
        )

    def abandon(self, *, event: Completion | None = None, stream: Stream | None = None) -> None:
        """See `Lease.abandon`. Does not wait without an event or a stream."""
        self._owner._check_thread()
        if event is None and stream is None:
            self._owner._schedule(self._lease.abandon)
        else:
            call = partial(self._lease.abandon, event=event, stream=stream)
            self._owner._call(partial(self._owner._now, call), None)

    def _lost(self, reply: object) -> None:
        self._lease.abandon()

    def __enter__(self) -> Self:
        self._owner._call(self._lease.__aenter__, None)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self._owner._call(partial(self._lease.__aexit__, None, None, None), None)
        else:
            with suppress(CacheClosed):  # the exception of the block is raised
                self.abandon()
