"""PrefixIndex: finds cached prefixes of requests and gives requests device blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain, count
from typing import ClassVar

from kvactors.actor import Actor, ActorRef, Envelope, Message, PeerRestarted, on
from kvactors.cpu_evictor.messages import (
    Cancel,
    ClearHost,
    DropHostCopies,
    EvictFirst,
    HostBlocksAdded,
    HostBlocksRemoved,
    HostCleared,
    HostRequest,
    KeepHostCopies,
    LayersLoaded,
    Load,
    Loaded,
    LoadStalled,
    Offload,
    Offloaded,
    PinHostBlocks,
    PrefetchToHost,
    Save,
    Saved,
    SetHostQuota,
    SetTargets,
    UnpinHostBlocks,
)
from kvactors.errors import CacheAsleep, LeasesOpen, RankLost, ensure
from kvactors.flush_notifier.messages import (
    BlocksAdded,
    BlocksRemoved,
    NamespaceChanged,
    PathCached,
    Report,
    TierCleared,
)
from kvactors.gpu_swapper.messages import CopiedWithin, CopyWithin, DataPlaneStatus
from kvactors.identity import PLAIN
from kvactors.native import BlockTree
from kvactors.prefix_index.finish import Endings
from kvactors.prefix_index.host import Evictions, SaveTable, TreeClears
from kvactors.prefix_index.leases import LeaseTable
from kvactors.prefix_index.loads import LoadTable
from kvactors.prefix_index.messages import (
    Abandon,
    Ack,
    Acquire,
    AcquireResult,
    AdmissionDeadline,
    ChangeShares,
    Clear,
    Commit,
    Extend,
    Finish,
    Fork,
    ForkResult,
    LayerReady,
    LayerResult,
    LoadDeadline,
    Pause,
    PinExpired,
    Preempt,
    Prefetch,
    Proceed,
    Ready,
    ReadyResult,
    Reserve,
    Resume,
    SetNamespace,
    SetNumBlocks,
    StepLeases,
    StepResult,
    Sweep,
    Truncate,
    Unpin,
    Withdrawn,
)
from kvactors.prefix_index.pins import Pins
from kvactors.prefix_index.reports import Announcements, IndexStatistics
from kvactors.prefix_index.requests import Requests
from kvactors.prefix_index.settings import IndexSettings, Roots
from kvactors.prefix_index.tree import BlockIndex
from kvactors.prefix_index.waiting import WaitQueue
from kvactors.prefix_index.work import IndexEffects, NextSlice, Work, hash_first
from kvactors.quotas import salt_id
from kvactors.types import Reason


class IndexCore:
    """Everything that one incarnation of PrefixIndex owns, and what concerns all of it: clears,
    losses, pauses, sleep. Each object depends only on those made before it.

    Args:
        restarted: it is not the first incarnation.
    """

    def __init__(
        self,
        index: BlockIndex,
        out: IndexEffects,
        roots: Roots,
        settings: IndexSettings,
        *,
        restarted: bool,
    ) -> None:
        ops = count(1)
        self._restarted = restarted
        self._sleep: Envelope[Ack] | None = None
        self.index, self.out, self.roots, self.settings = index, out, roots, settings
        self.clears = TreeClears(out, ops)
        self.announcements = Announcements(index, out, roots, settings)
        self.evictions = Evictions(self, ops)
        self.leases = LeaseTable(self, restarted=restarted)
        self.loads = LoadTable(self, ops)
        self.saves = SaveTable(self, ops)
        self.pins = Pins(self)
        self.queue = WaitQueue(self)
        self.endings = Endings(self)
        self.requests = Requests(self, ops)

    # -- completions

    def loaded(self, op: int, num_loaded: int, from_host: int) -> None:
        """A load is over."""
        if self.loads.finish(op, num_loaded, from_host):
            self.queue.serve()

    def load_overdue(self, op: int) -> None:
        """A load is past its deadline, or is blocked on a rank that does not respond."""
        if self.loads.overdue(op):
            self.queue.serve()

    def offloaded(self, op: int, on_host: bytes) -> None:
        """The copies of an eviction are complete."""
        if self.evictions.finish(op, on_host):
            self.queue.serve()

    def saved(self, op: int, on_host: bytes) -> None:
        """Blocks of a finished request have been copied. After the last of them its path is
        released."""
        saved = self.saves.finish(op, on_host)
        if saved is not None:
            if saved.answered():
                self.queue.release(saved.tree, saved.path)
            self.queue.serve()

    def host_blocks(self, message: HostBlocksAdded | HostBlocksRemoved) -> None:
        """Blocks left the host tier, or it has more. A hint of more blocks from before a clear or a
        loss is out of date."""
        if isinstance(message, HostBlocksRemoved):
            self.index.tree.host_blocks_removed(message.hashes)
        elif (
            message.clears == self.clears.sent
            and message.memory_generation == self.index.memory_generation
        ):
            self.index.tree.host_blocks_added(message.hashes)

    # -- restarts and losses

    def started(self) -> None:
        """The first turn. A restarted index has an empty device tier."""
        if self._restarted:
            self.announcements.cleared(Reason.RESTART)

    def data_plane_status(self, message: DataPlaneStatus) -> None:
        """Device memory was lost, or copies in flight may never complete."""
        if message.memory_lost:
            self.device_lost(message.generation)
        elif not message.available:
            self.queue.stall()

    def device_lost(self, memory_generation: int) -> None:
        """The blocks on the device may be lost: none of them can be hit any more, and no granted
        lease can be used."""
        self.index.memory_generation = memory_generation
        self.index.retire()
        self.pins.device_lost()
        self.announcements.cleared(Reason.RESTART)
        self.leases.fail_all(
            RankLost, "a rank was lost, and with it what this lease's blocks held there"
        )
        self.queue.stall()

    def peer_restarted(self, name: str) -> None:
        """The host tier has lost its operations in flight, or a notifier its ledger."""
        if name == "cpu_evictor":
            self.host_lost()
        elif name == "gpu_swapper":
            self.requests.swapper_lost()
        elif name == "flush_notifier":
            self.announcements.announce_all()

    def host_lost(self) -> None:
        """The host tier and the swapper have restarted: no copy is in flight, interrupted copies
        have not arrived, and the host tier is empty."""
        self.loads.host_lost()
        self.evictions.host_lost()
        for saved in self.saves.host_lost():
            self.queue.release(saved.tree, saved.path)
        self.index.tree.clear_host()
        self.out.begin(self._sweep_host(self.index.tree))
        self.pins.again()
        self.queue.serve()
        self.clears.again()

    def _sweep_host(self, tree: BlockTree) -> Work:
        """Remove the nodes of blocks that were on the host before its restart."""
        while not tree.sweep_host(self.index.turn_blocks):
            yield

    # -- clears, pins, quotas, the namespace

    def clear(self, message: Clear, envelope: Envelope[Ack]) -> None:
        """Continue with an empty tree, host tier and, on request, store, or without the blocks of a
        salt. Leases keep their blocks in the old tree until they end."""
        if self.queue.asleep:
            self.out.refuse(envelope, CacheAsleep())
        elif message.salt is not None:
            self._clear_salt(message.salt, envelope, storage=message.storage)
        elif message.lora is not None:
            self._clear_lora(message.lora, envelope)
        else:
            self.pins.end_all()
            freed = self.index.retire()
            self.announcements.cleared(Reason.CLEAR)
            op = self.clears.start(envelope, None, storage=message.storage)
            self.clears.device_cleared(op, envelope, freed)
            self.queue.serve()

    def _clear_salt(self, name: str, envelope: Envelope[Ack], *, storage: bool) -> None:
        """Forget the blocks of a salt. Leases keep theirs, which nothing else finds."""
        tree, salt = self.index.tree, salt_id(name)
        self.pins.end_all(lambda pin: pin.salt == salt)
        self.index.policy.quotas.forget(name)
        tree.begin_forget(salt)
        used = [lease.path for lease in self.leases]
        used += self.loads.paths()
        used += [saved.path for saved in self.saves.paths()]
        for path in used:
            if path.salt == salt:
                path.forgotten = True
        op = self.clears.start(envelope, salt, storage=storage)
        self.out.begin(self._forget(tree, op, envelope))

    def _forget(self, tree: BlockTree, op: int, envelope: Envelope[Ack]) -> Work:
        """Free and report the blocks that are not found any more, some of them a turn."""
        index, count, over = self.index, 0, False
        index.room.closing += 1
        while True:
            over, freed, hashes = tree.forget_step(index.turn_blocks, index.hashes)
            index.pool.give(freed)
            count += len(freed)
            if not tree.retired:
                self.announcements.removed(hashes, Reason.CLEAR)
            if over:
                break
            self.queue.serve()
            yield
        index.room.closing -= 1
        self.clears.device_cleared(op, envelope, count)
        self.queue.serve()

    def _clear_lora(self, lora: str, envelope: Envelope[Ack]) -> None:
        """Let requests with an adapter start from another root hash. Blocks below the previous one
        age out, as after `set_namespace`."""
        scopes = self.announcements.scopes
        self.pins.end_all(lambda pin: scopes.get(pin.root, PLAIN).lora == lora)
        self.roots.renew(lora)
        self.announcements.namespace_changed(self.roots.namespace)
        self.out.reply(envelope, Ack())
        self.queue.serve()

    def change_shares(self, message: ChangeShares, envelope: Envelope[Ack]) -> None:
        """Change a pin, or the quota of a salt in both tiers."""
        change, policy = message.change, self.index.policy
        if isinstance(change, Unpin):
            self._unpin(change, envelope)
            return
        self.out.to_evictor(policy.set_quota(self.index.tree, change.salt, change.quota))
        self.out.reply(envelope, Ack())

    def _unpin(self, message: Unpin, envelope: Envelope[Ack]) -> None:
        """End the pin of a path."""
        self.requests.set_root(message.path, message.scope)
        end = partial(self._end_pin, message, envelope)
        self.out.begin(hash_first(message.path, self.index.turn_blocks, end))

    def _end_pin(self, message: Unpin, envelope: Envelope[Ack]) -> None:
        if self.requests.set_root(message.path, message.scope):
            self._unpin(message, envelope)  # the namespace has changed since
            return
        self.out.reply(envelope, Ack(self.pins.unpin(message.path)))
        self.queue.serve()

    def set_namespace(self, message: SetNamespace, envelope: Envelope[Ack]) -> None:
        """Admit requests under another namespace, those that wait included. Blocks of the previous
        one age out."""
        if message.namespace != self.roots.namespace:
            self.roots.use(message.namespace)
            self.announcements.namespace_changed(message.namespace)
        self.out.reply(envelope, Ack())

    def set_num_blocks(self, message: SetNumBlocks) -> None:
        """Take the device blocks of a cache that was opened without any."""
        if not self.index.pool.total:
            self.index.set_num_blocks(message.num_blocks)
            self.queue.free_low = message.free_low
            self.queue.free_high = message.free_high

    # -- pause and sleep

    def pause(self, message: Pause, envelope: Envelope[Ack]) -> None:
        """Hold new requests, and answer once no transfer is in flight.

        For a sleep, refuse them and end all pins, then empty the device, some blocks a turn: each
        block is evicted as for a request, so that the host tier gets a copy as far as it has
        capacity, and sinks are sent each removal. Answered when nothing is on the device.
        """
        queue = self.queue
        if not message.asleep:
            queue.paused = True
            queue.wait_idle(envelope)
        elif self._is_busy():
            self.out.refuse(envelope, LeasesOpen(len(self.leases)))
        else:
            queue.asleep = queue.contended = True
            self._sleep, queue.on_idle = envelope, self._empty_device
            self.pins.end_all()
            queue.serve()

    def resume(self, message: Resume, envelope: Envelope[Ack]) -> None:
        """Admit requests again, first those that waited."""
        if message.awake:
            self._wake()
        else:
            self.queue.paused = False
        self.out.reply(envelope, Ack(len(self.queue.held)))
        self.requests.admit_waiting()

    def _wake(self) -> None:
        self.queue.asleep = False
        self._sleep = self.queue.on_idle = None

    def _is_busy(self) -> bool:
        return bool(self.leases or self.queue.waiting or self.queue.heads())

    def _empty_device(self) -> None:
        """No transfer is in flight: evict the next blocks, or answer."""
        envelope = self._sleep
        if envelope is None or envelope.abandoned:
            return  # its caller ends the sleep
        if self.evictions.evict(self.index.turn_blocks):
            self.queue.proceed_later()
            return
        self.queue.on_idle = self._sleep = None
        tree = self.index.tree.statistics()
        if tree["referenced"] or self.index.room.reserved or self._is_busy():  # it came before
            self._wake()
            self.out.refuse(envelope, LeasesOpen(len(self.leases)))
            return
        if tree["device"]:  # blocks that no eviction takes
            self.index.retire()
            self.announcements.cleared(Reason.CLEAR)
        self.out.reply(envelope, Ack())

    # -- inspection

    def in_use(self) -> bool:
        """Whether a lease, a request or an operation may hold device blocks."""
        holders = (self.leases, self.loads, self.evictions, self.saves, self.queue.waiting)
        return any(holders) or bool(self.requests.copies)

    def check_steps(self, *, idle: bool) -> Iterator[None]:
        """Check every invariant, in steps of about a millisecond.

        Args:
            idle: no work has slices left.

        Raises:
            AssertionError, RuntimeError: names the inconsistency.
        """
        if idle and not self.in_use():
            tree, pool = self.index.tree.statistics(), self.index.pool
            used = tree["referenced"] - self.index.tree.pinned
            ensure(used == 0, f"{used} nodes referenced, no lease")
            used = pool.total - self.index.room.free
            ensure(used == tree["device"], f"{used} blocks in use, {tree['device']} in the tree")
            shared = pool.num_shared
            ensure(not shared, f"{shared} blocks with several owners, no lease")
        yield from chain(self.leases.check_steps(), self.index.check_steps())

    def statistics(self) -> IndexStatistics:
        """A snapshot."""
        index, leases, evictions, queue = self.index, self.leases, self.evictions, self.queue
        tree = index.tree.statistics()
        return IndexStatistics(
            requests=leases.requests,
            blocks_looked_up=leases.looked_up,
            device_hits=leases.device_hits,
            host_hits=leases.host_hits,
            storage_hits=leases.storage_hits,
            no_room=queue.no_room,
            refused_size=queue.refused_size,
            refused_pins=queue.refused_pins,
            preempted=self.endings.preempted,
            abandoned=self.endings.abandoned,
            leases=len(leases),
            waiting=len(queue.waiting) + len(queue.acquires) + len(queue.forks),
            blocks_total=index.pool.total,
            blocks_free=index.room.free,
            nodes=tree["nodes"],
            nodes_referenced=tree["referenced"],
            evictable=tree["evictable"],
            evicted=evictions.evicted,
            rescued=evictions.rescued,
            loads_in_flight=len(self.loads),
            offloads_in_flight=len(evictions),
            saves_in_flight=len(self.saves),
            overdue_loads=self.loads.overdue_loads,
            resumed=leases.resumed,
            forks=self.requests.forks,
            tails_copied=self.requests.tails,
            blocks_shared=index.pool.num_shared,
            pinned=index.tree.pinned,
            pins_refused=self.pins.refused,
            pins_expired=self.pins.expired,
            quota_evictions=index.policy.quota_evictions + index.tree.quota_evictions,
        )


class PrefixIndex(Actor):
    """Owns the block tree, the device blocks, their LRU order and the leases."""

    ROLE: ClassVar[str] = "prefix_index"
    SENDS: ClassVar[Mapping[str, tuple[type[Message], ...]]] = {
        "cpu_evictor": (
            Offload,
            Load,
            SetTargets,
            Cancel,
            Save,
            DropHostCopies,
            KeepHostCopies,
            ClearHost,
            EvictFirst,
            PinHostBlocks,
            UnpinHostBlocks,
            SetHostQuota,
            PrefetchToHost,
        ),
        "gpu_swapper": (CopyWithin,),
        "flush_notifier": (PathCached, BlocksAdded, BlocksRemoved, TierCleared, NamespaceChanged),
    }

    def __init__(
        self,
        ref: ActorRef,
        *,
        index: BlockIndex,
        evictor: ActorRef[HostRequest],
        swapper: ActorRef[CopyWithin],
        notifier: ActorRef[Report],
        roots: Roots,
        settings: IndexSettings,
    ) -> None:
        super().__init__(ref)
        self.index = index
        self.out = IndexEffects(self.context, evictor, swapper, notifier)
        self.core = core = IndexCore(
            index, self.out, roots, settings, restarted=self.incarnation > 0
        )
        # Bound here: a call through a method of this class would cost each request another call.
        self.handlers[Acquire] = core.requests.acquire
        self.handlers[Extend] = self.handlers[Reserve] = core.requests.grow
        self.handlers[StepLeases] = core.requests.step
        self.handlers[Commit] = core.endings.commit
        self.handlers[Finish] = core.endings.finish

    def started(self) -> None:
        """A restarted index begins with an empty device tier."""
        self.core.started()

    @on(Acquire)
    def acquire(self, message: Acquire, envelope: Envelope[AcquireResult]) -> None:
        """Give a request its device blocks, those of its cached prefix included."""
        self.core.requests.acquire(message, envelope)

    @on(Prefetch)
    def prefetch(self, message: Prefetch, envelope: Envelope[Ack]) -> None:
        """Let the host tier fetch the blocks of an expected request."""
        self.core.requests.prefetch(message, envelope)

    @on(Ready)
    def ready(self, message: Ready, envelope: Envelope[ReadyResult]) -> None:
        """Answer once the loads of a lease are over."""
        self.core.leases.wait_ready(message, envelope)

    @on(LayerReady)
    def layer_ready(self, message: LayerReady, envelope: Envelope[LayerResult]) -> None:
        """Answer once one layer of the loads of a lease has arrived."""
        self.core.leases.wait_layer(message, envelope)

    @on(Extend)
    def extend(self, message: Extend, envelope: Envelope[AcquireResult]) -> None:
        """Append tokens to a lease."""
        self.core.requests.grow(message, envelope)

    @on(Reserve)
    def reserve(self, message: Reserve, envelope: Envelope[AcquireResult]) -> None:
        """Give a lease device blocks ahead of tokens."""
        self.core.requests.grow(message, envelope)

    @on(Fork)
    def fork(self, message: Fork, envelope: Envelope[ForkResult]) -> None:
        """Make further leases of the tokens of one."""
        self.core.requests.fork(message, envelope)

    @on(CopiedWithin)
    def copied_within(self, message: CopiedWithin) -> None:
        """The copies for a fork have ended."""
        self.core.requests.copied(message)

    @on(Truncate)
    def truncate(self, message: Truncate, envelope: Envelope[Ack]) -> None:
        """Drop tokens of a lease, and reserved blocks."""
        self.core.requests.truncate(message, envelope)

    @on(StepLeases)
    def step_leases(self, message: StepLeases, envelope: Envelope[StepResult]) -> None:
        """Extend and commit many leases."""
        self.core.requests.step(message, envelope)

    @on(Commit)
    def commit(self, message: Commit, envelope: Envelope[Ack]) -> None:
        """Make the full blocks of computed tokens shareable."""
        self.core.endings.commit(message, envelope)

    @on(Finish)
    def finish(self, message: Finish, envelope: Envelope[Ack]) -> None:
        """End a lease: commit the computed blocks, announce and save by policy, release."""
        self.core.endings.finish(message, envelope)

    @on(Preempt)
    def preempt(self, message: Preempt, envelope: Envelope[Ack]) -> None:
        """End a lease whose request will be acquired again."""
        self.core.endings.preempt(message, envelope)

    @on(Abandon)
    def abandon(self, message: Abandon) -> None:
        """The holder of a lease, or the caller of a request that waits, has gone."""
        self.core.endings.abandon(message)

    @on(Withdrawn)
    def withdrawn(self, message: Withdrawn) -> None:
        """The caller of an extend or a fork that waits has gone."""
        self.core.queue.withdraw(message.lease)

    # -- the whole cache

    @on(Clear)
    def clear(self, message: Clear, envelope: Envelope[Ack]) -> None:
        """Empty the cache."""
        self.core.clear(message, envelope)

    @on(ChangeShares)
    def change_shares(self, message: ChangeShares, envelope: Envelope[Ack]) -> None:
        """Change a pin or a quota."""
        self.core.change_shares(message, envelope)

    @on(Pause)
    def pause(self, message: Pause, envelope: Envelope[Ack]) -> None:
        """Hold new requests, and answer once no transfer is in flight."""
        self.core.pause(message, envelope)

    @on(Resume)
    def resume(self, message: Resume, envelope: Envelope[Ack]) -> None:
        """Admit requests again."""
        self.core.resume(message, envelope)

    @on(SetNamespace)
    def set_namespace(self, message: SetNamespace, envelope: Envelope[Ack]) -> None:
        """Admit requests under another namespace."""
        self.core.set_namespace(message, envelope)

    @on(SetNumBlocks)
    def set_num_blocks(self, message: SetNumBlocks) -> None:
        """Take the device blocks of a cache that was opened without any."""
        self.core.set_num_blocks(message)

    @on(Loaded)
    def loaded(self, message: Loaded) -> None:
        """A load is over."""
        self.core.loaded(message.op, message.num_loaded, message.from_host)

    @on(LayersLoaded)
    def layers_loaded(self, message: LayersLoaded) -> None:
        """Some layers of a load have arrived."""
        self.core.loads.layers_loaded(message)

    @on(LoadDeadline)
    @on(LoadStalled)
    def load_overdue(self, message: LoadDeadline | LoadStalled) -> None:
        """A load is past its deadline, or is blocked on a rank that does not respond."""
        self.core.load_overdue(message.op)

    @on(Offloaded)
    def offloaded(self, message: Offloaded) -> None:
        """The copies of an eviction are complete."""
        self.core.offloaded(message.op, message.kept_mask)

    @on(Saved)
    def saved(self, message: Saved) -> None:
        """The copies of a finished request are complete."""
        self.core.saved(message.op, message.kept_mask)

    @on(HostCleared)
    def host_cleared(self, message: HostCleared) -> None:
        """Host tier and store are empty, or the store could not be emptied."""
        self.core.clears.finish(message)

    @on(HostBlocksRemoved)
    @on(HostBlocksAdded)
    def host_blocks(self, message: HostBlocksAdded | HostBlocksRemoved) -> None:
        """Blocks left the host tier, or it has more."""
        self.core.host_blocks(message)

    @on(DataPlaneStatus)
    def data_plane_status(self, message: DataPlaneStatus) -> None:
        """Device memory was lost, or copies in flight may never complete."""
        self.core.data_plane_status(message)

    @on(PeerRestarted)
    def peer_restarted(self, message: PeerRestarted) -> None:
        """The host tier has lost its operations in flight, or a notifier its ledger."""
        self.core.peer_restarted(message.name)

    @on(AdmissionDeadline)
    def deadline(self, message: AdmissionDeadline) -> None:
        """The deadline of a wait, for blocks or for the end of a pause."""
        self.core.queue.expire(message.lease, message.ticket)

    @on(PinExpired)
    def pin_expired(self, message: PinExpired) -> None:
        """The end of a pin."""
        self.core.pins.expire(message.number)
        self.core.queue.serve()

    @on(Proceed)
    def proceed(self, message: Proceed) -> None:
        """The next turn's share of the requests that wait."""
        self.core.queue.proceed()
        self.core.requests.admit_waiting()

    @on(Sweep)
    def sweep(self, message: Sweep) -> None:
        """The next turn's share of the work after a clear."""
        self.core.queue.sweep()

    @on(NextSlice)
    def continue_work(self, message: NextSlice) -> None:
        """The next slice of some work."""
        self.out.works -= 1
        self.out.begin(message.work)

    def check(self) -> None:
        deque(self.check_steps(), maxlen=0)

    def check_steps(self) -> Iterator[None]:
        return self.core.check_steps(idle=not self.out.works)
