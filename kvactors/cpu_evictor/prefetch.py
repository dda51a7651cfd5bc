"""One prefetch: stored blocks of a path are read into the host tier ahead of their use."""

from __future__ import annotations

from math import inf

from kvactors.cpu_evictor.actions import Action
from kvactors.cpu_evictor.memory import HostMemory
from kvactors.cpu_evictor.messages import PrefetchToHost
from kvactors.cpu_evictor.slots import HostBlock, SlotState
from kvactors.lineage import lineage
from kvactors.storage.messages import Outcome
from kvactors.types import split_hashes


class PrefetchJob:
    """Brings the leading run of a path that the host lacks and storage has to the host tier. It is
    not answered."""

    __slots__ = ("_blocks", "_first", "_hashes", "_memory", "_message")

    def __init__(self, memory: HostMemory, message: PrefetchToHost) -> None:
        self._memory = memory
        self._message = message
        self._hashes = split_hashes(message.hashes)
        self._first = 0  # position of the first block that the host lacks
        self._blocks: list[HostBlock] = []

    def begin(self) -> list[Action]:
        """Look up in storage the blocks that the host lacks."""
        message, host, requests = self._message, self._memory.host, self._memory.requests
        lacking = (
            position
            for position in range(message.start, len(self._hashes))
            if self._hashes[position] not in host.blocks
        )
        self._first = next(lacking, len(self._hashes))
        if self._first == len(self._hashes) or not (
            requests.may_read and host.capacity and message.deadline > requests.clock()
        ):
            return []
        return [requests.probe(self, self._hashes[self._first :], message.deadline)]

    def on_probed(self, found: int) -> list[Action]:
        """See `ProbeJob.on_probed`: read as many blocks as fit."""
        message, memory, host = self._message, self._memory, self._memory.host
        lacking = [
            position
            for position in range(self._first, self._first + found)
            if self._hashes[position] not in host.blocks
        ]
        if found < memory.storage.min_fetch_blocks or not lacking:
            return []
        del lacking[len(lacking) - memory.surplus(message.salt, len(lacking)) :]
        salts = {message.salt: len(lacking)}
        actions = memory.make_space(len(lacking), len(lacking), self._hashes, salts)
        space = min(host.free, host.capacity - host.resident)
        for position in lacking[:space]:
            parent = self._hashes[position - 1] if position else message.root
            block = host.add(
                self._hashes[position],
                parent,
                SlotState.RESIDENT,
                lineage(message.lineages, position, len(self._hashes), parent),
                (message.salt, 0, inf),
            )
            self._blocks.append(block)
        if self._blocks:
            actions.append(memory.requests.read(self, 0, self._blocks, message.deadline))
        return actions

    def on_read(self, first: int, outcomes: bytes) -> list[Action]:
        """See `ReadJob.on_read`."""
        memory = self._memory
        failed = frozenset(i for i, outcome in enumerate(outcomes) if outcome != Outcome.OK)
        landed = memory.host.land(self._blocks, failed)
        memory.counts.fetched += len(landed)
        for block in landed:
            block.prefetched = True
        return memory.announce_fetched(landed) + memory.keep_watermarks()
