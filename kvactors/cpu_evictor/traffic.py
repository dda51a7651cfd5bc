"""CpuEvictor, the part that speaks to swapper and storage: copies, probes, reads and writes in
flight, and what follows each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from kvactors.actor import Actor, ActorRef, PeerRestarted, on
from kvactors.actor.clock import now
from kvactors.config import HostConfig, StorageConfig
from kvactors.cpu_evictor.messages import HostCleared, HostGained, HostGone
from kvactors.cpu_evictor.reports import count_of, outcomes_of
from kvactors.cpu_evictor.slots import HostBlock, HostTier, SlotState
from kvactors.device.arena import Arena
from kvactors.flush_notifier.messages import Gained, Gone
from kvactors.gpu_swapper.messages import Copied, Copy, CopyProgress, Direction
from kvactors.storage.messages import (
    ClearStore,
    Outcome,
    Probe,
    Probed,
    Read,
    ReadDone,
    StoreCleared,
    Write,
    Written,
)
from kvactors.types import Reason, Tier, indices_of, join_keys

WRITE_BATCH = 256
"""Blocks a write message carries at most: a slow store answers for a part of a large eviction
early."""


class Asked(NamedTuple):
    """A request to a storage actor: whom, how many keys, and what to do with the answer."""

    actor: ActorRef
    keys: int
    then: Callable[[Any], None]


class Copying(NamedTuple):
    """A copy in flight: how many pairs, and what to do with the indices of those that failed."""

    pairs: int
    then: Callable[[frozenset[int]], None]


class Clearing(NamedTuple):
    """A clear of the store in flight: who does it, and the number of the ClearHost that it is
    for."""

    writer: ActorRef
    op: int


class Traffic(Actor):
    """Holds the host tier's state and carries movements out. A completion calls what was passed as
    `then`."""

    def __init__(
        self,
        ref: ActorRef,
        *,
        config: HostConfig,
        storage: StorageConfig,
        arena: Arena,
        index: ActorRef,
        swapper: ActorRef,
        readers: Sequence[ActorRef],
        writers: Sequence[ActorRef],
        notifier: ActorRef,
        era: int,
    ) -> None:
        super().__init__(ref)
        self.era = era
        self.config = config
        self.storage = storage
        self.index = index
        self.swapper = swapper
        self.readers = readers
        self.writers = writers
        self.notifier = notifier
        self.host = HostTier(config.slots, arena.num_slots, arena.in_use)
        self.exclusive = config.mode == "exclusive" or not config.slots
        self.write_back = storage.write_policy == "write_back" and bool(writers)
        self.evicted = self.offloaded = self.loaded = self.fetched = self.shed = self.written = 0
        self.copy_failures = self.write_failures = 0
        self._ops = count(1)
        self.clears = 0  # ClearHost handled
        self._copies: dict[int, Copying] = {}
        self._progress: dict[int, Callable[[int], None]] = {}
        self._probes: dict[int, Asked] = {}
        self._asks: dict[int, Asked] = {}
        self._reads: dict[int, Asked] = {}
        self._writes: dict[int, Asked] = {}
        self._clears: dict[int, Clearing] = {}
        self._held: list[HostBlock] = []  # evicted, to be written once no probe is open

    # -- copies

    def copy(
        self,
        direction: Direction,
        blocks: Sequence[int],
        entries: Sequence[HostBlock],
        then: Callable[[frozenset[int]], None],
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Move pairs; `then` gets the indices that failed, `progress` how many layers have arrived.
        The caller holds the pins."""
        if not entries:
            then(frozenset())
            return
        op = next(self._ops)
        self._copies[op] = Copying(len(entries), then)
        if progress is not None:
            self._progress[op] = progress
        slots = tuple(entry.slot for entry in entries)
        self.tell(
            self.swapper, Copy(op, direction, tuple(blocks), slots, progress is not None, self.era)
        )

    @on(CopyProgress)
    def copy_progress(self, message: CopyProgress) -> None:
        """Some layers of a copy are there."""
        progress = self._progress.get(message.op)
        if progress is not None:
            progress(message.layers)

    @on(Copied)
    def copied(self, message: Copied) -> None:
        """A copy is over."""
        self._progress.pop(message.op, None)
        copying = self._copies.pop(message.op, None)
        if copying is not None:
            failed = indices_of(message.failed, copying.pairs)
            self.copy_failures += len(failed)
            copying.then(failed)

    def arrive(self, entries: Sequence[HostBlock], failed: frozenset[int]) -> list[HostBlock]:
        """A copy or read into slots is over: the good ones stand, unpinned; the others go."""
        good = []
        for i, entry in enumerate(entries):
            entry.arriving = False
            if i in failed:
                self.host.drop(entry)
            elif not entry.dropped:
                good.append(entry)
            self.host.unpin(entry)
        return good

    # -- storage

    def probe(self, keys: Sequence[bytes], deadline: float, then: Callable[[int], None]) -> None:
        """How many leading keys the store can give."""
        op, reader = next(self._ops), self._least_loaded(self.readers, self._probes, self._reads)
        self._probes[op] = Asked(reader, len(keys), then)
        self.tell(reader, Probe(op, join_keys(keys), deadline))

    def ask_before_write(
        self, keys: Sequence[bytes], deadline: float, then: Callable[[int], None]
    ) -> int:
        """How many leading keys the store has. Unlike a probe it holds back no write. The
        operation's number, for `give_up_asking`."""
        op, reader = next(self._ops), self._least_loaded(self.readers, self._probes, self._reads)
        self._asks[op] = Asked(reader, len(keys), then)
        self.tell(reader, Probe(op, join_keys(keys), deadline))
        return op

    def give_up_asking(self, op: int) -> None:
        """The store has not answered in time: count everything as stored, so that nothing is
        written."""
        asked = self._asks.pop(op, None)
        if asked is not None:
            asked.then(asked.keys)

    @on(Probed)
    def probed(self, message: Probed) -> None:
        """A probe is answered. Reads come before the writes that were held back for them."""
        asked = self._asks.pop(message.op, None)
        if asked is not None:
            asked.then(count_of(message.found, asked.keys))
            return
        asked = self._probes.pop(message.op, None)
        if asked is not None:
            found = count_of(message.found, asked.keys)
            asked.then(found if self.may_read else 0)  # what was found may be from before a clear
            self.flush_writes()

    def read(
        self, entries: Sequence[HostBlock], deadline: float, then: Callable[[bytes], None]
    ) -> None:
        """Fill slots from the store; `then` gets one outcome a key. The caller holds the pins."""
        op, reader = next(self._ops), self._least_loaded(self.readers, self._probes, self._reads)
        self._reads[op] = Asked(reader, len(entries), then)
        keys = join_keys(entry.key for entry in entries)
        self.tell(
            reader,
            Read(
                op, keys, tuple(e.slot for e in entries), deadline, self.storage.exclusive, self.era
            ),
        )

    @on(ReadDone)
    def read_done(self, message: ReadDone) -> None:
        """A read is over."""
        asked = self._reads.pop(message.op, None)
        if asked is not None:
            asked.then(outcomes_of(message.outcomes, asked.keys))

    def write(self, entries: Sequence[HostBlock]) -> None:
        """Write slots to the store, least recently used first; each is pinned until its batch is
        over."""
        for start in range(0, len(entries), WRITE_BATCH):
            batch = list(entries[start : start + WRITE_BATCH])
            for entry in batch:
                self.host.pin(entry)
            op, writer = next(self._ops), self._least_loaded(self.writers, self._writes)
            self._writes[op] = Asked(writer, len(batch), partial(self._after_write, batch))
            keys, slots = (
                join_keys(entry.key for entry in batch),
                tuple(entry.slot for entry in batch),
            )
            lineages = tuple(entry.lineage for entry in batch)
            self.tell(
                writer,
                Write(
                    op,
                    keys,
                    slots,
                    now() + self.storage.timeout,
                    self.era,
                    lineages if any(lineages) else (),
                ),
            )

    def _after_write(self, batch: Sequence[HostBlock], outcomes: bytes) -> None:
        self.let_go(
            [entry for entry in batch if entry.place is SlotState.TRANSIT]
        )  # the writer has reported what is stored now
        for entry, outcome in zip(batch, outcomes, strict=True):
            good = outcome in (Outcome.OK, Outcome.EXISTS)
            self.written += good
            self.write_failures += not good
            self.host.unpin(entry)
            if entry.place is SlotState.LEAVING and not (entry.pins or entry.handed):
                self.stay_after_all(entry)

    def stay_after_all(self, entry: HostBlock) -> None:
        """It was leaving for the device and is not wanted there: it stays if there is room."""
        if entry.dropped:
            return
        if self.host.resident < self.host.capacity:
            self.host.move(entry, SlotState.RESIDENT)
        else:
            self.tell(self.index, HostGone(entry.key))
            self.let_go([entry])

    @on(Written)
    def write_done(self, message: Written) -> None:
        """A write is over."""
        asked = self._writes.pop(message.op, None)
        if asked is not None:
            asked.then(outcomes_of(message.outcomes, asked.keys))

    @property
    def may_read(self) -> bool:
        """Whether there is a store to read from; one that is to be emptied is as good as empty."""
        return bool(self.readers) and not self._clears

    def clear_store(self, asked: int) -> None:
        """Have the store emptied, by the writer's next incarnation if this one fails before. asked:
        the ClearHost that is answered then."""
        if not self.writers:
            self.tell(self.index, HostCleared(asked, ""))
            return
        op = next(self._ops)
        self._clears[op] = Clearing(self.writers[0], asked)
        self.tell(self.writers[0], ClearStore(op))

    @on(StoreCleared)
    def store_cleared(self, message: StoreCleared) -> None:
        """The store is empty, or could not be emptied."""
        clearing = self._clears.pop(message.op, None)
        if clearing is not None:
            self.tell(self.index, HostCleared(clearing.op, message.error))

    @on(PeerRestarted)
    def peer_restarted(self, message: PeerRestarted) -> None:
        """A storage actor began anew: what it was asked will not be answered. A new notifier is
        told what is here."""
        if message.name == "flush_notifier":
            self.gained(self.host.keys())
            return
        dead = message.name
        for op, clearing in [one for one in self._clears.items() if one[1].writer.name == dead]:
            del self._clears[op]
            self.clear_store(clearing.op)
        for op, _ in [
            one for one in (*self._probes.items(), *self._asks.items()) if one[1].actor.name == dead
        ]:
            self.probed(Probed(op, 0))
        for op, asked in [one for one in self._reads.items() if one[1].actor.name == dead]:
            self.read_done(ReadDone(op, bytes([Outcome.UNAVAILABLE]) * asked.keys))
        for op, asked in [one for one in self._writes.items() if one[1].actor.name == dead]:
            self.write_done(Written(op, bytes([Outcome.UNAVAILABLE]) * asked.keys))

    @staticmethod
    def _least_loaded(actors: Sequence[ActorRef], *tables: dict[int, Asked]) -> ActorRef:
        """One of a pool. A substitute answers at once, so it never has any load: it is chosen only
        if all are switched off."""
        load = {actor.name: 0 for actor in actors}
        for table in tables:
            for asked in table.values():
                load[asked.actor.name] += asked.keys + 1
        return min(actors, key=lambda actor: (actor.switched_off, load[actor.name]))

    # -- eviction

    def make_room(self, incoming: int, slots: int, protected: Sequence[bytes] = ()) -> None:
        """Evict until `incoming` more residents fit the capacity, and leave `slots` slots free if
        writing back would take them all."""
        over = self.host.resident + incoming - self.host.capacity
        self.evict(self.host.victims(over, protected), slots)

    def evict(self, victims: Sequence[HostBlock], slots: int = 0) -> None:
        """Let blocks go, least recently used first: written back if that is the policy and there
        are slots to spare, else dropped. Indexes are sent that a block left the host when its write
        is over: until then a load finds it in its slot."""
        if not victims:
            return
        self.evicted += len(victims)
        self.tell(self.index, HostGone(join_keys(entry.key for entry in victims)))
        shed = (
            max(0, min(len(victims), slots - self.host.free)) if self.write_back else len(victims)
        )
        self.shed += shed if self.write_back else 0
        self.let_go(victims[:shed])
        for entry in victims[shed:]:
            self.host.move(entry, SlotState.TRANSIT)
            self.host.pin(entry)
        self._held += victims[shed:]
        self.flush_writes()

    def flush_writes(self) -> None:
        """Write what was held back, unless somebody is about to read: a store of limited size must
        not lose what is asked for."""
        if self._held and not self._probes:
            held, self._held = self._held, []
            for entry in held:
                self.host.unpin(entry)
            self.write([entry for entry in held if not entry.dropped])

    def keep_watermarks(self) -> None:
        """Above the high mark evict down to the low one."""
        high = self.config.high_watermark * self.host.capacity
        if high and self.host.resident > high:
            self.evict(
                self.host.victims(
                    self.host.resident - int(self.config.low_watermark * self.host.capacity)
                )
            )

    # -- telling index and notifier

    def hint(self, entries: Sequence[HostBlock]) -> None:
        """These have come to the host tier from storage."""
        if entries:
            self.tell(
                self.index,
                HostGained(join_keys(entry.key for entry in entries), self.clears, self.era),
            )

    def gained(self, keys: Sequence[bytes]) -> None:
        """These are resident on the host."""
        if keys:
            for key in keys:
                self.host.entries[key].told = True
            self.tell(self.notifier, Gained(join_keys(keys), Tier.HOST, Reason.OFFLOAD))

    def let_go(self, entries: Sequence[HostBlock]) -> None:
        """Drop entries and report those gone that indexes were sent as resident."""
        self.gone([entry for entry in entries if not entry.dropped], Reason.CPU_EVICTION)
        for entry in entries:
            self.host.drop(entry)

    def gone(self, entries: Sequence[HostBlock], reason: Reason) -> None:
        """These left the host."""
        told = [entry for entry in entries if entry.told]
        for entry in told:
            entry.told = False
        if told:
            self.tell(
                self.notifier, Gone(join_keys(entry.key for entry in told), Tier.HOST, reason)
            )
