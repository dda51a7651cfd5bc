"""PrefixIndex turn by turn, with an evictor that answers in any order: rules and invariants of a
state machine."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvactors.actor import PeerRestarted
from kvactors.actor.sliced import finish
from kvactors.cpu_evictor.messages import (
    Cancel,
    HostBlocksAdded,
    HostBlocksRemoved,
    LayersLoaded,
    Load,
    Loaded,
    LoadStalled,
    Offload,
    Offloaded,
    Save,
    Saved,
    SetTargets,
)
from kvactors.errors import KVActorsError, LeaseEnded, NeverFits, NoRoom, Paused
from kvactors.flush_notifier.messages import (
    BlocksAdded,
    BlocksRemoved,
    NamespaceChanged,
    PathCached,
    TierCleared,
)
from kvactors.gpu_swapper.messages import CopiedWithin, CopyWithin, DataPlaneStatus
from kvactors.identity import PLAIN
from kvactors.native import Path, StepTokens
from kvactors.prefix_index.actor import PrefixIndex
from kvactors.prefix_index.leases import LeaseState
from kvactors.prefix_index.messages import (
    Abandon,
    Acquire,
    AcquireResult,
    Clear,
    Commit,
    Extend,
    Finish,
    Fork,
    ForkResult,
    LayerReady,
    Pause,
    Preempt,
    Proceed,
    Ready,
    Reserve,
    Resume,
    SetNamespace,
    StepLeases,
    Truncate,
    Withdrawn,
)
from kvactors.prefix_index.settings import IndexSettings, Roots
from kvactors.prefix_index.tree import BlockIndex
from kvactors.prefix_index.work import NextSlice
from kvactors.types import split_hashes
from tests.support.effects import receiver
from tests.support.stepper import Stepper

BLOCK = 2
LONGEST = 5


class IndexMachine:
    """Every request and every completion in any order. `leases` holds the numbers of the leases
    that were granted and have not ended."""

    def start(
        self,
        blocks: int,
        exclusive: bool,
        host: bool,
        fetch: bool,
        recompute: bool,
        save: Any,
        low: int,
        part: int = 100,
        announce: bool = True,
    ) -> None:
        self.announce = announce
        self.roots = Roots("model", "a", bytes(32))
        self.index = BlockIndex(BLOCK, blocks, 64, recompute_last_token=recompute)
        self.trees = [self.index.tree]
        self.loads: dict[int, Load] = {}
        self.offloads: dict[int, Offload] = {}
        self.admits: dict[int, Save] = {}
        self.copies: dict[int, CopyWithin] = {}
        self.leases: dict[int, int] = {}  # number -> tokens
        self.open: dict[int, int] = {}  # acquires that are not answered yet -> tokens
        self.number = self.memory_generation = self.incarnation = 0

        def make(ref: Any) -> PrefixIndex:
            return PrefixIndex(
                ref,
                index=self.index,
                evictor=receiver("cpu_evictor"),
                swapper=receiver("gpu_swapper"),
                notifier=receiver("flush_notifier"),
                roots=self.roots,
                settings=IndexSettings(
                    exclusive=exclusive or not host,
                    host_tier=host,
                    fetch=fetch,
                    announce=announce,
                    save=save if fetch else "none",
                    free_low=low,
                    free_high=2 * low,
                ),
            )

        self.fetch = fetch
        self.stepper = Stepper(make)
        self.index.turn_blocks = part
        self.works: list[NextSlice | Proceed] = []
        self.sweeps: list[Any] = []  # of cleared trees
        # The namespace that the notifier was sent since it started, None before.
        self.namespace: str | None = None
        # Blocks that the notifier was sent as resident, each below a root or a block sent before.
        self.sent: set[bytes] = set()
        self.notifier_life = 0

    def lease_state(self, lease: int) -> LeaseState:
        state = self.actor.leases.get(lease)
        assert state is not None
        return state

    @property
    def actor(self) -> PrefixIndex:
        return self.stepper.actor

    # -- effects of every turn

    def take(self, effects: Any) -> Any:
        """Note what the turn sent to the evictor and answered to the requests."""
        for message in effects.to("cpu_evictor"):
            if isinstance(message, Load):
                self.loads[message.op] = message
            elif isinstance(message, SetTargets):
                load = self.loads.get(message.op)
                if load is not None:
                    self.loads[message.op] = Load(
                        load.op,
                        load.root,
                        load.hashes,
                        load.start,
                        message.blocks,
                        load.deadline,
                        load.fetch,
                        memory_generation=load.memory_generation,
                    )
            elif isinstance(message, Cancel):
                self.loads.pop(message.op, None)
            elif isinstance(message, Offload):
                self.offloads[message.op] = message
            elif isinstance(message, Save):
                self.admits[message.op] = message
        for message in effects.to("gpu_swapper"):
            assert isinstance(message, CopyWithin)
            assert len({*message.targets, *message.sources}) == len(message.targets) + 1
            self.copies[message.op] = message
        for told in effects.told:
            if isinstance(told.message, (NextSlice, Proceed)):
                sweep = getattr(getattr(told.message, "work", None), "__name__", "") == "_sweep"
                (self.sweeps if sweep else self.works).append(told.message)
        for message in effects.to("flush_notifier"):
            self.note(message)
        for answered in effects.answered:
            error = answered.error
            assert error is None or isinstance(error, (KVActorsError, ValueError)), repr(error)
            if isinstance(answered.message, Acquire):
                tokens = self.open.pop(answered.message.lease)
                fits = self.index.blocks_for(tokens) <= self.index.pool.total
                if isinstance(error, NeverFits) or not fits:
                    assert not fits, error
                    assert isinstance(error, (NeverFits, Paused, LeaseEnded)), error
                elif isinstance(error, NoRoom):
                    assert not answered.message.wait_for_room, "it was to wait for space"
                if error is None:
                    self.leases[answered.message.lease] = tokens
                    self.judge_table(answered.message, answered.value, tokens)
                    assert answered.message.path.root == self.roots.root(answered.message.scope), (
                        "admitted under an earlier namespace"
                    )
            if isinstance(answered.message, Extend) and error is None:
                self.leases[answered.message.lease] += answered.message.added.num_tokens
            if isinstance(answered.message, Fork):
                self.judge_forks(answered.message, answered.value, error)
            if isinstance(answered.message, Ready) and error is None:
                media = self.lease_state(answered.message.lease).media
                assert not any(o < answered.value.cached_tokens < o + n for o, n in media), (
                    "a media item is cached in part"
                )
        if self.index.tree not in self.trees:
            self.trees.append(self.index.tree)
        return effects

    def judge_forks(
        self, message: Fork, result: ForkResult | None, error: BaseException | None
    ) -> None:
        """Every fork has the tokens of its parent, and the blocks of those that are full. The last
        block is new."""
        if error is not None or result is None:
            assert all(self.actor.leases.get(number) is None for number in message.leases)
            return
        parent = self.actor.leases.get(message.lease)
        for number, fork in zip(message.leases, result.leases, strict=True):
            self.leases[number] = message.position
            assert fork.path.num_tokens == message.position
            assert list(fork.ready.blocks) == fork.path.blocks()
            if parent is None or parent.loads or parent.fault or parent.path.num_tokens < 1:
                continue
            full = min(fork.path.num_full_blocks, fork.path.num_blocks)
            assert fork.path.hashes(0, full) == parent.path.hashes(0, full)

    def judge_table(self, message: Acquire, granted: AcquireResult, tokens: int) -> None:
        """A request has blocks for all of its tokens, or for a chunk after the cached ones. They may
        be more: of known blocks that cannot be hit, and before a media item that would be split."""
        covered = tokens
        if message.chunk_tokens:
            covered = min(tokens, granted.cached_tokens + message.chunk_tokens)
        entries = len(granted.blocks)
        assert self.index.blocks_for(covered) <= entries <= self.index.blocks_for(tokens)
        assert min(granted.blocks) >= 0, "a position of the table has no block"

    def note(
        self, message: PathCached | BlocksAdded | BlocksRemoved | TierCleared | NamespaceChanged
    ) -> None:
        """A notifier keeps what it is sent, and finds the block above every block that is
        announced."""
        if isinstance(message, PathCached):
            keys = split_hashes(message.hashes)
            assert len(keys) <= self.index.turn_blocks
            assert len(message.tokens) == 4 * BLOCK * len(keys)
            if not message.start:
                assert message.parent == message.root
            elif message.parent not in self.sent:
                assert self.actor.announcements._walk is not None, "announced before its parent"
                return
            self.sent.update(keys[: message.count])
        elif isinstance(message, BlocksAdded):
            self.sent.update(split_hashes(message.hashes))
        elif isinstance(message, BlocksRemoved):
            self.sent.difference_update(split_hashes(message.hashes))
        elif isinstance(message, NamespaceChanged):
            self.namespace = message.namespace
        else:
            self.sent.clear()

    def turn(self, message: Any, deadline: float | None = None) -> Any:
        """A message, and what came of its turn."""
        return self.take(self.stepper.turn(message, deadline=deadline))

    def lease(self, which: int) -> int:
        return sorted(self.leases)[which % len(self.leases)]

    # -- requests

    def acquire(
        self,
        family: int,
        tokens: int,
        patience: float,
        wait: bool,
        media: Any = (),
        space: bool = False,
        chunk: int = 0,
    ) -> None:
        if len(self.leases) + len(self.open) > 5:
            return
        self.number += 1
        path = Path(BLOCK, bytes(32))
        path.extend([family * 100 + i for i in range(tokens)])
        self.open[self.number] = tokens
        deadline = self.stepper.now + patience
        media = tuple(item for item in media if sum(item) <= tokens)
        message = Acquire(
            self.number,
            f"r{self.number}",
            path,
            deadline,
            wait,
            media=media,
            wait_for_room=space,
            chunk_tokens=chunk,
        )
        self.turn(message, deadline)

    def commit(self, which: int, less: int) -> None:
        lease = self.lease(which)
        self.turn(Commit(lease, max(0, self.leases[lease] - less)))

    def extend(self, which: int, count: int, stale: int = 0) -> None:
        lease = self.lease(which)
        added = Path(BLOCK, bytes(32))
        added.extend(list(range(count)))
        busy = self.changes(lease)
        message = Extend(lease, self.leases[lease] - stale, added)
        effects = self.turn(message, self.stepper.now + 1.0)
        for answered in effects.answered:
            if answered.message is message and (busy or stale):
                assert answered.error is not None, "an extend in the wrong place was taken"

    def reserve(self, which: int, count: int, stale: int = 0) -> None:
        lease = self.lease(which)
        busy = self.changes(lease)
        message = Reserve(lease, self.leases[lease] - stale, self.leases[lease] + count)
        effects = self.turn(message, self.stepper.now + 1.0)
        for answered in effects.answered:
            if answered.message is message and (busy or stale):
                assert answered.error is not None, "a reserve in the wrong place was taken"

    def next_chunk(self, which: int, count: int) -> None:
        lease = self.lease(which)
        covered = self.lease_state(lease).path.num_blocks * BLOCK
        upto = min(self.leases[lease], covered + count)
        self.turn(Reserve(lease, self.leases[lease], upto), self.stepper.now + 1.0)

    def fork(
        self, which: int, count: int, stale: int = 0, wait: bool = True, for_room: bool = False
    ) -> None:
        if len(self.leases) + len(self.open) > 6:
            return
        lease = self.lease(which)
        busy = self.changes(lease) or stale > 0 or self.lease_state(lease).fault is not None
        numbers = tuple(self.number + 1 + i for i in range(count))
        self.number += count
        names = tuple(f"r{number}" for number in numbers)
        deadline = self.stepper.now + 1.0
        message = Fork(lease, self.leases[lease] - stale, numbers, names, deadline, wait, for_room)
        effects = self.turn(message, deadline)
        for answered in effects.answered:
            if answered.message is message and busy:
                assert answered.error is not None, "a fork in the wrong place was made"

    def cancel_fork(self, which: int) -> None:
        """The caller of a fork goes."""
        for envelope in [one for one in self.stepper._open if isinstance(one.message, Fork)]:
            message = envelope.message
            self.stepper.withdraw(message)
            for number in message.leases:
                self.turn(Abandon(number))
            self.turn(Withdrawn(message.lease))

    def copied(self, which: int, failed: tuple[int, ...]) -> None:
        copy = self.copies.pop(sorted(self.copies)[which % len(self.copies)])
        self.turn(CopiedWithin(copy.op, failed))

    def truncate(self, which: int, less: int, stale: int = 0) -> None:
        lease = self.lease(which)
        state, kept = self.lease_state(lease), max(0, self.leases[lease] - less)
        busy = self.changes(lease) or bool(state.loads) or stale > 0
        refused = busy or kept < state.path.num_committed * BLOCK or state.fault is not None
        before, (full, rest) = state.path.num_blocks, divmod(kept, BLOCK)
        if rest and full < min(before, state.path.num_full_blocks):
            refused = refused or self.index.pool.owners(state.path.blocks(full, full + 1)[0]) > 1
        message = Truncate(lease, self.leases[lease] - stale, kept)
        [answered] = [one for one in self.turn(message).answered if one.message is message]
        assert (answered.error is not None) == refused
        if answered.error is None:
            self.leases[lease] = kept
            assert state.path.num_blocks == answered.value.count == min(before, -(-kept // BLOCK))

    def step(self, which: int, count: int, less: int | None) -> None:
        """One message extends and commits up to two leases. None of them waits."""
        chosen = sorted({self.lease(which), self.lease(which + 1)})
        positions = [self.leases[lease] for lease in chosen]
        computed = [None if less is None else max(0, at + count - less) for at in positions]
        before = [self.lease_state(lease).path.num_blocks for lease in chosen]
        tokens = StepTokens([list(range(count))] * len(chosen))
        can_wait = bool(self.actor.queue.waiting)
        message = StepLeases(0, chosen, tokens, positions, computed)
        [answered] = [one for one in self.turn(message).answered if one.message is message]
        assert answered.error is None
        grown = dict(answered.value.grown)
        for row, lease in enumerate(chosen):
            state, done = self.lease_state(lease), answered.value.committed[row]
            assert state.path.blocks()[before[row] :] == list(grown.get(row, ()))
            if done < 0:
                assert state.path.num_tokens == positions[row]
                assert row not in grown
                continue
            self.leases[lease] += count
            assert done == state.path.num_committed
            assert not (grown.get(row) and can_wait), "blocks of a request that waits"
            assert not state.loads
            assert state.fault is None
            assert not self.changes(lease)

    def changes(self, lease: int) -> bool:
        """Whether an extend, a reserve or a fork of a lease waits for blocks."""
        call = self.actor.queue.call_of(lease)
        return any(
            (isinstance(one.message, (Extend, Reserve)) and one.message.lease == lease)
            or (call is not None and one.message is call.message)
            for one in self.stepper._open
        )

    def cancel_extend(self, which: int) -> None:
        lease = self.lease(which)
        for envelope in [
            one
            for one in self.stepper._open
            if isinstance(one.message, (Extend, Reserve)) and one.message.lease == lease
        ]:
            self.stepper.withdraw(envelope.message)
            self.turn(Withdrawn(lease))

    def set_namespace(self, name: str) -> None:
        self.turn(SetNamespace(name))

    def ready(self, which: int) -> None:
        self.turn(Ready(self.lease(which)))

    def layer_ready(self, which: int, layer: int) -> None:
        self.turn(LayerReady(self.lease(which), layer))

    def finish(self, which: int) -> None:
        lease = self.lease(which)
        del self.leases[lease]
        self.turn(Finish(lease))

    def preempt(self, which: int, share: int) -> None:
        lease = self.lease(which)
        effects = self.turn(Preempt(lease, share * self.leases[lease]))
        if all(
            answered.error is None
            for answered in effects.answered
            if isinstance(answered.message, Preempt)
        ):
            del self.leases[lease]

    def abandon(self, which: int) -> None:
        everything = sorted([*self.leases, *self.open])
        if everything:
            lease = everything[which % len(everything)]
            self.leases.pop(lease, None)
            if lease in self.open:
                for envelope in [
                    e for e in self.stepper._open if getattr(e.message, "lease", 0) == lease
                ]:
                    self.stepper.withdraw(envelope.message)
            self.open.pop(lease, None)
            self.turn(Abandon(lease))

    # -- completions

    def loaded(self, which: int, good: int, host: bool) -> None:
        load = self.loads[sorted(self.loads)[which % len(self.loads)]]
        if not load.blocks and load.memory_generation == self.memory_generation:
            # the evictor answers a load without blocks only if it is about another memory
            # generation
            return
        del self.loads[load.op]
        good = min(good, len(load.blocks))
        self.turn(Loaded(load.op, good, good if host else 0))

    def stalled(self, which: int) -> None:
        load = self.loads[sorted(self.loads)[which % len(self.loads)]]
        if load.blocks:
            self.turn(LoadStalled(load.op))

    def layers(self, which: int, layers: int) -> None:
        load = self.loads[sorted(self.loads)[which % len(self.loads)]]
        if load.blocks:
            self.turn(LayersLoaded(load.op, layers, len(load.blocks)))

    def offloaded(self, which: int, kept: int) -> None:
        offload = self.offloads.pop(sorted(self.offloads)[which % len(self.offloads)])
        flags = bytes(kept >> j % 8 & 1 for j in range(len(offload.blocks)))
        self.turn(Offloaded(offload.op, flags))

    def admitted(self, which: int, kept: int) -> None:
        admit = self.admits.pop(sorted(self.admits)[which % len(self.admits)])
        self.turn(Saved(admit.op, bytes(kept >> j % 8 & 1 for j in range(len(admit.blocks)))))

    def elapse(self, seconds: float) -> None:
        self.take(self.stepper.elapse(seconds))

    def hint(self, family: int, start: int, gained: bool) -> None:
        path = Path(BLOCK, self.roots.root(PLAIN))
        path.extend([family * 100 + i for i in range(LONGEST * BLOCK)])
        keys = path.hashes(start, LONGEST)
        self.turn(
            HostBlocksAdded(keys, self.actor.clears.sent, self.index.memory_generation)
            if gained
            else HostBlocksRemoved(keys)
        )

    def device_lost(self, sure: int) -> None:
        if not sure:
            self.memory_generation += 1
            self.turn(DataPlaneStatus(True, True, self.memory_generation))

    def host_ahead_of_the_index(self, sure: int) -> None:
        """The host tier learns of a lost memory before the index does: it answers what is of the
        generation before with nothing."""
        if not sure:
            self.memory_generation += 1
            for load in [one for one in self.loads.values() if not one.blocks]:
                del self.loads[load.op]
                self.turn(Loaded(load.op, 0, 0))
            self.turn(DataPlaneStatus(True, True, self.memory_generation))

    def evictor_restarted(self, sure: int) -> None:
        if not sure:
            self.incarnation += 1
            self.loads.clear()
            self.offloads.clear()
            self.admits.clear()
            self.turn(PeerRestarted("cpu_evictor", self.incarnation))
            self.copies.clear()  # what is sent between the two is dropped
            self.turn(PeerRestarted("gpu_swapper", self.incarnation))

    def notifier_restarted(self, sure: int) -> None:
        if not sure:
            self.notifier_life += 1
            self.sent.clear()
            self.namespace = None
            self.turn(PeerRestarted("flush_notifier", self.notifier_life))

    def clear(self, sure: int) -> None:
        if not sure:
            self.turn(Clear())

    def sweep(self, count: int) -> None:
        """A step of what a clear leaves, which may come at any time. The pool gets at most `count`
        blocks by it."""
        before, returning = self.index.pool.free, self.index.reclaimable
        shared = self.index.pool.num_shared
        sweep = self.index.sweep
        self.index.sweep = lambda: sweep(count)  # type: ignore[method-assign, misc]
        try:
            self.turn(self.sweeps.pop())
        finally:
            del self.index.sweep
        gained = self.index.pool.free - before
        assert min(count, returning) - shared <= gained <= min(count, returning)
        assert bool(self.sweeps) == self.index.sweeping, (
            "a sweep must go on by itself, and only while there is something to do"
        )

    def pause(self, sure: int) -> None:
        if not sure:
            self.turn(Pause())

    def resume(self) -> None:
        if self.actor.queue.paused:
            self.turn(Resume())

    def go_on(self, which: int) -> None:
        """The next part of some work. Works go on in any order, and everything else may come in
        between."""
        self.turn(self.works.pop(which % len(self.works)))

    def finish_works(self) -> None:
        while self.works:
            self.go_on(0)

    # -- invariants after every turn

    def consistent(self) -> None:
        finish(self.index.check_steps())
        self.actor.check()
        core = self.actor
        waiting = list(core.queue.waiting.values())
        assert self.index.promised == sum(waiter.lacking for waiter in waiting)
        assert core.queue._sweeping or not self.index.sweeping, (
            "nothing brings back what a clear left"
        )
        leaving = sum(op.total for op in core.evictions._in_flight.values())
        assert 0 <= self.index.coming <= leaving
        space = core.queue.acquires
        for held in space.waits.values():
            path = held.message.path
            assert path.num_held == path.num_blocks == 0, "it waits, and holds blocks"
        first = space.first
        if first is not None and not (self.works or core.queue.paused):
            first.message.path.set_root(self.roots.root(PLAIN))
            message, fetch = first.message, self.fetch * LONGEST
            needed = self.index.needed_blocks(
                message.path,
                message.chunk_tokens,
                fetch=fetch,
                media=message.media,
                most=message.most,
            )
            fits = self.index.fits(message.path, needed, message.media, message.most)
            assert not fits, "nothing wakes a request that fits"
        paths = {id(lease.path): lease for lease in core.leases}
        private: list[int] = []
        places: dict[int, tuple[int, bytes]] = {}  # of private blocks in the tables of leases
        for lease in paths.values():
            path = lease.path
            own = [b for p, b in enumerate(path.blocks()) if b >= 0 and not path.is_shared(p)]
            private += own
            for position, block in enumerate(path.blocks()):
                if block < 0 or path.is_shared(position):
                    continue
                full = position < path.num_full_blocks
                place = (position, path.hashes(position, position + 1) if full else b"")
                assert place[1] or block not in places, "a block that is not full is shared"
                assert places.setdefault(block, place) == place, "a block is in two places"
            if lease.fault is None:
                for position in range(path.num_committed, path.num_blocks):
                    block = path.blocks(position, position + 1)[0]
                    load = self.index.loading.get(block)
                    assert load is None or load in lease.loads, (
                        "a request computes into a block that a copy still writes"
                    )
                    assert block >= 0, "a granted lease has a position without a block"
        for path in [saved.path for saved in core.saves.paths()]:
            private += [b for p, b in enumerate(path.blocks()) if b >= 0 and not path.is_shared(p)]
        owned = Counter(private)
        for copy in self.copies.values():
            owned.update({copy.sources[0], *copy.targets})
        pool = self.index.pool
        for block, owners in owned.items():
            assert owners <= pool.owners(block), "a block in use is free, or given to two requests"
        private = list(owned.elements())
        works = (*self.works, *self.sweeps)
        assert self.actor.out.works == sum(isinstance(work, NextSlice) for work in works)
        if self.announce and core.announcements._walk is None:
            assert self.sent == set(split_hashes(self.index.tree.device_hashes())), (
                "the notifier was not sent what is true"
            )
            assert self.namespace in (None, self.roots.namespace), (
                "the notifier has another namespace than requests"
            )
        if not (
            waiting or self.works
        ):  # a waiter's path may hold replaced blocks that no table here lists
            in_trees = sum(
                tree.statistics()["device"] + tree.statistics()["loading"] for tree in self.trees
            )
            used = sum(map(pool.owners, range(pool.total)))
            assert used == in_trees + len(private), (
                f"{used} blocks in use, {in_trees} in trees, {len(private)} private"
            )

    def teardown(self) -> None:
        """Everything is answered, every lease ends: nothing is left."""
        if self.actor.queue.paused:
            self.turn(Resume())
        for _ in range(200):
            for load in list(self.loads.values()):
                if load.blocks:
                    del self.loads[load.op]
                    self.turn(Loaded(load.op, 0, 0))
            for op in list(self.copies):
                del self.copies[op]
                self.turn(CopiedWithin(op, ()))
            for offload in list(self.offloads):
                self.turn(Offloaded(offload, bytes(len(self.offloads.pop(offload).blocks))))
            for admit in list(self.admits):
                self.turn(Saved(admit, bytes(len(self.admits.pop(admit).blocks))))
            self.finish_works()
            self.take(self.stepper.elapse(1.0))
            for lease in list(self.leases):
                del self.leases[lease]
                self.turn(Finish(lease))
            self.finish_works()
            flights = (self.loads, self.offloads, self.admits, self.copies)
            if not (any(flights) or self.leases or self.open):
                break
        self.consistent()
        core = self.actor
        left = (core.queue.held, core.queue.acquires, core.index.loading)
        assert not core.in_use()
        assert not any(left), f"left over: {left}"
        assert not self.stepper._open, (
            f"asks without an answer: {[e.message for e in self.stepper._open]}"
        )
        assert not self.actor.context.unanswered, "an ask is kept although it has ended"
        state = self.index.tree.statistics()
        assert state["referenced"] == state["loading"] == state["offloading"] == 0
        assert not self.index.reserved
        assert self.index.free + state["device"] == self.index.pool.total
        assert self.index.tree.sweep_host(1), (
            "hints of before a restart of the host tier are never removed"
        )
        while self.sweeps:
            self.turn(self.sweeps.pop())
        assert not self.index.reclaimable
        assert not self.index.retired, "a tree that nothing uses is kept"
        assert self.index.pool.free + state["device"] == self.index.pool.total
        self.stepper.close()
