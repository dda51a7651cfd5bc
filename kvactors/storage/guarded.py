"""The seam to a store of any origin: its exceptions and wrong answers are logged and counted, and
replaced by a value that costs misses only."""

from __future__ import annotations

import asyncio
import operator
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from typing import Any, Literal, Protocol, TypeVar

from kvactors.actor.clock import now
from kvactors.actor.log import described, get_logger
from kvactors.device.arena import Arena, HostSlots
from kvactors.errors import KVActorsError, StoreError, StoreUnavailable
from kvactors.flush_notifier.messages import PathPart
from kvactors.lineage import Lineage
from kvactors.storage.attempts import Attempts, StoreAttempts
from kvactors.storage.backend import (
    Backend,
    Expired,
    ReadReport,
    StoreCounters,
    StoreStatistics,
    WriteReport,
)
from kvactors.storage.catalog import OwnedInventory, StoreShares
from kvactors.storage.messages import Outcome
from kvactors.types import HASH_BYTES

log = get_logger()


class CheckedBackend:
    """A back end with the methods of `Backend`, whose exceptions are contained and whose answers
    are checked, counted and judged. While a call takes longer than its timeout no other one begins:
    a look-up finds nothing, and reads and writes are UNAVAILABLE.

    Attributes:
        inner: the back end.
        fence: the last clear, as (incarnation of the actor that asked, number of its operation).
            Batches from before it are not written.
        inventory: the keys that it lists.
        counters: outcomes of its batches.
        shares: its objects by salt. None: it cannot keep quotas of salts.
        clears: clears in progress, and whether one is pending.

    Args:
        timeout: seconds that a call may take.
    """

    def __init__(self, inner: SlotStore, timeout: float) -> None:
        self.inner = inner
        self.block_bytes = inner.block_bytes
        self.exclusive = inner.exclusive
        self.slot_trailer_bytes = inner.slot_trailer_bytes
        self.keeps_lineages = bool(inner.keeps_lineages)
        self.shares = _shares_of(inner)
        self.generation = 0
        self.stuck = False
        self.fence = (0, 0)
        self._calls = Containment(type(inner).__name__, timeout)
        self.counters = _counters_of(inner)
        self.clears = Clears()
        self.inventory = CheckedInventory(inner, self._calls, self.clears)

    def _backend(self) -> Backend:
        if not isinstance(self.inner, Backend):
            raise TypeError(f"{type(self.inner).__name__} is not in reach of this process's memory")
        return self.inner

    @property
    def attempts(self) -> StoreAttempts:
        """Whether look-ups, reads and writes work."""
        return self._calls.attempts

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
        """See `Backend.open`."""
        try:
            await self.inner.open()
        except BaseException as error:
            if isinstance(error, KVActorsError) or not self._calls.contains("open", error):
                raise
            raise StoreError(f"the store could not be opened: {self.last_fault}") from error
        self.generation = self._calls.call(
            "generation", lambda: operator.index(self.inner.generation), 0
        )

    async def attach(self, arena: Arena) -> None:
        """See `Backend.attach`."""
        try:
            await self.inner.attach(arena)
        except BaseException as error:
            if isinstance(error, KVActorsError) or not self._calls.contains("attach", error):
                raise
            raise StoreError(f"the store does not take the arena: {self.last_fault}") from error

    async def close(self) -> None:
        """See `Backend.close`. An exception is logged."""
        await self._calls.wait("close", self.inner.close, None, ignore)
        self.stuck = bool(self._calls.call("stuck", lambda: self.inner.stuck, False))

    def probe(self, keys: Sequence[bytes]) -> int | None:
        """See `Backend.probe`."""
        if self.clears.closed or self.attempts.reads.paused or self.overdue():
            return 0
        found: int | None = self._calls.call("probe", lambda: self.inner.probe(keys), 0)
        return None if found is None else self._calls.number("probe", found, len(keys))

    async def ask(self, keys: Sequence[bytes], expired: Expired) -> int:
        """See `Backend.ask`."""

        def checked(found: int) -> int:
            return self._calls.number("ask", found, len(keys))

        if self.clears.closed:
            return 0
        return await self._calls.look_up("ask", lambda: self.inner.ask(keys, expired), 0, checked)

    async def ask_each(self, keys: Sequence[bytes], expired: Expired) -> list[bool]:
        """See `presence.ask_each`."""
        absent = [False] * len(keys)
        if self.clears.closed:
            return absent
        return await self._calls.look_up(
            "ask_each", lambda: ask_each(self.inner, keys, expired), absent, lambda found: found
        )

    def take(self, keys: Sequence[bytes]) -> None:
        """See `Backend.take`."""
        self._calls.call("take", lambda: self.inner.take(keys), None)

    async def read(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired
    ) -> ReadReport:
        """See `Backend.read`."""
        return await self._read(keys, lambda: self._backend().read(keys, views, expired))

    async def read_slots(
        self, keys: Sequence[bytes], arena: HostSlots, slots: Sequence[int], expired: Expired
    ) -> ReadReport:
        """See `Backend.read_slots`."""
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
        trouble = getattr(self.inner, "trouble", str)
        attempts = self.attempts.reads if what == "read" else self.attempts.writes
        return await self._calls.move(what, attempts, call, len(keys), trouble)

    async def write(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired
    ) -> WriteReport:
        """See `Backend.write`."""
        return await self._write(keys, lambda: self._backend().write(keys, views, expired))

    async def write_slots(
        self,
        keys: Sequence[bytes],
        arena: HostSlots,
        slots: Sequence[int],
        expired: Expired,
        lineages: Sequence[Lineage | None] = (),
        salts: Sequence[int] = (),
    ) -> WriteReport:
        """See `Backend.write_slots`. Those of other packages may lack the last two arguments."""
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
        """See `Backend.remove`."""
        await self._calls.wait("remove", lambda: self.inner.remove(keys), None, ignore)

    async def clear(self, generation: int = 0) -> None:
        """See `Backend.clear`. Writes in flight end first. During the clear new writes are LATE and
        reads MISS."""
        async with self._clearing("clear"):
            await self.inner.clear(generation)
            found = self._calls.call("generation", lambda: operator.index(self.inner.generation), 0)
            self.generation = max(self.generation + 1, generation, found)

    async def forget(self, salt: int) -> int:
        """See `Backend.forget`. Reads and writes are treated as in `clear`. The whole store is
        cleared in its place while a clear is pending, as it is after a failure of this one."""
        if self.clear_pending:
            await self.clear()
            return 0
        async with self._clearing("forget", whole=False):
            return self._calls.number("forget", await self._backend().forget(salt), sys.maxsize)

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
        """See `Backend.wipe`."""
        return await self._backend().wipe(expired)

    def needs_clear(self) -> bool:
        """Whether a clear is to be repeated: it failed, or did not reach all of the store."""
        return not self.clears.running and (
            self.clear_pending
            or bool(self._calls.call("clear_pending", lambda: self.inner.clear_pending, False))
        )

    def removed_outside(self) -> bool:
        """See `Backend.removed_outside`."""
        return bool(getattr(self.inner, "removed_outside", False))

    def condition(self) -> str:
        """See `Backend.condition`."""
        found = getattr(self.inner, "condition", str)
        return str(self._calls.call("condition", found, ""))

    def keys(self) -> list[bytes]:
        """See `Backend.keys`."""
        return self.inventory.keys()

    def iter_keys(self) -> Iterator[bytes]:
        """See `Backend.iter_keys`."""
        return self.inventory.iter_keys()

    def count(self) -> int:
        """See `Backend.count`."""
        return self.inventory.count()

    def holds(self, key: bytes) -> bool:
        """See `Backend.holds`."""
        return self.inventory.holds(key)

    def holding(self, keys: Iterable[bytes]) -> list[bytes]:
        """The keys that the store holds, in order."""
        return self.inventory.holding(keys)

    def begin_paths(self) -> None:
        """See `Backend.begin_paths`."""
        self._calls.call("begin_paths", self.inner.begin_paths, None)

    async def next_paths(self, most: int) -> list[PathPart] | None:
        """See `Backend.next_paths`."""
        if not self.keeps_lineages:
            return None

        def checked(found: list[PathPart] | None) -> list[PathPart] | None:
            return None if found is None else self._calls.parts("next_paths", found)

        return await self._calls.wait(
            "next_paths", lambda: self.inner.next_paths(most), None, checked
        )

    def end_paths(self) -> None:
        """See `Backend.end_paths`."""
        self._calls.call("end_paths", self.inner.end_paths, None)

    def statistics(self) -> StoreStatistics:
        """See `Backend.statistics`."""
        found = self._calls.call("statistics", self.inner.statistics, None)
        if not isinstance(found, StoreStatistics):
            found = self.counters.statistics(self.count(), self.block_bytes)
        return found._replace(faults=self.faults, breaker=self.attempts.state)


