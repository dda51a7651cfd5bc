"""The seam to a store of any origin: its exceptions and wrong answers are logged and counted, and
replaced by a value that costs misses only.

A clear is complete when it returns: writes in flight have ended, and after a clear that failed
nothing is read or written until one has succeeded.
"""

from __future__ import annotations

import asyncio
import operator
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from typing import Any, Literal, TypeVar

from kvactors.actor.clock import now
from kvactors.actor.log import described, get_logger
from kvactors.device.arena import Arena
from kvactors.errors import KVActorsError, StoreError, StoreUnavailable
from kvactors.flush_notifier.messages import PathPart
from kvactors.identity import Lineage
from kvactors.storage.attempts import Attempts, StoreAttempts
from kvactors.storage.backend import (
    Backend,
    Expired,
    Keys,
    ReadReport,
    SlotViews,
    StoreCounters,
    StoreStatistics,
    Views,
    WriteReport,
)
from kvactors.storage.messages import Outcome
from kvactors.types import HASH_BYTES

log = get_logger()


WORST = max(Outcome)

T = TypeVar("T")


class GuardedBackend:
    """A store with the methods of `Backend`, whose exceptions are contained and whose answers are
    checked, counted and judged. It lists nothing while a clear is pending. While a call takes
    longer than its timeout no other one begins: a look-up finds nothing, and reads and writes are
    UNAVAILABLE.

    Attributes:
        faults: calls that raised, or answered something that the contract does not allow.
        fence: the last clear, as (incarnation of the actor that asked, number of its operation).
            Batches from before it are not written.
        shares: its objects by salt. None: it cannot keep quotas of salts.

    Args:
        timeout: seconds that an awaited call may take before it is overdue.
    """

    def __init__(self, inner: Backend, timeout: float) -> None:
        self.inner = inner
        self.block_bytes = inner.block_bytes
        self.keeps_lineages = bool(inner.keeps_lineages)
        self.shares = inner.shares
        self.stuck = False
        self.fence = (0, 0)
        self.faults = 0
        self.last_fault = ""
        self._faults_by_call: Counter[str] = Counter()
        self._name = type(inner).__name__
        self._timeout = timeout
        self._numbers = count(1)
        # Awaited calls in flight, the oldest first: name and start.
        self._in_flight: dict[int, tuple[str, float]] = {}
        self._logged = 0  # the last call that was logged as overdue
        self.attempts = StoreAttempts(self._name, inner.more_space)
        # One of another package may leave `Backend.__init__` out.
        self.counters: StoreCounters = getattr(inner, "counters", StoreCounters())
        self.clears = StoreClears()

    @property
    def clear_pending(self) -> bool:
        return self.clears.pending

    async def open(self) -> None:
        await self._begin("open", self.inner.open, "the store could not be opened")

    async def attach(self, arena: Arena) -> None:
        await self._begin(
            "attach", lambda: self.inner.attach(arena), "the store does not take the arena"
        )

    async def _begin(self, what: str, call: Callable[[], Awaitable[None]], failure: str) -> None:
        """Await a call whose failure the cache must hear of. StoreError if it raises another one
        than those of the package."""
        try:
            await call()
        except BaseException as error:
            if isinstance(error, KVActorsError) or not self._contains(what, error):
                raise
            raise StoreError(f"{failure}: {self.last_fault}") from error

    async def close(self) -> None:
        await self._wait("close", self.inner.close, None)
        self.stuck = bool(self._call("stuck", lambda: self.inner.stuck, False))

    # -- look-ups

    def probe(self, keys: Keys) -> int | None:
        if not self._readable():
            return 0
        found = self._call("probe", lambda: self.inner.probe(keys), 0)
        return None if found is None else self._number("probe", found, len(keys))

    def _readable(self) -> bool:
        return not (self.clears.closed or self.attempts.reads.paused or self.overdue())

    async def ask(self, keys: Keys, expired: Expired) -> int:
        return await self._look_up(
            "ask",
            lambda: self.inner.ask(keys, expired),
            0,
            lambda found: self._number("ask", found, len(keys)),
        )

    async def exists_many(self, keys: Keys, expired: Expired) -> list[bool]:
        def checked(answer: Any) -> list[bool]:
            found = [bool(one) for one in answer]
            if len(found) != len(keys):
                raise ValueError(f"answered {len(found)} of {len(keys)} keys")
            return found

        absent = [False] * len(keys)
        return await self._look_up(
            "exists_many", lambda: self.inner.exists_many(keys, expired), absent, checked
        )

    async def _look_up(
        self, what: str, call: Callable[[], Awaitable[Any]], absent: T, check: Callable[[Any], T]
    ) -> T:
        """Await the answer to a question, and check it. Returns `absent` without an answer, and
        while objects could not be read."""
        lookups = self.attempts.lookups
        if self.clears.closed or self.attempts.reads.paused or self._refuses(lookups):
            return absent

        async def answer() -> T:
            try:
                found = await call()
            except StoreUnavailable as error:
                lookups.failed(str(error))
                return absent
            before = self.faults
            result = check(found)
            if self.faults == before:
                lookups.worked()
            else:
                lookups.failed(self.last_fault)
            return result

        return await self._wait(what, answer, absent, lookups)

    def held_run(self, keys: Keys) -> int:
        """Length of the leading run of keys that `probe` would find now. None of them counts as
        used. 0 for a store that lists no keys."""
        if not self._readable():
            return 0
        holds = self.inner.holds

        def run() -> int:
            return next((i for i, key in enumerate(keys) if not holds(key)), len(keys))

        return self._number("holds", self._call("holds", run, 0), len(keys))

    @property
    def is_complete(self) -> bool:
        """Whether `held_run` finds every object that can be read. It does not in a store whose
        contents other processes decide about."""
        return self._call("is_complete", lambda: self.inner.is_complete, False) is True

    # -- reads and writes

    async def read(self, keys: Keys, views: Views, expired: Expired) -> ReadReport:
        gone = list[bytes]()
        if not self._fit(keys, views, writable=True):
            outcomes = bytes([Outcome.REFUSED]) * len(keys)
        elif self.clears.closed:
            outcomes = bytes([Outcome.MISS]) * len(keys)
        else:
            begun = self.clears.begun
            outcomes, gone = await self._move(
                "read", lambda: self.inner.read(keys, views, expired), len(keys)
            )
            if begun != self.clears.begun:  # the objects read may be from before the clear
                outcomes = outcomes.replace(bytes([Outcome.OK]), bytes([Outcome.MISS]))
        self.counters.read(outcomes)
        if corrupt := outcomes.count(Outcome.CORRUPT):
            log.error("corrupt object", store=self._name, objects=corrupt)
        return ReadReport(outcomes, gone)

    async def write(
        self,
        keys: Keys,
        views: Views,
        expired: Expired,
        lineages: Sequence[Lineage | None] = (),
        salts: Sequence[int] = (),
    ) -> WriteReport:
        """Those of other packages may lack the last two arguments."""
        more: dict[str, Any] = {}
        if lineages and self.keeps_lineages:
            more["lineages"] = lineages
        if salts and self.shares is not None:
            more["salts"] = salts
        fits = self._fit(keys, views, writable=False)
        evicted, obstacle = list[bytes](), await self._unwritable() if fits else Outcome.REFUSED
        if obstacle is None:
            with self.clears.writing():
                outcomes, evicted = await self._move(
                    "write", lambda: self.inner.write(keys, views, expired, **more), len(keys)
                )
        else:
            outcomes = bytes([obstacle]) * len(keys)
        self.counters.written(outcomes)
        return WriteReport(outcomes, evicted)

    async def _move(
        self, what: Literal["read", "write"], call: Callable[[], Awaitable[Any]], count: int
    ) -> tuple[bytes, list[bytes]]:
        """Outcomes of a call, and the keys that left the store."""
        attempts = self.attempts.reads if what == "read" else self.attempts.writes
        unmoved = bytes([Outcome.UNAVAILABLE]) * count, list[bytes]()
        if self._refuses(attempts):
            return unmoved

        async def moved() -> tuple[bytes, list[bytes]]:
            report = await call()
            before = self.faults
            outcomes = self._outcomes(what, report, count)
            faulty = self.faults > before
            attempts.record(outcomes, self.last_fault if faulty else str(self.inner.trouble()))
            left = getattr(report, "gone" if what == "read" else "evicted", None)
            return outcomes, self._keys(what, left)

        return await self._wait(what, moved, unmoved, attempts)

    def _fit(self, keys: Keys, views: Views, *, writable: bool) -> bool:
        """Whether every view can hold an object. A store moves `block_bytes` bytes from the start
        of a view, so a shorter one, or one with gaps, would expose the memory behind it."""
        return len(views) == len(keys) and (
            isinstance(views, SlotViews)
            or all(
                view.nbytes == self.block_bytes
                and view.c_contiguous
                and not (writable and view.readonly)
                for view in views
            )
        )

    async def remove(self, keys: Keys) -> None:
        await self._wait("remove", lambda: self.inner.remove(keys), None)

    # -- clears

    async def _unwritable(self) -> Outcome | None:
        """Why nothing can be written now, None if it can. A clear that failed is repeated first."""
        if self.clears.running:
            return Outcome.LATE
        if not self.clear_pending:
            return None
        if self.overdue() or self.attempts.writes.paused:
            return Outcome.UNAVAILABLE
        begun = self.clears.begun
        try:
            await self.clear()
        except StoreError:
            self.attempts.writes.failed(self.last_fault)
            return Outcome.UNAVAILABLE
        if self.clears.begun != begun + 1:
            # Another clear began during this one. It did not wait for this write.
            return Outcome.LATE
        return None

    async def clear(self, generation: int = 0) -> None:
        """Writes in flight end first. During the clear new writes are LATE and
        reads MISS."""
        async with self._clearing("clear"):
            await self.inner.clear(generation)

    async def forget(self, salt: int) -> int:
        """Reads and writes are treated as in `clear`. The whole store is
        cleared in its place while a clear is pending, as it is after a failure of this one."""
        if self.clear_pending:
            await self.clear()
            return 0
        async with self._clearing("forget", whole=False):
            return self._number("forget", await self.inner.forget(salt), sys.maxsize)

    @asynccontextmanager
    async def _clearing(self, what: str, *, whole: bool = True) -> AsyncIterator[None]:
        """A clear is in progress. StoreError if the back end raises."""
        try:
            async with self.clears.clearing(whole=whole):
                yield
        except BaseException as error:
            if isinstance(error, StoreError):
                self.last_fault = f"{what} raised {error}"
                raise
            if not self._contains(what, error):
                raise
            raise StoreError(f"the store could not be cleared: {self.last_fault}") from error

    async def wipe(self, expired: Expired) -> str:
        return await self.inner.wipe(expired)

    def needs_clear(self) -> bool:
        """Whether a clear is to be repeated: it failed, or did not reach all of the store."""
        return not self.clears.running and (
            self.clear_pending
            or bool(self._call("clear_pending", lambda: self.inner.clear_pending, False))
        )

    # -- keys

    def keys(self) -> list[bytes]:
        """`Backend.keys`, checked, in any order."""
        return list(self.snapshot())

    def snapshot(self) -> Iterator[bytes]:
        """The keys that the store holds from now until they are taken, and perhaps others. They are
        listed in parts as they are taken, and each is checked."""
        if self.clears.pending:
            return
        parts = self._call("keys", self.inner.key_slices, iter(()))
        while (part := self._call("keys", lambda: next(parts, None), None)) is not None:
            yield from self._keys("keys", part)

    def count(self) -> int:
        if self.clears.pending:
            return 0
        return self._number("count", self._call("count", self.inner.count, 0), sys.maxsize)

    def holds(self, key: bytes) -> bool:
        return bool(self.holding([key]))

    def holding(self, keys: Iterable[bytes]) -> list[bytes]:
        """The keys that the store holds, in order. None of them if the store raises."""
        if self.clears.pending:
            return []
        holds = self.inner.holds
        found: list[bytes] = self._call("holds", lambda: [key for key in keys if holds(key)], [])
        return found

    def removed_outside(self) -> bool:
        return bool(self.inner.removed_outside)

    def take_removed(self) -> list[bytes]:
        return self._keys("take_removed", self._call("take_removed", self.inner.take_removed, []))

    def acknowledge_removed(self, keys: Iterable[bytes]) -> None:
        self._call("acknowledge_removed", lambda: self.inner.acknowledge_removed(keys), None)

    # -- paths

    def begin_paths(self) -> None:
        self._call("begin_paths", self.inner.begin_paths, None)

    async def next_paths(self, most: int) -> list[PathPart] | None:
        async def parts() -> list[PathPart] | None:
            """None unless all of them are valid."""
            found: Any = await self.inner.next_paths(most)
            if found is None or (
                isinstance(found, list)
                and all(isinstance(part, PathPart) and part.whole() for part in found)
            ):
                return found
            self._fault("next_paths", "answered what is no part of a path")
            return None

        return await self._wait("next_paths", parts, None) if self.keeps_lineages else None

    def end_paths(self) -> None:
        self._call("end_paths", self.inner.end_paths, None)

    # -- its condition

    def condition(self) -> str:
        return str(self._call("condition", self.inner.condition, ""))

    def statistics(self) -> StoreStatistics:
        found = self._call("statistics", self.inner.statistics, None)
        if not isinstance(found, StoreStatistics):
            found = self.counters.statistics(self.count(), self.block_bytes)
        return found._replace(faults=self.faults, breaker=self.attempts.state)

    def overdue(self) -> tuple[str, float] | None:
        """Name and start (on the loop's clock) of a call that has been in flight for longer than
        the timeout; None if there is none."""
        number = next(iter(self._in_flight), 0)
        if not number or now() - self._in_flight[number][1] <= self._timeout:
            return None
        if self._logged < number:
            self._logged = number
            log.error(
                "store call does not return",
                store=self._name,
                call=self._in_flight[number][0],
                seconds=self._timeout,
            )
        return self._in_flight[number]

    # -- calls of foreign code

    def _contains(self, what: str, error: BaseException) -> bool:
        """Record an exception of the back end. False for one that must be raised: our own
        cancellation, or the end of the process."""
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            return False
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                return False
        self._fault(what, f"raised {described(error)}")
        return True

    def _fault(self, what: str, text: str) -> None:
        """Record a fault. Of each kind, the first, second, fourth, eighth .. is logged."""
        self.faults += 1
        self._faults_by_call[what] += 1
        self.last_fault = f"{what} {text}"
        if self._faults_by_call[what].bit_count() == 1:
            log.error(
                "store fault contained",
                store=self._name,
                call=what,
                error=text,
                times=self._faults_by_call[what],
            )

    def _call(self, what: str, call: Callable[[], Any], fallback: Any) -> Any:
        try:
            return call()
        except BaseException as error:
            if not self._contains(what, error):
                raise
            return fallback

    async def _wait(
        self,
        what: str,
        call: Callable[[], Awaitable[T]],
        fallback: T,
        attempts: Attempts | None = None,
    ) -> T:
        """Await a call. Returns `fallback` if it raises, which is a failure of `attempts`."""
        number = next(self._numbers)
        self._in_flight[number] = (what, now())
        try:
            return await call()
        except BaseException as error:
            if not self._contains(what, error):
                raise
            if attempts is not None:
                attempts.failed(self.last_fault)
            return fallback
        finally:
            del self._in_flight[number]

    def _refuses(self, attempts: Attempts) -> bool:
        """Whether no call of a kind may begin: one is overdue, or the kind pauses."""
        return bool(self.overdue()) or not attempts.allow()

    # -- answers of foreign code

    def _number(self, what: str, found: Any, most: int) -> int:
        """A count in [0, most]; 0 for anything else."""
        try:
            number = operator.index(found)
        except TypeError:
            number = -1
        if 0 <= number <= most:
            return number
        self._fault(what, f"answered {str(found)[:40]!r} of {most}")
        return 0

    def _outcomes(self, what: str, report: Any, count: int) -> bytes:
        """One outcome a key; UNAVAILABLE where the report has none that is valid."""
        found = getattr(report, "outcomes", None)
        if not isinstance(found, bytes | bytearray) or len(found) != count:
            length = operator.length_hint(found)
            self._fault(
                what, f"answered {type(found).__name__} of {length} outcomes for {count} keys"
            )
            return bytes([Outcome.UNAVAILABLE]) * count
        if count and max(found) > WORST:
            self._fault(what, f"answered outcome {max(found)}")
            return bytes(one if one <= WORST else Outcome.UNAVAILABLE for one in found)
        return bytes(found)

    def _keys(self, what: str, found: Any) -> list[bytes]:
        no_list = isinstance(found, str | bytes)
        listed: list[Any] = [] if no_list else self._call(what, lambda: list(found), [])
        good = [key for key in listed if is_key(key)]
        if len(good) != len(listed) or no_list:
            self._fault(what, "answered keys that are not 32 bytes")
        return good


