"""Blocks of a finished request that the host tier or the store lacks are copied off the device, and
stored blocks of a path are read into the host tier ahead of their use."""

from __future__ import annotations

from collections.abc import Collection

from kvactors.cpu_evictor.memory import HostJob, Placed
from kvactors.cpu_evictor.messages import PrefetchToHost, Save, Saved
from kvactors.cpu_evictor.offload import JobToHost
from kvactors.cpu_evictor.requests import WRITE_PROBE
from kvactors.cpu_evictor.slots import BlockTraits, SlotState
from kvactors.storage.messages import Probed

ASK_TIMEOUT_S = 1.0
"""Seconds, `storage.timeout_s` if that is less, that a store may take to answer which blocks of a
finished request it has. The device blocks are held until then."""


class SaveJob(JobToHost):
    """Keeps a copy of a finished request's path on the host (inclusive tiers), writes what is to be
    saved and is not stored, and answers with `Saved`. Blocks move in windows of slots, the deepest
    first: so a path's beginning counts as used after its end, on the host and in the store.

    Neither the index nor the host tier records the blocks in storage: the store is asked at every
    finish, so a block that found no slot or whose write failed, or that the store has evicted
    since, is written again.
    """

    ANSWER = Saved
    message: Save
    _probe: int | None = None  # number of the request for which blocks are stored
    _offered: frozenset[int] = frozenset()  # positions that were written

    def begin(self) -> None:
        message, requests = self.message, self.requests
        if not message.save or requests.peers.device_store is not None or not requests.may_read:
            self._copy(0)
            return
        limit = min(ASK_TIMEOUT_S, self.memory.storage.timeout_s)
        hashes, deadline = self.hashes[: message.save[-1] + 1], requests.clock() + limit
        self._probe = requests.probe(hashes, deadline, self._on_probed, WRITE_PROBE)
        self.start_timer(limit)

    def on_deadline(self) -> None:
        """Of a store that has not answered every block counts as stored: nothing is written, and
        the device blocks are not held. The next finish offers the blocks again."""
        if self._probe is None:
            super().on_deadline()
        elif (probe := self.requests.take(self._probe, Probed)) is not None:
            probe.then(probe.size)

    def _on_probed(self, found: int) -> None:
        self.stop_timer()
        self._probe = None
        if self.generation == self.host.generation:
            self._copy(found)
        else:  # the host tier was cleared: blocks of before may not enter it
            self.answer()

    def _copy(self, stored: int) -> None:
        """Copy the blocks that the host lacks. stored: leading blocks that storage has."""
        message, memory, host = self.message, self.memory, self.host
        if not self.is_current:
            self.answer()
            return
        wait = memory.may_wait
        if self.requests.peers.writers:
            self.to_write = frozenset(position for position in message.save if position >= stored)
        lacking = [i for i, block_hash in enumerate(self.hashes) if block_hash not in host.blocks]
        kept = 0
        if message.keep:
            staying = len(lacking) - memory.over_quota(message.salt, len(lacking))
            slots = 0 if wait else len(lacking)
            memory.make_space(staying, slots, frozenset(self.hashes), {message.salt: staying})
            for position, block_hash in enumerate(self.hashes):
                # Blocks that the host has already were used with the hints of this request.
                if (block := host.blocks.get(block_hash)) is not None:
                    host.set_traits(block, self.traits(position))
            kept = max(0, min(staying, host.capacity - host.resident))
        passing = [position for position in lacking[kept:] if position in self.to_write]
        self.passing = frozenset(passing)
        self.waiting = lacking[:kept] + passing
        self.start(memory.storage.timeout_s if wait else None)

    def fill(self, most: int) -> Placed:
        """With the last block of the path all of it was used."""
        blocks = super().fill(most)
        if not self.waiting:
            self.host.touch(reversed(self.hashes))
        return blocks

    def traits(self, position: int) -> BlockTraits:
        return self.message.salt, self.message.priority, self.message.expiry

    def on_copied(self, blocks: Placed, failed: frozenset[int]) -> None:
        memory = self.memory
        landed = self.host.land([block for _, block in blocks], failed)
        if self.message.keep:
            staying = [block for block in landed if block.state is SlotState.RESIDENT]
            memory.announce([block.hash for block in staying])
            memory.counts["offloaded"] += len(staying)
        used = self._used()
        written = [(at, block) for at, block in blocks if at in used and not block.dropped]
        self._offered |= {at for at, _ in written}
        memory.write([block for _, block in written])
        self.end_if_complete()

    def _used(self) -> Collection[int]:
        """Positions that are offered to the store. With copies of the whole path on the host all of
        it is, so that its beginning counts as used after its end."""
        return self.message.save if self.message.keep and self.to_write else self.to_write

    def end_if_complete(self) -> None:
        """Once every block has been copied, write those that the host had before, and answer: with
        a device store, when it has the blocks."""
        message = self.message
        if self.waiting or self.moving:
            return
        rest = sorted(set(self._used()) - self._offered, reverse=True)
        found = [self.host.readable(self.hashes[position]) for position in rest]
        self.stop_timer()
        self.memory.write([block for block in found if block is not None])
        if self.requests.peers.device_store is not None and message.save:
            first, last = message.save[0], message.save[-1]
            blocks = message.blocks[first : last + 1]
            self.requests.save(message.tokens, first, blocks, self._on_saved)
        else:
            self._on_saved()
        self.memory.keep_watermarks()

    def _on_saved(self, _saved: int = 0) -> None:
        """Answer with the blocks that the host holds now: a save to a device store takes long, and
        copies may have been evicted since."""
        self.answer(self.kept() if self.message.keep else ())


class PrefetchJob(HostJob):
    """Brings the leading run of a path that the host lacks and storage has to the host tier, in
    windows of slots. It is not answered."""

    message: PrefetchToHost
    _first = 0  # position of the first block that the host lacks

    def begin(self) -> None:
        message, requests = self.message, self.requests
        lacking = self._lacking(message.start, len(self.hashes))
        if lacking and requests.may_read and self.host.capacity and not self._is_late():
            self._first = lacking[0]
            requests.probe(self.hashes[self._first :], message.deadline, self._on_probed)

    def _is_late(self) -> bool:
        return self.message.deadline <= self.requests.clock()

    def _lacking(self, start: int, stop: int) -> list[int]:
        blocks = self.host.blocks
        return [position for position in range(start, stop) if self.hashes[position] not in blocks]

    def _on_probed(self, found: int) -> None:
        memory = self.memory
        lacking = self._lacking(self._first, self._first + found)
        if not lacking:
            return
        stays = len(lacking) - memory.over_quota(self.message.salt, len(lacking))
        self.waiting = lacking[: min(stays, self.host.capacity)][::-1]
        if self.waiting:
            memory.movements.enter(self)

    def take(self, most: int) -> None:
        """Read the next blocks. The first that cannot stay ends the prefetch."""
        host, requests, salt = self.host, self.requests, self.message.salt
        if self.generation != host.generation or not requests.may_read or self._is_late():
            self.give_up()
            return
        most = min(most, len(self.waiting))
        self.memory.make_space(most, 0, frozenset(self.hashes), {salt: most})
        if blocks := self.fill(most):
            slots = [block for _, block in blocks]
            requests.read(slots, self.message.deadline, self.window(blocks, self._on_read))

    def _on_read(self, blocks: Placed, outcomes: bytes) -> None:
        memory = self.memory
        landed = self.land(blocks, outcomes)
        memory.counts["fetched"] += len(landed)
        for block in landed:
            block.prefetched = True
        memory.announce_fetched(landed)
        memory.keep_watermarks()
