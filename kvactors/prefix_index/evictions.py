"""Evictions of device blocks, and the copies to the host tier that some of them wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kvactors.cpu_evictor.messages import DropHostCopies, KeepHostCopies, Offload
from kvactors.native import HOST
from kvactors.prefix_index.actions import Action
from kvactors.prefix_index.announcements import Announcements
from kvactors.prefix_index.host_victims import HostVictims
from kvactors.prefix_index.index import BlockIndex, Eviction, pick_hashes
from kvactors.prefix_index.lineages import LineageSource
from kvactors.types import Reason

if TYPE_CHECKING:
    from kvactors.prefix_index.admission import Waiter


class Evictions:
    """Frees device blocks, in the order of the eviction policy.

    Args:
        offload: blocks are copied to the host tier before they are free.
        ops: numbers of operations.
        victims: of the host tier, to make space for the copies.

    Attributes:
        blocks_being_freed: device blocks that copies in flight will free, at most, without stalled
            copies.
        started: blocks evicted since this was last set to 0.
        evicted, rescued: all blocks so far, and those of them that were matched again while they
            were being copied.
    """

    def __init__(
        self,
        index: BlockIndex,
        announcements: Announcements,
        lineages: LineageSource,
        ops: Iterator[int],
        victims: HostVictims,
        *,
        offload: bool,
    ) -> None:
        self.blocks_being_freed = 0
        self.started = self.evicted = self.rescued = 0
        self._index = index
        self._announcements = announcements
        self._lineages = lineages
        self._ops = ops
        self._victims = victims
        self._offload = offload
        self._in_flight: dict[int, Eviction] = {}
        self._stalled: set[int] = set()

    def __len__(self) -> int:
        """Evictions whose copies are in flight."""
        return len(self._in_flight)

    @property
    def blocks_in_flight(self) -> int:
        """Device blocks of those, stalled ones included."""
        return sum(op.total for op in self._in_flight.values())

    def evict(self, wanted: int, salt: int = 0, incoming: int = 0) -> tuple[int, list[Action]]:
        """Begin to free `wanted` device blocks, at most a part.

        Args:
            wanted: blocks.
            salt: of the request that needs them.
            incoming: blocks that the request takes in all.

        Returns:
            How many blocks are free or will be, and the actions.
        """
        part = self._index.part
        op = self._index.evict(min(wanted, part), next(self._ops), salt, incoming)
        if not op.total:
            return op.freed, []
        self.started += op.total
        self.evicted += op.total
        if not self._offload:
            return op.total + op.freed, self._complete(
                op, bytes(state & HOST for state in op.states)
            )
        self._in_flight[op.op] = op
        self.blocks_being_freed += op.total
        lineages = self._lineages.of_eviction(op)
        generation = self._index.memory_generation
        offload = Offload(op.op, op.hashes, op.parents, op.blocks, generation, lineages, op.traits)
        return op.total + op.freed, [*self._victims.before(self.blocks_being_freed), offload]

    def evict_for(self, lacking: Callable[[], int], waiter: Waiter) -> tuple[int, list[Action]]:
        """Evict what a request lacks, see `evict`. A block with another owner leaves the tree, and
        is not free: then the next ones are evicted. lacking: blocks that are still to be freed."""
        evicted, actions = 0, list[Action]()
        while evicted < self._index.part and (deficit := lacking()) > 0:
            more, done = self.evict(deficit, waiter.salt, waiter.needed)
            actions += done
            if not more:
                break
            evicted += more
        return evicted, actions

    def drop(self, wanted: int, salt: int = 0) -> list[Action]:
        """Free device blocks without a copy, for a request of a salt. A block with another owner
        leaves the tree, and is not free: then the next ones are evicted."""
        actions, until = list[Action](), self._index.free + wanted
        while (lacking := until - self._index.free) > 0:
            op = self._index.evict(lacking, next(self._ops), salt, wanted)
            if not (op.total or op.freed):
                break
            self.evicted += op.total
            actions += self._complete(op, bytes(state & HOST for state in op.states))
        return actions

    def finish(self, op: int, on_host: bytes) -> list[Action] | None:
        """The copies of an eviction are complete: only now are its blocks free. None for an unknown
        operation. on_host: one byte a block, non-zero if the host tier has it."""
        eviction = self._remove(op)
        return None if eviction is None else self._complete(eviction, on_host)

    def stall(self) -> None:
        """The copies in flight may never complete."""
        self._stalled = set(self._in_flight)
        self.blocks_being_freed = 0

    def host_lost(self) -> list[Action]:
        """The host tier has restarted, and no copy is in flight any more."""
        actions: list[Action] = []
        for op in list(self._in_flight.values()):
            self._remove(op.op)
            actions += self._complete(op, bytes(op.total))
        return actions

    def drop_host_copies(self, hashes: bytes) -> list[Action]:
        """The device has these blocks, and has reported it: an exclusive host tier drops them."""
        if not (hashes and self._offload):
            return []
        self._index.tree.host_blocks_removed(hashes)
        return [DropHostCopies(hashes)]

    def keep_host_copies(self, hashes: bytes) -> list[Action]:
        """The device did not take these loaded blocks: an exclusive host tier keeps them."""
        return [KeepHostCopies(hashes)] if hashes and self._offload else []

    def _remove(self, op: int) -> Eviction | None:
        eviction = self._in_flight.pop(op, None)
        if op in self._stalled:
            self._stalled.remove(op)
        elif eviction is not None:
            self.blocks_being_freed -= eviction.total
        return eviction

    def _complete(self, op: Eviction, on_host: bytes) -> list[Action]:
        past = frozenset(op.tree.forgotten(op.nodes)) if op.tree.sharing else frozenset()
        went, stayed = self._index.finish_evict(op, on_host)
        self.rescued += len(stayed)
        if op.tree.retired:
            return []
        if past:
            went = [j for j in went if j not in past]
            stayed = [j for j in stayed if j not in past]
        actions: list[Action] = []
        for hosted, reason in ((True, Reason.DEVICE_EVICTION), (False, Reason.DEVICE_DROP)):
            gone = pick_hashes(op.hashes, [j for j in went if bool(on_host[j]) is hosted])
            actions += self._announcements.removed(gone, reason)
        return actions + self.drop_host_copies(
            pick_hashes(op.hashes, [j for j in stayed if on_host[j]])
        )
