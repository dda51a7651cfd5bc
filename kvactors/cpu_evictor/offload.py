"""One offload: blocks that the device evicts are copied into host slots."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import ClassVar

from kvactors.cpu_evictor.memory import HostJob, Placed
from kvactors.cpu_evictor.messages import Offload, Offloaded, Save, Saved
from kvactors.cpu_evictor.slots import PLAIN_BLOCK, BlockTraits, HostBlock, SlotState
from kvactors.data_plane.base import Direction
from kvactors.types import hash_at


class JobToHost(HostJob):
    """A job that copies device blocks into host slots, in windows of slots."""

    ANSWER: ClassVar[type[Offloaded | Saved]]
    message: Offload | Save

    @property
    def is_current(self) -> bool:
        """Whether the blocks may enter the host tier: they are not of a lost memory."""
        return self.message.memory_generation == self.requests.generation

    def start(self, wait_s: float | None) -> None:
        """Copy the blocks that find slots. The others wait for slots up to `wait_s` seconds.
        Without a wait the first of `waiting` get the slots, and the others end here."""
        if not self.waiting or wait_s is None:
            self._shed(self.waiting[self.host.free :])
            del self.waiting[self.host.free :]
            self.take(len(self.waiting))
            return
        self.memory.movements.enter(self)
        if self.waiting:
            self.start_timer(wait_s)

    def take(self, most: int) -> None:
        if self.generation != self.host.generation or not self.is_current:
            # Blocks from before a clear, or of a lost memory, may not enter the host tier.
            self.waiting.clear()
        blocks = self.fill(most)
        if not blocks:
            self.end_if_complete()
            return
        device_blocks = [self.message.blocks[position] for position, _ in blocks]
        slots = [block for _, block in blocks]
        then = self.window(blocks, self.on_copied)
        self.requests.copy(Direction.TO_HOST, device_blocks, slots, then)

    def on_deadline(self) -> None:
        movements = self.memory.movements
        movements.behind = True
        movements.leave(self)
        self.give_up()

    def give_up(self) -> None:
        """End without the blocks that lack a slot, and count those that are not written."""
        self._shed(self.waiting)
        self.waiting.clear()
        self.end_if_complete()

    def _shed(self, positions: Sequence[int]) -> None:
        self.memory.counts["shed"] += sum(position in self.to_write for position in positions)

    def kept(self) -> list[HostBlock | None]:
        """The blocks that the host holds now: others may have evicted some since."""
        found = map(self.host.readable, self.hashes)
        return [one if one and one.state is SlotState.RESIDENT else None for one in found]

    def answer(self, kept: Sequence[object | None] = ()) -> None:
        """Answer with the blocks that the host holds, none by default."""
        mask = bytes(one is not None for one in kept) or bytes(len(self.hashes))
        self.out.send(self.memory.index, self.ANSWER(self.message.op, mask))

    @abstractmethod
    def on_copied(self, blocks: Placed, failed: frozenset[int]) -> None:
        """A copy has ended. failed: indices of the blocks whose bytes did not arrive."""

    @abstractmethod
    def end_if_complete(self) -> None:
        """Answer once no block waits or is being copied."""


class OffloadJob(JobToHost):
    """Copies evicted device blocks to the host tier, as far as it has capacity, least recently used
    first, and answers with `Offloaded`.

    The victims that leave the tier for them leave first: those that are written back give their
    slots to later windows.
    """

    URGENT: ClassVar[bool] = True
    ANSWER = Offloaded
    message: Offload

    def begin(self) -> None:
        memory, host = self.memory, self.host
        if not self.is_current:
            self.answer()
            return
        new: list[int] = []
        for position, block_hash in enumerate(self.hashes):
            block = host.readable(block_hash)
            if block is not None and (
                block.state is SlotState.RESIDENT or host.resident < host.capacity
            ):
                host.move(block, SlotState.RESIDENT)
                host.set_traits(block, self.traits(position))
                host.touch((block_hash,))
            elif block_hash not in host.blocks:
                new.append(position)
        # Under write_through the store has these blocks already: none is worth a wait.
        wait = memory.may_wait and memory.storage.saves != "write_through"
        self._make_space(new, wait=wait)
        self.start(memory.storage.on_full_wait_s if wait else None)

    def _make_space(self, new: Sequence[int], *, wait: bool) -> None:
        """Evict for new blocks. Those beyond the tier's capacity only pass through, on their way to
        storage. wait: for slots. If not, and there are not enough, the last used blocks get them.
        """
        memory, host = self.memory, self.host
        new, staying, salts = self._sort(new)
        slots = 0 if wait else len(new)
        memory.make_space(staying, slots, frozenset(self.hashes), salts)
        passing = max(0, len(new) - (host.capacity - host.resident))
        first = 0 if memory.write_back else passing
        self.passing = frozenset(new[first:passing])
        self.waiting = [*reversed(new[first:])]
        self.to_write = frozenset(self.waiting if memory.write_back else ())

    def _sort(self, new: Sequence[int]) -> tuple[Sequence[int], int, Mapping[int, int]]:
        """Put blocks beyond the quota of their salt first: they only pass through. Returns the
        positions, how many blocks stay, and those by salt."""
        host = self.host
        plain = self.message.traits is None
        salts = Counter({0: len(new)} if plain else [self.traits(position)[0] for position in new])
        over = host.resident + len(new) - host.capacity
        above: list[int] = []
        for salt, count in salts.items():
            beyond = host.shares.over_quota(salt, count, over - len(above))
            if beyond:
                own = [position for position in new if self.traits(position)[0] == salt]
                above += own[:beyond]
        if not above:
            return new, len(new), salts
        passing = set(above)
        salts.subtract(self.traits(position)[0] for position in above)
        rest = [position for position in new if position not in passing]
        return [*above, *rest], len(rest), salts

    def parent(self, position: int) -> bytes:
        return hash_at(self.message.parents, position)

    def traits(self, position: int) -> BlockTraits:
        if self.message.traits is None:
            return PLAIN_BLOCK
        salts, priorities, expiries = self.message.traits
        return salts[position], priorities[position], expiries[position]

    def on_copied(self, blocks: Placed, failed: frozenset[int]) -> None:
        memory = self.memory
        landed = self.host.land([block for _, block in blocks], failed)
        # Blocks in transit are announced as well, until they are written: otherwise indexes would
        # find them nowhere between device and storage.
        memory.announce([block.hash for block in landed])
        memory.counts["offloaded"] += sum(block.state is SlotState.RESIDENT for block in landed)
        memory.write([block for block in landed if block.state is SlotState.TRANSIT])
        self.end_if_complete()

    def end_if_complete(self) -> None:
        if self.waiting or self.moving:
            return
        kept = self.kept()
        # Blocks that are kept without a copy may have been reported gone (they were being written
        # back).
        self.memory.announce([block.hash for block in kept if block and not block.announced])
        self.stop_timer()
        self.answer(kept)
        self.memory.keep_watermarks()
