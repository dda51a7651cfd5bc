"""One offload: blocks that the device evicts are copied into host slots."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import ClassVar

from kvactors.cpu_evictor.actions import Action, StartTimer, StopTimer, send
from kvactors.cpu_evictor.memory import HostMemory
from kvactors.cpu_evictor.messages import Offload, Offloaded, SlotDeadline
from kvactors.cpu_evictor.slots import PLAIN_BLOCK, BlockTraits, HostBlock, SlotState, set_traits
from kvactors.data_plane.base import Direction
from kvactors.identity import lineage
from kvactors.types import split_hashes


class OffloadJob:
    """Copies evicted device blocks to the host tier, as far as it has capacity, in windows of
    slots, and answers with `Offloaded`.

    The victims that leave the tier for them leave first: those that are written back give their
    slots to later windows.
    """

    URGENT: ClassVar[bool] = True

    __slots__ = (
        "_copies",
        "_generation",
        "_hashes",
        "_memory",
        "_message",
        "_parents",
        "_passing",
        "_timed",
        "_waiting",
        "_windows",
    )

    def __init__(self, memory: HostMemory, message: Offload) -> None:
        self._memory = memory
        self._message = message
        self._hashes = split_hashes(message.hashes)
        self._parents = split_hashes(message.parents)
        self._generation = memory.host.generation
        self._waiting: deque[int] = deque()  # positions that have no slot yet
        self._passing: frozenset[int] = frozenset()  # those that only pass through
        self._windows = 0
        self._copies: dict[int, list[HostBlock]] = {}  # by window
        self._timed = False

    def begin(self) -> list[Action]:
        """Keep the blocks that the host has already, and copy the rest."""
        message, memory, host = self._message, self._memory, self._memory.host
        if message.memory_generation != memory.requests.generation:
            return [self._answer(bytes(len(self._hashes)))]
        new: list[int] = []
        for position, block_hash in enumerate(self._hashes):
            block = host.readable(block_hash)
            if block is not None and (
                block.state is SlotState.RESIDENT or host.resident < host.capacity
            ):
                host.move(block, SlotState.RESIDENT)
                set_traits(host, block, self._traits(position))
                host.touch((block_hash,))
            elif block_hash not in host.blocks:
                new.append(position)
        # Under write_through the store has these blocks already: none is worth a wait.
        wait = memory.may_wait and memory.storage.saves != "write_through"
        actions = self._make_space(new, wait=wait)
        if not self._waiting or not wait:
            return actions + self.take(len(self._waiting))
        actions += memory.movements.enter(self)
        if self._waiting:
            self._timed = True
            seconds = memory.storage.on_full_wait_s
            actions.append(StartTimer(self, seconds, SlotDeadline(message.op)))
        return actions

    def _make_space(self, new: Sequence[int], *, wait: bool) -> list[Action]:
        """Evict for new blocks. Those beyond the tier's capacity only pass through, on their way to
        storage. wait: for slots. If not, and there are not enough, the last used blocks get them.
        """
        memory, host = self._memory, self._memory.host
        new, staying, salts = self._sort(new)
        slots = 0 if wait else len(new)
        actions = memory.make_space(staying, slots, frozenset(self._hashes), salts)
        passing = max(0, len(new) - (host.capacity - host.resident))
        first = 0 if memory.write_back else passing
        if not wait:
            first = max(first, len(new) - host.free)
            memory.counts.shed += first if memory.write_back else 0
        self._passing = frozenset(new[first:passing])
        self._waiting.extend(new[first:])
        return actions

    @property
    def op(self) -> int:
        """See `Movement.op`."""
        return self._message.op

    @property
    def lacking(self) -> int:
        """See `Movement.lacking`."""
        return len(self._waiting)

    def take(self, most: int) -> list[Action]:
        """See `Movement.take`: copy the next blocks, least recently used first."""
        message, memory, host = self._message, self._memory, self._memory.host
        requests, waiting = memory.requests, self._waiting
        if self._generation != host.generation or message.memory_generation != requests.generation:
            # Blocks from before a clear, or of a lost memory, may not enter the host tier.
            waiting.clear()
        positions: list[int] = []
        blocks: list[HostBlock] = []
        while waiting and len(blocks) < most and host.free:
            position = waiting.popleft()
            stays = position not in self._passing and host.resident < host.capacity
            if self._hashes[position] in host.blocks or not (stays or memory.write_back):
                continue
            parent = self._parents[position]
            block = host.add(
                self._hashes[position],
                parent,
                SlotState.RESIDENT if stays else SlotState.TRANSIT,
                lineage(message.lineages, position, len(self._hashes), parent),
                self._traits(position),
            )
            positions.append(position)
            blocks.append(block)
        if not blocks:
            return self._answer_if_complete()
        self._windows += 1
        self._copies[self._windows] = blocks
        device_blocks = [message.blocks[position] for position in positions]
        return [requests.copy(self, Direction.TO_HOST, device_blocks, blocks, first=self._windows)]

    def give_up(self) -> list[Action]:
        """See `Movement.give_up`."""
        if self._memory.write_back:
            self._memory.counts.shed += len(self._waiting)
        self._waiting.clear()
        return self._answer_if_complete()

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
        """See `CopyJob.on_copied`. first: the window."""
        memory = self._memory
        landed = memory.host.land(self._copies.pop(first), failed)
        # Blocks in transit are announced as well, until they are written: otherwise indexes would
        # find them nowhere between device and storage.
        actions = memory.announce([block.hash for block in landed])
        memory.counts.offloaded += sum(block.state is SlotState.RESIDENT for block in landed)
        actions += memory.write([block for block in landed if block.state is SlotState.TRANSIT])
        return actions + self._answer_if_complete()

    def _answer_if_complete(self) -> list[Action]:
        """Answer with the blocks that the host holds now: others may have evicted some since."""
        memory, host = self._memory, self._memory.host
        if self._waiting or self._copies:
            return []
        held = [host.readable(block_hash) for block_hash in self._hashes]
        kept = [block for block in held if block is not None and block.state is SlotState.RESIDENT]
        # Blocks that are kept without a copy may have been reported gone (they were being written
        # back).
        actions = memory.announce([block.hash for block in kept if not block.announced])
        if self._timed:
            actions.append(StopTimer(self))
        mask = bytes(block is not None and block.state is SlotState.RESIDENT for block in held)
        return [*actions, self._answer(mask), *memory.keep_watermarks()]

    def _answer(self, kept: bytes) -> Action:
        return send(self._memory.requests.peers.index, Offloaded(self._message.op, kept))
