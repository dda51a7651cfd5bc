"""One save: blocks of a finished request that the host tier or the store lacks are copied off the
device."""

from __future__ import annotations

from collections.abc import Collection
from math import inf
from typing import ClassVar

from kvactors.cpu_evictor.actions import Action, StartTimer, StopTimer, send
from kvactors.cpu_evictor.memory import HostMemory
from kvactors.cpu_evictor.messages import PrefetchToHost, Save, Saved, SaveUnanswered, SlotDeadline
from kvactors.cpu_evictor.slots import HostBlock, SlotState, set_traits
from kvactors.data_plane.base import Direction
from kvactors.identity import lineage
from kvactors.storage.messages import Outcome
from kvactors.types import split_hashes

ASK = 1.0
"""Seconds, `storage.timeout_s` if that is less, that a store may take to answer which blocks of a
finished request it has. The device blocks are held until then."""


class SaveJob:
    """Keeps a copy of a finished request's path on the host (inclusive tiers), writes what is to be
    saved and is not stored, and answers with `Saved`. Blocks move in windows of slots, the deepest
    first: so a path's beginning counts as used after its end, on the host and in the store.

    Neither the index nor the host tier records the blocks in storage: the store is asked at every
    finish, so a block that found no slot or whose write failed, or that the store has evicted
    since, is written again.
    """

    URGENT: ClassVar[bool] = False

    __slots__ = (
        "_copies",
        "_generation",
        "_hashes",
        "_memory",
        "_message",
        "_missing",
        "_offered",
        "_passing",
        "_timed",
        "_waiting",
        "_windows",
    )

    def __init__(self, memory: HostMemory, message: Save) -> None:
        self._memory = memory
        self._message = message
        self._hashes = split_hashes(message.hashes)
        self._generation = memory.host.generation
        self._missing: frozenset[int] = frozenset()  # positions that are to be written
        self._offered: set[int] = set()  # positions that were written
        self._waiting: list[int] = []  # positions that have no slot yet, the next one last
        self._passing = 0  # positions from here on do not stay on the host
        self._windows = 0
        self._copies: dict[int, list[tuple[int, HostBlock]]] = {}  # by window
        self._timed = False

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
        wait = memory.may_wait
        if memory.requests.peers.writers:
            self._missing = frozenset(position for position in message.save if position >= stored)
        lacking = [i for i, block_hash in enumerate(self._hashes) if block_hash not in host.blocks]
        kept = 0
        if message.keep:
            staying = len(lacking) - memory.surplus(message.salt, len(lacking))
            slots = 0 if wait else len(lacking)
            protected, salts = frozenset(self._hashes), {message.salt: staying}
            actions += memory.make_space(staying, slots, protected, salts)
            self._renew()
            kept = max(0, min(staying, host.capacity - host.resident))
        passing = [position for position in lacking[kept:] if position in self._missing]
        moving = lacking[:kept] + passing
        self._passing = passing[0] if passing else len(self._hashes)
        if not wait:
            memory.counts.shed += sum(position in self._missing for position in moving[host.free :])
            del moving[host.free :]
        self._waiting = moving
        if not moving or not wait:
            return actions + self.take(len(moving))
        actions += memory.movements.enter(self)
        if self._waiting:
            self._timed = True
            seconds = memory.storage.timeout_s
            actions.append(StartTimer(self, seconds, SlotDeadline(message.op)))
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
        """See `Movement.take`: copy the next blocks off the device."""
        message, memory, host = self._message, self._memory, self._memory.host
        requests, waiting = memory.requests, self._waiting
        if self._generation != host.generation or message.memory_generation != requests.generation:
            # Blocks from before a clear, or of a lost memory, may not enter the host tier.
            waiting.clear()
        blocks: list[tuple[int, HostBlock]] = []
        while waiting and len(blocks) < most and host.free:
            position = waiting.pop()
            stays = position < self._passing and host.resident < host.capacity
            if self._hashes[position] in host.blocks or not (stays or position in self._missing):
                continue
            parent = self._hashes[position - 1] if position else message.root
            block = host.add(
                self._hashes[position],
                parent,
                SlotState.RESIDENT if stays else SlotState.TRANSIT,
                lineage(message.lineages, position, len(self._hashes), parent),
                (message.salt, message.priority, message.expiry),
            )
            blocks.append((position, block))
        if not waiting:
            host.touch(reversed(self._hashes))
        if not blocks:
            return self._end_if_complete()
        self._windows += 1
        self._copies[self._windows] = blocks
        device_blocks = [message.blocks[position] for position, _ in blocks]
        slots = [block for _, block in blocks]
        return [requests.copy(self, Direction.TO_HOST, device_blocks, slots, first=self._windows)]

    def give_up(self) -> list[Action]:
        """See `Movement.give_up`."""
        shed = sum(position in self._missing for position in self._waiting)
        self._memory.counts.shed += shed
        self._waiting.clear()
        return self._end_if_complete()

    def _renew(self) -> None:
        """Blocks that the host has already were used with the hints of this request."""
        message, host = self._message, self._memory.host
        for block_hash in self._hashes:
            block = host.blocks.get(block_hash)
            if block is not None:
                set_traits(host, block, (message.salt, message.priority, message.expiry))

    def on_copied(self, first: int, size: int, failed: frozenset[int]) -> list[Action]:
        """See `CopyJob.on_copied`: write to storage. first: the window."""
        memory, blocks = self._memory, self._copies.pop(first)
        landed = memory.host.land([block for _, block in blocks], failed)
        actions: list[Action] = []
        if self._message.keep:
            staying = [block for block in landed if block.state is SlotState.RESIDENT]
            actions += memory.announce([block.hash for block in staying])
            memory.counts.offloaded += len(staying)
        used = self._used()
        written = [(at, block) for at, block in blocks if at in used and not block.dropped]
        self._offered.update(at for at, _ in written)
        actions += memory.write([block for _, block in written])
        return actions + self._end_if_complete()

    def _used(self) -> Collection[int]:
        """Positions that are offered to the store. With copies of the whole path on the host all of
        it is, so that its beginning counts as used after its end."""
        return self._message.save if self._message.keep and self._missing else self._missing

    def _end_if_complete(self) -> list[Action]:
        """Once every block has been copied, write those that the host had before, and answer: with
        a device store, when it has the blocks."""
        message, requests, host = self._message, self._memory.requests, self._memory.host
        if self._waiting or self._copies:
            return []
        rest = sorted(set(self._used()) - self._offered, reverse=True)
        found = [host.readable(self._hashes[position]) for position in rest]
        actions: list[Action] = [StopTimer(self)] if self._timed else []
        actions += self._memory.write([block for block in found if block is not None])
        if requests.peers.device_store is not None and message.save:
            first, last = message.save[0], message.save[-1]
            blocks = message.blocks[first : last + 1]
            actions.append(requests.save(self, message.tokens, first, blocks))
        else:
            actions.append(self._answer_kept())
        return actions + self._memory.keep_watermarks()

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


# -- One prefetch: stored blocks of a path are read into the host tier ahead of their use.


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