def _counters_of(store: SlotStore) -> StoreCounters:
    found = getattr(store, "counters", None)  # of other packages: maybe none
    return found if isinstance(found, StoreCounters) else StoreCounters()


def _shares_of(store: SlotStore) -> StoreShares | None:
    inventory = getattr(store, "inventory", None)
    if isinstance(inventory, OwnedInventory) and inventory.keeps_salts:
        return inventory.catalog.shares
    return None


def ignore(_answer: object) -> None:
    """The check of a call that returns nothing."""


# -- calls


A = TypeVar("A")
T = TypeVar("T")


WORST = max(Outcome)


class Containment:
    """Makes calls to a back end.

    Attributes:
        faults: calls that raised, or returned something that the contract does not allow.
        last_fault: the last of them.
        attempts: whether look-ups, reads and writes work.

    Args:
        store: name of the back end, for the log.
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
        """Make a call, await it, and check its answer. Returns `fallback` if it raises.

        Args:
            what: name of the call.
            call: makes it.
            fallback: the result if it raises.
            check: the result, made of the answer. Records the answer's faults.
            attempts: of its kind, which fail if it raises.
        """
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
        """`wait` for the report of a read or a write.

        Args:
            what: name of the call.
            attempts: of its kind.
            call: makes it.
            count: of keys.
            trouble: the back end's last failure.

        Returns:
            One outcome a key, and the keys that left the store.
        """
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


# -- keys


class CheckedInventory:
    """Lists nothing while a clear is pending."""

    def __init__(self, inner: SlotStore, calls: Containment, clears: Clears) -> None:
        self._inner = inner
        self._calls = calls
        self._clears = clears

    def keys(self) -> list[bytes]:
        """See `Backend.keys`."""
        if self._clears.pending:
            return []
        return self._calls.keys("keys", self._calls.call("keys", self._inner.keys, []))

    def snapshot(self) -> Iterator[bytes]:
        """The keys that the store holds from now until they are taken, and perhaps others. They are
        listed in parts as they are taken, and each is checked."""
        if self._clears.pending:
            return
        parts = self._calls.call("keys", self._parts, iter(()))
        while (part := self._calls.call("keys", lambda: next(parts, None), None)) is not None:
            yield from self._calls.keys("keys", part)

    def _parts(self) -> Iterator[Any]:
        """The parts that the store lists its keys in. One of another package lists them at once."""
        inventory: Any = getattr(self._inner, "inventory", None)
        owner = inventory if isinstance(inventory, OwnedInventory) else self._inner
        slices: Any = getattr(owner, "key_slices", None)
        return iter([self._inner.keys()]) if slices is None else slices()

    def iter_keys(self) -> Iterator[bytes]:
        """See `Backend.iter_keys`."""
        if self._clears.pending:
            return
        key: Any
        try:
            for key in self._inner.iter_keys():
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
        """See `Backend.count`."""
        if self._clears.pending:
            return 0
        count = self._calls.call("count", self._inner.count, 0)
        return self._calls.number("count", count, sys.maxsize)

    def holds(self, key: bytes) -> bool:
        """See `Backend.holds`."""
        return not self._clears.pending and self._calls.call(
            "holds", lambda: bool(self._inner.holds(key)), False
        )

    def holding(self, keys: Iterable[bytes]) -> list[bytes]:
        """The keys that the store holds, in order. None of them if the store raises."""
        if self._clears.pending:
            return []
        holds = self._inner.holds
        found: list[bytes] = self._calls.call(
            "holds", lambda: [key for key in keys if holds(key)], []
        )
        return found

    @property
    def is_complete(self) -> bool:
        """Whether `held_run` finds every object that can be read. It does not in a store whose
        contents other processes decide about."""
        inventory: Any = getattr(self._inner, "inventory", None)
        if isinstance(inventory, OwnedInventory):
            return inventory.answerable
        complete = self._calls.call(
            "is_complete", lambda: getattr(self._inner, "is_complete", False), False
        )
        return complete is True

    def held_run(self, keys: Sequence[bytes]) -> int:
        """Length of the leading run of keys that `probe` would find now. None of them counts as
        used. 0 for a store that lists no keys."""
        calls = self._calls
        if self._clears.closed or calls.attempts.reads.paused or calls.overdue():
            return 0
        holds = self._inner.holds

        def run() -> int:
            return next((i for i, key in enumerate(keys) if not holds(key)), len(keys))

        return calls.number("holds", calls.call("holds", run, 0), len(keys))

    def take_removed(self) -> list[bytes]:
        """See `Backend.take_removed`."""
        removed = self._calls.call("take_removed", self._inner.take_removed, [])
        return self._calls.keys("take_removed", removed)

    def acknowledge_removed(self, keys: Iterable[bytes]) -> None:
        """See `Backend.acknowledge_removed`."""
        self._calls.call("acknowledge_removed", lambda: self._inner.acknowledge_removed(keys), None)


# -- the order of clears and batches


class Clears:
    """A clear waits for the writes in flight. Until one has succeeded, nothing is read or written.
    After one of a salt that has failed, the whole store must be cleared.

    Attributes:
        begun: clears that were begun.
        running: clears that are in progress.
        pending: whether no clear of the whole store has succeeded since the last one that was
            begun.
        pending_since: when that began, on the loop's clock.
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


