"""CpuEvictor, the part that hears of device memory: layers of a load that have arrived, copies that
cannot be made, slots that are lost, blocks that the device holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvactors.actor import ActorRef, on
from kvactors.cpu_evictor.direct import Direct
from kvactors.cpu_evictor.load import LoadJob
from kvactors.cpu_evictor.messages import Discard, HostGone, LayersLoaded, LoadStalled
from kvactors.cpu_evictor.slots import SlotState
from kvactors.flush_notifier.messages import Cleared
from kvactors.gpu_swapper.messages import HostChanged
from kvactors.storage.messages import Recount
from kvactors.types import Reason, Tier, join_keys, split_keys


class Plane(Direct):
    """layerwise: whether loads are to be told of layer by layer."""

    def __init__(self, ref: ActorRef, *, layerwise: bool, **rest: Any) -> None:
        super().__init__(ref, **rest)
        self.layerwise = layerwise
        self.loads: dict[int, LoadJob] = {}

    def progress_of(self, job: LoadJob, first: int) -> Callable[[int], None] | None:
        """What to do when layers of a copy of the load's blocks from position `first` on have
        arrived."""
        if not self.layerwise:
            return None
        job.layers[first] = 0

        def note(layers: int) -> None:
            before = job.reached()
            job.layers[first] = layers
            if job.reached() > before and not (job.fetching or job.over):
                self.tell(self.index, LayersLoaded(job.op, job.reached(), len(job.entries)))

        return note

    @on(HostChanged)
    def host_changed(self, message: HostChanged) -> None:
        """Loads do not wait for whoever does not answer; lost slots hold nothing."""
        self.era = message.era
        if message.lost:
            self.host.clear()
            self.tell(self.notifier, Cleared(Tier.HOST, Reason.RESTART))
        if message.possible:
            for writer in self.writers[:1]:
                self.tell(writer, Recount())
            return
        for job in list(self.loads.values()):
            job.late = job.late or job.fetching
            if job.copies and job.blocks is not None:
                self.tell(self.index, LoadStalled(job.op))
            else:
                self.load_moved(job)

    @on(Discard)
    def discard(self, message: Discard) -> None:
        """The device holds these: an exclusive tier forgets them."""
        if not self.exclusive:
            return
        found = [
            entry
            for key in split_keys(message.keys)
            if (entry := self.host.entries.get(key)) is not None
        ]
        self.gone(found, Reason.PROMOTION)
        dropped = [
            entry for entry in found if entry.place is not SlotState.TRANSIT and not entry.arriving
        ]
        for entry in dropped:
            self.host.drop(entry)
        # A HostGained or Offloaded with these may have been sent after the index sent this Discard.
        if dropped:
            self.tell(self.index, HostGone(join_keys(entry.key for entry in dropped)))
