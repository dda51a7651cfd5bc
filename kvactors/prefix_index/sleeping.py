"""An index that gets ready for sleep: no lease is open, and every block leaves the device."""

from __future__ import annotations

from kvactors.actor import Envelope
from kvactors.errors import LeasesOpen
from kvactors.prefix_index.actions import Action, Refusal, Reply
from kvactors.prefix_index.admission import Admission
from kvactors.prefix_index.announcements import Announcements
from kvactors.prefix_index.evictions import Evictions
from kvactors.prefix_index.held import HeldRequests
from kvactors.prefix_index.index import BlockIndex
from kvactors.prefix_index.leases import LeaseTable
from kvactors.prefix_index.messages import Ack
from kvactors.prefix_index.pins import Pins
from kvactors.types import Reason


class Sleep:
    """Empties the device for a sleep, a part a turn: each block is evicted as for a request, so
    that the host tier gets a copy as far as it has capacity, and sinks are sent each removal."""

    def __init__(
        self,
        index: BlockIndex,
        held: HeldRequests,
        leases: LeaseTable,
        evictions: Evictions,
        announcements: Announcements,
        admission: Admission,
        pins: Pins,
    ) -> None:
        self._index = index
        self._held = held
        self._leases = leases
        self._evictions = evictions
        self._announcements = announcements
        self._admission = admission
        self._pins = pins
        self._envelope: Envelope[Ack] | None = None

    def begin(self, envelope: Envelope[Ack]) -> list[Action]:
        """Refuse new requests from now on, and end all pins. Answered when nothing is on the
        device."""
        if self._is_busy():
            return [Refusal(envelope, LeasesOpen(len(self._leases)))]
        self._held.asleep = True
        self._envelope = envelope
        self._admission.on_idle = self._on_idle
        return self._pins.end_all() + self._admission.serve_waiting()

    def end(self) -> None:
        """Admit requests again."""
        self._held.asleep = False
        self._admission.on_idle = None
        self._envelope = None

    def _is_busy(self) -> bool:
        admission = self._admission
        return bool(self._leases or admission.waiting or admission.heads())

    def _on_idle(self) -> list[Action]:
        """No transfer is in flight: evict the next part, or answer."""
        envelope = self._envelope
        if envelope is None or envelope.abandoned:
            return []  # its caller ends the sleep
        evicted, actions = self._evictions.evict(self._index.part)
        if evicted:
            return actions + self._admission.proceed_later()
        self._admission.on_idle = self._envelope = None
        tree = self._index.tree.statistics()
        if tree["referenced"] or self._index.reserved or self._is_busy():  # it came before
            self.end()
            return [*actions, Refusal(envelope, LeasesOpen(len(self._leases)))]
        if tree["device"]:  # blocks that no eviction takes
            self._index.retire()
            actions += self._announcements.cleared(Reason.CLEAR)
        return [*actions, Reply(envelope, Ack())]
