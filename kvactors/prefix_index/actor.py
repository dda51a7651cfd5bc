"""PrefixIndex: the part that the door asks. One turn an ask; what needs a copy goes on behind the
answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from kvactors.actor import ActorRef, Envelope, Message, PeerRestarted, on
from kvactors.cpu_evictor.messages import (
    Admit,
    Cancel,
    ClearHost,
    Discard,
    Load,
    Offload,
    Place,
    Prefetch,
)
from kvactors.errors import LeaseBusy, LeaseEnded, NotReady, RankLost
from kvactors.flush_notifier.messages import Announced, Cleared, Gained, Gone, Scoped
from kvactors.native import BlockTree, Path
from kvactors.prefix_index.clearing import Clearing
from kvactors.prefix_index.messages import (
    Abandon,
    Commit,
    Done,
    Extend,
    Finish,
    Granted,
    Pause,
    Preempt,
)
from kvactors.prefix_index.records import Fault, IndexStatistics, Lease, Saved, Saving, Waiting
from kvactors.types import KEY_BYTES, Reason

WritePolicy = Literal["none", "write_through", "write_through_selective", "write_back"]


class PrefixIndex(Clearing):
    """Owns the block tree, the device block pool, reference counts, the device LRU and the leases.

    save: when finished requests are written to storage. keep: whether the host tier gets a copy at
    finish (inclusive tiers).
    """

    ROLE: ClassVar[str] = "prefix_index"
    SENDS: ClassVar[Mapping[str, tuple[type[Message], ...]]] = {
        "cpu_evictor": (Offload, Load, Place, Cancel, Admit, Discard, ClearHost, Prefetch),
        "flush_notifier": (Announced, Gained, Gone, Cleared, Scoped),
    }

    def __init__(
        self, ref: ActorRef, *, save: WritePolicy, min_hits: int, keep: bool, **rest: Any
    ) -> None:
        super().__init__(ref, **rest)
        self._save = save
        self._min_hits = {"write_through": 1, "write_through_selective": min_hits}.get(save, 0)
        self._keep = keep
        self._preempted = self._abandoned = 0

    def started(self) -> None:
        """A life after a death begins with an empty device tier."""
        if self.life:
            self.device_cleared(Reason.RESTART)

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
        waiting = self.waiting.get(lease.id)
        if waiting is not None and waiting.envelope.abandoned:
            self.stop_waiting(waiting)
            self.refuse(waiting.envelope, LeaseEnded("this call was cancelled"))
            waiting = None
        path = lease.path
        if waiting is not None or message.position != path.num_tokens:
            self.refuse(
                envelope,
                LeaseBusy(
                    f"the lease of {lease.request_id!r} has {path.num_tokens} tokens, or is being "
                    "extended"
                ),
            )
            return
        needed = max(
            0, self.index.blocks_for(path.num_tokens + message.added.num_tokens) - path.num_blocks
        )

        def complete(blocks: list[int]) -> None:
            position = path.num_blocks
            path.append(message.added)
            path.assign(position, blocks)
            self.answer(envelope, Granted(tuple(blocks), 0, False, 0))

        if not needed:
            complete([])
            return
        deadline = envelope.deadline if envelope.deadline is not None else lease.deadline
        waiter = Waiting(lease.id, envelope, needed, complete, give_up=lambda: None)
        if not self.request_blocks(waiter, wait=True, deadline=deadline):
            self.refuse_room(envelope, needed)

    @on(Commit)
    def commit(self, message: Commit, envelope: Envelope[Done]) -> None:
        """Full blocks of what is computed become shareable."""
        lease = self.find_lease(message.lease, envelope)
        if lease is None:
            return
        error = self._uncommittable(lease, message.computed_tokens) or self._commit(
            lease, message.computed_tokens
        )
        if error is not None:
            self.refuse(envelope, error)
            return
        self.answer(envelope, Done(lease.path.num_committed))

    def _uncommittable(self, lease: Lease, computed: int) -> Exception | None:
        if lease.fault is not None and lease.fault.kind is RankLost:
            return lease.fault.error()
        if lease.ops:
            return NotReady(
                f"lease of {lease.request_id!r} waits for loads: await ready() before commit()"
            )
        if type(computed) is not int:
            return TypeError(f"computed_tokens must be an int, not {type(computed).__name__}")
        if not 0 <= computed <= lease.path.num_tokens:
            return ValueError(
                f"computed_tokens is {computed}, the lease has {lease.path.num_tokens} tokens"
            )
        return None if lease.fault is None else lease.fault.error()

    def _commit(self, lease: Lease, computed: int) -> Exception | None:
        """None, or why the tree does not take these blocks: such a lease is unusable, and it
        alone."""
        try:
            start, stop, adopted = lease.tree.commit(lease.path, computed // self.index.block_size)
        except ValueError as error:
            self.log.error("commit refused by the block tree", error=str(error))
            lease.fault = Fault(
                LeaseEnded,
                (f"lease of {lease.request_id!r} has ended: acquire again ({error})",),
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
        """Commit what is computed, unpin; save and announce by policy."""
        lease = self.find_lease(message.lease, envelope)
        if lease is None:
            return
        computed, error = message.computed_tokens, None
        if computed is not None:
            error = self._uncommittable(lease, computed) or self._commit(lease, computed)
        if error is not None:
            self.refuse(envelope, error)
            return
        self.in_parts(self._close(lease, envelope))

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
        self.remember_preempted(lease.request_id)
        self.in_parts(self._close(lease, envelope))

    @on(Abandon)
    def abandon(self, message: Abandon) -> None:
        """The holder is gone."""
        lease = self.leases.get(message.lease)
        if lease is not None:
            self._abandoned += 1
            self.in_parts(self._close(lease, None))
        waiter = self.waiting.get(message.lease)
        if waiter is not None:
            self.stop_waiting(waiter)
            self.refuse(waiter.envelope, LeaseEnded("this request was given up"))
        held = self.held.pop(message.lease, None)
        if held is not None:
            held.timer.cancel()
            self.refuse(held.envelope, LeaseEnded("this request was given up"))
        self.room_changed()

    def _close(self, lease: Lease, envelope: Envelope[Done] | None) -> Iterator[None]:
        """The end of a lease, a part of its blocks a turn: the announcement, the save, the release.
        envelope: is answered with the blocks left in the cache; None if the holder has gone: then
        nothing is saved."""
        path, tree = lease.path, lease.tree
        self.detach(lease)
        committed = 0 if tree.retired else path.num_committed
        whole = Saved(tree, path, 1)
        self.closing += 1
        if self.announce:
            yield from self._announce_finished(tree, path, committed)
        if envelope is not None and (self._keep or self._min_hits):
            # A store that is addressed by tokens is given the whole path with every part: it gets
            # one part.
            part = self.part if self.token_root is None else max(1, committed)
            for start in range(0, committed, part):
                if committed > part:
                    yield
                if whole.parts and not tree.retired:
                    self._save_part(whole, start, min(start + part, committed))
        if whole.parts:
            whole.parts -= 1
            if not whole.parts:
                yield from self.give_back_parts(tree, path)
        self.closing -= 1
        if envelope is not None:
            self.answer(envelope, Done(committed))
        self.room_changed()

    def _announce_finished(self, tree: BlockTree, path: Path, committed: int) -> Iterator[None]:
        """What a lease has committed stays cached: sinks that follow finished requests get it now,
        as far as no finish has announced it."""
        for start in range(0, committed, self.part):
            if start:
                yield
            if not tree.retired:
                stop = min(start + self.part, committed)
                first = tree.mark_announced(path, start, stop)
                first = start if self.announce_whole else first
                if first < stop:
                    self.announced(path, first, stop, Reason.REQUEST_FINISH)

    def _save_part(self, whole: Saved, start: int, stop: int) -> None:
        """Offer blocks [start, stop) to the host tier and to the store; the path is held until both
        have answered."""
        path, last = whole.path, min(stop, self.storable(whole.path))
        save = (
            whole.tree.worth_saving(path, start, last, self._min_hits)
            if self._min_hits and start < last
            else []
        )
        if not (save or self._keep):
            return
        op = next(self.ops)
        whole.parts += 1
        self.saves[op] = Saving(whole, start)
        parent = path.keys(start - 1, start) if start else path.root
        keys, blocks = path.keys(start, stop), tuple(path.blocks(start, stop))
        tokens = path.tokens(0, save[-1] + 1) if save and self.token_root is not None else b""
        positions = tuple(position - start for position in save)
        lineages = self.lineages.of_path(path, start, stop)
        self.tell(
            self.evictor,
            Admit(op, parent, keys, blocks, self._keep, positions, tokens, self.era, lineages),
        )

    # -- the whole cache

    @on(Pause)
    def pause(self, message: Pause, envelope: Envelope[Done]) -> None:
        """Admit nobody; answer when nothing is in flight."""
        self.paused = True
        self.quiescing.append(envelope)
        self.room_changed()

    def quiet(self, envelope: Envelope[Done]) -> None:
        """Nothing is in flight: answer a Pause."""
        self.answer(envelope, Done())

    @on(PeerRestarted)
    def peer_restarted(self, message: PeerRestarted) -> None:
        """Write off what was in flight with the dead; tell a new notifier everything."""
        if message.name == "cpu_evictor":
            self.data_plane_restarted()
            self.clear_again()
        elif message.name == "flush_notifier":
            self.announce_all()

    # -- for inspection

    def index_statistics(self) -> IndexStatistics:
        """A moment's picture."""
        tree, pool = self.index.tree.statistics(), self.index.pool
        return IndexStatistics(
            self._requests,
            self._looked_up,
            self.device_hits,
            self.host_hits,
            self.storage_hits,
            self._no_room,
            self._preempted,
            self._abandoned,
            len(self.leases),
            len(self.waiting),
            pool.total,
            self.index.free,
            tree["nodes"],
            tree["referenced"],
            tree["evictable"],
            self.evicted,
            self.rescued,
            len(self.loads),
            len(self.offloads),
            len(self.saves),
            self.overdue_loads,
            self._resumed,
        )
