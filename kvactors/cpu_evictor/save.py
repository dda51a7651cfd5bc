"""One save: blocks of a finished request that the host tier or the store lacks are copied off the
device."""

from __future__ import annotations

from kvactors.cpu_evictor.actions import Action, StartTimer, StopTimer, send
from kvactors.cpu_evictor.memory import HostMemory
from kvactors.cpu_evictor.messages import Save, Saved, SaveUnanswered
from kvactors.cpu_evictor.slots import HostBlock, SlotState
from kvactors.cpu_evictor.victims import set_traits
from kvactors.gpu_swapper.messages import Direction
from kvactors.lineage import lineage
from kvactors.types import split_hashes

ASK = 1.0
"""Seconds, `storage.timeout_s` if that is less, that a store may take to answer which blocks of a
finished request it has. The device blocks are held until then."""


class SaveJob:
    """Keeps a copy of a finished request's path on the host (inclusive tiers), writes what is to be
    saved and is not stored, and answers with `Saved`.

    Neither the index nor the host tier records the blocks in storage: the store is asked at every
    finish, so a block whose write failed, or that the store has evicted since, is written again.
    """

    __slots__ = ("_blocks", "_generation", "_hashes", "_memory", "_message", "_save")

    def __init__(self, memory: HostMemory, message: Save) -> None:
        self._memory = memory
        self._message = message
        self._hashes = split_hashes(message.hashes)
        self._generation = memory.host.generation
        self._save: list[int] = []  # positions that are to be saved and are not stored
        self._blocks: list[HostBlock] = []  # that are copied

    def begin(self) -> list[Action]:
        """Look up the path in the store, if there is something to save."""
        message, requests = self._message, self._memory.requests
        device_store = requests.peers.device_store is not None
        if not message.save or device_store or not requests.may_read:
            return self._copy(0)
        limit = min(ASK, self._memory.storage.timeout_s)
        hashes = self._hashes[: message.save[-1] + 1]
        probe = requests.ask_stored(self, hashes, requests.clock() + limit)
        return [probe, StartTimer(self, limit, SaveUnanswered(probe.message.op))]

    def on_probed(self, found: int) -> list[Action]:
        """See `ProbeJob.on_probed`: the blocks beyond `found` are written."""
        stop = StopTimer(self)
        if self._generation == self._memory.host.generation:
            return [stop, *self._copy(found)]
        # The host tier was cleared: blocks of before may not enter it.
        return [stop, self._answer(bytes(len(self._hashes)))]

    def _copy(self, stored: int) -> list[Action]:
        """Copy the blocks that the host lacks.

        Args:
            stored: leading blocks that storage has.
        """
        message, memory, host = self._message, self._memory, self._memory.host
        if message.memory_generation != memory.requests.generation:
            return [self._answer(bytes(len(self._hashes)))]
        actions: list[Action] = []
        self._save = [position for position in message.save if position >= stored]
        saved = set(self._save)
        lacking = [i for i, block_hash in enumerate(self._hashes) if block_hash not in host.blocks]
        if message.keep:
            staying = len(lacking) - memory.surplus(message.salt, len(lacking))
            salts = {message.salt: staying}
            actions += memory.make_space(staying, len(lacking), self._hashes, salts)
            self._renew()
            space = max(0, min(staying, host.capacity - host.resident, host.free))
            state = SlotState.RESIDENT
        else:
            passing = saved if memory.requests.peers.device_store is None else set()
            lacking = [position for position in lacking if position in passing]
            space, state = host.free, SlotState.TRANSIT
        if memory.requests.peers.writers:
            memory.counts.shed += sum(position in saved for position in lacking[space:])
        del lacking[space:]
        for position in lacking:
            parent = self._hashes[position - 1] if position else message.root
            block = host.add(
                self._hashes[position],
                parent,
                state,
                lineage(message.lineages, position, len(self._hashes), parent),
                (message.salt, message.priority, message.expiry),
            )
            self._blocks.append(block)
        host.touch(reversed(self._hashes))
        if not self._blocks:
            return actions + self.on_copied(0, 0, frozenset())
        device_blocks = [message.blocks[position] for position in lacking]
        copy = memory.requests.copy(self, Direction.TO_HOST, device_blocks, self._blocks)
        return [*actions, copy]

    def _renew(self) -> None:
        """Blocks that the host has already were used with the hints of this request."""
        message, host = self._message, self._memory.host
        for block_hash in self._hashes:
            block = host.blocks.get(block_hash)
            if block is not None:
                set_traits(host, block, (message.salt, message.priority, message.expiry))

    def on_copied(self, first: int, size: int, failed: frozenset[int]) -> list[Action]:
        """See `CopyJob.on_copied`: write to storage."""
        message, memory, host, save = self._message, self._memory, self._memory.host, self._save
        landed = host.land(self._blocks, failed)
        actions: list[Action] = []
        if message.keep:
            actions += memory.announce([block.hash for block in landed])
            memory.counts.offloaded += len(landed)
        if memory.requests.peers.device_store is not None and save:
            blocks = message.blocks[save[0] : save[-1] + 1]
            actions.append(memory.requests.save(self, message.tokens, save[0], blocks))
        else:
            if memory.requests.peers.writers and save:
                # With copies of the whole path on the host all of it is offered, so that its
                # beginning counts as used after its end.
                used = message.save if message.keep else save
                sources = [host.readable(self._hashes[position]) for position in reversed(used)]
                actions += memory.write([block for block in sources if block is not None])
            actions.append(self._answer_kept())
        return actions + memory.keep_watermarks()

    def on_saved(self) -> list[Action]:
        """See `SaveToDeviceStoreJob.on_saved`."""
        return [self._answer_kept()]

    def _answer_kept(self) -> Action:
        """Answer with the blocks that the host holds now: a save to a device store takes long, and
        copies may have been evicted since."""
        host, keep = self._memory.host, self._message.keep
        held = (host.readable(block_hash) if keep else None for block_hash in self._hashes)
        return self._answer(
            bytes(block is not None and block.state is SlotState.RESIDENT for block in held)
        )

    def _answer(self, kept: bytes) -> Action:
        return send(self._memory.requests.peers.index, Saved(self._message.op, kept))
