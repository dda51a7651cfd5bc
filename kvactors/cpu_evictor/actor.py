"""Host tier manager: slots, eviction, and every movement through host memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

from kvactors.actor import Actor, ActorRef, Envelope, Message, PeerRestarted, Timer, on
from kvactors.actor.clock import now
from kvactors.cpu_evictor.actions import Action, Send, StartTimer, send
from kvactors.cpu_evictor.load import LoadJob
from kvactors.cpu_evictor.memory import (
    Emptying,
    HostMemory,
    HostStatistics,
    count_of,
    host_statistics,
    outcomes_of,
)
from kvactors.cpu_evictor.messages import (
    Cancel,
    ClearHost,
    DropHostCopies,
    EmptyHost,
    EvictFirst,
    FetchDeadline,
    HostBlocksAdded,
    HostBlocksRemoved,
    HostCleared,
    HostReply,
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
    SaveUnanswered,
    SetHostQuota,
    SetTargets,
    ShareMessage,
    SlotDeadline,
    UnpinHostBlocks,
)
from kvactors.cpu_evictor.offload import OffloadJob
from kvactors.cpu_evictor.requests import (
    ClearRequest,
    CopyRequest,
    FetchRequest,
    Peers,
    ProbeRequest,
    ReadRequest,
    RequestTable,
    SaveRequest,
    WriteRequest,
)
from kvactors.cpu_evictor.save import PrefetchJob, SaveJob
from kvactors.cpu_evictor.slots import POLICIES, HostShares, HostTier
from kvactors.device.arena import HostSlots
from kvactors.errors import ensure
from kvactors.flush_notifier.messages import BlocksAdded, BlocksRemoved, Report, TierCleared
from kvactors.gpu_swapper.messages import Copied, Copy, CopyProgress, DataPlaneStatus
from kvactors.settings import HostConfig, StorageConfig
from kvactors.storage.messages import (
    ClearStore,
    DeviceFetched,
    DeviceSaved,
    DeviceStoreMessage,
    FetchDevice,
    Outcome,
    Probed,
    ProbeStore,
    Read,
    ReadDone,
    ReaderMessage,
    ReportLost,
    SaveDevice,
    StoreCleared,
    Write,
    WriterMessage,
    Written,
)
from kvactors.types import indices_of, split_hashes

# -- Completions of requests in flight: checks the reports of other actors and passes them to the
# job.


Completion = (
    Copied
    | CopyProgress
    | Probed
    | ReadDone
    | Written
    | StoreCleared
    | DeviceFetched
    | DeviceSaved
    | SaveUnanswered
)


class Completions:
    """Ends requests. A completion of a request that is not in the table changes nothing."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._requests = memory.requests

    def handle(self, message: Completion) -> list[Action]:
        """End the request, or report its progress, and continue its job."""
        match message:
            case Copied():
                return self._copied(message)
            case Probed():
                return self._probed(message)
            case ReadDone():
                return self._read(message)
            case Written():
                return self._written(message)
            case CopyProgress():
                return self._progress(message)
            case DeviceFetched():
                return self._fetched(message)
            case DeviceSaved():
                return self._saved(message)
            case StoreCleared():
                return self._cleared(message)
            case SaveUnanswered():
                return self._unanswered(message)

    def peer_failed(self, peer: str) -> list[Action]:
        """A storage actor failed, so its requests will not be answered: a clear is sent again, the
        others end without success.

        Args:
            peer: name of the actor.
        """
        if peer == "prefix_index":
            self._memory.host.shares.unpin(b"")  # pins end with its state
        actions: list[Action] = []
        for op, request in self._requests.open_at(peer):
            failed = bytes([Outcome.UNAVAILABLE]) * request.size
            match request:
                case ClearRequest():
                    self._requests.take(op, ClearRequest)
                    actions.append(self._memory.clear_store(request.op, request.salt))
                case ProbeRequest():
                    actions += self._probed(Probed(op, 0))
                case ReadRequest():
                    actions += self._read(ReadDone(op, failed))
                case WriteRequest():
                    actions += self._written(Written(op, failed))
                case FetchRequest():
                    actions += self._fetched(DeviceFetched(op, 0))
                case SaveRequest():
                    actions += self._saved(DeviceSaved(op, 0))
        return actions

    def _copied(self, message: Copied) -> list[Action]:
        request = self._requests.take(message.op, CopyRequest)
        if request is None:
            return []
        failed = indices_of(message.failed, request.size)
        self._memory.counts.copy_failures += len(failed)
        return request.job.on_copied(request.first, request.size, failed)

    def _progress(self, message: CopyProgress) -> list[Action]:
        request = self._requests.get(message.op, CopyRequest)
        if request is None or not isinstance(request.job, LoadJob):
            return []
        return request.job.on_layers(request.first, message.layers)

    def _probed(self, message: Probed) -> list[Action]:
        """Reads that follow from a probe are sent before the writes that were held back for it, and
        before those of the eviction that makes space for them."""
        request = self._requests.take(message.op, ProbeRequest)
        if request is None:
            return []
        found = count_of(message.found, request.size)
        if not request.HOLDS_WRITES:
            return request.job.on_probed(found)
        self._requests.hold_writes()
        # During a clear, blocks from before it may have been found.
        actions = request.job.on_probed(found if self._requests.may_read else 0)
        self._requests.release_writes()
        return actions + self._memory.write_held()

    def _unanswered(self, message: SaveUnanswered) -> list[Action]:
        """Count every block as stored, so that nothing is written and the device blocks of a
        finished request are not held. The next finish offers them again."""
        request = self._requests.take(message.op, ProbeRequest)
        return [] if request is None else request.job.on_probed(request.size)

    def _read(self, message: ReadDone) -> list[Action]:
        request = self._requests.take(message.op, ReadRequest)
        if request is None:
            return []
        outcomes = outcomes_of(message.outcomes, request.size)
        return request.job.on_read(request.first, outcomes) + self._memory.write_held()

    def _written(self, message: Written) -> list[Action]:
        request = self._requests.take(message.op, WriteRequest)
        if request is None:
            return []
        outcomes = outcomes_of(message.outcomes, request.size)
        return self._memory.on_written(request.blocks, outcomes)

    def _cleared(self, message: StoreCleared) -> list[Action]:
        request = self._requests.take(message.op, ClearRequest)
        if request is None:
            return []
        cleared = HostCleared(request.op, message.error, message.unknown)
        return [send(self._requests.peers.index, cleared)]

    def _fetched(self, message: DeviceFetched) -> list[Action]:
        request = self._requests.take(message.op, FetchRequest)
        if request is None:
            return []
        return request.job.on_fetched(request.first, count_of(message.num_blocks, request.size))

    def _saved(self, message: DeviceSaved) -> list[Action]:
        request = self._requests.take(message.op, SaveRequest)
        if request is None:
            return []
        saved = count_of(message.num_blocks, request.size)
        self._memory.counts.written += saved
        self._memory.counts.write_failures += request.size - saved
        self._memory.counts.not_stored_unavailable += request.size - saved
        return request.job.on_saved()


