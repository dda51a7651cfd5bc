"""Requests that wait: for the end of a pause, for evictions in flight, or until other requests
release device blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import takewhile
from math import inf
from typing import TYPE_CHECKING, Any

from kvactors.actor import Control, Envelope
from kvactors.errors import (
    DeadlineExceeded,
    KVActorsError,
    LeaseEnded,
    NeverFits,
    NoRoom,
    NumBlocksUnset,
    Paused,
)
from kvactors.native import Path
from kvactors.prefix_index.messages import Acquire, Fork, Proceed
from kvactors.prefix_index.tree import Media
from kvactors.prefix_index.work import Timed, Work

if TYPE_CHECKING:
    from kvactors.prefix_index.actor import PrefixIndex


TURN_REQUESTS = 64
"""Requests that one turn serves, refuses or admits. The others follow in later turns."""

OVERTAKEN = 64
"""Requests of any size that get blocks before one that waits for room. After that only requests
get blocks before it that fit on the device together with it."""

PINNED = "only the end of a pin makes room"
"""Reason of a refusal."""


class Wait(Timed, eq=False):
    """A request that waits."""

    lease: int  # the lease that it is for, or that a fork is made of
    envelope: Envelope[Any]  # of its call
    claim: int = 0  # device blocks that its lease uses once it is granted
    since: int = 0  # `WaitQueue.overtakings` when it began to wait for room
    needed: int = 0  # device blocks that it asks for
    lacking: int = 0  # those that are not reserved for it yet
    salt: int = 0  # of the request, see `kvactors.quotas.salt_id`
    complete: Callable[[], None] = lambda: None  # called when all are free
    give_up: Callable[[], None] = lambda: None  # called if it gets none

    @property
    def message(self) -> Any:
        return self.envelope.message


class AdmissionDeadline(Control, frozen=True, eq=False):
    """To itself: the deadline of a wait, for blocks or for the end of a pause."""

    wait: Wait


class Line:
    """Requests that wait and hold nothing: no block, no reference, no load. In the order of their
    calls."""

    def __init__(self) -> None:
        self.waits: OrderedDict[int, Wait] = OrderedDict()  # by lease
        self.claims = 0  # blocks of `waits`

    def __len__(self) -> int:
        return len(self.waits)

    @property
    def first(self) -> Wait | None:
        return next(iter(self.waits.values()), None)

    def enter(self, wait: Wait) -> None:
        """Let a request wait, before those that were called later."""
        number, backwards = number_of(wait.message), reversed(self.waits.values())
        later = list(takewhile(lambda one: number_of(one.message) > number, backwards))
        if later:
            wait.since = later[-1].since
        self.waits[wait.lease] = wait
        self.claims += wait.claim
        for one in reversed(later):
            self.waits.move_to_end(one.lease)

    def remove(self, lease: int) -> Wait | None:
        """The request of a lease does not wait any more. None if it did not."""
        wait = self.waits.pop(lease, None)
        if wait is not None:
            wait.stop_timer()
            self.claims -= wait.claim
        return wait


class WaitQueue:
    """First come, first served, with a bound: blocks that become free go to the request that has
    waited longest, or, if it does not fit, to OVERTAKEN later ones that do, and to any that fit
    beside it. A lease waits for one thing at a time, in one of four lines."""

    def __init__(self, core: PrefixIndex) -> None:
        # Requests that wait for the end of a pause. Forks, and acquires, that wait for others to
        # release blocks. Forks come first: the leases that they are of hold blocks.
        self.held, self.forks, self.acquires = Line(), Line(), Line()
        # Requests that wait for evictions and releases in flight, with the blocks that are reserved
        # for them, by lease in order of arrival.
        self.waiting: dict[int, Wait] = {}
        self.contended = True  # a request waits or has to wait. May be true for longer
        self.paused, self.asleep = False, core.settings.asleep  # new requests are held, or refused
        self.overtakings = 0  # requests that got blocks before one that waited for room
        self.no_room = self.refused_size = self.refused_pins = 0  # see `IndexStatistics`
        self.free_low, self.free_high = core.settings.free_low, core.settings.free_high
        self.on_idle: list[Callable[[], object]] = []  # called once no transfer is in flight
        self.proceeding = False  # a later turn continues with the lines
        self._core, self._out = core, core.out
        self._index, self._evictions = core.index, core.evictions
        self._serving = self._sweeping = False

    def is_quiet(self) -> bool:
        """Whether a request need not wait for others, and its end has no consequences for them."""
        waits = self.held.waits or self.waiting or self.heads() or self.on_idle
        self.contended = bool(self.paused or self.asleep or waits)
        return not self.contended

    def heads(self) -> list[Wait]:
        """The fork and the acquire that have waited longest for room."""
        return [wait for wait in (self.forks.first, self.acquires.first) if wait is not None]

    @property
    def releasing(self) -> bool:
        """Whether blocks of ended leases will be free or evictable: copies in flight own theirs
        until they end."""
        core = self._core
        return bool(core.saves.in_flight or self._index.closing) or core.loads.any_unused()

    # -- requests that hold nothing

    def hold(self, envelope: Envelope[Any]) -> None:
        """Let a request wait for the end of a pause."""
        self._enter(self.held, envelope, 0)

    def wait_for_room(self, envelope: Envelope[Any]) -> None:
        line = self.acquires if isinstance(envelope.message, Acquire) else self.forks
        self._enter(line, envelope, self._wanted(envelope.message)[1])

    def _enter(self, line: Line, envelope: Envelope[Any], claim: int) -> None:
        message: Any = envelope.message
        wait = Wait(message.lease, envelope, claim=claim, since=self.overtakings)
        line.enter(wait)
        self._start(wait, message.deadline)

    def _start(self, wait: Wait, deadline: float) -> None:
        self.contended = True
        self._out.at(wait, deadline, AdmissionDeadline(wait))

    def spare(self, heads: list[Wait]) -> float:
        """Device blocks that a request may claim, together with all requests that it overtakes, of
        which `heads` have waited longest. Leases that are older than those requests are not
        counted: they end without them."""
        if all(self.overtakings - wait.since < OVERTAKEN for wait in heads):
            return inf
        first = min(number_of(wait.message) for wait in heads)
        newer = sum(lease.path.num_blocks for lease in self._core.leases if lease.id > first)
        return self._index.pool.total - self._index.tree.pinned - newer

    def refuse_unreachable(
        self, envelope: Envelope[Any], path: Path, claim: int, deadline: float, media: Media = ()
    ) -> bool:
        """Refuse a request of `claim` blocks that cannot be granted before its deadline even if
        every lease and transfer ends. Returns whether it was refused."""
        index, total = self._index, self._index.pool.total
        if claim > total:
            error = NeverFits(claim, index.available, total) if total else NumBlocksUnset()
            self.refuse(envelope, error)
            return True
        if claim <= total - index.tree.pinned:
            return False
        hits = index.before_media(index.limit_of(path.num_tokens), media)
        withheld = self._core.pins.withheld(path, hits, deadline)
        if claim <= total - withheld:
            return False
        self.refuse(envelope, NoRoom(claim, index.available, withheld, PINNED))
        return True

    def check_reach(self) -> None:
        """Refuse the waiting requests that pins keep out: blocks were pinned, or the namespace is
        another one."""
        for line in (self.forks, self.acquires):
            for wait in list(line.waits.values()):
                if self.refuse_unreachable(wait.envelope, *self._wanted(wait.message)):
                    line.remove(wait.lease)

    def _wanted(self, message: Any) -> tuple[Path, int, float, Media]:
        """Path, claim, deadline and media items of an `Acquire` or `Fork`."""
        if isinstance(message, Acquire):
            path = message.path
            self._core.set_root(path, message.scope)
            return path, self._index.blocks_for(path.num_tokens), message.deadline, message.media
        lease: Any = self._core.leases.get(message.lease)  # holds its blocks until the fork is made
        return lease.path, lease.path.num_blocks + len(message.leases), message.deadline, ()

    # -- requests that wait for evictions

    def request(self, wait: Wait, *, may_wait: bool, deadline: float) -> None:
        """Give a request its blocks, or let it wait behind evictions until a deadline, if it may.
        Otherwise it lacks room."""
        index = self._index
        wait.lacking = wait.needed
        evicted, deficit = 0, wait.needed - index.free - index.unpromised
        if deficit > index.evictable() and not self.releasing:
            may_wait = False
        elif deficit > 0:
            evicted = self._evictions.evict_for(
                lambda: wait.needed - index.free - index.unpromised, wait.salt, wait.needed
            )
        if not self.waiting and index.free >= wait.needed:
            wait.complete()
            return
        if not may_wait:
            wait.give_up()
            self.lacks_room(wait.envelope, wait.needed)
            return
        self.waiting[wait.lease] = wait
        index.promised += wait.lacking
        self._start(wait, deadline)
        if evicted < index.turn_blocks:
            self._serve_evictions()
        else:
            self.proceed_later()  # this turn has evicted its part

    def _serve_evictions(self) -> None:
        if self._serving:
            return  # an outer call continues with the queue
        self._serving = True
        try:
            self._evictions.started = 0
            for _ in range(TURN_REQUESTS):
                if not self._serve_first():
                    return
                if self._evictions.started >= self._index.turn_blocks:
                    break
        finally:
            self._serving = False
        self.proceed_later()

    def _serve_first(self) -> bool:
        """Reserve free blocks for the first request. Returns whether more can be done now."""
        wait, index = next(iter(self.waiting.values()), None), self._index
        if wait is None:
            return False
        if wait.envelope.abandoned:
            self._end(wait, LeaseEnded("this request was given up"))
            return True
        reserved = min(wait.lacking, index.free)
        index.reserved += reserved
        wait.lacking -= reserved
        index.promised -= reserved
        if not wait.lacking:
            self._dequeue(wait)
            index.reserved -= wait.needed
            wait.complete()
            return True
        if self._evictions.evict_for(
            lambda: -index.unpromised - index.free, wait.salt, wait.needed
        ):
            return True  # free now or later, or not if another request has them too
        if index.unpromised >= 0 or self.releasing:
            return index.free > 0
        # There will be no blocks for the last one, or the last of those that can wait for room.
        for last in reversed(self.waiting.values()):
            if may_wait_for_room(last.message):
                self._take_back(last)
                self.lacks_room(last.envelope, 0)
                return True
        last = next(reversed(self.waiting.values()))
        self.no_room += 1
        error = NoRoom(last.needed, last.needed - last.lacking, self._index.tree.pinned)
        self._end(last, error)
        return True

    def _dequeue(self, wait: Wait) -> None:
        del self.waiting[wait.lease]
        self._index.promised -= wait.lacking
        wait.stop_timer()

    def _take_back(self, wait: Wait) -> None:
        self._dequeue(wait)
        self._index.reserved -= wait.needed - wait.lacking
        wait.give_up()

    # -- refusals

    def lacks_room(self, envelope: Envelope[Any], needed: int) -> None:
        """Refuse a request that cannot get `needed` blocks now, or let it wait for room."""
        if envelope.abandoned or not may_wait_for_room(envelope.message):
            available, pinned = self._index.available, self._index.tree.pinned
            self.refuse(envelope, NoRoom(needed, available, pinned))
        elif not self.refuse_unreachable(envelope, *self._wanted(envelope.message)):
            self.wait_for_room(envelope)

    def refuse(self, envelope: Envelope[Any], error: KVActorsError) -> None:
        """Refuse a request, and count it if it lacks blocks."""
        self.no_room += isinstance(error, NoRoom)
        self.refused_size += isinstance(error, NeverFits)
        self.refused_pins += isinstance(error, NoRoom) and error.reason == PINNED
        self._out.refuse(envelope, error)

    def call_of(self, lease: int) -> Envelope[Any] | None:
        """The call of a granted lease that waits for blocks, None if there is none."""
        wait = self.waiting.get(lease) or self.forks.waits.get(lease)
        return None if wait is None else wait.envelope

    def _find(self, lease: int) -> Wait | None:
        lines = (self.waiting, self.held.waits, self.forks.waits, self.acquires.waits)
        return next((line[lease] for line in lines if lease in line), None)

    def _end(self, wait: Wait, error: Exception) -> None:
        if wait.lease in self.waiting:
            self._take_back(wait)
        for line in (self.held, self.forks, self.acquires):
            line.remove(wait.lease)
        self._out.refuse(wait.envelope, error)

    def cancel(self, lease: int, reason: str) -> None:
        wait = self._find(lease)
        if wait is not None:
            self._end(wait, LeaseEnded(reason))

    def expire(self, wait: Wait) -> None:
        lease = wait.lease
        if self._find(lease) is not wait:
            return  # it has ended, and its lease may wait again
        if lease in self.held.waits:
            self._end(wait, Paused("the cache is paused"))
            return
        if lease in self.waiting:
            error = f"no device blocks became free in time ({wait.lacking} lacking)"
        else:
            needed = wait.claim if lease in self.acquires.waits else len(wait.message.leases)
            error = (
                f"other requests did not release enough device blocks in time: {needed} needed, "
                f"{self._index.available} available, {self._index.tree.pinned} pinned"
            )
        self._end(wait, DeadlineExceeded(error))
        self.serve()

    # -- when blocks become free

    def serve(self) -> None:
        """Blocks became free, or an operation ended: serve the requests that wait for that."""
        if self.contended or self._index.retired:
            self._serve()
            self.look_again()
            self.is_quiet()

    def _serve(self) -> None:
        if self.waiting:
            self._serve_evictions()
        if self._index.sweeping and not self._sweeping:
            self._sweeping = True
            self._out.begin(self._sweep())
        if self.on_idle and not (self._core.loads or self._evictions or self.releasing):
            calls, self.on_idle = self.on_idle, []
            for call in calls:
                call()

    def when_idle(self, call: Callable[[], object]) -> None:
        self.contended = True
        self.on_idle.append(call)
        self.serve()

    def evict_to_watermark(self) -> None:
        """Evict ahead of need if the free device blocks are fewer than the low watermark."""
        free = self._index.free + self._index.unpromised
        if free < self.free_low:
            self._evictions.evict(self.free_high - free)

    def look_again(self) -> None:
        """Look at the requests that wait for room in a later turn."""
        if self.acquires.waits or self.forks.waits:
            self.proceed_later()

    def proceed_later(self) -> None:
        """Continue with the queues in a later turn, after other messages."""
        if not self.proceeding:
            self.proceeding = True
            self._out.to_self(Proceed())

    def proceed(self) -> None:
        self.proceeding = False
        self._serve()

    def _sweep(self) -> Work:
        """Return blocks and memory of cleared trees in later turns. Requests do not wait for it:
        `BlockIndex.take` reclaims the blocks that they need."""
        while self._index.sweeping:
            yield
            self._index.sweep()
        self._sweeping = False


def may_wait_for_room(message: Any) -> bool:
    """An extend may not: its lease holds blocks."""
    return bool(getattr(message, "wait_for_room", False))


def number_of(message: Acquire | Fork) -> int:
    """Ascending in the order of calls: the number of the lease that the request is for."""
    return message.lease if isinstance(message, Acquire) else message.leases[0]
