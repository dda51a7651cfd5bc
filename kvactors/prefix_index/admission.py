"""PrefixIndex, the part that admits requests: match, pin, take device blocks, at once or when there
is room."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

from kvactors.actor import ActorRef, Envelope, on
from kvactors.actor.actor import Timer
from kvactors.actor.clock import now
from kvactors.errors import NoRoom, Paused
from kvactors.flush_notifier.messages import Origin
from kvactors.native import Path
from kvactors.prefix_index.index import Match
from kvactors.prefix_index.layers import Layers
from kvactors.prefix_index.messages import (
    Acquire,
    Done,
    Expired,
    Granted,
    Landed,
    Prefetch,
    Proceed,
    Ready,
    Resume,
    SetNamespace,
)
from kvactors.prefix_index.records import Lease, Waiting
from kvactors.prefix_index.room import STEPS
from kvactors.prefix_index.roots import Roots
from kvactors.prefix_index.transfers import landed

PREEMPTED = 65_536
"""Requests remembered after `preempt`, the oldest forgotten first: when they come again they are
not counted again."""


class Held(NamedTuple):
    """A request that waits for the end of a pause. ticket, timer: of its deadline."""

    message: Acquire
    envelope: Envelope[Granted]
    ticket: int
    timer: Timer


class Admission(Layers):
    """Requests until they have their blocks, and the namespace they are admitted under."""

    def __init__(self, ref: ActorRef, *, roots: Roots, **rest: Any) -> None:
        super().__init__(ref, root_of=roots.root, **rest)
        self.roots = roots
        self.paused = False
        self.held: dict[int, Held] = {}  # by lease, in order of arrival
        self.preempted: dict[str, None] = {}  # request ids, until they are acquired again
        self._requests = self._looked_up = self._no_room = self._resumed = 0

    # -- acquire and ready

    @on(Acquire)
    def acquire(self, message: Acquire, envelope: Envelope[Granted]) -> None:
        """Match, pin and take blocks; queue behind evictions if there must be some."""
        if self.paused or self.held:
            ticket = next(self.tickets)
            timer = self.after(max(0.0, message.deadline - now()), Expired(message.lease, ticket))
            self.held[message.lease] = Held(message, envelope, ticket, timer)
        else:
            self.admit(message, envelope)

    def admit(
        self, message: Acquire, envelope: Envelope[Granted], *, at_once: bool = False
    ) -> None:
        """Admit a request now, or begin to. at_once: whatever its length."""
        path, index = message.path, self.index
        self._name(path, message.origin)
        needed = index.blocks_for(path.num_tokens)
        if needed > self.part and not at_once and self.admit_in_parts(message, needed, envelope):
            return
        self._admit_at_once(message, needed, envelope)

    @abstractmethod
    def admit_in_parts(self, message: Acquire, needed: int, envelope: Envelope[Granted]) -> bool:
        """Begin to admit a long request; False if that must be done in one turn."""

    def _admit_at_once(self, message: Acquire, needed: int, envelope: Envelope[Granted]) -> None:
        """Admit a request in this turn, or let it wait for room."""
        path, index = message.path, self.index
        free = index.free
        if free < needed and not (
            self.saves or self.closing or index.could_fit(path, needed, self.coming() - self.owed())
        ):
            self.refuse_room(envelope, needed)
            return
        match = index.match(path, fetch=self.fetchable(path), media=message.media)
        lease = Lease(message.lease, message.request_id, path, index.tree, message.deadline)
        lease.media = message.media
        lease.device_hits = match.run
        lease.hoped = match.segments[-1].stop if match.segments else match.run
        if not self.waiting and free >= match.own:
            self._grant(lease, match, index.take(match.own), envelope)
            return
        self.begin_loads(lease, match.segments, placed=False)
        waiter = Waiting(
            lease.id,
            envelope,
            match.own,
            complete=lambda blocks: self._grant_late(
                lease, match, blocks, message.origin, envelope
            ),
            give_up=lambda: self.forget(lease),
        )
        if not self.request_blocks(waiter, wait=message.wait, deadline=message.deadline):
            self.forget(lease)
            self.refuse_room(envelope, match.own)

    def _name(self, path: Path, origin: Origin) -> bool:
        """Let the path start from the root of the present namespace; whether it did not."""
        root = self.roots.root(origin)
        renamed = path.root != root
        if renamed:
            path.set_root(root)
        self.remember_origin(root, origin)
        return renamed

    def refuse_room(self, envelope: Envelope[Any], needed: int) -> None:
        """There is no room for so many blocks."""
        self._no_room += 1
        self.refuse(envelope, NoRoom(needed, self.available()))

    def grant_long(self, lease: Lease, table: list[int], envelope: Envelope[Granted]) -> None:
        """A long request has its blocks."""
        self._granted(lease, envelope, table)

    def _grant(
        self, lease: Lease, match: Match, blocks: list[int], envelope: Envelope[Granted]
    ) -> None:
        self.index.fill_table(lease.path, match, blocks)
        if match.segments:
            self.begin_loads(lease, match.segments, placed=True)
        self._granted(lease, envelope)

    def _grant_late(
        self,
        lease: Lease,
        match: Match,
        blocks: list[int],
        origin: Origin,
        envelope: Envelope[Granted],
    ) -> None:
        """The blocks are there. What the tree has of the path, or its namespace, may have changed
        since: match again, and go on with the loads that were sent ahead only if nothing has."""
        before = lease.tree
        self.index.pool.give(
            lease.tree.release(lease.path)
        )  # with blocks of its own in place of a shared load's that came short
        lease.fault = None
        lease.tree = self.index.tree
        renamed = self._name(lease.path, origin)
        again = self.index.match(lease.path, fetch=self.fetchable(lease.path), media=lease.media)
        if (
            not renamed
            and again == match
            and lease.tree is before
            and len(lease.ops) == len(match.segments)
        ):
            self.index.fill_table(lease.path, match, blocks)
            self.place_loads(lease)
            self._granted(lease, envelope)
            return
        self.cancel_loads(lease, 0)
        self.detach(lease)
        lease.device_hits, lease.host_hits, lease.storage_hits = (
            again.run,
            0,
            0,
        )  # loads that landed meanwhile are in the run
        lease.hoped = again.segments[-1].stop if again.segments else again.run
        lacking = max(0, again.own - len(blocks))  # a clear may have taken what had been hit
        if lacking > self.index.free:
            self.drop(lacking - self.index.free)
        if lacking > self.index.free:
            self.index.pool.give(blocks)
            self.forget(lease)
            self.refuse_room(envelope, lacking)
            return
        blocks = blocks + self.index.take(lacking)
        self.index.pool.give(blocks[again.own :])
        self._grant(lease, again, blocks[: again.own], envelope)

    def _granted(
        self, lease: Lease, envelope: Envelope[Granted], table: list[int] | None = None
    ) -> None:
        self.leases[lease.id] = lease
        lease.granted = True
        lease.counted = lease.request_id not in self.preempted
        if lease.counted:
            self._requests += 1
            self._looked_up += lease.path.num_full_blocks
        else:
            del self.preempted[lease.request_id]
            self._resumed += 1
        pending = bool(lease.ops)
        if not pending:
            self.lease_ready(lease)
            lease.hoped = lease.path.num_committed
        hoped = self.index.before_media(lease.hoped, lease.media) if lease.media else lease.hoped
        cached = hoped * self.index.block_size
        reply = Granted(
            tuple(lease.path.blocks()) if table is None else table,
            cached,
            pending,
            lease.device_hits,
        )
        if not self.answer(envelope, reply):
            self.give_back(lease)
        elif self.free_low:
            self.keep_some_free()

    def remember_preempted(self, request_id: str) -> None:
        """The request is to be acquired again."""
        self.preempted[request_id] = None
        if len(self.preempted) > PREEMPTED:
            del self.preempted[next(iter(self.preempted))]

    @on(Prefetch)
    def prefetch(self, message: Prefetch, envelope: Envelope[Done]) -> None:
        """See `Transfers.prefetch`."""
        self._name(message.path, message.origin)
        super().prefetch(message, envelope)

    @on(Ready)
    def ready(self, message: Ready, envelope: Envelope[Landed]) -> None:
        """Answer once the lease's loads are over."""
        lease = self.find_lease(message.lease, envelope)
        if lease is None:
            return
        if lease.fault is not None:
            self.refuse(envelope, lease.fault.error())
        elif lease.ops:
            lease.ready.append(envelope)
        else:
            self.answer(envelope, landed(lease, self.index.block_size))

    # -- pause, resume, namespace

    @on(Resume)
    def resume(self, message: Resume, envelope: Envelope[Done]) -> None:
        """Admit again, first those that waited."""
        self.paused = False
        self.answer(envelope, Done(len(self.held)))
        self._admit_held()

    def _admit_held(self) -> None:
        """A turn's share of the requests that waited for the end of a pause."""
        for _ in range(STEPS):
            if self.paused or not self.held:
                return
            held = self.held.pop(next(iter(self.held)))
            held.timer.cancel()
            if not held.envelope.abandoned:
                self.admit(held.message, held.envelope)
        if self.held:
            self.proceed_later()

    @on(Proceed)
    def proceed(self, message: Proceed) -> None:
        """See `Room.proceed`."""
        super().proceed(message)
        self._admit_held()

    @on(SetNamespace)
    def set_namespace(self, message: SetNamespace, envelope: Envelope[Done]) -> None:
        """Requests are admitted under it from now on, those that wait included; what was cached
        under another one ages out."""
        if message.namespace != self.roots.namespace:
            self.roots.namespace = message.namespace
            self.scoped(message.namespace)
        self.answer(envelope, Done())

    @on(Expired)
    def expired(self, message: Expired) -> None:
        """The deadline of a request that waits, for room or for the end of a pause."""
        held = self.held.get(message.lease)
        if held is not None and held.ticket == message.ticket:
            del self.held[message.lease]
            self.refuse(held.envelope, Paused("the cache is paused"))
        else:
            super().expired(message)