# -- which keys a store holds


def lists_keys(store: Any) -> bool:
    """Whether `keys` returns every key of a back end. If not, `ask_each` finds them."""
    if not isinstance(store, Backend):
        return False
    return type(store).keys is not Backend.keys or store.inventory.lists_keys


async def ask_each(store: Any, keys: Sequence[bytes], expired: Callable[[], bool]) -> list[bool]:
    """Whether each key can be read. A back end may have an `ask_each` that answers for all keys at
    once. Any other is asked once for each run of keys that it holds."""
    found: list[bool] = [False] * len(keys)
    ask = getattr(store, "ask_each", None)
    if ask is not None:
        answers = [bool(one) for one in await ask(keys, expired)]
        if len(answers) != len(keys):
            raise ValueError(f"answered {len(answers)} of {len(keys)} keys")
        return answers
    start = 0
    while start < len(keys) and not expired():
        run = min(max(0, await store.ask(keys[start:], expired)), len(keys) - start)
        found[start : start + run] = [True] * run
        start += run + 1
    return found


# -- the interface of a store


# ruff: noqa: D102 (each member is documented in `Backend`)


class SlotStore(Protocol):
    """A store whose objects are read into host slots and written from them. See `Backend`, which is
    one for slots in the memory of this process. Ranks have separate slots and stores."""

    block_bytes: int
    exclusive: bool
    keeps_lineages: bool
    slot_trailer_bytes: int
    counters: StoreCounters

    @property
    def generation(self) -> int: ...

    @property
    def stuck(self) -> bool: ...

    @property
    def clear_pending(self) -> bool: ...

    async def open(self) -> None: ...

    async def attach(self, arena: Arena) -> None: ...

    async def close(self) -> None: ...

    def probe(self, keys: Sequence[bytes]) -> int | None: ...

    async def ask(self, keys: Sequence[bytes], expired: Expired) -> int: ...

    def take(self, keys: Sequence[bytes]) -> None: ...

    async def read_slots(
        self, keys: Sequence[bytes], arena: Any, slots: Sequence[int], expired: Expired
    ) -> ReadReport: ...

    async def write_slots(
        self,
        keys: Sequence[bytes],
        arena: Any,
        slots: Sequence[int],
        expired: Expired,
        lineages: Sequence[Lineage | None] = (),
    ) -> WriteReport: ...

    async def remove(self, keys: Sequence[bytes]) -> None: ...

    async def clear(self, generation: int = 0) -> None: ...

    def keys(self) -> list[bytes]: ...

    def iter_keys(self) -> Iterator[bytes]: ...

    def count(self) -> int: ...

    def holds(self, key: bytes) -> bool: ...

    def take_removed(self) -> list[bytes]: ...

    def acknowledge_removed(self, keys: Iterable[bytes]) -> None: ...

    def begin_paths(self) -> None: ...

    async def next_paths(self, most: int) -> list[PathPart] | None: ...

    def end_paths(self) -> None: ...

    def statistics(self) -> StoreStatistics: ...
