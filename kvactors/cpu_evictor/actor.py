"""Host tier manager: slots, eviction, and every movement through host memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

from kvactors.actor import Actor, ActorRef, Envelope, Message, PeerRestarted, on
from kvactors.actor.actor import Timer
from kvactors.actor.clock import now
from kvactors.config import HostConfig, StorageConfig
from kvactors.cpu_evictor.actions import Action, Send, StartTimer, send
from kvactors.cpu_evictor.completions import Completion, Completions
from kvactors.cpu_evictor.emptying import Emptying
from kvactors.cpu_evictor.load import LoadJob
from kvactors.cpu_evictor.memory import HostMemory
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
from kvactors.cpu_evictor.policy import POLICIES
from kvactors.cpu_evictor.prefetch import PrefetchJob
from kvactors.cpu_evictor.requests import Peers, RequestTable
from kvactors.cpu_evictor.save import SaveJob
from kvactors.cpu_evictor.share_changes import change_shares
from kvactors.cpu_evictor.shares import HostShares
from kvactors.cpu_evictor.slots import HostTier
from kvactors.cpu_evictor.statistics import HostStatistics, host_statistics
from kvactors.device.arena import HostSlots
from kvactors.flush_notifier.messages import BlocksAdded, BlocksRemoved, Report, TierCleared
from kvactors.gpu_swapper.messages import Copied, Copy, CopyProgress, DataPlaneStatus
from kvactors.invariant import ensure
from kvactors.storage.messages import (
    ClearStore,
    DeviceFetched,
    DeviceSaved,
    DeviceStoreMessage,
    FetchDevice,
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
        change_shares(self.host, message)

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
