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
    ReadReport,
    StoreCounters,
    StoreStatistics,
    WriteReport,
)
from kvactors.storage.messages import Outcome
from kvactors.types import HASH_BYTES

log = get_logger()


class GuardedBackend:
    """A store with the methods of `Backend`, whose exceptions are contained and whose answers are
    checked, counted and judged. It lists nothing while a clear is pending. While a call takes
    longer than its timeout no other one begins: a look-up finds nothing, and reads and writes are
    UNAVAILABLE.

    Attributes:
        fence: the last clear, as (incarnation of the actor that asked, number of its operation).
            Batches from before it are not written.
        shares: its objects by salt. None: it cannot keep quotas of salts.
    """

    def __init__(self, inner: Backend, timeout: float) -> None:
        self.inner = inner
        self.block_bytes = inner.block_bytes
        self.exclusive = inner.exclusive
        self.slot_trailer_bytes = inner.slot_trailer_bytes
        self.keeps_lineages = bool(inner.keeps_lineages)
        self.shares = inner.shares
        self.generation = 0
        self.stuck = False
        self.fence = (0, 0)
        self._calls = GuardedCalls(type(inner).__name__, timeout)
        self.attempts = self._calls.attempts
        # One of another package may leave `Backend.__init__` out.
        self.counters: StoreCounters = getattr(inner, "counters", StoreCounters())
        self.clears = StoreClears()

    @property
    def faults(self) -> int:
        """Calls that raised, or answered something that the contract does not allow."""
        return self._calls.faults

    @property
    def last_fault(self) -> str:
        """The last fault."""
        return self._calls.last_fault

    @property
    def clear_pending(self) -> bool:
        """Whether no clear has succeeded since the last one that was begun."""
        return self.clears.pending

    def overdue(self) -> tuple[str, float] | None:
        """Name and start (on the loop's clock) of a call that takes longer than its timeout."""
        return self._calls.overdue()

    async def open(self) -> None:
        await self._begin("open", self.inner.open, "the store could not be opened")
        self.generation = self._calls.call(
            "generation", lambda: operator.index(self.inner.generation), 0
        )

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
            if isinstance(error, KVActorsError) or not self._calls.contains(what, error):
                raise
            raise StoreError(f"{failure}: {self.last_fault}") from error

    async def close(self) -> None:
        """An exception is logged."""
        await self._calls.wait("close", self.inner.close, None, ignore)
        self.stuck = bool(self._calls.call("stuck", lambda: self.inner.stuck, False))

    def probe(self, keys: Sequence[bytes]) -> int | None:
        if self.clears.closed or self.attempts.reads.paused or self.overdue():
            return 0
        found: int | None = self._calls.call("probe", lambda: self.inner.probe(keys), 0)
        return None if found is None else self._calls.number("probe", found, len(keys))

    async def ask(self, keys: Sequence[bytes], expired: Expired) -> int:

        def checked(found: int) -> int:
            return self._calls.number("ask", found, len(keys))

        if self.clears.closed:
            return 0
        return await self._calls.look_up("ask", lambda: self.inner.ask(keys, expired), 0, checked)

    async def exists_many(self, keys: Sequence[bytes], expired: Expired) -> list[bool]:
        absent = [False] * len(keys)
        if self.clears.closed:
            return absent

        async def ask() -> list[bool]:
            found = [bool(one) for one in await self.inner.exists_many(keys, expired)]
            if len(found) != len(keys):
                raise ValueError(f"answered {len(found)} of {len(keys)} keys")
            return found

        return await self._calls.look_up("exists_many", ask, absent, lambda found: found)

    def take(self, keys: Sequence[bytes]) -> None:
        self._calls.call("take", lambda: self.inner.take(keys), None)

    async def read(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired
    ) -> ReadReport:
        return await self._read(keys, lambda: self.inner.read(keys, views, expired))

    async def read_slots(
        self, keys: Sequence[bytes], arena: Any, slots: Sequence[int], expired: Expired
    ) -> ReadReport:
        return await self._read(keys, lambda: self.inner.read_slots(keys, arena, slots, expired))

    async def _read(
        self, keys: Sequence[bytes], call: Callable[[], Awaitable[ReadReport]]
    ) -> ReadReport:
        gone = list[bytes]()
        if self.clears.closed:
            outcomes = bytes([Outcome.MISS]) * len(keys)
        else:
            begun = self.clears.begun
            outcomes, gone = await self._move("read", keys, call)
            if begun != self.clears.begun:  # the objects read may be from before the clear
                outcomes = outcomes.replace(bytes([Outcome.OK]), bytes([Outcome.MISS]))
        self.counters.read(outcomes)
        if corrupt := outcomes.count(Outcome.CORRUPT):
            log.error("corrupt object", store=type(self.inner).__name__, objects=corrupt)
        return ReadReport(outcomes, gone)

    async def _move(
        self,
        what: Literal["read", "write"],
        keys: Sequence[bytes],
        call: Callable[[], Awaitable[ReadReport | WriteReport]],
    ) -> tuple[bytes, list[bytes]]:
        """Outcomes of a call, and the keys that left the store."""
        attempts = self.attempts.reads if what == "read" else self.attempts.writes
        return await self._calls.move(what, attempts, call, len(keys), self.inner.trouble)

    async def write(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired
    ) -> WriteReport:
        return await self._write(keys, lambda: self.inner.write(keys, views, expired))

    async def write_slots(
        self,
        keys: Sequence[bytes],
        arena: Any,
        slots: Sequence[int],
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
        return await self._write(
            keys, lambda: self.inner.write_slots(keys, arena, slots, expired, **more)
        )

    async def _write(
        self, keys: Sequence[bytes], call: Callable[[], Awaitable[WriteReport]]
    ) -> WriteReport:
        evicted, obstacle = list[bytes](), await self._unwritable()
        if obstacle is None:
            with self.clears.writing():
                outcomes, evicted = await self._move("write", keys, call)
        else:
            outcomes = bytes([obstacle]) * len(keys)
        self.counters.written(outcomes)
        return WriteReport(outcomes, evicted)

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

    async def remove(self, keys: Sequence[bytes]) -> None:
        await self._calls.wait("remove", lambda: self.inner.remove(keys), None, ignore)

    async def clear(self, generation: int = 0) -> None:
        """Writes in flight end first. During the clear new writes are LATE and
        reads MISS."""
        async with self._clearing("clear"):
            await self.inner.clear(generation)
            found = self._calls.call("generation", lambda: operator.index(self.inner.generation), 0)
            self.generation = max(self.generation + 1, generation, found)

    async def forget(self, salt: int) -> int:
        """Reads and writes are treated as in `clear`. The whole store is
        cleared in its place while a clear is pending, as it is after a failure of this one."""
        if self.clear_pending:
            await self.clear()
            return 0
        async with self._clearing("forget", whole=False):
            return self._calls.number("forget", await self.inner.forget(salt), sys.maxsize)

    @asynccontextmanager
    async def _clearing(self, what: str, *, whole: bool = True) -> AsyncIterator[None]:
        """A clear is in progress. StoreError if the back end raises."""
        try:
            async with self.clears.clearing(whole=whole):
                yield
        except BaseException as error:
            if isinstance(error, StoreError):
                self._calls.last_fault = f"{what} raised {error}"
                raise
            if not self._calls.contains(what, error):
                raise
            raise StoreError(f"the store could not be cleared: {self.last_fault}") from error

    async def wipe(self, expired: Expired) -> str:
        return await self.inner.wipe(expired)

    def needs_clear(self) -> bool:
        """Whether a clear is to be repeated: it failed, or did not reach all of the store."""
        return not self.clears.running and (
            self.clear_pending
            or bool(self._calls.call("clear_pending", lambda: self.inner.clear_pending, False))
        )

    def removed_outside(self) -> bool:
        return bool(self.inner.removed_outside)

    def condition(self) -> str:
        return str(self._calls.call("condition", self.inner.condition, ""))

    # -- keys

    def keys(self) -> list[bytes]:
        if self.clears.pending:
            return []
        return self._calls.keys("keys", self._calls.call("keys", self.inner.keys, []))

    def snapshot(self) -> Iterator[bytes]:
        """The keys that the store holds from now until they are taken, and perhaps others. They are
        listed in parts as they are taken, and each is checked."""
        if self.clears.pending:
            return
        parts = self._calls.call("keys", self.inner.key_slices, iter(()))
        while (part := self._calls.call("keys", lambda: next(parts, None), None)) is not None:
            yield from self._calls.keys("keys", part)

    def iter_keys(self) -> Iterator[bytes]:
        if self.clears.pending:
            return
        key: Any
        try:
            for key in self.inner.iter_keys():
                if not is_key(key):
                    self._calls.fault("iter_keys", "answered a key that is not 32 bytes")
                    return
                yield key
        except RuntimeError:
            raise  # the store changed: the caller begins again
        except BaseException as error:
            if not self._calls.contains("iter_keys", error):
                raise

    def count(self) -> int:
        if self.clears.pending:
            return 0
        count = self._calls.call("count", self.inner.count, 0)
        return self._calls.number("count", count, sys.maxsize)

    def holds(self, key: bytes) -> bool:
        return not self.clears.pending and self._calls.call(
            "holds", lambda: bool(self.inner.holds(key)), False
        )

    def holding(self, keys: Iterable[bytes]) -> list[bytes]:
        """The keys that the store holds, in order. None of them if the store raises."""
        if self.clears.pending:
            return []
        holds = self.inner.holds
        found: list[bytes] = self._calls.call(
            "holds", lambda: [key for key in keys if holds(key)], []
        )
        return found

    @property
    def is_complete(self) -> bool:
        """Whether `held_run` finds every object that can be read. It does not in a store whose
        contents other processes decide about."""
        complete = self._calls.call("is_complete", lambda: self.inner.is_complete, False)
        return complete is True

    def held_run(self, keys: Sequence[bytes]) -> int:
        """Length of the leading run of keys that `probe` would find now. None of them counts as
        used. 0 for a store that lists no keys."""
        if self.clears.closed or self.attempts.reads.paused or self.overdue():
            return 0
        holds = self.inner.holds

        def run() -> int:
            return next((i for i, key in enumerate(keys) if not holds(key)), len(keys))

        return self._calls.number("holds", self._calls.call("holds", run, 0), len(keys))

    def take_removed(self) -> list[bytes]:
        removed = self._calls.call("take_removed", self.inner.take_removed, [])
        return self._calls.keys("take_removed", removed)

    def acknowledge_removed(self, keys: Iterable[bytes]) -> None:
        self._calls.call("acknowledge_removed", lambda: self.inner.acknowledge_removed(keys), None)

    # -- paths

    def begin_paths(self) -> None:
        self._calls.call("begin_paths", self.inner.begin_paths, None)

    async def next_paths(self, most: int) -> list[PathPart] | None:
        if not self.keeps_lineages:
            return None

        def checked(found: list[PathPart] | None) -> list[PathPart] | None:
            return None if found is None else self._calls.parts("next_paths", found)

        return await self._calls.wait(
            "next_paths", lambda: self.inner.next_paths(most), None, checked
        )

    def end_paths(self) -> None:
        self._calls.call("end_paths", self.inner.end_paths, None)

    def statistics(self) -> StoreStatistics:
        found = self._calls.call("statistics", self.inner.statistics, None)
        if not isinstance(found, StoreStatistics):
            found = self.counters.statistics(self.count(), self.block_bytes)
        return found._replace(faults=self.faults, breaker=self.attempts.state)


def ignore(_answer: object) -> None:
    """The check of a call that returns nothing."""


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
        """Whether the contents of the store must not be used."""
        return bool(self.running) or self.pending

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A write is in flight."""
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


# -- calls


A = TypeVar("A")
T = TypeVar("T")


WORST = max(Outcome)


class GuardedCalls:
    """Makes calls of foreign code.

    Attributes:
        attempts: whether look-ups, reads and writes work.

    Args:
        timeout: seconds that an awaited call may take before it is overdue.
    """

    def __init__(self, store: str, timeout: float) -> None:
        self.faults = 0
        self.last_fault = ""
        self.attempts = StoreAttempts(store)
        self._store = store
        self._timeout = timeout
        self._kinds: Counter[str] = Counter()
        self._numbers = count(1)
        # Calls in flight, the oldest first: name and start.
        self._calls: dict[int, tuple[str, float]] = {}
        self._logged = 0  # the last call that was logged as overdue

    def contains(self, what: str, error: BaseException) -> bool:
        """Record an exception of the back end. False for one that must be raised: our own
        cancellation, or the end of the process."""
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            return False
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                return False
        self.fault(what, f"raised {described(error)}")
        return True

    def fault(self, what: str, text: str) -> None:
        """Record a fault. Of each kind, the first, second, fourth, eighth .. is logged."""
        self.faults += 1
        self._kinds[what] += 1
        self.last_fault = f"{what} {text}"
        if self._kinds[what].bit_count() == 1:
            log.error(
                "store fault contained",
                store=self._store,
                call=what,
                error=text,
                times=self._kinds[what],
            )

    def call(self, what: str, call: Callable[[], Any], fallback: Any) -> Any:
        """Make a synchronous call. Returns `fallback` if it raises."""
        try:
            return call()
        except BaseException as error:
            if not self.contains(what, error):
                raise
            return fallback

    async def wait(
        self,
        what: str,
        call: Callable[[], Awaitable[A]],
        fallback: T,
        check: Callable[[A], T],
        attempts: Attempts | None = None,
    ) -> T:
        """Make a call, await it, and check its answer. `check` makes the result and records faults.
        Returns `fallback` if the call raises, which is a failure of `attempts`."""
        number = next(self._numbers)
        self._calls[number] = (what, now())
        try:
            return check(await call())
        except BaseException as error:
            if not self.contains(what, error):
                raise
            if attempts is not None:
                attempts.failed(self.last_fault)
            return fallback
        finally:
            del self._calls[number]

    async def look_up(
        self, what: str, call: Callable[[], Awaitable[T]], absent: T, check: Callable[[T], T]
    ) -> T:
        """`wait` for the answer to a question. Returns `absent` without an answer, and while
        objects could not be read."""
        lookups = self.attempts.lookups
        if self.attempts.reads.paused or self._refuses(lookups):
            return absent

        async def answer() -> T | None:
            try:
                return await call()
            except StoreUnavailable as error:
                lookups.failed(str(error))
                return None

        def checked(found: T | None) -> T:
            if found is None:
                return absent
            before = self.faults
            result = check(found)
            if self.faults == before:
                lookups.worked()
            else:
                lookups.failed(self.last_fault)
            return result

        return await self.wait(what, answer, absent, checked, lookups)

    async def move(
        self,
        what: Literal["read", "write"],
        attempts: Attempts,
        call: Callable[[], Awaitable[Any]],
        count: int,
        trouble: Callable[[], str],
    ) -> tuple[bytes, list[bytes]]:
        """`wait` for the report of a read or a write."""
        unmoved = bytes([Outcome.UNAVAILABLE]) * count, list[bytes]()
        if self._refuses(attempts):
            return unmoved

        def checked(report: Any) -> tuple[bytes, list[bytes]]:
            before = self.faults
            outcomes = self.outcomes(what, report, count)
            faulty = self.faults > before
            attempts.record(outcomes, self.last_fault if faulty else str(trouble()))
            left = getattr(report, "gone" if what == "read" else "evicted", None)
            return outcomes, self.keys(what, left)

        return await self.wait(what, call, unmoved, checked, attempts)

    def _refuses(self, attempts: Attempts) -> bool:
        """Whether no call of a kind may begin: one is overdue, or the kind pauses."""
        return bool(self.overdue()) or not attempts.allow()

    def overdue(self) -> tuple[str, float] | None:
        """Name and start (on the loop's clock) of a call that has been in flight for longer than
        the timeout; None if there is none."""
        number = next(iter(self._calls), 0)
        if not number or now() - self._calls[number][1] <= self._timeout:
            return None
        if self._logged < number:
            self._logged = number
            log.error(
                "store call does not return",
                store=self._store,
                call=self._calls[number][0],
                seconds=self._timeout,
            )
        return self._calls[number]

    # -- answers

    def number(self, what: str, found: Any, most: int) -> int:
        """A count in [0, most]; 0 for anything else."""
        try:
            number = operator.index(found)
        except TypeError:
            number = -1
        if 0 <= number <= most:
            return number
        self.fault(what, f"answered {str(found)[:40]!r} of {most}")
        return 0

    def outcomes(self, what: str, report: Any, count: int) -> bytes:
        """One outcome a key; UNAVAILABLE where the report has none that is valid."""
        found = getattr(report, "outcomes", None)
        if not isinstance(found, bytes | bytearray) or len(found) != count:
            self.fault(
                what,
                f"answered {type(found).__name__} of {_length(found)} outcomes for {count} keys",
            )
            return bytes([Outcome.UNAVAILABLE]) * count
        if count and max(found) > WORST:
            self.fault(what, f"answered outcome {max(found)}")
            return bytes(one if one <= WORST else Outcome.UNAVAILABLE for one in found)
        return bytes(found)

    def keys(self, what: str, found: Any) -> list[bytes]:
        """The valid keys of an answer."""
        no_list = isinstance(found, str | bytes)
        listed: list[Any] = [] if no_list else self.call(what, lambda: list(found), [])
        good = [key for key in listed if is_key(key)]
        if len(good) != len(listed) or no_list:
            self.fault(what, "answered keys that are not 32 bytes")
        return good

    def parts(self, what: str, found: Any) -> list[PathPart] | None:
        """Parts of paths. None unless all of them are valid."""
        if isinstance(found, list) and all(
            isinstance(part, PathPart) and part.whole() for part in found
        ):
            return found
        self.fault(what, "answered what is no part of a path")
        return None


def is_key(found: object) -> bool:
    """Whether an object is a storage key."""
    return isinstance(found, bytes) and len(found) == HASH_BYTES


def _length(found: Any) -> int:
    try:
        return len(found)
    except Exception:
        return 0
