"""Completions of requests in flight: checks the reports of other actors and passes them to the
job."""

from __future__ import annotations

from kvactors.cpu_evictor.actions import Action, send
from kvactors.cpu_evictor.load import LoadJob
from kvactors.cpu_evictor.memory import HostMemory
from kvactors.cpu_evictor.messages import HostCleared, SaveUnanswered
from kvactors.cpu_evictor.reports import count_of, outcomes_of
from kvactors.cpu_evictor.requests import (
    ClearRequest,
    CopyRequest,
    FetchRequest,
    ProbeRequest,
    ReadRequest,
    SaveRequest,
    WriteRequest,
)
from kvactors.gpu_swapper.messages import Copied, CopyProgress
from kvactors.storage.messages import (
    DeviceFetched,
    DeviceSaved,
    Outcome,
    Probed,
    ReadDone,
    StoreCleared,
    Written,
)
from kvactors.types import indices_of

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
