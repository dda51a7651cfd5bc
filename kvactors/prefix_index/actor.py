"""PrefixIndex: the part that the door asks. One turn an ask; what needs a copy goes on behind the answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from kvactors.actor import ActorRef, Envelope, Message, PeerRestarted, on
from kvactors.actor.clock import now
from kvactors.cpu_evictor.messages import Admit, Cancel, ClearHost, Discard, Load, Offload, Place, Prefetch
from kvactors.errors import LeaseEnded, NoRoom, NotReady, Paused, RankLost
from kvactors.flush_notifier.messages import Announced, Cleared, Gone
from kvactors.prefix_index.index import Match
from kvactors.prefix_index.layers import Layers
from kvactors.prefix_index.messages import (
    Abandon,
    Acquire,
    Clear,
    Commit,
    Done,
    Expired,
    Extend,
    Finish,
    Granted,
    Landed,
    Pause,
    Preempt,
    Ready,
    Resume,
    SetNamespace,
)  # fmt: skip
from kvactors.prefix_index.records import Fault, IndexStatistics, Lease, Waiting
from kvactors.prefix_index.transfers import landed
from kvactors.units import KEY_BYTES, Reason, Tier

WritePolicy = Literal["none", "write_through", "write_through_selective", "write_back"]


class PrefixIndex(Layers):
    """Owns the block tree, the device block pool, reference counts, the device LRU and the leases.

    save: when finished requests are written to storage. keep: whether the host tier gets a copy at finish (inclusive tiers).
    """

    ROLE: ClassVar[str] = "prefix_index"
    SENDS: ClassVar[Mapping[str, tuple[type[Message], ...]]] = {
        "cpu_evictor": (Offload, Load, Place, Cancel, Admit, Discard, ClearHost, Prefetch),
        "flush_notifier": (Announced, Gone, Cleared),
    }

    def __init__(self, ref: ActorRef, *, save: WritePolicy, min_hits: int, keep: bool, namespace: str, **rest: Any) -> None:
        super().__init__(ref, **rest)
        self.namespace = namespace
        self.paused = False
        self.held: deque[tuple[Acquire, Envelope[Granted]]] = deque()
        self._save = save
        self._min_hits = {"write_through": 1, "write_through_selective": min_hits}.get(save, 0)
        self._keep = keep
        self._requests = self._looked_up = self._no_room = self._preempted = self._abandoned = 0

    def started(self) -> None:
        """A life after a death begins with an empty device tier."""
        if self.life and self.announce:
            self.tell(self.notifier, Cleared(Tier.DEVICE, Reason.RESTART))

    # -- acquire and ready

    @on(Acquire)
    def acquire(self, message: Acquire, envelope: Envelope[Granted]) -> None:
        """Match, pin and take blocks; queue behind evictions if there must be some."""
        if self.paused:
            self.held.append((message, envelope))
            self.after(max(0.0, message.deadline - now()), Expired(message.lease))
            return
        path, index = message.path, self.index
        self.remember_origin(path.root, message.origin)
        needed = index.blocks_for(path.num_tokens)
        if index.pool.free < needed and not (self.saves or index.could_fit(path, needed, self.coming() - self.owed())):
            self._refuse_room(envelope, needed)
            return
        match = index.match(path, fetch=self.fetchable(path))
        lease = Lease(message.lease, message.request_id, path, index.tree, message.deadline)
        lease.device_hits = match.run
        lease.hoped = match.segments[-1].stop if match.segments else match.run
        if not self.waiting and index.pool.free >= match.own:
            self._grant(lease, match, index.pool.take(match.own), envelope)
            return
        self.begin_loads(lease, match.segments, placed=False)
        waiter = Waiting(
            lease.id, envelope, match.own,
            complete=lambda blocks: self._grant_late(lease, match, blocks, envelope),
            give_up=lambda: self._forget(lease),
        )  # fmt: skip
        if not self.request_blocks(waiter, wait=message.wait, deadline=message.deadline):
            self._forget(lease)
            self._refuse_room(envelope, match.own)

    def _refuse_room(self, envelope: Envelope[Any], needed: int) -> None:
        self._no_room += 1
        self.refuse(envelope, NoRoom(needed, self.available()))

    def _grant(self, lease: Lease, match: Match, blocks: list[int], envelope: Envelope[Granted]) -> None:
        self.index.fill_table(lease.path, match, blocks)
        if match.segments:
            self.begin_loads(lease, match.segments, placed=True)
        self._granted(lease, envelope)

    def _grant_late(self, lease: Lease, match: Match, blocks: list[int], envelope: Envelope[Granted]) -> None:
        """The blocks are there at last. What is known of the path may have changed meanwhile: look again, and only if it has not, go
        on with the loads that went ahead."""
        before = lease.tree
        self._release(lease)  # with blocks of its own in place of a shared load's that came short
        lease.fault = None
        lease.tree = self.index.tree
        again = self.index.match(lease.path, fetch=self.fetchable(lease.path))
        if again == match and lease.tree is before and len(lease.ops) == len(match.segments):
            self.index.fill_table(lease.path, match, blocks)
            self.place_loads(lease)
            self._granted(lease, envelope)
            return
        self.cancel_loads(lease, 0)
        self._detach(lease)
        lease.device_hits, lease.host_hits, lease.storage_hits = again.run, 0, 0  # loads that landed meanwhile are in the run
        lease.hoped = again.segments[-1].stop if again.segments else again.run
        lacking = max(0, again.own - len(blocks))  # a clear may have taken what had been hit
        if lacking > self.index.pool.free:
            self.drop(lacking - self.index.pool.free)
        if lacking > self.index.pool.free:
            self.index.pool.give(blocks)
            self._forget(lease)
            self._refuse_room(envelope, lacking)
            return
        blocks = blocks + self.index.pool.take(lacking)
        self.index.pool.give(blocks[again.own :])
        self._grant(lease, again, blocks[: again.own], envelope)

    def _granted(self, lease: Lease, envelope: Envelope[Granted]) -> None:
        self.leases[lease.id] = lease
        lease.granted = True
        pending = bool(lease.ops)
        if not pending:
            lease.hoped = lease.path.num_committed
            self.lease_ready(lease)
        self._requests += 1
        self._looked_up += lease.path.num_full_blocks
        cached = lease.hoped * self.index.block_size
        reply = Granted(tuple(lease.path.blocks()), cached, pending, lease.device_hits)
        if not self.answer(envelope, reply):
            self._give_back(lease)
        elif self.free_low:
            self.keep_some_free()

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

    # -- extend and commit

    @on(Extend)
    def extend(self, message: Extend, envelope: Envelope[Granted]) -> None:
        """More tokens; more blocks when a boundary is crossed."""
        lease = self.find_lease(message.lease, envelope)
        if lease is None:
            return
        if lease.fault is not None and lease.fault.kind is RankLost:
            self.refuse(envelope, lease.fault.error())
            return
        path = lease.path
        position = path.num_blocks
        needed = max(0, self.index.blocks_for(path.num_tokens + message.count) - position)

        def complete(blocks: list[int]) -> None:
            path.extend(message.tokens)
            path.assign(position, blocks)
            self.answer(envelope, Granted(tuple(blocks), 0, False, 0))

        if not needed:
            complete([])
            return
        deadline = envelope.deadline if envelope.deadline is not None else lease.deadline
        waiter = Waiting(lease.id, envelope, needed, complete, give_up=lambda: None)
        if not self.request_blocks(waiter, wait=True, deadline=deadline):
            self._refuse_room(envelope, needed)

    @on(Commit)
    def commit(self, message: Commit, envelope: Envelope[Done]) -> None:
        """Full blocks of what is computed become shareable."""
        lease = self.find_lease(message.lease, envelope)
        if lease is None:
            return
        error = self._uncommittable(lease, message.computed_tokens) or self._commit(lease, message.computed_tokens)
        if error is not None:
            self.refuse(envelope, error)
            return
        self.answer(envelope, Done(lease.path.num_committed))

    def _uncommittable(self, lease: Lease, computed: int) -> Exception | None:
        if lease.fault is not None and lease.fault.kind is RankLost:
            return lease.fault.error()
        if lease.ops:
            return NotReady(f"lease of {lease.request_id!r} waits for loads: await ready() before commit()")
        if not 0 <= computed <= lease.path.num_tokens:
            return ValueError(f"computed_tokens is {computed}, the lease has {lease.path.num_tokens} tokens")
        return None if lease.fault is None else lease.fault.error()

    def _commit(self, lease: Lease, computed: int) -> Exception | None:
        """None, or why the tree does not take these blocks: such a lease is unusable, and it alone."""
        try:
            start, stop, adopted = lease.tree.commit(lease.path, computed // self.index.block_size)
        except ValueError as error:
            self.log.error("commit refused by the block tree", error=str(error))
            lease.fault = Fault(
                LeaseEnded, (f"lease of {lease.request_id!r} cannot be used any more: acquire again ({error})",)
            )
            return lease.fault.error()
        if stop > start and not lease.tree.retired:
            self.announced(lease.path, start, stop, Reason.COMMIT)
            if adopted:
                keys = lease.path.keys(0, stop)
                self.discard(b"".join(keys[p * KEY_BYTES : (p + 1) * KEY_BYTES] for p in adopted))
        return None

    # -- the end of a lease

    @on(Finish)
    def finish(self, message: Finish, envelope: Envelope[Done]) -> None:
        """Unpin; save and announce by policy."""
        lease = self.find_lease(message.lease, envelope)
        if lease is not None:
            self.answer(envelope, Done(self._close(lease)))

    @on(Preempt)
    def preempt(self, message: Preempt, envelope: Envelope[Done]) -> None:
        """Keep what is computed, give the rest back."""
        lease = self.find_lease(message.lease, envelope)
        if lease is None:
            return
        computed, error = message.computed_tokens, None
        if computed:
            error = self._uncommittable(lease, computed) or self._commit(lease, computed)
        if error is not None:
            self.refuse(envelope, error)
            return
        self._preempted += 1
        self.answer(envelope, Done(self._close(lease)))

    @on(Abandon)
    def abandon(self, message: Abandon) -> None:
        """The holder is gone."""
        lease = self.leases.get(message.lease)
        if lease is not None:
            self._abandoned += 1
            self._give_back(lease)
        for waiter in [one for one in self.waiting if one.lease == message.lease]:
            self.stop_waiting(waiter)
            self.refuse(waiter.envelope, LeaseEnded("this request was given up"))
        for acquire, asker in [one for one in self.held if one[0].lease == message.lease]:
            self.held.remove((acquire, asker))
            self.refuse(asker, LeaseEnded("this request was given up"))
        self.room_changed()

    def _close(self, lease: Lease) -> int:
        """Finish: the announcement, the save, the release. Returns the blocks left in the cache."""
        path, tree = lease.path, lease.tree
        committed = path.num_committed
        if tree.retired or not committed:
            self._give_back(lease)
            return 0
        if self.announce and tree.mark_announced(path, committed):
            self.announced(path, 0, committed, Reason.REQUEST_FINISH)
        save = self._positions_to_save(lease, min(committed, self.storable(path)))
        if not (save or self._keep):
            self._give_back(lease)
            return committed
        self._detach(lease)
        op = next(self.ops)
        self.saves[op] = (tree, path)
        blocks = tuple(path.blocks(0, committed))
        tokens = path.tokens(0, save[-1] + 1) if save and self.token_root is not None else b""
        self.tell(
            self.evictor, Admit(op, path.root, path.keys(0, committed), blocks, self._keep, tuple(save), tokens, self.era)
        )
        return committed

    def _positions_to_save(self, lease: Lease, committed: int) -> list[int]:
        """Positions that the policy wants in storage; the host tier asks the store which of them it has."""
        return lease.tree.worth_saving(lease.path, committed, self._min_hits) if self._min_hits else []

    def _give_back(self, lease: Lease) -> None:
        self._detach(lease)
        self._release(lease)
        self.room_changed()

    def _release(self, lease: Lease) -> None:
        blocks = lease.tree.release(lease.path)
        self.index.pool.give(blocks)

    def _forget(self, lease: Lease) -> None:
        """A lease that never got its blocks."""
        self.cancel_loads(lease, 0)
        self._detach(lease)
        self._release(lease)

    def _detach(self, lease: Lease) -> None:
        self.leases.pop(lease.id, None)
        for load in lease.ops:
            if load.owner is lease:
                load.owner = None
            else:
                load.sharers.remove(lease)
        lease.ops.clear()
        ended = LeaseEnded(f"lease of {lease.request_id!r} has ended")
        for waiter in [one for one in self.waiting if one.lease == lease.id and lease.granted]:  # an extend
            self.stop_waiting(waiter)
            self.refuse(waiter.envelope, ended)
        for envelope in (*lease.ready, *(envelope for _, envelope in lease.layers)):
            self.refuse(envelope, ended)
        lease.ready.clear()
        lease.layers.clear()

    # -- the whole cache

    @on(Clear)
    def clear(self, message: Clear, envelope: Envelope[Done]) -> None:
        """A new, empty tree; leases in use keep their blocks in the old one until they end."""
        freed = self.index.retire()
        if self.announce:
            self.tell(self.notifier, Cleared(Tier.DEVICE, Reason.CLEAR))
        self.clears += 1
        self.tell(self.evictor, ClearHost(message.storage))
        self.answer(envelope, Done(freed))
        self.room_changed()

    @on(Pause)
    def pause(self, message: Pause, envelope: Envelope[Done]) -> None:
        """Admit nobody; answer when nothing is in flight."""
        self.paused = True
        self.quiescing.append(envelope)
        self.room_changed()

    def quiet(self, envelope: Envelope[Done]) -> None:
        """Nothing is in flight: answer a Pause."""
        self.answer(envelope, Done())

    @on(Resume)
    def resume(self, message: Resume, envelope: Envelope[Done]) -> None:
        """Admit again, first those that waited."""
        self.paused = False
        held, self.held = self.held, deque()
        self.answer(envelope, Done(len(held)))
        for acquire, asker in held:
            if not asker.abandoned:
                self.acquire(acquire, asker)

    @on(SetNamespace)
    def set_namespace(self, message: SetNamespace, envelope: Envelope[Done]) -> None:
        """The door names new requests by it; what was cached under another name ages out."""
        self.namespace = message.namespace
        self.answer(envelope, Done())

    @on(Expired)
    def expired(self, message: Expired) -> None:
        """A deadline of somebody who waits, for room or for the end of a pause."""
        for acquire, asker in [one for one in self.held if one[0].lease == message.lease]:
            self.held.remove((acquire, asker))
            self.refuse(asker, Paused("the cache is paused"))
        super().expired(message)

    @on(PeerRestarted)
    def peer_restarted(self, message: PeerRestarted) -> None:
        """Write off what was in flight with the dead; tell a new notifier everything."""
        if message.name == "cpu_evictor":
            self.data_plane_restarted()
        elif message.name == "flush_notifier":
            self.index.tree.clear_announced()
            self.announce_all()

    # -- for inspection

    def index_statistics(self) -> IndexStatistics:
        """A moment's picture."""
        tree, pool = self.index.tree.statistics(), self.index.pool
        return IndexStatistics(
            self._requests, self._looked_up, self.device_hits, self.host_hits, self.storage_hits, self._no_room,
            self._preempted, self._abandoned, len(self.leases), len(self.waiting), pool.total, pool.free, tree["nodes"],
            tree["referenced"], tree["evictable"], self.evicted, self.rescued, len(self.loads), len(self.offloads),
            len(self.saves), self.overdue_loads,
        )  # fmt: skip
