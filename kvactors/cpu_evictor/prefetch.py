"""One prefetch: stored blocks of a path are read into the host tier ahead of their use."""

from __future__ import annotations

from math import inf
from typing import ClassVar

from kvactors.cpu_evictor.actions import Action
from kvactors.cpu_evictor.memory import HostMemory
from kvactors.cpu_evictor.messages import PrefetchToHost
from kvactors.cpu_evictor.slots import HostBlock, SlotState
from kvactors.lineage import lineage
from kvactors.storage.messages import Outcome
from kvactors.types import split_hashes


class PrefetchJob:
    """Brings the leading run of a path that the host lacks and storage has to the host tier, in
    windows of slots. It is not answered."""

    URGENT: ClassVar[bool] = False

    __slots__ = ("_first", "_generation", "_hashes", "_memory", "_message", "_reads", "_waiting")

    def __init__(self, memory: HostMemory, message: PrefetchToHost) -> None:
        self._memory = memory
        self._message = message
        self._hashes = split_hashes(message.hashes)
        self._first = 0  # position of the first block that the host lacks
        self._generation = memory.host.generation
        self._waiting: list[int] = []  # positions that have no slot yet, the next one last
        self._reads: dict[int, list[HostBlock]] = {}  # by their first position

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
        """See `ProbeJob.on_probed`: read as many blocks as the tier keeps."""
        message, memory, host = self._message, self._memory, self._memory.host
        lacking = [
            position
            for position in range(self._first, self._first + found)
            if self._hashes[position] not in host.blocks
        ]
        if found < memory.storage.min_fetch_blocks or not lacking:
            return []
        stays = len(lacking) - memory.surplus(message.salt, len(lacking))
        self._waiting = lacking[: min(stays, host.capacity)][::-1]
        return memory.movements.enter(self) if self._waiting else []

    @property
    def op(self) -> int:
        """See `Movement.op`: it waits until its deadline."""
        return 0

    @property
    def lacking(self) -> int:
        """See `Movement.lacking`."""
        return len(self._waiting)

    def take(self, most: int) -> list[Action]:
        """See `Movement.take`: read the next blocks. The first that cannot stay ends the
        prefetch."""
        message, memory, host = self._message, self._memory, self._memory.host
        requests, waiting = memory.requests, self._waiting
        most = min(most, len(waiting))
        ended = self._generation != host.generation or not requests.may_read
        if ended or message.deadline <= requests.clock():
            return self.give_up()
        actions = memory.make_space(most, 0, frozenset(self._hashes), {message.salt: most})
        blocks: list[HostBlock] = []
        first = waiting[-1]
        while waiting and len(blocks) < most and host.free:
            if host.resident >= host.capacity:
                waiting.clear()
                break
            position = waiting.pop()
            if self._hashes[position] in host.blocks:
                continue
            parent = self._hashes[position - 1] if position else message.root
            block = host.add(
                self._hashes[position],
                parent,
                SlotState.RESIDENT,
                lineage(message.lineages, position, len(self._hashes), parent),
                (message.salt, 0, inf),
            )
            blocks.append(block)
        if blocks:
            self._reads[first] = blocks
            actions.append(requests.read(self, first, blocks, message.deadline))
        return actions

    def give_up(self) -> list[Action]:
        """See `Movement.give_up`."""
        self._waiting.clear()
        return []

    def on_read(self, first: int, outcomes: bytes) -> list[Action]:
        """See `ReadJob.on_read`."""
        memory = self._memory
        failed = frozenset(i for i, outcome in enumerate(outcomes) if outcome != Outcome.OK)
        landed = memory.host.land(self._reads.pop(first), failed)
        memory.counts.fetched += len(landed)
        for block in landed:
            block.prefetched = True
        return memory.announce_fetched(landed) + memory.keep_watermarks()
