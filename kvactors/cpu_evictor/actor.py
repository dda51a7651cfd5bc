"""Host tier manager: slots, eviction, and every movement through host memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, get_args

from kvactors.actor import Actor, ActorRef, Envelope, Message, PeerRestarted, on
from kvactors.actor.clock import now
from kvactors.actor.context import Effects
from kvactors.actor.sliced import finish
from kvactors.cpu_evictor.load import LoadJob
from kvactors.cpu_evictor.memory import WINDOW, Completion, HostMemory, HostStatistics
from kvactors.cpu_evictor.messages import (
    Cancel,
    ClearHost,
    DropHostCopies,
    EmptyHost,
    EvictFirst,
    HostReply,
    JobDeadline,
    KeepHostCopies,
    Load,
    Offload,
    PinHostBlocks,
    PrefetchToHost,
    Save,
    SetHostQuota,
    SetTargets,
    ShareMessage,
    UnpinHostBlocks,
)
from kvactors.cpu_evictor.offload import OffloadJob
from kvactors.cpu_evictor.requests import Peers, RequestTable
from kvactors.cpu_evictor.save import PrefetchJob, SaveJob
from kvactors.cpu_evictor.slots import HostShares, HostTier
from kvactors.device.arena import HostSlots
from kvactors.errors import ensure
from kvactors.flush_notifier.messages import BlocksAdded, BlocksRemoved, TierCleared
from kvactors.gpu_swapper.messages import Copied, Copy, CopyProgress, DataPlaneStatus
from kvactors.settings import HostConfig, StorageConfig
from kvactors.storage.messages import (
    DeviceFetched,
    DeviceSaved,
    DeviceStoreMessage,
    Probed,
    ReadDone,
    ReaderMessage,
    ReportLost,
    StoreCleared,
    WriterMessage,
    Written,
)
from kvactors.types import split_hashes


class CpuEvictor(Actor):
    """Owns the host slots. It alone hands them out, so it leads every movement through host memory:
    a job for each offload, load, prefetch and finished request. `HostMemory` is their shared state,
    and `RequestTable` has the requests in flight."""

    ROLE: ClassVar[str] = "cpu_evictor"
    SENDS: ClassVar[Mapping[str, tuple[type[Message], ...]]] = {
        "gpu_swapper": (Copy,),
        "storage_reader": get_args(ReaderMessage),
        "storage_writer": get_args(WriterMessage),
        "storage_direct": get_args(DeviceStoreMessage),
        "flush_notifier": (BlocksAdded, BlocksRemoved, TierCleared),
        "prefix_index": get_args(HostReply),
    }

    def __init__(
        self,
        ref: ActorRef,
        *,
        config: HostConfig,
        storage: StorageConfig,
        arena: HostSlots,
        peers: Peers,
        layerwise: bool,
        memory_generation: int,
        shares: HostShares | None = None,
        flat: bool = False,
    ) -> None:
        super().__init__(ref)
        self.layerwise, self._arena = layerwise, arena
        self.host = HostTier(config.slots, arena.num_slots, arena.in_use, shares)
        out = Effects(self.context)
        self.requests = RequestTable(peers, storage, memory_generation, now, out)
        self.memory = HostMemory(self.host, self.requests, config, storage, flat=flat)
        self.exclusive = self.memory.exclusive  # a block leaves when the device has it
        self._emptying: Envelope[int] | None = None  # the request to empty the tier that waits

    def started(self) -> None:
        """A later incarnation begins with an empty host tier."""
        if self.incarnation:
            self.memory.announce_restart()

    def _end_turn(self) -> None:
        """Hand out the slots that the turn has freed. Answer a request to empty the tier once
        nothing is in flight."""
        movements = self.memory.movements
        while len(movements) and movements.serve():
            pass
        if self._emptying is not None and self.requests.idle:
            envelope, self._emptying = self._emptying, None
            self.answer(envelope, len(self.host.blocks))

    # -- orders of the index

    @on(Offload)
    def offload(self, message: Offload) -> None:
        OffloadJob(self.memory, message).begin()
        self._end_turn()

    @on(Load)
    def load(self, message: Load) -> None:
        LoadJob(self.memory, message, layerwise=self.layerwise).begin()
        self._end_turn()

    @on(SetTargets)
    @on(Cancel)
    def continue_load(self, message: SetTargets | Cancel) -> None:
        if (job := self.memory.loads.get(message.op)) is None:
            return
        if isinstance(message, SetTargets):
            job.set_targets(message.blocks)
        else:
            job.cancel()
        self._end_turn()

    @on(JobDeadline)
    def deadline(self, message: JobDeadline) -> None:
        if (job := self.memory.timed.pop(message.number, None)) is not None:
            job.on_deadline()
        self._end_turn()

    @on(PrefetchToHost)
    def prefetch(self, message: PrefetchToHost) -> None:
        PrefetchJob(self.memory, message).begin()
        self._end_turn()

    @on(Save)
    def save(self, message: Save) -> None:
        SaveJob(self.memory, message).begin()
        self._end_turn()

    @on(DropHostCopies)
    def drop_host_copies(self, message: DropHostCopies) -> None:
        self.memory.drop_host_copies(message.hashes)
        self._end_turn()

    @on(KeepHostCopies)
    def keep_host_copies(self, message: KeepHostCopies) -> None:
        self.memory.keep_host_copies(message.hashes)
        self._end_turn()

    @on(ClearHost)
    def clear(self, message: ClearHost) -> None:
        self.memory.on_clear(message)
        self._end_turn()

    @on(EvictFirst)
    @on(PinHostBlocks)
    @on(UnpinHostBlocks)
    @on(SetHostQuota)
    def share(self, message: ShareMessage) -> None:
        tier = self.host
        tier.changes += 1
        if isinstance(message, EvictFirst):
            tier.evict_first(split_hashes(message.hashes))
        elif isinstance(message, PinHostBlocks):
            tier.shares.pin(message.hashes)
        elif isinstance(message, UnpinHostBlocks):
            tier.shares.unpin(message.hashes)
        else:
            residents = tier.candidates()
            tier.shares.set_quota(message.salt, message.blocks, residents, named=message.named)

    @on(EmptyHost)
    def empty(self, message: EmptyHost, envelope: Envelope[int]) -> None:
        host, self._emptying = self.host, envelope
        if message.count:
            self.memory.evict(host.victims(message.count))
        else:
            self.memory.remove([b for b in reversed(host.blocks.values()) if not b.pins])
        self._end_turn()

    # -- other actors

    @on(Copied)
    @on(CopyProgress)
    @on(Probed)
    @on(ReadDone)
    @on(Written)
    @on(StoreCleared)
    @on(DeviceFetched)
    @on(DeviceSaved)
    def completed(self, message: Completion) -> None:
        self.memory.completed(message)
        self._end_turn()

    @on(DataPlaneStatus)
    def data_plane_status(self, message: DataPlaneStatus) -> None:
        """Copies are available again, or are not for now. Lost slots hold nothing."""
        self.requests.generation = message.generation
        if message.memory_lost:
            self.memory.lose()
            self._end_turn()
        if message.available:
            for writer in self.requests.peers.writers[:1]:
                self.tell(writer, ReportLost())
            self._end_turn()
            return
        for job in list(self.memory.loads.values()):
            job.on_copies_unavailable()
            self._end_turn()

    @on(PeerRestarted)
    def peer_restarted(self, message: PeerRestarted) -> None:
        """A new notifier is sent the resident blocks. Requests to a storage actor that failed are
        ended."""
        if message.name == "flush_notifier":
            self.memory.announce(self.host.hashes())
        else:
            self.memory.peer_failed(message.name)
        self._end_turn()

    # -- observation

    def check(self) -> None:
        finish(self.check_steps())

    def check_steps(self) -> Iterator[None]:
        """AssertionError if the tier's state is wrong, or a slot is pinned although nothing is in
        flight."""
        if not (self.memory.loads or self.requests.holds_slots):
            ensure(not self.host.pinned, f"{self.host.pinned} slots pinned at rest")
            ensure(not self.host.in_transit, f"{self.host.in_transit} slots in transit at rest")
        yield from self.host.check_steps()

    def host_statistics(self) -> HostStatistics:
        host, shares = self.host, self.host.shares
        counts = self.memory.counts | {
            "quota_evictions": shares.quota_evictions,
            "pins_refused": shares.pins_refused,
            "pinned_blocks": shares.pinned,
        }
        return HostStatistics(
            slots=host.num_slots,
            resident=host.resident,
            free_slots=host.free,
            pinned=host.pinned,
            capacity=host.capacity,
            small_pages=self._arena.small_pages,
            read_block_s=self.requests.cost.reads.at(1),
            read_window_s=self.requests.cost.reads.at(WINDOW),
            **counts,
        )
