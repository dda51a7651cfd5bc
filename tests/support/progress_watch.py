"""A watch of admission: the law of progress, stated apart from the code that keeps it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvactors.actor import Actor, ActorRef, Envelope, Instrument
from kvactors.errors import NeverFits, NoRoom
from kvactors.prefix_index.actor import PrefixIndex
from kvactors.prefix_index.messages import Acquire
from kvactors.prefix_index.waiting import Wait, WaitQueue, number_of
from kvactors.types import split_hashes

CLOCKS = 0.002
"""Seconds by which the end of a pin and a deadline may be taken for the same moment."""


class ProgressWatch(Instrument):
    """Looks at the requests that wait for space after each turn of an index, at each request that
    overtakes them and at each refusal.

    * A request that cannot be granted before its deadline, because of its size or of pins, does not
      wait. No other one that may wait is refused.
    * A request that fits does not wait and is not refused, unless it would overtake one that was
      overtaken `bound` times and the two do not fit on the device together.

    Args:
        fail: called with a text for each violation.
        seen: counts of what was watched.
        bound: see above.
    """

    def __init__(self, fail: Callable[[str], None], seen: Counter[str], bound: int) -> None:
        self._fail = fail
        self._seen = seen
        self._bound = bound
        self._actor: PrefixIndex | None = None
        self._overtaken: Counter[int] = Counter()  # by the number of the request
        self._fitted: dict[
            int, bool
        ] = {}  # requests that are being matched, which changes the tree

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watch within a block. One watch a process at a time."""
        admit, match, refuse = PrefixIndex._admit, PrefixIndex._match, WaitQueue.refuse
        admitted: Any = None

        def on_admit(index: PrefixIndex, message: Acquire, envelope: Envelope[Any]) -> Any:
            nonlocal admitted
            admitted = message
            try:
                return admit(index, message, envelope)
            finally:
                admitted = None
                self._fitted.pop(message.lease, None)

        def on_match(index: PrefixIndex, envelope: Envelope[Any]) -> Any:
            message: Any = envelope.message
            if message is admitted and message.lease not in self._fitted:
                self._overtakes(message, index.index.blocks_for(message.path.num_tokens))
                self._fitted[message.lease] = self._fits(message)
            return match(index, envelope)

        def on_refusal(queue: WaitQueue, envelope: Envelope[Any], error: Exception) -> Any:
            if isinstance(envelope.message, Acquire) and not envelope.abandoned:
                self._refused(envelope.message, error)
            return refuse(queue, envelope, error)  # type: ignore[arg-type]

        patches: Any = (PrefixIndex, WaitQueue)
        patches[0]._admit, patches[0]._match, patches[1].refuse = on_admit, on_match, on_refusal
        try:
            yield
        finally:
            patches[0]._admit, patches[0]._match, patches[1].refuse = admit, match, refuse

    # -- see `Instrument`

    def started(self, actor: Actor) -> None:
        """An incarnation of the index begins without waiting requests."""
        if isinstance(actor, PrefixIndex):
            self._actor = actor
            self._overtaken.clear()

    def finished(self, receiver: ActorRef, envelope: Envelope[Any]) -> None:
        """After a turn no request waits that must not."""
        actor = self._actor
        if actor is None or receiver.role != actor.ROLE:
            return
        queue = actor.queue
        self._refuse_hopeless()
        if queue.proceeding or actor.out.works > queue._sweeping:
            return  # the index looks at the queue in a later turn
        ahead: list[Wait] = []
        for held in self._waiting():
            message = held.message
            if isinstance(message, Acquire) and queue.paused:
                return
            self._seen["waiting requests watched"] += 1
            if self._may_pass(held.claim, ahead) and self._fits(message):
                self._fail(f"progress: {type(message).__name__} waits for room, and fits")
            ahead.append(held)

    def _waiting(self) -> list[Wait]:
        assert self._actor is not None
        queue = self._actor.queue
        waiting: list[Wait] = [*queue.forks.waits.values()]
        waiting += queue.acquires.waits.values()
        return [held for held in waiting if not held.envelope.abandoned]

    # -- the law

    def _refuse_hopeless(self) -> None:
        for held in self._waiting():
            if self._is_hopeless(held.message, held.claim, CLOCKS):
                self._fail(f"progress: {type(held.message).__name__} waits that pins keep out")

    def _refused(self, message: Acquire, error: Exception) -> None:
        assert self._actor is not None
        core, path = self._actor, message.path
        claim = core.index.blocks_for(path.num_tokens)
        if not isinstance(error, NoRoom):
            return
        if isinstance(error, NeverFits):
            if claim <= core.index.pool.total:
                self._fail("progress: a request that fits the device is refused for ever")
            return
        if self._is_hopeless(message, claim, -CLOCKS):
            self._seen["refused for pins"] += 1
            return
        if message.wait_for_room:
            self._fail(f"progress: a request that may wait for room is refused: {error}")
            return
        ahead = [held for held in self._waiting() if number_of(held.message) < message.lease]
        if not self._may_pass(claim, ahead):
            self._seen["refused behind others"] += 1
        elif message.wait and not path.num_held:
            fits = self._fitted.get(message.lease)
            if self._fits(message) if fits is None else fits:
                self._fail(f"progress: a request that fits is refused: {error}")

    def _overtakes(self, message: Acquire, needed: int) -> None:
        """A request is about to get its blocks."""
        assert self._actor is not None
        waiting = {held.message.lease: held for held in self._waiting()}
        self._overtaken = Counter({n: c for n, c in self._overtaken.items() if n in waiting})
        for lease, held in waiting.items():
            if isinstance(held.message, Acquire) and lease > message.lease:
                continue
            self._seen["overtaken"] += 1
            if self._overtaken[lease] >= self._bound:
                self._seen["overtaken by one that fits beside"] += 1
                if needed + held.claim + self._newer([held]) > self._reach():
                    self._fail("progress: a waiting request is overtaken too often")
            self._overtaken[lease] += 1

    def _may_pass(self, claim: int, ahead: Sequence[Wait]) -> bool:
        assert self._actor is not None
        overtakings = self._actor.queue.overtakings
        if all(overtakings - held.since < self._bound for held in ahead):
            return True
        claims = claim + sum(held.claim for held in ahead)
        return claims + self._newer(ahead) <= self._reach()

    def _newer(self, ahead: Sequence[Wait]) -> int:
        """Blocks of the leases that are newer than the first of these requests."""
        assert self._actor is not None
        first = min(number_of(held.message) for held in ahead)
        leases = self._actor.leases
        return sum(lease.path.num_blocks for lease in leases if lease.id > first)

    def _reach(self) -> int:
        assert self._actor is not None
        index = self._actor.index
        return index.pool.total - index.tree.pinned

    def _fits(self, message: Any) -> bool:
        """Whether free blocks, and those that evictions free, are enough for a request now."""
        assert self._actor is not None
        core, index = self._actor, self._actor.index
        unpromised = core.index.unpromised
        if not isinstance(message, Acquire):
            return index.free + index.evictable() + unpromised >= len(message.leases)
        # A request that is computed in chunks needs fewer, as long as its cached blocks leave.
        path = message.path
        return index.fits(path, index.blocks_for(path.num_tokens), message.media, message.most)

    def _is_hopeless(self, message: Any, claim: int, margin: float) -> bool:
        """Whether blocks that stay pinned until the deadline of a request keep it out. margin:
        seconds after the deadline until which pins count as ended."""
        assert self._actor is not None
        core = self._actor
        if isinstance(message, Acquire):
            path = message.path
        else:
            lease = core.leases.get(message.lease)
            assert lease is not None
            path = lease.path
        pinned: set[bytes] = set()
        for pin in core.pins._pins.values():
            if pin.nodes is not None and pin.expiry > message.deadline + margin:
                pinned.update(split_hashes(pin.hashes))
        own = 0
        media = message.media if isinstance(message, Acquire) else ()
        # the last token is computed again, and an item of media whole
        most = core.index.before_media(core.index.limit_of(path.num_tokens), media)
        full = min(path.num_full_blocks, most) if pinned else 0
        for key in split_hashes(path.hashes(0, full)):
            if key not in pinned:
                break
            own += 1
        return claim - own > core.index.pool.total - len(pinned)
