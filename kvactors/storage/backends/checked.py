"""The seam between the storage actors and a back end of any origin: what it answers is checked,
what it raises is contained.

A wrong answer costs misses, is counted and logged, and goes no further. A clear is complete when it
returns: writes in flight have ended, and after a clear that failed nothing is read or written until
one has succeeded.
"""

from __future__ import annotations

import asyncio
import inspect
import operator
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any, TypeVar

from kvactors.actor.clock import now
from kvactors.actor.log import described, get_logger
from kvactors.device.arena import Arena
from kvactors.errors import KVActorsError, StoreError
from kvactors.flush_notifier.messages import PathPart
from kvactors.lineage import Lineage
from kvactors.storage.backends.base import (
    Backend,
    Expired,
    ReadReport,
    StoreStatistics,
    WriteReport,
)
from kvactors.storage.breaker import Breaker
from kvactors.storage.messages import Outcome
from kvactors.types import KEY_BYTES

T = TypeVar("T")

log = get_logger()

WORST = max(Outcome)


class CheckedBackend(Backend):
    """faults: calls of `inner` that raised, or answered what the contract does not allow;
    last_fault: the last of them.

    fence: the last clear, as (incarnation of who asked, number of the operation); batches from
    before it are not written.

    timeout: seconds that a call may take. While a call takes longer no other one begins: a look-up
    finds nothing, reads and writes are UNAVAILABLE.
    """

    def __init__(self, inner: Backend, timeout: float) -> None:
        super().__init__(inner.fingerprint, inner.block_bytes)
        self.inner = inner
        self.exclusive = inner.exclusive
        self.trailer = inner.trailer
        self.keeps_lineages = bool(inner.keeps_lineages)
        self.faults = 0
        self.last_fault = ""
        self.fence = (0, 0)
        self.breaker = Breaker(
            store=type(inner).__name__
        )  # for faults; the back end has one for what it reports itself
        self._kinds: Counter[str] = Counter()
        self._writing: set[asyncio.Future[None]] = set()
        self._clears = self._clearing = 0
        self._timeout = timeout
        self._numbers = count(1)
        self._calls: dict[
            int, tuple[str, float]
        ] = {}  # in flight, the oldest first: name and start
        self._logged = 0  # the last call that was logged as one that does not return

    # -- containing

    def _contained(self, what: str, error: BaseException) -> bool:
        """Whether an exception is the back end's fault; False for one that must pass: our own
        cancellation, or the process's end."""
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            return False
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                return False
        self._fault(what, f"raised {described(error)}")
        return True

    def _fault(self, what: str, text: str) -> None:
        self.faults += 1
        self._kinds[what] += 1
        self.last_fault = f"{what} {text}"
        if self._kinds[what].bit_count() == 1:  # the first, second, fourth, eighth, ..
            log.error(
                "store fault contained",
                store=type(self.inner).__name__,
                call=what,
                error=text,
                times=self._kinds[what],
            )

    def _now(self, what: str, call: Callable[[], Any], fallback: Any) -> Any:
        """A call that answers at once."""
        try:
            return call()
        except BaseException as error:
            if not self._contained(what, error):
                raise
            return fallback

    async def _later(self, what: str, call: Callable[[], Awaitable[T]], fallback: T) -> T:
        """A call that is awaited; several that fail open the circuit."""
        before, number = self.faults, next(self._numbers)
        self._calls[number] = (what, now())
        try:
            found = await call()
        except BaseException as error:
            if not self._contained(what, error):
                raise
            found = fallback
        finally:
            del self._calls[number]
        self.breaker.saw(self.faults == before, self.last_fault)
        return found

    def overdue(self) -> tuple[str, float] | None:
        """Name and start (on the loop's clock) of a call that has been in flight for longer than
        the time-out; None if there is none."""
        number = next(iter(self._calls), 0)
        if not number or now() - self._calls[number][1] <= self._timeout:
            return None
        if self._logged < number:
            self._logged = number
            what = self._calls[number][0]
            log.error(
                "store call does not return",
                store=type(self.inner).__name__,
                call=what,
                seconds=self._timeout,
            )
        return self._calls[number]

    # -- checking

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
        """One outcome a key; UNAVAILABLE where the answer says nothing that can be used."""
        found = getattr(report, "outcomes", None)
        if not isinstance(found, bytes | bytearray) or len(found) != count:
            self._fault(
                what,
                f"answered {type(found).__name__} of {_length(found)} outcomes for {count} keys",
            )
            return bytes([Outcome.UNAVAILABLE]) * count
        if count and max(found) > WORST:
            self._fault(what, f"answered outcome {max(found)}")
            return bytes(one if one <= WORST else Outcome.UNAVAILABLE for one in found)
        return bytes(found)

    def _keys(self, what: str, found: Any) -> list[bytes]:
        """Keys among what was answered."""
        listed: list[Any] = (
            self._now(what, lambda: list(found), []) if not isinstance(found, str | bytes) else []
        )
        good = [key for key in listed if isinstance(key, bytes) and len(key) == KEY_BYTES]
        if len(good) != len(listed) or isinstance(found, str | bytes):
            self._fault(what, "answered names that are no keys")
        return good

    def _closed(self) -> bool:
        """Whether nothing may be read or written: a clear is in progress, or the last one
        failed."""
        return bool(self._clearing) or self.uncleared

    # -- the contract

    async def open(self) -> None:
        """See `Backend.open`."""
        try:
            await self.inner.open()
        except BaseException as error:
            if isinstance(error, KVActorsError) or not self._contained("open", error):
                raise
            raise StoreError(f"the store could not be opened: {self.last_fault}") from error
        self.generation = self._now("generation", lambda: operator.index(self.inner.generation), 0)

    @property
    def era(self) -> int:
        """See `Backend.era`."""
        found: int = self._now("era", lambda: operator.index(self.inner.era), 0)
        return found

    async def attach(self, arena: Arena) -> None:
        """See `Backend.attach`."""
        try:
            await self.inner.attach(arena)
        except BaseException as error:
            if isinstance(error, KVActorsError) or not self._contained("attach", error):
                raise
            raise StoreError(f"the store does not take the arena: {self.last_fault}") from error

    async def close(self) -> None:
        """See `Backend.close`; what it raises is logged."""
        await self._later("close", self.inner.close, None)
        self.stuck = bool(self._now("stuck", lambda: self.inner.stuck, False))

    def probe(self, keys: Sequence[bytes]) -> int | None:
        """See `Backend.probe`."""
        if self._closed() or self.breaker.state() == "open" or self.overdue():
            return 0
        found: int | None = self._now("probe", lambda: self.inner.probe(keys), 0)
        return None if found is None else self._number("probe", found, len(keys))

    async def ask(self, keys: Sequence[bytes], expired: Expired) -> int:
        """See `Backend.ask`."""
        if self._closed() or self.overdue() or not self.breaker.closed():
            return 0

        async def call() -> int:
            return self._number("ask", await self.inner.ask(keys, expired), len(keys))

        return await self._later("ask", call, 0)

    def take(self, keys: Sequence[bytes]) -> None:
        """See `Backend.take`."""
        self._now("take", lambda: self.inner.take(keys), None)

    async def read(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired
    ) -> ReadReport:
        """See `Backend.read`."""
        return await self._read(keys, lambda: self.inner.read(keys, views, expired))

    async def read_slots(
        self, keys: Sequence[bytes], arena: Arena, slots: Sequence[int], expired: Expired
    ) -> ReadReport:
        """See `Backend.read_slots`."""
        return await self._read(keys, lambda: self.inner.read_slots(keys, arena, slots, expired))

    async def _read(
        self, keys: Sequence[bytes], call: Callable[[], Awaitable[ReadReport]]
    ) -> ReadReport:
        if self._closed():
            return ReadReport(bytes([Outcome.MISS]) * len(keys), [])
        unread = ReadReport(bytes([Outcome.UNAVAILABLE]) * len(keys), [])
        if self.overdue() or not self.breaker.closed():
            return unread
        clears = self._clears

        async def checked() -> ReadReport:
            report = await call()
            return ReadReport(
                self._outcomes("read", report, len(keys)),
                self._keys("read", getattr(report, "gone", None)),
            )

        report = await self._later("read", checked, unread)
        if clears != self._clears:  # what was read may be from before the clear
            return ReadReport(
                report.outcomes.replace(bytes([Outcome.OK]), bytes([Outcome.MISS])), report.gone
            )
        return report

    async def write(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired
    ) -> WriteReport:
        """See `Backend.write`."""
        return await self._write(keys, lambda: self.inner.write(keys, views, expired))

    async def write_slots(
        self,
        keys: Sequence[bytes],
        arena: Arena,
        slots: Sequence[int],
        expired: Expired,
        lineages: Sequence[Lineage | None] = (),
    ) -> WriteReport:
        """See `Backend.write_slots`; back ends of other packages may have one without lineages."""
        more = (lineages,) if lineages and self.keeps_lineages else ()
        return await self._write(
            keys, lambda: self.inner.write_slots(keys, arena, slots, expired, *more)
        )

    async def _write(
        self, keys: Sequence[bytes], call: Callable[[], Awaitable[WriteReport]]
    ) -> WriteReport:
        if self._clearing:
            return WriteReport(bytes([Outcome.LATE]) * len(keys), [])
        unwritten = WriteReport(bytes([Outcome.UNAVAILABLE]) * len(keys), [])
        if self.overdue() or not self.breaker.closed():
            return unwritten
        if self.uncleared:
            try:
                await self.clear()
            except StoreError:
                self.breaker.saw(False, self.last_fault)
                return unwritten

        async def checked() -> WriteReport:
            report = await call()
            return WriteReport(
                self._outcomes("write", report, len(keys)),
                self._keys("write", getattr(report, "evicted", None)),
            )

        writing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writing.add(writing)
        try:
            return await self._later("write", checked, unwritten)
        finally:
            self._writing.discard(writing)
            writing.set_result(None)

    async def remove(self, keys: Sequence[bytes]) -> None:
        """See `Backend.remove`."""
        await self._later("remove", lambda: self.inner.remove(keys), None)

    async def clear(self, generation: int = 0) -> None:
        """See `Backend.clear`. Writes in flight end first; those that come in the meantime are
        LATE, and reads MISS."""
        self._clears += 1
        self._clearing += 1
        mine, self.uncleared = self._clears, True  # until one has succeeded
        try:
            while self._writing:
                await asyncio.wait(list(self._writing))
            await self._clear(generation)
            self.generation = max(
                self.generation + 1,
                generation,
                self._now("generation", lambda: operator.index(self.inner.generation), 0),
            )
            if mine == self._clears:
                self.uncleared = False
        except BaseException as error:
            if isinstance(error, StoreError):
                self.last_fault = f"clear raised {error}"
                raise
            if not self._contained("clear", error):
                raise
            raise StoreError(f"the store could not be cleared: {self.last_fault}") from error
        finally:
            self._clearing -= 1

    async def _clear(self, generation: int) -> None:
        """Back ends of other packages may have a `clear` without an argument."""
        if inspect.signature(self.inner.clear).parameters:
            await self.inner.clear(generation)
        else:
            await self.inner.clear()

    def needs_clear(self) -> bool:
        """Whether a clear is to be repeated: it failed, or did not reach all of the store."""
        return not self._clearing and (
            self.uncleared or bool(self._now("uncleared", lambda: self.inner.uncleared, False))
        )

    def keys(self) -> list[bytes]:
        """See `Backend.keys`."""
        return [] if self.uncleared else self._keys("keys", self._now("keys", self.inner.keys, []))

    def snapshot(self) -> Iterator[bytes]:
        """The keys of this moment; each is checked when it is taken, so that a large store costs no
        long turn."""
        listed: list[Any] = (
            [] if self.uncleared else self._now("keys", lambda: list(self.inner.keys()), [])
        )
        return self._good(listed)

    def _good(self, listed: list[Any]) -> Iterator[bytes]:
        for key in listed:
            if isinstance(key, bytes) and len(key) == KEY_BYTES:
                yield key
            else:
                self._fault("keys", "answered a name that is no key")

    def names(self) -> Iterator[bytes]:
        """See `Backend.names`; lazily, as the back end gives them."""
        if self.uncleared:
            return
        key: Any
        try:
            for key in self.inner.names():
                if not isinstance(key, bytes) or len(key) != KEY_BYTES:
                    self._fault("names", "answered a name that is no key")
                    return
                yield key
        except RuntimeError:
            raise  # the store changed: the caller begins again
        except BaseException as error:
            if not self._contained("names", error):
                raise

    def count(self) -> int:
        """See `Backend.count`."""
        return (
            0
            if self.uncleared
            else self._number("count", self._now("count", self.inner.count, 0), sys.maxsize)
        )

    def holds(self, key: bytes) -> bool:
        """See `Backend.holds`."""
        return not self.uncleared and self._now("holds", lambda: bool(self.inner.holds(key)), False)

    def lost(self) -> list[bytes]:
        """See `Backend.lost`."""
        return self._keys("lost", self._now("lost", self.inner.lost, []))

    def begin_paths(self) -> None:
        """See `Backend.begin_paths`."""
        self._now("begin_paths", self.inner.begin_paths, None)

    async def next_paths(self, most: int) -> list[PathPart] | None:
        """See `Backend.next_paths`."""
        if not self.keeps_lineages:
            return None
        found: Any = await self._later("next_paths", lambda: self.inner.next_paths(most), None)
        if found is None:
            return None
        good = (
            [part for part in found if isinstance(part, PathPart) and part.whole()]
            if isinstance(found, list)
            else []
        )
        if not isinstance(found, list) or len(good) != len(found):
            self._fault("next_paths", "answered what is no part of a path")
            return None
        return good

    def end_paths(self) -> None:
        """See `Backend.end_paths`."""
        self._now("end_paths", self.inner.end_paths, None)

    def told(self, keys: Iterable[bytes]) -> None:
        """See `Backend.told`."""
        self._now("told", lambda: self.inner.told(keys), None)

    def statistics(self) -> StoreStatistics:
        """See `Backend.statistics`."""
        found = self._now("statistics", self.inner.statistics, None)
        if not isinstance(found, StoreStatistics):
            found = super().statistics()
        breaker = found.breaker if self.breaker.state() == "closed" else self.breaker.state()
        return found._replace(faults=self.faults, breaker=breaker)


def _length(found: Any) -> int:
    try:
        return len(found)
    except Exception:
        return 0
