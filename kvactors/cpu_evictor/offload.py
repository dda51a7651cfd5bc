"""One offload: blocks that the device evicts are copied into host slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from kvactors.cpu_evictor.actions import Action, send
from kvactors.cpu_evictor.memory import HostMemory
from kvactors.cpu_evictor.messages import Offload, Offloaded
from kvactors.cpu_evictor.slots import PLAIN_BLOCK, BlockTraits, HostBlock, SlotState
from kvactors.cpu_evictor.victims import set_traits
from kvactors.gpu_swapper.messages import Direction
from kvactors.lineage import lineage
from kvactors.types import split_hashes


class OffloadJob:
    """Copies evicted device blocks to the host tier, as far as it has capacity, and answers with
    `Offloaded`."""

    __slots__ = ("_blocks", "_hashes", "_kept", "_memory", "_message", "_positions")

    def __init__(self, memory: HostMemory, message: Offload) -> None:
        self._memory = memory
        self._message = message
        self._hashes = split_hashes(message.hashes)
        self._kept = bytearray(len(self._hashes))
        self._positions: list[int] = []  # of the blocks that are copied
        self._blocks: list[HostBlock] = []

    def begin(self) -> list[Action]:
        """Keep the blocks that the host has already, and copy the rest."""
        message, memory, host = self._message, self._memory, self._memory.host
        if message.memory_generation != memory.requests.generation:
            return [self._answer()]
        new: list[int] = []
        for position, block_hash in enumerate(self._hashes):
            block = host.readable(block_hash)
            if block is not None and (
                block.state is SlotState.RESIDENT or host.resident < host.capacity
            ):
                host.move(block, SlotState.RESIDENT)
                set_traits(host, block, self._traits(position))
                host.touch((block_hash,))
                self._kept[position] = 1
            elif block_hash not in host.blocks:
                new.append(position)
        actions = self._take_slots(new)
        if not self._blocks:
            return actions + self.on_copied(0, 0, frozenset())
        device_blocks = [message.blocks[position] for position in self._positions]
        copy = memory.requests.copy(self, Direction.TO_HOST, device_blocks, self._blocks)
        return [*actions, copy]

    def _take_slots(self, new: Sequence[int]) -> list[Action]:
        """Take slots for new blocks, for the last used of them if there are not enough. Blocks
        beyond the tier's capacity only pass through, on their way to storage."""
        message, memory, host = self._message, self._memory, self._memory.host
        new, staying, salts = self._sort(new)
        actions = memory.make_space(staying, len(new), self._hashes, salts)
        passing = max(0, len(new) - (host.capacity - host.resident))
        first = max(0 if memory.write_back else passing, len(new) - host.free)
        if memory.write_back:
            memory.counts.shed += first
        self._positions = list(new[first:])
        parents = split_hashes(message.parents)
        for i, position in enumerate(self._positions, first):
            parent = parents[position]
            block = host.add(
                self._hashes[position],
                parent,
                SlotState.TRANSIT if i < passing else SlotState.RESIDENT,
                lineage(message.lineages, position, len(self._hashes), parent),
                self._traits(position),
            )
            self._blocks.append(block)
        return actions

    def _sort(self, new: Sequence[int]) -> tuple[Sequence[int], int, Mapping[int, int]]:
        """Put blocks beyond the quota of their salt first: they only pass through. Returns the
        positions, how many blocks stay, and those by salt."""
        host = self._memory.host
        plain = self._message.traits is None
        salts = Counter({0: len(new)} if plain else [self._traits(position)[0] for position in new])
        over = host.resident + len(new) - host.capacity
        surplus: list[int] = []
        for salt, count in salts.items():
            beyond = host.shares.surplus(salt, count, over - len(surplus))
            if beyond:
                own = [position for position in new if self._traits(position)[0] == salt]
                surplus += own[:beyond]
        if not surplus:
            return new, len(new), salts
        passing = set(surplus)
        salts.subtract(self._traits(position)[0] for position in surplus)
        rest = [position for position in new if position not in passing]
        return [*surplus, *rest], len(rest), salts

    def _traits(self, position: int) -> BlockTraits:
        traits = self._message.traits
        if traits is None:
            return PLAIN_BLOCK
        salts, priorities, expiries = traits
        return salts[position], priorities[position], expiries[position]

    def on_copied(self, first: int, size: int, failed: frozenset[int]) -> list[Action]:
        """See `CopyJob.on_copied`."""
        memory, host, kept = self._memory, self._memory.host, self._kept
        landed = host.land(self._blocks, failed)
        for position, block in zip(self._positions, self._blocks, strict=True):
            kept[position] = block.state is SlotState.RESIDENT and not block.dropped
        for position, block_hash in enumerate(self._hashes):
            if not host.is_resident(block_hash):
                kept[position] = 0  # it was here before, and has been evicted since
        # Blocks in transit are announced as well, until they are written: otherwise indexes would
        # find them nowhere between device and storage.
        copied = [block.hash for block in landed]
        actions = memory.announce(copied + self._not_announced(frozenset(copied)))
        memory.counts.offloaded += sum(block.state is SlotState.RESIDENT for block in landed)
        actions += memory.write([block for block in landed if block.state is SlotState.TRANSIT])
        actions.append(self._answer())
        return actions + memory.keep_watermarks()

    def _not_announced(self, copied: frozenset[bytes]) -> list[bytes]:
        """Blocks that are kept without a copy, and were reported gone before (they were being
        written back)."""
        found = [
            self._memory.host.readable(block_hash)
            for block_hash, keep in zip(self._hashes, self._kept, strict=True)
            if keep and block_hash not in copied
        ]
        return [block.hash for block in found if block is not None and not block.announced]

    def _answer(self) -> Action:
        return send(
            self._memory.requests.peers.index, Offloaded(self._message.op, bytes(self._kept))
        )
