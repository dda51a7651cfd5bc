"""PrefixIndex, the part that makes room: the queue for device blocks, and the evictions that will
free them."""

from __future__ import annotations

from abc import abstractmethod
from itertools import count
from typing import Any

from kvactors.actor import ActorRef, Envelope, on
from kvactors.actor.clock import now
from kvactors.errors import DeadlineExceeded, LeaseEnded, NoRoom
from kvactors.prefix_index.messages import Expired, Proceed, Sweep, Withdrawn
from kvactors.prefix_index.records import Waiting
from kvactors.prefix_index.transfers import Transfers

STEPS = 64
"""Waiters that one turn serves, refuses or admits; the others follow in later turns."""


class Room(Transfers):
    """First come, first served: blocks that become free go to the request that has waited longest.

    free_low, free_high: when fewer than `free_low` device blocks are free after a grant, evict
    until `free_high` are.
    """

    def __init__(self, ref: ActorRef, *, free_low: int, free_high: int, **rest: Any) -> None:
        super().__init__(ref, **rest)
        self.free_low = free_low
        self.free_high = free_high
        self.waiting: dict[
            int, Waiting
        ] = {}  # by lease, in order of arrival: a lease waits for one thing at a time
        self.tickets = count(1)
        self.quiescing: list[Envelope[Any]] = []
        self._owed = 0  # blocks that `waiting` lacks, all together
        self._feeding = self._proceeding = self._sweeping = False

    def coming(self) -> int:
        """Device blocks that evictions in flight will free, at most."""
        return self.offloads.coming

    def stall(self) -> None:
        """Do not count on the offloads in flight: requests that wait for room get other blocks."""
        self.offloads.stall()
        self.room_changed()

    def owed(self) -> int:
        """Device blocks that waiters still lack."""
        return self._owed

    def request_blocks(self, waiter: Waiting, *, wait: bool, deadline: float) -> bool:
        """Complete the waiter now, or queue it behind evictions. False if there is no room (or, not
        waiting, none yet)."""
        if self._complete_now(waiter):
            return True
        deficit, evicted = self.owed() + waiter.needed - self.index.free - self.coming(), 0
        if deficit > 0:
            if self.index.evictable() < deficit and not (self.saves or self.closing):
                return False
            evicted = self.evict(deficit)
            if self._complete_now(waiter):
                return True
        if not wait:
            return False
        self.waiting[waiter.lease] = waiter
        self._owed += waiter.owed
        waiter.ticket = next(self.tickets)
        waiter.timer = self.after(max(0.0, deadline - now()), Expired(waiter.lease, waiter.ticket))
        if evicted < self.part:
            self._feed()
        else:
            self.proceed_later()  # this turn has evicted its part
        return True

    def _complete_now(self, waiter: Waiting) -> bool:
        if self.waiting or self.index.free < waiter.needed:
            return False
        if waiter.reserves:
            self.index.reserved += waiter.needed
            waiter.complete([])
        else:
            waiter.complete(self.index.take(waiter.needed))
        return True

    def available(self) -> int:
        """Device blocks that a new request could have at most."""
        return self.index.free + self.index.evictable() + max(0, self.coming() - self.owed())

    def _feed(self) -> None:
        if self._feeding:
            return  # the caller's caller goes on with the queue
        self._feeding = True
        try:
            self.evicting = 0
            for _ in range(STEPS):
                if not self._serve_one():
                    return
                if self.evicting >= self.part:
                    break
        finally:
            self._feeding = False
        self.proceed_later()

    def _serve_one(self) -> bool:
        """Give the first waiter what is free; False if nothing more can be done now."""
        waiter = next(iter(self.waiting.values()), None)
        if waiter is None:
            return False
        if waiter.envelope.abandoned:
            self.stop_waiting(waiter)
            self.refuse(waiter.envelope, LeaseEnded("this request was given up"))
            return True
        index = self.index
        count = min(waiter.owed, index.free)
        if waiter.reserves:
            index.reserved += count
        else:
            waiter.taken += index.take(count)
        waiter.owed -= count
        self._owed -= count
        if not waiter.owed:
            self._dequeue(waiter)
            waiter.complete(waiter.taken)
            return True
        deficit = self.owed() - self.coming()
        evicted = self.evict(deficit) if deficit > 0 else 0
        if evicted == self.part:
            return True  # there may be more to evict
        if deficit <= 0 or evicted or self.saves or self.closing:
            return index.free > 0
        last = next(reversed(self.waiting.values()))  # nothing will ever come for the youngest
        self.stop_waiting(last)
        self.refuse(last.envelope, NoRoom(last.needed, last.needed - last.owed))
        return True

    def _dequeue(self, waiter: Waiting) -> None:
        del self.waiting[waiter.lease]
        self._owed -= waiter.owed
        waiter.stop_timer()

    def stop_waiting(self, waiter: Waiting) -> None:
        """Take a waiter out of the queue; what it had goes back."""
        self._dequeue(waiter)
        self.index.pool.give(waiter.taken)
        if waiter.reserves:
            self.index.reserved -= waiter.needed - waiter.owed
        waiter.give_up()

    def room_changed(self) -> None:
        """Blocks became free, or an operation ended."""
        if self.waiting:
            self._feed()
        if self.index.retired:
            self._sweep_later()
        if self.quiescing and not (self.loads or self.offloads or self.saves or self.closing):
            quiescing, self.quiescing = self.quiescing, []
            for envelope in quiescing:
                self.quiet(envelope)

    @abstractmethod
    def quiet(self, envelope: Envelope[Any]) -> None:
        """Nothing is in flight: answer a Pause."""

    def proceed_later(self) -> None:
        """Go on with the queues in a later turn, after other messages."""
        if not self._proceeding:
            self._proceeding = True
            self.to_self(Proceed())

    @on(Proceed)
    def proceed(self, message: Proceed) -> None:
        """The next turn's share of the queue."""
        self._proceeding = False
        self.room_changed()

    def _sweep_later(self) -> None:
        if not self._sweeping and self.index.sweeping:
            self._sweeping = True
            self.to_self(Sweep())

    @on(Sweep)
    def sweep(self, message: Sweep) -> None:
        """A turn's share of what a clear leaves: requests do not wait for it, `BlockIndex.take`
        brings back what they need."""
        self._sweeping = False
        self.index.sweep()
        self._sweep_later()

    def keep_some_free(self) -> None:
        """Evict ahead of need, if the device's free blocks ran below the low mark."""
        free = self.index.free + self.coming() - self.owed()
        if free < self.free_low:
            self.evict(self.free_high - free)

    @on(Expired)
    def expired(self, message: Expired) -> None:
        """A waiter's deadline has come."""
        waiter = self.waiting.get(message.lease)
        if waiter is not None and waiter.ticket == message.ticket:
            lacking = waiter.owed
            self.stop_waiting(waiter)
            self.refuse(
                waiter.envelope,
                DeadlineExceeded(f"no device blocks became free in time ({lacking} lacking)"),
            )
            self.room_changed()

    @on(Withdrawn)
    def withdrawn(self, message: Withdrawn) -> None:
        """A waiting extend was cancelled."""
        waiter = self.waiting.get(message.lease)
        if waiter is not None and waiter.envelope.abandoned:
            self.stop_waiting(waiter)
            self.refuse(waiter.envelope, LeaseEnded("this call was cancelled"))
            self.room_changed()
