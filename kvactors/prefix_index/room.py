"""PrefixIndex, the part that makes room: who waits for device blocks, and the evictions that will free them."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from typing import Any

from kvactors.actor import ActorRef, Envelope, on
from kvactors.actor.clock import now
from kvactors.errors import DeadlineExceeded, LeaseEnded, NoRoom
from kvactors.prefix_index.messages import Expired
from kvactors.prefix_index.records import Waiting
from kvactors.prefix_index.transfers import Transfers


class Room(Transfers):
    """First come, first served: blocks that become free go to whoever has waited longest.

    free_low, free_high: when fewer than `free_low` device blocks are free after a grant, evict until `free_high` are.
    """

    def __init__(self, ref: ActorRef, *, free_low: int, free_high: int, **rest: Any) -> None:
        super().__init__(ref, **rest)
        self.free_low = free_low
        self.free_high = free_high
        self.waiting: deque[Waiting] = deque()
        self.stalled: set[int] = set()  # offloads that end nobody knows when
        self.quiescing: list[Envelope[Any]] = []

    def coming(self) -> int:
        """Device blocks that evictions in flight will free, at most."""
        return sum(op.total for op in self.offloads.values() if op.op not in self.stalled)

    def stall(self) -> None:
        """Do not count on the offloads in flight: whoever waits for room gets other blocks."""
        self.stalled = set(self.offloads)
        self.room_changed()

    def owed(self) -> int:
        """Device blocks that waiters still lack."""
        return sum(waiter.owed for waiter in self.waiting)

    def request_blocks(self, waiter: Waiting, *, wait: bool, deadline: float) -> bool:
        """Complete the waiter now, or queue it behind evictions. False if there is no room (or, not waiting, none yet)."""
        if self._complete_now(waiter):
            return True
        deficit = self.owed() + waiter.needed - self.index.pool.free - self.coming()
        if deficit > 0:
            if self.index.evictable() < deficit and not self.saves:
                return False
            self.evict(deficit)
            if self._complete_now(waiter):
                return True
        if not wait:
            return False
        self.waiting.append(waiter)
        self.after(max(0.0, deadline - now()), Expired(waiter.lease))
        self._feed()
        return True

    def _complete_now(self, waiter: Waiting) -> bool:
        if self.waiting or self.index.pool.free < waiter.needed:
            return False
        waiter.complete(self.index.pool.take(waiter.needed))
        return True

    def available(self) -> int:
        """Device blocks that can be had without anybody giving way."""
        return self.index.pool.free + self.index.evictable() + max(0, self.coming() - self.owed())

    def _feed(self) -> None:
        pool = self.index.pool
        while self.waiting:
            waiter = self.waiting[0]
            if waiter.envelope.abandoned:
                self.stop_waiting(waiter)
                self.refuse(waiter.envelope, LeaseEnded("this request was given up"))
                continue
            taken = pool.take(min(waiter.owed, pool.free))
            waiter.taken += taken
            waiter.owed -= len(taken)
            if not waiter.owed:
                self.waiting.popleft()
                waiter.complete(waiter.taken)
                continue
            deficit = self.owed() - self.coming()
            if deficit <= 0 or self.evict(deficit) or self.saves:
                if pool.free:
                    continue
                return
            last = self.waiting[-1]  # nothing will ever come for the youngest
            self.stop_waiting(last)
            self.refuse(last.envelope, NoRoom(last.needed, len(last.taken)))

    def stop_waiting(self, waiter: Waiting) -> None:
        """Take a waiter out of the queue; what it had goes back."""
        self.waiting.remove(waiter)
        self.index.pool.give(waiter.taken)
        waiter.give_up()

    def room_changed(self) -> None:
        """Blocks became free, or an operation ended."""
        if self.waiting:
            self._feed()
        if self.quiescing and not (self.loads or self.offloads or self.saves):
            quiescing, self.quiescing = self.quiescing, []
            for envelope in quiescing:
                self.quiet(envelope)

    @abstractmethod
    def quiet(self, envelope: Envelope[Any]) -> None:
        """Nothing is in flight: answer a Pause."""

    def keep_some_free(self) -> None:
        """Evict ahead of need, if the device's free blocks ran below the low mark."""
        free = self.index.pool.free + self.coming() - self.owed()
        if free < self.free_low:
            self.evict(self.free_high - free)

    @on(Expired)
    def expired(self, message: Expired) -> None:
        """A waiter's deadline has come."""
        for waiter in [one for one in self.waiting if one.lease == message.lease]:
            self.stop_waiting(waiter)
            self.refuse(waiter.envelope, DeadlineExceeded(f"no device blocks became free in time ({waiter.owed} lacking)"))
        if self.waiting:
            self._feed()
