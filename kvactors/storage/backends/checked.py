"""Validation between the storage actors and a back end of any origin.

A wrong answer costs misses, is counted and logged, and goes no further. A clear is complete when it
returns: writes in flight have ended, and after a clear that failed nothing is read or written until
one has succeeded.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

from kvactors.actor.log import get_logger
from kvactors.device.arena import Arena, HostSlots
from kvactors.errors import KVActorsError, StoreError
from kvactors.flush_notifier.messages import PathPart
from kvactors.lineage import Lineage
from kvactors.storage.attempts import StoreAttempts
from kvactors.storage.backends.base import Backend, Expired, ReadReport, WriteReport
from kvactors.storage.checked_inventory import CheckedInventory
from kvactors.storage.clears import Clears
from kvactors.storage.containment import Containment
from kvactors.storage.counters import StoreCounters, StoreStatistics
from kvactors.storage.inventory import OwnedInventory
from kvactors.storage.messages import Outcome
from kvactors.storage.presence import ask_each
from kvactors.storage.shares import StoreShares
from kvactors.storage.slot_store import SlotStore

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
