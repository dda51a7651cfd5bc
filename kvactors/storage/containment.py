"""Containment of a back end's exceptions and wrong answers: they are logged and counted, and
replaced by a value that costs misses only."""

from __future__ import annotations

import asyncio
import operator
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any, Literal, TypeVar

from kvactors.actor.clock import now
from kvactors.actor.log import described, get_logger
from kvactors.errors import StoreUnavailable
from kvactors.flush_notifier.messages import PathPart
from kvactors.storage.attempts import Attempts, StoreAttempts
from kvactors.storage.messages import Outcome
from kvactors.types import HASH_BYTES

A = TypeVar("A")
T = TypeVar("T")

log = get_logger()

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
