"""Host tier manager: slots, eviction, and every movement through host memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

from kvactors.actor import Actor, ActorRef, Message, PeerRestarted, on
from kvactors.actor.actor import Timer
from kvactors.actor.clock import now
from kvactors.config import HostConfig, StorageConfig
from kvactors.cpu_evictor.actions import Action, Send, StartTimer
from kvactors.cpu_evictor.load import LoadJob
from kvactors.cpu_evictor.memory import HostMemory
from kvactors.cpu_evictor.messages import (
    Admit,
    Admitted,
    Cancel,
    ClearHost,
    Discard,
    HostCleared,
    HostGained,
    HostGone,
    LayersLoaded,
    Load,
    Loaded,
    LoadStalled,
    Offload,
    Offloaded,
    Overdue,
    Place,
    Prefetch,
    SaveUnanswered,
)
from kvactors.cpu_evictor.offload import OffloadJob
from kvactors.cpu_evictor.prefetch import PrefetchJob
from kvactors.cpu_evictor.reports import count_of, outcomes_of
from kvactors.cpu_evictor.requests import (
    ClearRequest,
    CopyRequest,
    FetchRequest,
    Peers,
    ProbeRequest,
    ReadRequest,
    Requests,
    SaveRequest,
    WriteRequest,
)
from kvactors.cpu_evictor.save import SaveJob
from kvactors.cpu_evictor.slots import HostTier
from kvactors.cpu_evictor.statistics import HostStatistics, host_statistics
from kvactors.device.arena import Arena
from kvactors.flush_notifier.messages import Cleared, Gained, Gone
from kvactors.gpu_swapper.messages import Copied, Copy, CopyProgress, HostChanged
from kvactors.storage.messages import (
    ClearStore,
    FetchDevice,
    Fetched,
    Outcome,
    Probe,
    Probed,
    Read,
    ReadDone,
    Recount,
    Saved,
    SaveDevice,
    StoreCleared,
    Write,
    Written,
)
from kvactors.types import indices_of


class CpuEvictor(Actor):
    """Owns the host slots. It alone hands them out, so it leads every movement through host memory.

    Handlers call pure objects, which return the actions to carry out: a job for each offload, load,
    prefetch and finished request, `HostMemory` for what they share, and `Requests` for what is in
    flight.

    Args:
        direct: actor of a store that moves device memory itself, None without one.
        layerwise: whether the index is sent the progress of loads by layers.
        era: memory generation at the start.
    """

    ROLE: ClassVar[str] = "cpu_evictor"
    SENDS: ClassVar[Mapping[str, tuple[type[Message], ...]]] = {
        "gpu_swapper": (Copy,),
        "storage_reader": (Probe, Read),
        "storage_writer": (Write, ClearStore, Recount),
        "storage_direct": (FetchDevice, SaveDevice),
        "flush_notifier": (Gained, Gone, Cleared),
        "prefix_index": (
            Offloaded,
            Loaded,
            Admitted,
            HostGained,
            HostGone,
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
        arena: Arena,
        index: ActorRef,
        swapper: ActorRef,
        readers: Sequence[ActorRef],
        writers: Sequence[ActorRef],
        notifier: ActorRef,
        direct: ActorRef | None,
        layerwise: bool,
        era: int,
    ) -> None:
        super().__init__(ref)
        self.layerwise = layerwise
        self.peers = Peers(index, swapper, readers, writers, notifier, direct)
        self.host = HostTier(config.slots, arena.num_slots, arena.in_use)
        self.requests = Requests(self.peers, storage, era, now)
        self.memory = HostMemory(self.host, self.requests, config, storage)
        self.loads: dict[int, LoadJob] = {}
        self._timers_of: dict[object, Timer] = {}  # by job

    def started(self) -> None:
        """A later incarnation begins with an empty host tier."""
        if self.life:
            self._perform([self.memory.announce_restart()])

    def _perform(self, actions: Iterable[Action]) -> None:
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
        job = LoadJob(self.memory, message, self.loads, layerwise=self.layerwise)
        self._perform(job.begin())

    @on(Place)
    def place(self, message: Place) -> None:
        """The device blocks of a load that began without."""
        if (job := self.loads.get(message.op)) is not None:
            self._perform(job.place(message.blocks))

    @on(Cancel)
    def cancel(self, message: Cancel) -> None:
        """A load that was never placed is not wanted any longer."""
        if (job := self.loads.get(message.op)) is not None:
            self._perform(job.cancel())

    @on(Overdue)
    def overdue(self, message: Overdue) -> None:
        """The deadline of a load that waits for storage."""
        if (job := self.loads.get(message.op)) is not None:
            self._perform(job.on_deadline())

    @on(Prefetch)
    def prefetch(self, message: Prefetch) -> None:
        """Bring blocks that storage has to the host."""
        self._perform(PrefetchJob(self.memory, message).begin())

    @on(Admit)
    def admit(self, message: Admit) -> None:
        """Keep and save the path of a finished request."""
        self._perform(SaveJob(self.memory, message).begin())

    @on(SaveUnanswered)
    def save_unanswered(self, message: SaveUnanswered) -> None:
        """The store has not answered in time what it has of a finished request: nothing is saved,
        so that the device blocks are not held for it. The next finish offers them again."""
        if (request := self.requests.take(message.op, ProbeRequest)) is not None:
            self._perform(request.job.on_probed(request.size))

    @on(Discard)
    def discard(self, message: Discard) -> None:
        """The device holds these blocks."""
        self._perform(self.memory.discard(message.keys))

    @on(ClearHost)
    def clear(self, message: ClearHost) -> None:
        """Forget every block, on request those in storage too."""
        self._perform(self.memory.clear())
        if message.storage:
            self._perform([self.memory.clear_store(message.op)])

    # -- completions of copies

    @on(CopyProgress)
    def copy_progress(self, message: CopyProgress) -> None:
        """Some layers of a copy have arrived."""
        request = self.requests.get(message.op, CopyRequest)
        if request is not None and isinstance(request.job, LoadJob):
            self._perform(request.job.on_layers(request.first, message.layers))

    @on(Copied)
    def copied(self, message: Copied) -> None:
        """A copy has ended."""
        if (request := self.requests.take(message.op, CopyRequest)) is not None:
            failed = indices_of(message.failed, request.size)
            self.memory.counts.copy_failures += len(failed)
            self._perform(request.job.on_copied(request.first, request.size, failed))

    @on(HostChanged)
    def host_changed(self, message: HostChanged) -> None:
        """Copies are available again, or are not for now. Lost slots hold nothing."""
        self.requests.generation = message.era
        if message.lost:
            self._perform(self.memory.lose())
        if message.possible:
            self._perform(Send(writer, Recount()) for writer in self.peers.writers[:1])
            return
        for job in list(self.loads.values()):
            self._perform(job.on_copies_unavailable())

    # -- completions of storage

    @on(Probed)
    def probed(self, message: Probed) -> None:
        """A probe has ended. Reads that follow are sent before the writes that were held back."""
        request = self.requests.take(message.op, ProbeRequest)
        if request is None:
            return
        found = count_of(message.found, request.size)
        if not request.HOLDS_WRITES:
            self._perform(request.job.on_probed(found))
            return
        # During a clear, blocks from before it may have been found.
        self._perform(request.job.on_probed(found if self.requests.may_read else 0))
        self._perform(self.memory.write_held())

    @on(ReadDone)
    def read_done(self, message: ReadDone) -> None:
        """A read has ended."""
        if (request := self.requests.take(message.op, ReadRequest)) is not None:
            outcomes = outcomes_of(message.outcomes, request.size)
            self._perform(request.job.on_read(request.first, outcomes))

    @on(Written)
    def write_done(self, message: Written) -> None:
        """A write has ended."""
        if (request := self.requests.take(message.op, WriteRequest)) is not None:
            outcomes = outcomes_of(message.outcomes, request.size)
            self._perform(self.memory.on_written(request.blocks, outcomes))

    @on(StoreCleared)
    def store_cleared(self, message: StoreCleared) -> None:
        """The store is empty, or could not be emptied."""
        if (request := self.requests.take(message.op, ClearRequest)) is not None:
            self.tell(self.peers.index, HostCleared(request.op, message.error))

    @on(Fetched)
    def fetched(self, message: Fetched) -> None:
        """A device store writes to these device blocks no longer."""
        if (request := self.requests.take(message.op, FetchRequest)) is not None:
            fetched = count_of(message.good, request.size)
            self._perform(request.job.on_fetched(request.first, fetched))

    @on(Saved)
    def saved(self, message: Saved) -> None:
        """A device store reads from these device blocks no longer."""
        if (request := self.requests.take(message.op, SaveRequest)) is not None:
            saved = count_of(message.good, request.size)
            self.memory.counts.written += saved
            self.memory.counts.write_failures += request.size - saved
            self._perform(request.job.on_saved())

    @on(PeerRestarted)
    def peer_restarted(self, message: PeerRestarted) -> None:
        """A new notifier is sent what is resident. Requests to a storage actor that failed will not
        be answered: a clear is sent again, the others end without success."""
        if message.name == "flush_notifier":
            self._perform(self.memory.announce(self.host.keys()))
            return
        for op, request in self.requests.open_at(message.name):
            failed = bytes([Outcome.UNAVAILABLE]) * request.size
            if isinstance(request, ClearRequest):
                self.requests.take(op, ClearRequest)
                self._perform([self.memory.clear_store(request.op)])
            elif isinstance(request, ProbeRequest):
                self.probed(Probed(op, 0))
            elif isinstance(request, ReadRequest):
                self.read_done(ReadDone(op, failed))
            elif isinstance(request, WriteRequest):
                self.write_done(Written(op, failed))
            elif isinstance(request, FetchRequest):
                self.fetched(Fetched(op, 0))
            elif isinstance(request, SaveRequest):
                self.saved(Saved(op, 0))

    # -- observation

    @property
    def exclusive(self) -> bool:
        """Whether a block leaves the host tier when the device has it."""
        return self.memory.exclusive

    def host_keys(self) -> list[bytes]:
        """Hashes of the blocks that a load finds on the host: see `HostTier.keys`."""
        return self.host.keys()

    def check(self) -> None:
        """AssertionError if the tier's state is wrong, or a slot is pinned although nothing is in
        flight."""
        for _ in self.check_steps():
            pass

    def check_steps(self) -> Iterator[None]:
        """`check` in steps of about a millisecond, between which turns may be taken."""
        if not (self.loads or self.requests.holds_slots):
            assert not self.host.pinned, f"{self.host.pinned} slots pinned at rest"
            assert not self.host.in_transit, f"{self.host.in_transit} slots in transit at rest"
        yield from self.host.check_steps()

    def host_statistics(self) -> HostStatistics:
        """The host tier at this moment."""
        return host_statistics(self.host, self.memory.counts)
