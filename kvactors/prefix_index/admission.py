"""Admission to the device: the queue of requests that wait for blocks, and the choice of evictions
for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from math import inf
from typing import Any, ClassVar

from kvactors.actor import Envelope
from kvactors.errors import (
    DeadlineExceeded,
    KVActorsError,
    LeaseEnded,
    NeverFits,
    NoRoom,
    NumBlocksUnset,
)
from kvactors.native import BlockTree, Path
from kvactors.prefix_index.actions import Action, Refusal, Reply, StartTimer, Timed, Work
from kvactors.prefix_index.evictions import Evictions
from kvactors.prefix_index.held import Held, SpaceQueue, number_of
from kvactors.prefix_index.index import BlockIndex, Media
from kvactors.prefix_index.leases import LeaseTable
from kvactors.prefix_index.loads import LoadTable
from kvactors.prefix_index.messages import Ack, Acquire, AdmissionDeadline, Fork, Proceed
from kvactors.prefix_index.parts import next_part
from kvactors.prefix_index.pins import Pins
from kvactors.prefix_index.saves import SaveTable
from kvactors.prefix_index.sweeps import Sweeper

STEPS = 64
"""Requests that one turn serves, refuses or admits. The others follow in later turns."""

OVERTAKEN = 64
"""Requests of any size that get blocks before one that waits for space. After that only requests
get blocks before it that fit on the device together with it."""


PINNED = "only the end of a pin makes room"
"""Reason of a refusal."""


class Waiter(Timed, ABC):
    """A request for device blocks, which may have to wait for them.

    Attributes:
        needed: blocks.
        salt: of the request, see `kvactors.quotas.salt_id`.
        lacking: those that it does not have yet.
        taken: those that it has.
        ticket: of its deadline, since a lease may wait again.
        reserves: its blocks are counted in `BlockIndex.reserved`, and taken by it in later turns.
    """

    __slots__ = ("envelope", "lacking", "lease", "needed", "salt", "taken", "ticket")

    reserves: ClassVar[bool] = False

    def __init__(self, lease: int, envelope: Envelope[Any], needed: int, salt: int = 0) -> None:
        super().__init__()
        self.lease = lease
        self.salt = salt
        self.envelope = envelope
        self.needed = needed
        self.lacking = needed
        self.taken: list[int] = []
        self.ticket = 0

    @abstractmethod
    def complete(self, blocks: list[int]) -> list[Action]:
        """The request has its blocks: `needed` of them, none if it reserves them."""

    @abstractmethod
    def give_up(self) -> list[Action]:
        """The request gets no blocks."""


def waits_for_room(envelope: Envelope[Any]) -> bool:
    """Whether a request waits until other requests release device blocks."""
    message = envelope.message
    return isinstance(message, Acquire | Fork) and message.wait_for_room


class Admission:
    """First come, first served, with a bound: blocks that become free go to the request that has
    waited longest, or, if it does not fit, to OVERTAKEN later ones that do, and to any that fit
    beside it.

    Attributes:
        waiting: by lease, in order of arrival. A lease waits for one thing at a time. They wait for
            evictions and releases in flight, with the blocks that they have already.
        space: requests that wait, holding nothing, until other requests release blocks.
        forking: forks that wait for that, before those of `space`, by the lease that is forked.
        overtakings: requests so far that got blocks before one that waited in these two.
        blocks_promised: device blocks that the waiting ones lack.
        free_low, free_high: see `IndexSettings`.
        closing: paths whose blocks are being released in parts.
        on_idle: called whenever no transfer is in flight, for a sleep.
        copies: copies within the device that are in flight.
        no_room: requests that were refused for lack of device blocks.
        refused_size, refused_pins: those of them that are too large, or that pins keep out.
        pausing: calls to be answered once no transfer is in flight.
    """

    def __init__(
        self,
        index: BlockIndex,
        loads: LoadTable,
        evictions: Evictions,
        saves: SaveTable,
        leases: LeaseTable,
        pins: Pins,
        tickets: Iterator[int],
        *,
        free_low: int,
        free_high: int,
    ) -> None:
        self.waiting: dict[int, Waiter] = {}
        self.space: SpaceQueue[Acquire] = SpaceQueue(tickets)
        self.forking: SpaceQueue[Fork] = SpaceQueue(tickets)
        self._patient: dict[int, Waiter] = {}  # those of `waiting` that may wait in `space` as well
        self.blocks_promised = self.overtakings = 0
        self.closing = self.copies = 0
        self.no_room = self.refused_size = self.refused_pins = 0
        self.sweeper = Sweeper(index)
        self.free_low = free_low
        self.free_high = free_high
        self._index = index
        self._loads = loads
        self._evictions = evictions
        self._saves = saves
        self._leases = leases
        self._pins = pins
        self._tickets = tickets
        self.pausing: list[Envelope[Ack]] = []
        self._serving = self._proceeding = False
        self.on_idle: Callable[[], list[Action]] | None = None

    # -- the queue

    @property
    def releasing(self) -> bool:
        """Whether blocks of ended leases will be free, or evictable, without an eviction: copies
        in flight own theirs until they end."""
        if self._saves.in_flight or self.closing > 0 or self.copies > 0:
            return True
        return self._loads.any_unused()

    def unpromised(self) -> int:
        """Blocks that evictions in flight will free, less those that requests wait for."""
        return self._evictions.blocks_being_freed - self.blocks_promised

    def available(self) -> int:
        """Device blocks that a new request could have at most."""
        return self._index.free + self._index.evictable() + max(0, self.unpromised())

    def request(self, waiter: Waiter, *, wait: bool, deadline: float) -> tuple[bool, list[Action]]:
        """Give a request its blocks, or let it wait behind evictions.

        Args:
            waiter: the request.
            wait: whether it waits for blocks that are not free at the end of this turn.
            deadline: absolute loop time until which it waits.

        Returns:
            Whether the request has its blocks or may get them, and the actions. If it may not, it
            is not in the queue.
        """
        if self._fits(waiter):
            return True, self._give(waiter)
        actions: list[Action] = []
        deficit, evicted = waiter.needed - self._index.free - self.unpromised(), 0
        if deficit > 0:
            if self._index.evictable() < deficit and not self.releasing:
                return False, actions
            evicted, actions = self._evictions.evict_for(
                lambda: waiter.needed - self._index.free - self.unpromised(), waiter
            )
            if self._fits(waiter):
                return True, actions + self._give(waiter)
        if not wait:
            return False, actions
        self.waiting[waiter.lease] = waiter
        if waits_for_room(waiter.envelope):
            self._patient[waiter.lease] = waiter
        self.blocks_promised += waiter.lacking
        waiter.ticket = next(self._tickets)
        actions.append(StartTimer(waiter, deadline, AdmissionDeadline(waiter.lease, waiter.ticket)))
        if evicted < self._index.part:
            return True, actions + self._serve_queue()
        return True, actions + self.proceed_later()  # this turn has evicted its part

    def refuse(self, waiter: Waiter, error: Exception) -> list[Action]:
        """Take a request out of the queue. The blocks that it has become free."""
        return [*self._take_back(waiter), Refusal(waiter.envelope, error)]

    def _take_back(self, waiter: Waiter) -> list[Action]:
        self._dequeue(waiter)
        self._index.pool.give(waiter.taken)
        if waiter.reserves:
            self._index.reserved -= waiter.needed - waiter.lacking
        return waiter.give_up()

    def no_room_refusal(self, envelope: Envelope[Any], needed: int) -> Action:
        """A request that is not in the queue cannot get `needed` blocks now: refuse it, or let it
        wait for space."""
        if waits_for_room(envelope) and not envelope.abandoned:
            error = self.unreachable(*self._wanted(envelope.message))
            return self.hold(envelope) if error is None else self.count_refusal(envelope, error)
        error = NoRoom(needed, self.available(), self._index.tree.pinned)
        return self.count_refusal(envelope, error)

    def hold(self, envelope: Envelope[Any]) -> StartTimer:
        """Let a request wait for space."""
        message: Any = envelope.message
        queue: SpaceQueue[Any] = self.space if isinstance(message, Acquire) else self.forking
        return queue.enter(message, envelope, self._wanted(message)[1], self.overtakings)

    def heads(self) -> list[Held[Any]]:
        """The fork and the request that have waited longest for space."""
        return [held for held in (self.forking.first, self.space.first) if held is not None]

    def spare(self, heads: list[Held[Any]]) -> float:
        """Device blocks that a request may claim, together with all requests that it overtakes.

        Leases that are older than those requests are not counted: they end without them.

        Args:
            heads: the requests that it overtakes and that have waited longest.
        """
        if all(self.overtakings - held.since < OVERTAKEN for held in heads):
            return inf
        first = min(number_of(held.message) for held in heads)
        newer = sum(lease.path.num_blocks for lease in self._leases if lease.id > first)
        return self._index.pool.total - self._index.tree.pinned - newer

    def unreachable(
        self, path: Path, claim: int, deadline: float, media: Media = ()
    ) -> KVActorsError | None:
        """Why a request cannot be granted before its deadline even if every lease and transfer
        ends. None if it can.

        Args:
            path: of the request.
            claim: see `Held`.
            deadline: absolute loop time.
            media: see `Acquire`.
        """
        index = self._index
        total, pinned = index.pool.total, index.tree.pinned
        if claim > total:
            return NeverFits(claim, self.available(), total) if total else NumBlocksUnset()
        if claim <= total - pinned:
            return None
        hits = index.before_media(index.match_limit(path), media)
        withheld = self._pins.withheld(path, hits, deadline)
        if claim <= total - withheld:
            return None
        return NoRoom(claim, self.available(), withheld, PINNED)

    def refuse_unreachable(self) -> list[Action]:
        """Blocks were pinned: refuse the waiting requests that these pins keep out."""
        actions: list[Action] = []
        queues: tuple[SpaceQueue[Any], ...] = (self.forking, self.space)
        for queue in queues:
            for held in list(queue.requests.values()):
                error = self.unreachable(*self._wanted(held.message))
                if error is not None:
                    queue.remove(held.message.lease)
                    actions.append(self.count_refusal(held.envelope, error))
        return actions

    def _wanted(self, message: Any) -> tuple[Path, int, float, Media]:
        """Path, claim, deadline and media items of an `Acquire` or `Fork`."""
        if isinstance(message, Acquire):
            path = message.path
            return path, self._index.blocks_for(path.num_tokens), message.deadline, message.media
        lease: Any = self._leases.get(message.lease)  # holds its blocks until the fork is made
        claim = lease.path.num_blocks + len(message.leases)
        return lease.path, claim, message.deadline, ()

    def end_retry(self, lease: int) -> list[Action]:
        """A request that had waited for space has its blocks, waits in this queue, or has gone: the
        next one may follow."""
        if lease not in self.space.retried:
            return []
        del self.space.retried[lease]
        return self.proceed_later() if self.space.requests else []

    def count_refusal(self, envelope: Envelope[Any], error: KVActorsError) -> Refusal:
        """Refuse a request, and count it if it lacks blocks."""
        self.no_room += isinstance(error, NoRoom)
        self.refused_size += isinstance(error, NeverFits)
        self.refused_pins += isinstance(error, NoRoom) and error.reason == PINNED
        return Refusal(envelope, error)

    def cancel(self, lease: int, reason: str) -> list[Action]:
        """Refuse the request of a lease, if it waits."""
        held = self.forking.remove(lease)
        if held is not None:
            return [Refusal(held.envelope, LeaseEnded(reason))]
        waiter = self.waiting.get(lease)
        return [] if waiter is None else self.refuse(waiter, LeaseEnded(reason))

    def call_of(self, lease: int) -> Envelope[Any] | None:
        """The call of a lease that waits for blocks, None if there is none."""
        waits = self.waiting.get(lease) or self.forking.requests.get(lease)
        return None if waits is None else waits.envelope

    def withdraw(self, lease: int) -> list[Action]:
        """The waiting extend or fork of a lease was cancelled, unless it was answered before."""
        call = self.call_of(lease)
        if call is None or not call.abandoned:
            return []
        return self.cancel(lease, "this call was cancelled") + self.serve_waiting()

    def expire(self, lease: int, ticket: int) -> list[Action]:
        """The deadline of a wait has passed."""
        waiter = self.waiting.get(lease)
        if waiter is None or waiter.ticket != ticket:
            return []
        error = DeadlineExceeded(f"no device blocks became free in time ({waiter.lacking} lacking)")
        return self.refuse(waiter, error) + self.serve_waiting()

    def _fits(self, waiter: Waiter) -> bool:
        return not self.waiting and self._index.free >= waiter.needed

    def _give(self, waiter: Waiter) -> list[Action]:
        if waiter.reserves:
            self._index.reserved += waiter.needed
            return waiter.complete([])
        return waiter.complete(self._index.take(waiter.needed))

    def _dequeue(self, waiter: Waiter) -> None:
        del self.waiting[waiter.lease]
        self._patient.pop(waiter.lease, None)
        self.blocks_promised -= waiter.lacking
        waiter.stop_timer()

    def _serve_queue(self) -> list[Action]:
        if self._serving:
            return []  # an outer call continues with the queue
        self._serving = True
        actions: list[Action] = []
        try:
            self._evictions.started = 0
            for _ in range(STEPS):
                more, done = self._serve_first()
                actions += done
                if not more:
                    return actions
                if self._evictions.started >= self._index.part:
                    break
        finally:
            self._serving = False
        return actions + self.proceed_later()

    def _serve_first(self) -> tuple[bool, list[Action]]:
        """Give the first request the free blocks. Returns whether more can be done now."""
        waiter = next(iter(self.waiting.values()), None)
        if waiter is None:
            return False, []
        if waiter.envelope.abandoned:
            return True, self.refuse(waiter, LeaseEnded("this request was given up"))
        index = self._index
        count = min(waiter.lacking, index.free)
        if waiter.reserves:
            index.reserved += count
        else:
            waiter.taken += index.take(count)
        waiter.lacking -= count
        self.blocks_promised -= count
        if not waiter.lacking:
            self._dequeue(waiter)
            return True, waiter.complete(waiter.taken)
        more, actions = self._evictions.evict_for(lambda: -self.unpromised() - index.free, waiter)
        if more:
            return True, actions  # free now or later, or not if another request has them too
        if self.unpromised() >= 0 or self.releasing:
            return index.free > 0, actions
        # There will be no blocks for the last one, or the last of those that can wait for space.
        if self._patient:
            last = next(reversed(self._patient.values()))
            return True, [*actions, *self._take_back(last), self.no_room_refusal(last.envelope, 0)]
        last = next(reversed(self.waiting.values()))
        self.no_room += 1
        error = NoRoom(last.needed, last.needed - last.lacking, self._index.tree.pinned)
        return True, actions + self.refuse(last, error)

    # -- when blocks become free

    def serve_waiting(self) -> list[Action]:
        """Blocks became free, or an operation ended: serve the requests that wait for that."""
        return self._serve() + self.look_again()

    def _serve(self) -> list[Action]:
        actions = self._serve_queue() if self.waiting else []
        if self._index.retired:
            actions += self.sweeper.later()
        if not (self.pausing or self.on_idle):
            return actions
        busy = self._loads or self._evictions or self.releasing or self.copies
        if self.pausing and not busy:
            paused, self.pausing = self.pausing, []
            actions += [Reply(envelope, Ack()) for envelope in paused]
        return actions if busy or self.on_idle is None else actions + self.on_idle()

    def wait_idle(self, envelope: Envelope[Ack]) -> list[Action]:
        """Answer once no transfer is in flight."""
        self.pausing.append(envelope)
        return self.serve_waiting()

    def stall(self) -> list[Action]:
        """The copies in flight may never complete: the requests that wait get other blocks."""
        self._evictions.stall()
        return self.serve_waiting()

    def evict_to_watermark(self) -> list[Action]:
        """Evict ahead of need if the free device blocks are fewer than the low watermark."""
        free = self._index.free + self.unpromised()
        return self._evictions.evict(self.free_high - free)[1] if free < self.free_low else []

    def look_again(self) -> list[Action]:
        """Look at the requests that wait for space in a later turn."""
        waits = self.space.requests or self.forking.requests
        return self.proceed_later() if waits else []

    def proceed_later(self) -> list[Action]:
        """Continue with the queues in a later turn, after other messages."""
        if self._proceeding:
            return []
        self._proceeding = True
        return [Proceed()]

    def proceed(self) -> list[Action]:
        """That turn's share of the queue."""
        self._proceeding = False
        return self._serve()

    # -- releases

    def release(self, tree: BlockTree, path: Path) -> list[Action]:
        """Drop the references of a path. Blocks that no other path uses are free, those of a path
        longer than a part in later turns."""
        if max(path.num_blocks, path.num_held) <= self._index.part:
            self._index.pool.note_release(path)
            self._index.pool.give(tree.release(path))
            return []
        return next_part(self._release(tree, path))

    def _release(self, tree: BlockTree, path: Path) -> Work:
        self.closing += 1
        actions: list[Action] = []
        for _ in self._index.release_parts(tree, path):
            yield actions
            actions = self.serve_waiting()
        self.closing -= 1
        return actions + self.serve_waiting()
