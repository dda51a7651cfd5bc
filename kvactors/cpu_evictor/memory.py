"""Host memory: blocks that enter and leave the host tier, and the reports to indexes about them."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING

from kvactors.config import HostConfig, StorageConfig
from kvactors.cpu_evictor.actions import Action, send
from kvactors.cpu_evictor.messages import (
    ClearHost,
    HostBlocksAdded,
    HostBlocksRemoved,
    HostCleared,
)
from kvactors.cpu_evictor.movements import WINDOW, Movements
from kvactors.cpu_evictor.requests import RequestTable
from kvactors.cpu_evictor.slots import NOTHING, HostBlock, HostTier, SlotState
from kvactors.cpu_evictor.statistics import Counts
from kvactors.cpu_evictor.victims import clear_salt
from kvactors.flush_notifier.messages import BlocksAdded, BlocksRemoved, TierCleared
from kvactors.types import Reason, Tier, join_hashes, split_hashes

if TYPE_CHECKING:
    from kvactors.cpu_evictor.load import LoadJob

WRITE_BATCH = WINDOW
"""Blocks of one write message, at most: their slots come back together."""


class HostMemory:
    """Eviction, write-back and reports, for all jobs of the host tier.

    Attributes:
        host: the slots.
        requests: requests in flight.
        movements: those that wait for slots.
        loads: in flight, by operation.
        counts: see `Counts`.
        exclusive: whether a block leaves the host tier when the device has it.
        clears: `ClearHost` messages handled. Sent with hints, so that the index can tell those from
            before a clear.
    """

    def __init__(
        self, host: HostTier, requests: RequestTable, config: HostConfig, storage: StorageConfig
    ) -> None:
        self.host = host
        self.requests = requests
        self.movements = Movements(
            host, evict=self.evict, slots_come_back=self.slots_come_back, let_go=self.let_go
        )
        self.loads: dict[int, LoadJob] = {}
        self.config = config
        self.storage = storage
        self.counts = Counts()
        self.exclusive = config.mode == "exclusive" or not config.slots
        self.write_back = storage.saves == "write_back" and bool(requests.peers.writers)
        self.clears = 0
        self._index = requests.peers.index
        self._notifier = requests.peers.notifier
        self._held: list[HostBlock] = []  # evicted, and pinned, while no write may begin

    def slots_come_back(self) -> bool:
        """Whether an event is to come that returns slots: requests to the swapper and to storage
        end, each within a deadline, and the index discards blocks that the device has."""
        return bool(self._held) or self.requests.holds_slots or self.host.on_device > 0

    def let_go(self) -> list[Action]:
        """The slots that loads without device blocks have taken ahead come back."""
        actions: list[Action] = []
        for load in self.loads.values():
            actions += load.let_go()
        return actions

    # -- eviction

    def make_space(
        self,
        incoming: int,
        slots: int,
        protected: Container[bytes] = (),
        salts: Mapping[int, int] = NOTHING,
    ) -> list[Action]:
        """Evict until `incoming` more residents fit the capacity. Victims are not written back as
        far as fewer than `slots` slots are free. salts: the incoming ones by salt."""
        over = self.host.resident + incoming - self.host.capacity
        return self.evict(self.host.victims(over, protected, salts), slots)

    @property
    def may_wait(self) -> bool:
        """Whether a movement to the store waits for slots, or sheds what finds none now."""
        host, movements = self.host, self.movements
        if movements.behind:
            movements.behind = host.free * 2 < host.num_slots - host.capacity
        return self.storage.on_full == "wait" and not movements.behind

    def surplus(self, salt: int, incoming: int) -> int:
        """Incoming blocks of a salt that do not stay, see `HostShares.surplus`."""
        host = self.host
        over = host.resident + incoming - host.capacity
        return host.shares.surplus(salt, incoming, over)

    def keep_watermarks(self) -> list[Action]:
        """Above the high watermark evict down to the low one."""
        host, config = self.host, self.config
        high = config.high_watermark * host.capacity
        if not high or host.resident <= high:
            return []
        low = int(config.low_watermark * host.capacity)
        return self.evict(host.victims(host.resident - low))

    def evict(self, victims: Sequence[HostBlock], slots: int = 0) -> list[Action]:
        """Evict blocks, least recently used first: written back if that is the policy and there are
        slots to spare, else dropped.

        Indexes are sent that a block left the host when its write is over: until then a load finds
        it in its slot.
        """
        if not victims:
            return []
        host = self.host
        self.counts.evicted += len(victims)
        shed = len(victims)
        if self.write_back:
            shed = max(0, min(len(victims), slots - host.free))
            self.counts.shed += shed
        hashes = join_hashes(block.hash for block in victims)
        actions: list[Action] = [send(self._index, HostBlocksRemoved(hashes))]
        actions += self.remove(victims[:shed])
        for block in victims[shed:]:
            host.move(block, SlotState.TRANSIT)
            host.pin(block)
        self._held += victims[shed:]
        return actions + self.write_held()

    # -- writes to storage

    def write_held(self) -> list[Action]:
        """Write evicted blocks that were held back, unless a probe is in flight: a store of limited
        size must not evict for them what is about to be read."""
        if not self._held or self.requests.holds_writes:
            return []
        held, self._held = self._held, []
        for block in held:
            self.host.unpin(block)
        return self.write([block for block in held if not block.dropped])

    def write(self, blocks: Sequence[HostBlock]) -> list[Action]:
        """Write blocks to storage, least recently used first. Each is pinned until its batch has
        ended."""
        actions: list[Action] = []
        for start in range(0, len(blocks), WRITE_BATCH):
            batch = blocks[start : start + WRITE_BATCH]
            for block in batch:
                self.host.pin(block)
            actions.append(self.requests.write(batch))
        return actions

    def on_written(self, batch: Sequence[HostBlock], outcomes: bytes) -> list[Action]:
        """A batch has ended. The writer has reported the blocks that are stored now.

        Args:
            batch: the blocks of the write.
            outcomes: one `Outcome` for each.
        """
        actions = self.remove([block for block in batch if block.state is SlotState.TRANSIT])
        for block, outcome in zip(batch, outcomes, strict=True):
            self.counts.count_written(outcome)
            self.host.unpin(block)
            if block.state is SlotState.LEAVING and not (block.pins or block.on_device):
                actions += self.keep_if_space([block])
        return actions

    # -- blocks that leave

    def keep_if_space(self, blocks: Sequence[HostBlock]) -> list[Action]:
        """Blocks were leaving for the device and did not arrive there: they stay as far as the
        capacity allows, and the others are evicted."""
        host = self.host
        found = [block for block in blocks if not block.dropped]
        space = max(0, host.capacity - host.resident)
        for block in found[:space]:
            host.move(block, SlotState.RESIDENT)
        return self.evict(found[space:])

    def remove(self, blocks: Sequence[HostBlock]) -> list[Action]:
        """Drop blocks, and report those gone that were announced."""
        actions = self._report_gone(
            [block for block in blocks if not block.dropped], Reason.CPU_EVICTION
        )
        for block in blocks:
            self.host.drop(block)
        return actions

    def drop_host_copies(self, hashes: bytes) -> list[Action]:
        """The device holds these blocks: an exclusive tier drops them."""
        if not self.exclusive:
            return []
        found = [
            block
            for block_hash in split_hashes(hashes)
            if (block := self.host.blocks.get(block_hash)) is not None
        ]
        actions = self._report_gone(found, Reason.PROMOTION)
        dropped = [
            block for block in found if block.state is not SlotState.TRANSIT and not block.arriving
        ]
        for block in dropped:
            self.host.drop(block)
        # A HostBlocksAdded or Offloaded with such a block may have been sent after the
        # DropHostCopies was.
        if dropped:
            removed = join_hashes(block.hash for block in dropped)
            actions.append(send(self._index, HostBlocksRemoved(removed)))
        return actions

    def keep_host_copies(self, hashes: bytes) -> list[Action]:
        """The device did not take these blocks, deepest last: those that were leaving stay as far
        as the capacity allows, and the others are evicted."""
        found = [
            block
            for block_hash in reversed(split_hashes(hashes))
            if (block := self.host.blocks.get(block_hash)) is not None and block.on_device
        ]
        for block in found:
            self.host.mark_not_on_device(block)
        return self.keep_if_space([block for block in found if not block.pins])

    def on_clear(self, message: ClearHost) -> list[Action]:
        """Drop every block, or those of a salt, on request those in storage too."""
        salt = message.salt
        actions = self.clear() if salt is None else self.clear_salt(salt)
        return [*actions, self.clear_store(message.op, salt)] if message.storage else actions

    def clear(self) -> list[Action]:
        """Drop every block. Copies in flight end on blocks that are not found any longer."""
        self.host.clear()
        self.host.shares.unpin(b"")
        self.clears += 1
        return [send(self._notifier, TierCleared(Tier.HOST, Reason.CLEAR))]

    def clear_salt(self, salt: int) -> list[Action]:
        """Drop every block of a salt. Copies in flight end on blocks that are not found."""
        actions = self._report_gone(clear_salt(self.host, salt), Reason.CLEAR)
        self.clears += 1
        return actions

    def lose(self) -> list[Action]:
        """The bytes in the slots may be lost."""
        self.host.clear()
        return [self.announce_restart()]

    def announce_restart(self) -> Action:
        """No block of before is in the host tier."""
        return send(self._notifier, TierCleared(Tier.HOST, Reason.RESTART))

    def clear_store(self, op: int, salt: int | None) -> Action:
        """Clear the store, or remove the objects of a salt. `HostCleared` with this op is sent when
        that is done."""
        if not self.requests.peers.writers:
            return send(self._index, HostCleared(op, ""))
        return self.requests.clear_store(op, salt)

    def _report_gone(self, blocks: Sequence[HostBlock], reason: Reason) -> list[Action]:
        announced = [block for block in blocks if block.announced]
        for block in announced:
            block.announced = False
        if not announced:
            return []
        hashes = join_hashes(block.hash for block in announced)
        return [send(self._notifier, BlocksRemoved(hashes, Tier.HOST, reason))]

    # -- blocks that enter

    def announce(self, hashes: Sequence[bytes]) -> list[Action]:
        """Report blocks resident on the host."""
        if not hashes:
            return []
        for block_hash in hashes:
            self.host.blocks[block_hash].announced = True
        return [send(self._notifier, BlocksAdded(join_hashes(hashes), Tier.HOST, Reason.OFFLOAD))]

    def announce_fetched(self, blocks: Sequence[HostBlock]) -> list[Action]:
        """Report blocks that have come from storage to stay, to indexes and to the prefix index."""
        if not blocks:
            return []
        hashes = [block.hash for block in blocks]
        hint = HostBlocksAdded(join_hashes(hashes), self.clears, self.requests.generation)
        return [*self.announce(hashes), send(self._index, hint)]