class CpuEvictor(Actor):
    """Owns the host slots. It alone hands them out, so it leads every movement through host memory.

    Handlers call pure objects, which return the actions to carry out: a job for each offload, load,
    prefetch and finished request, `HostMemory` for their shared state, `RequestTable` for requests
    in flight, and `Completions` to continue a job when a request has ended.

    Args:
        device_store: actor of a store that moves device memory itself, None without one.
        layerwise: whether the index is sent the progress of loads by layers.
        memory_generation: at the start.
    """

    ROLE: ClassVar[str] = "cpu_evictor"
    SENDS: ClassVar[Mapping[str, tuple[type[Message], ...]]] = {
        "gpu_swapper": (Copy,),
        "storage_reader": (ProbeStore, Read),
        "storage_writer": (Write, ClearStore, ReportLost),
        "storage_direct": (FetchDevice, SaveDevice),
        "flush_notifier": (BlocksAdded, BlocksRemoved, TierCleared),
        "prefix_index": (
            Offloaded,
            Loaded,
            Saved,
            HostBlocksAdded,
            HostBlocksRemoved,
            HostCleared,
            LayersLoaded,
            LoadStalled,
        ),
    }

    def __init__(
        self,
        ref: ActorRef,
        *,
        config: HostConfig,
        storage: StorageConfig,
        arena: HostSlots,
        index: ActorRef[HostReply],
        swapper: ActorRef[Copy],
        readers: Sequence[ActorRef[ReaderMessage]],
        writers: Sequence[ActorRef[WriterMessage]],
        notifier: ActorRef[Report],
        device_store: ActorRef[DeviceStoreMessage] | None,
        layerwise: bool,
        memory_generation: int,
        shares: HostShares | None = None,
        policy: str = "lru",
    ) -> None:
        super().__init__(ref)
        self.layerwise, self._arena = layerwise, arena
        self.peers = Peers(index, swapper, readers, writers, notifier, device_store)
        self.host = HostTier(
            config.slots, arena.num_slots, arena.in_use, POLICIES[policy](), shares
        )
        self.requests = RequestTable(self.peers, storage, memory_generation, now)
        self.memory = HostMemory(self.host, self.requests, config, storage)
        self._completions = Completions(self.memory)
        self.exclusive = self.memory.exclusive  # a block leaves when the device has it
        self._emptying = Emptying(self.memory, self.context.answer)
        self._timers_of: dict[object, Timer] = {}  # by job

    def started(self) -> None:
        """A later incarnation begins with an empty host tier."""
        if self.incarnation:
            self._perform([self.memory.announce_restart()])

    def _perform(self, actions: Iterable[Action]) -> None:
        """Carry out the actions of a turn, and hand out the slots that it has freed."""
        self._carry_out(actions)
        while len(self.memory.movements) and (more := self.memory.movements.serve()):
            self._carry_out(more)
        if self._emptying.envelope is not None:
            self._emptying.answer()

    def _carry_out(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.tell(action.to, action.message)
            elif isinstance(action, StartTimer):
                self._timers_of[action.job] = self.after(action.seconds, action.message)
            else:
                self._timers_of.pop(action.job).cancel()

    # -- orders of the index

    @on(Offload)
    def offload(self, message: Offload) -> None:
        """Copy evicted device blocks to the host."""
        self._perform(OffloadJob(self.memory, message).begin())

    @on(Load)
    def load(self, message: Load) -> None:
        """Bring blocks back to the device."""
        job = LoadJob(self.memory, message, layerwise=self.layerwise)
        self._perform(job.begin())

    @on(SetTargets)
    def set_targets(self, message: SetTargets) -> None:
        """The device blocks of a load that began without."""
        if (job := self.memory.loads.get(message.op)) is not None:
            self._perform(job.set_targets(message.blocks))

    @on(Cancel)
    @on(FetchDeadline)
    def end_load(self, message: Cancel | FetchDeadline) -> None:
        """A load without targets is cancelled, or the deadline of one that waits for storage."""
        if (job := self.memory.loads.get(message.op)) is not None:
            self._perform(job.cancel() if isinstance(message, Cancel) else job.on_deadline())

    @on(SlotDeadline)
    def slot_deadline(self, message: SlotDeadline) -> None:
        """An offload or a save has waited long enough for slots."""
        self._perform(self.memory.movements.overdue(message.op))

    @on(PrefetchToHost)
    def prefetch(self, message: PrefetchToHost) -> None:
        """Bring blocks that storage has to the host."""
        self._perform(PrefetchJob(self.memory, message).begin())

    @on(Save)
    def save(self, message: Save) -> None:
        """Keep and save the path of a finished request."""
        self._perform(SaveJob(self.memory, message).begin())

    @on(DropHostCopies)
    @on(KeepHostCopies)
    def host_copies(self, message: DropHostCopies | KeepHostCopies) -> None:
        """The device holds these blocks, or did not take them."""
        drop, keep = self.memory.drop_host_copies, self.memory.keep_host_copies
        self._perform((drop if isinstance(message, DropHostCopies) else keep)(message.hashes))

    @on(ClearHost)
    def clear(self, message: ClearHost) -> None:
        """Drop every block, or those of a salt, on request those in storage too."""
        self._perform(self.memory.on_clear(message))

    @on(EvictFirst)
    @on(PinHostBlocks)
    @on(UnpinHostBlocks)
    @on(SetHostQuota)
    def share(self, message: ShareMessage) -> None:
        """Victims of the policy, pins, and quotas of salts."""
        tier = self.host
        tier.changes += 1
        if isinstance(message, EvictFirst):
            tier.policy.evict_first(split_hashes(message.hashes))
        elif isinstance(message, PinHostBlocks):
            tier.shares.pin(message.hashes)
        elif isinstance(message, UnpinHostBlocks):
            tier.shares.unpin(message.hashes)
        else:
            residents = tier.policy.candidates()
            tier.shares.set_quota(message.salt, message.blocks, residents, named=message.named)

    @on(EmptyHost)
    def empty(self, message: EmptyHost, envelope: Envelope[int]) -> None:
        """Evict blocks before a sleep."""
        self._perform(self._emptying.begin(message, envelope))

    # -- other actors

    @on(Copied)
    @on(CopyProgress)
    @on(Probed)
    @on(ReadDone)
    @on(Written)
    @on(StoreCleared)
    @on(DeviceFetched)
    @on(DeviceSaved)
    @on(SaveUnanswered)
    def completed(self, message: Completion) -> None:
        """A request to the swapper or to storage has ended, or made progress."""
        self._perform(self._completions.handle(message))

    @on(DataPlaneStatus)
    def data_plane_status(self, message: DataPlaneStatus) -> None:
        """Copies are available again, or are not for now. Lost slots hold nothing."""
        self.requests.generation = message.generation
        if message.memory_lost:
            self._perform(self.memory.lose())
        if message.available:
            self._perform(send(writer, ReportLost()) for writer in self.peers.writers[:1])
            return
        for job in list(self.memory.loads.values()):
            self._perform(job.on_copies_unavailable())

    @on(PeerRestarted)
    def peer_restarted(self, message: PeerRestarted) -> None:
        """A new notifier is sent the resident blocks. Requests to a storage actor that failed are
        ended."""
        if message.name == "flush_notifier":
            self._perform(self.memory.announce(self.host.hashes()))
        else:
            self._perform(self._completions.peer_failed(message.name))

    # -- observation

    def host_hashes(self) -> list[bytes]:
        """Hashes of the blocks that a load finds on the host: see `HostTier.hashes`."""
        return self.host.hashes()

    def check(self) -> None:
        """AssertionError if the tier's state is wrong, or a slot is pinned although nothing is in
        flight."""
        for _ in self.check_steps():
            pass

    def check_steps(self) -> Iterator[None]:
        """`check` in steps of about a millisecond, between which turns may be taken."""
        if not (self.memory.loads or self.requests.holds_slots):
            ensure(not self.host.pinned, f"{self.host.pinned} slots pinned at rest")
            ensure(not self.host.in_transit, f"{self.host.in_transit} slots in transit at rest")
        yield from self.host.check_steps()

    def host_statistics(self) -> HostStatistics:
        """The host tier at this moment."""
        return host_statistics(self.host, self.memory.counts, self._arena)