def is_key(found: object) -> bool:
    """Whether an object is a storage key."""
    return isinstance(found, bytes) and len(found) == HASH_BYTES


# -- the order of clears and batches


class StoreClears:
    """A clear waits for the writes in flight. Until one has succeeded, nothing is read or written.
    After one of a salt that has failed, the whole store must be cleared.
    """

    def __init__(self) -> None:
        self.begun = self.running = 0
        self.pending = False
        self.pending_since: float | None = None
        self._last = 0  # number of the last clear of the whole store
        self._writing: set[asyncio.Future[None]] = set()

    @property
    def closed(self) -> bool:
        return bool(self.running) or self.pending

    @contextmanager
    def writing(self) -> Iterator[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writing.add(done)
        try:
            yield
        finally:
            self._writing.discard(done)
            done.set_result(None)

    @asynccontextmanager
    async def clearing(self, *, whole: bool = True) -> AsyncIterator[None]:
        """A clear is in progress, of the whole store or of a salt. Entered when no write is in
        flight. It has failed if the block raises."""
        self.begun += 1
        self.running += 1
        number = self.begun
        if whole:
            self._last = number
            self._await_clear()
        try:
            while self._writing:
                await asyncio.wait(list(self._writing))
            yield
            if number == self._last:
                self.pending, self.pending_since = False, None
        except BaseException:
            self._await_clear()
            raise
        finally:
            self.running -= 1

    def _await_clear(self) -> None:
        if not self.pending:
            self.pending, self.pending_since = True, now()
