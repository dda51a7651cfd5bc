"""PrefixIndex, the part that hears of the data plane: layers that have arrived, loads that hang,
device memory that is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvactors.actor import ActorRef, Envelope, on
from kvactors.cpu_evictor.messages import LayersLoaded, LoadStalled
from kvactors.errors import LeaseEnded, RankLost
from kvactors.gpu_swapper.messages import DataPlaneStatus
from kvactors.prefix_index.messages import LayerReady, Overdue
from kvactors.prefix_index.records import Fault, Lease
from kvactors.prefix_index.room import Room
from kvactors.types import Reason


class Layers(Room):
    """Leases by number, and who waits for which layer of them."""

    def __init__(self, ref: ActorRef, **rest: Any) -> None:
        super().__init__(ref, **rest)
        self.leases: dict[int, Lease] = {}

    def find_lease(self, lease: int, envelope: Envelope[Any]) -> Lease | None:
        """The lease; if there is none any more, the asker is told."""
        found = self.leases.get(lease)
        if found is None:
            lost = (
                "it was lost when prefix_index was restarted: acquire again"
                if self.life
                else "it was finished, preempted or given back"
            )
            self.refuse(envelope, LeaseEnded(lost))
        return found

    def device_keys(self) -> bytes:
        """Names of the blocks that can be hit on the device."""
        return self.index.tree.device_keys()

    def check(self) -> None:
        """AssertionError or RuntimeError if tree, pool, leases and operations disagree; at rest
        nothing is referenced without a lease."""
        for _ in self.check_steps():
            pass

    def check_steps(self) -> Iterator[None]:
        """`check` in steps of about a millisecond, between which turns may be taken."""
        if not (
            self.leases or self.loads or self.offloads or self.saves or self.waiting or self.working
        ):
            state = self.index.tree.statistics()
            assert state["referenced"] == 0, f"{state['referenced']} nodes referenced, no lease"
            used = self.index.pool.total - self.index.free
            assert used == state["device"], f"{used} blocks in use, {state['device']} in the tree"
        yield from self.index.check_steps()

    # -- the end of a lease

    def give_back(self, lease: Lease) -> None:
        """End a lease that has its blocks."""
        self.detach(lease)
        self.release_lease(lease)
        self.room_changed()

    def release_lease(self, lease: Lease) -> None:
        """Drop its references; its own blocks are free, those of a long path later."""
        self.give_back_path(lease.tree, lease.path)

    def forget(self, lease: Lease) -> None:
        """A lease that never got its blocks."""
        self.cancel_loads(lease, 0)
        self.detach(lease)
        self.release_lease(lease)

    def detach(self, lease: Lease) -> None:
        """Take a lease out of everything that waits for or with it; its blocks stay as they are."""
        self.leases.pop(lease.id, None)
        for load in lease.ops:
            if load.owner is lease:
                load.owner = None
            else:
                load.sharers.remove(lease)
        lease.ops.clear()
        ended = "it has ended"
        waiter = self.waiting.get(lease.id) if lease.granted else None
        if waiter is not None:  # an extend
            self.stop_waiting(waiter)
            self.refuse(waiter.envelope, LeaseEnded(ended))
        for envelope in (*lease.ready, *(envelope for _, envelope in lease.layers)):
            self.refuse(envelope, LeaseEnded(ended))
        lease.ready.clear()
        lease.layers.clear()

    # -- layers

    @on(LayerReady)
    def layer_ready(self, message: LayerReady, envelope: Envelope[int]) -> None:
        """Answer once this layer has arrived for every load of the lease."""
        lease = self.find_lease(message.lease, envelope)
        if lease is not None:
            lease.layers.append((message.layer, envelope))
            self._answer_layers(lease)

    @on(LayersLoaded)
    def layers_loaded(self, message: LayersLoaded) -> None:
        """Some more layers of a load are there."""
        load = self.loads.get(message.op)
        if load is not None and load.result is None:
            load.layers, load.arriving = message.layers, message.blocks
            for lease in (load.owner, *load.sharers):
                if lease is not None:
                    self._answer_layers(lease)

    def _answer_layers(self, lease: Lease) -> None:
        if not lease.layers:
            return
        there = min((load.layers for load in lease.ops), default=None)
        waiting, lease.layers = lease.layers, []
        for layer, envelope in waiting:
            if lease.fault is not None:
                self.refuse(envelope, lease.fault.error())
            elif there is None or layer < there:
                self.answer(
                    envelope,
                    self.index.before_media(self._cached(lease), lease.media)
                    * self.index.block_size,
                )
            else:
                lease.layers.append((layer, envelope))

    def _cached(self, lease: Lease) -> int:
        """Leading blocks that are cached if everything lands that is arriving now."""
        run = lease.path.num_committed
        for load in sorted(lease.ops, key=lambda one: one.start):
            if load.start > run:
                break
            run = max(run, load.start + load.arriving)
        return min(run, lease.hoped) if lease.ops else run

    def lease_ready(self, lease: Lease) -> None:
        """See `Transfers.lease_ready`."""
        super().lease_ready(lease)
        self._answer_layers(lease)

    # -- trouble

    @on(LoadStalled)
    def load_stalled(self, message: LoadStalled) -> None:
        """Somebody whom a load needs does not answer: its leases go on without it, as if it were
        overdue."""
        self.overdue(Overdue(message.op))

    @on(DataPlaneStatus)
    def data_plane_status(self, message: DataPlaneStatus) -> None:
        """Device memory was lost, or copies are not available for now."""
        if message.memory_lost:
            self.device_lost(message.generation)
        elif not message.available:
            self.stall()

    def device_lost(self, generation: int) -> None:
        """The blocks that were resident on the device may be lost: none of them is cached, and no
        lease granted before can be relied on."""
        self.era = generation
        self.index.retire()
        self.device_cleared(Reason.RESTART)
        for lease in self.leases.values():
            lease.fault = lease.fault or Fault(
                RankLost, ("a rank was lost, and with it what this lease's blocks held there",)
            )
            for envelope in lease.ready:
                self.refuse(envelope, lease.fault.error())
            lease.ready.clear()
            self._answer_layers(lease)
        self.stall()
