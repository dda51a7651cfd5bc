"""Blocking calls for threads other than the loop's: what `FromThread` (the calls of a cache, in
`cache.py`) and `ThreadLease` are made of. Their signatures are those of `KVCache` and `Lease`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import msgspec

from kvactors.checks import check_seconds
from kvactors.device.events import Completion, Stream
from kvactors.errors import CacheClosed, DeadlineExceeded, WrongLoop
from kvactors.lease import AFTER_LOADS_S, Hits, Lease
from kvactors.system import System

P = ParamSpec("P")
T = TypeVar("T")
Work = Callable[[], Coroutine[Any, Any, T]]
"""Begins a call of the cache or of a lease, on the loop."""

MARGIN_S = AFTER_LOADS_S + 1.0
"""Seconds that a thread waits beyond an operation's own deadline before it gives up on the loop."""

DEADLINE = inspect.Parameter(
    "deadline", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="float | None"
)


class LoopCaller:
    """Runs the calls of a target, a cache or a lease of it, on the cache's loop, each for a thread
    that waits for its end.

    Raises:
        CacheClosed: the loop has ended.
        DeadlineExceeded: the loop did not answer in time. The call did not happen, or its lease has
            ended.
        WrongLoop: the call is from the loop's thread.
    """

    def __init__(self, system: System, loop: asyncio.AbstractEventLoop, target: Any) -> None:
        self._system = system
        self._loop = loop
        self._target = target

    def _call(
        self, work: Work[T], deadline: float | None, lost: Callable[[T], object] | None = None
    ) -> T:
        """Run a coroutine function on the loop and wait. lost: called on the loop with a result
        that came too late for this thread."""
        limit = (
            self._system.config.cache.default_deadline_s
            if deadline is None
            else check_seconds("deadline", deadline)
        )
        self._check_thread()
        self._system.check_usable()  # in a forked child there is no loop to answer
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
            return result.result(limit + MARGIN_S)
        except concurrent.futures.TimeoutError:
            if not result.cancel():  # it was answered just now, possibly with an error of this type
                return result.result()
        self._schedule(give_up)
        raise DeadlineExceeded(f"the loop did not answer in {limit + MARGIN_S} s")

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


# -- methods and attributes of the two mirrors, from those of `_target`


def mirrored(name: str) -> Any:
    """An attribute of the cache or lease."""

    def read(self: Any) -> Any:
        return getattr(self._target, name)

    read.__doc__ = f"As `{name}` of `KVCache` or `Lease`."
    return property(read)


LEASES = {"steps", "leases"}
"""Arguments that have leases."""


def own(value: Any) -> Any:
    """An argument with the loop's leases in place of a thread's: a lease, a step of one, or a list
    of them."""
    if isinstance(value, ThreadLease):
        return value._target
    if isinstance(value, list | tuple):
        return [own(one) for one in value]
    if isinstance(getattr(value, "lease", None), ThreadLease):
        return msgspec.structs.replace(value, lease=value.lease._target)
    return value


def end_made(_: Mapping[str, Any], made: Any) -> None:
    """End the leases that a call has made."""
    for lease in made if isinstance(made, tuple) else (made,):
        if isinstance(lease, Lease):
            lease.abandon()


def end_lease(given: Mapping[str, Any], _: object) -> None:
    """End the lease that a call has changed."""
    given["self"].abandon()


def end_stepped(given: Mapping[str, Any], outcomes: Sequence[Any]) -> None:
    """End the leases that a step has changed."""
    for step, outcome in zip(given["steps"], outcomes, strict=True):
        if outcome.error is None:
            step.lease.abandon()


def threaded(
    method: Callable[..., Any], lost: Callable[[Mapping[str, Any], Any], None] = end_made
) -> Any:
    """A method that blocks its thread until the loop has answered. One without a deadline takes one
    here. Leases that it makes are those of a thread. lost: called with the arguments and with an
    answer that comes too late for the thread."""
    signature = inspect.signature(method)
    timed = "deadline" in signature.parameters

    @functools.wraps(method)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        deadline = None if timed else kwargs.pop("deadline", None)
        bound = signature.bind(self._target, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        for name in LEASES & given.keys():
            given[name] = own(given[name])

        async def work() -> Any:
            found = getattr(self._target, method.__name__)(*bound.args[1:], **bound.kwargs)
            return await found if inspect.iscoroutine(found) else found

        found = self._call(work, given.get("deadline", deadline), partial(lost, given))
        if isinstance(found, tuple) and all(isinstance(one, Lease) for one in found):
            return tuple(ThreadLease(self._system, self._loop, one) for one in found)
        return ThreadLease(self._system, self._loop, found) if isinstance(found, Lease) else found

    if not timed:
        shown = signature.replace(parameters=[*signature.parameters.values(), DEADLINE])
        call.__signature__ = shown  # type: ignore[attr-defined]
    return call


def blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
    lost: Callable[[Mapping[str, Any], T], None] = end_made,
) -> Callable[Concatenate[Any, P], T]:
    """`threaded` with the types of an awaited method that makes no lease."""
    found: Callable[Concatenate[Any, P], T] = threaded(method, lost)
    return found


class ThreadLease(LoopCaller):
    """`Lease` for threads other than the loop's, with the same methods. A context manager."""

    request_id: str = mirrored("request_id")
    block_table: tuple[int, ...] = mirrored("block_table")
    block_tables: tuple[tuple[int, ...], ...] = mirrored("block_tables")
    cached_tokens: int = mirrored("cached_tokens")
    num_tokens: int = mirrored("num_tokens")
    covered_tokens: int = mirrored("covered_tokens")
    pending: bool = mirrored("pending")
    pinned_blocks: int = mirrored("pinned_blocks")
    hits: Hits = mirrored("hits")

    wait_ready = blocking(Lease.wait_ready)
    wait_layer = blocking(Lease.wait_layer)
    extend = blocking(Lease.extend, end_lease)
    next_chunk = blocking(Lease.next_chunk, end_lease)
    reserve = blocking(Lease.reserve, end_lease)
    truncate = blocking(Lease.truncate, end_lease)
    fork = threaded(Lease.fork)
    fork_many = threaded(Lease.fork_many)
    commit = blocking(Lease.commit, end_lease)
    finish = blocking(Lease.finish)
    preempt = blocking(Lease.preempt)
    pass_end = threaded(Lease.pass_end)
    hashes = threaded(Lease.hashes)

    def abandon(self, *, event: Completion | None = None, stream: Stream | None = None) -> None:
        """See `Lease.abandon`. Does not wait without an event or a stream."""
        self._check_thread()
        if event is None and stream is None:
            self._schedule(self._target.abandon)
            return

        async def work() -> None:
            self._target.abandon(event=event, stream=stream)

        self._call(work, None)

    def __enter__(self) -> Self:
        self._call(self._target.__aenter__, None)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self._call(partial(self._target.__aexit__, None, None, None), None)
        else:
            with suppress(CacheClosed):  # the exception of the block is raised
                self.abandon()
