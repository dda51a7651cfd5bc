"""CpuEvictor: the host tier. It alone hands out host slots, so it leads every movement through host
memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple

from kvactors.actor import Message, on
from kvactors.actor.clock import now
from kvactors.cpu_evictor.load import LoadJob
from kvactors.cpu_evictor.messages import (
    Admitted,
    Cancel,
    ClearHost,
    HostCleared,
    HostGained,
    HostGone,
    LayersLoaded,
    Load,
    Loaded,
    LoadStalled,
    Offload,
    Offloaded,
    Overdue,
    Place,
    Prefetch,
)
from kvactors.cpu_evictor.save import Saves
from kvactors.cpu_evictor.slots import HostBlock, SlotState
from kvactors.flush_notifier.messages import Cleared, Gained, Gone
from kvactors.gpu_swapper.messages import Copy, Direction
from kvactors.lineage import Lineages, lineage
from kvactors.storage.messages import (
    ClearStore,
    FetchDevice,
    Outcome,
    Probe,
    Read,
    Recount,
    SaveDevice,
    Write,
)
from kvactors.types import Reason, Tier, split_keys


class HostStatistics(NamedTuple):
    """A moment's picture of the host tier; the second half counts blocks of this life."""

    slots: int
    resident: int
    free_slots: int
    pinned: int
    evicted: int
    offloaded: int
    loaded: int
    fetched: int  # from storage
    written: int
    shed: int  # evicted without the write-back that was due, for want of slots
    copy_failures: int
    write_failures: int


class CpuEvictor(Saves):
    """Owns host slots, the host LRU and slot pins."""

    ROLE: ClassVar[str] = "cpu_evictor"
    SENDS: ClassVar[Mapping[str, tuple[type[Message], ...]]] = {
        "gpu_swapper": (Copy,),
        "storage_reader": (Probe, Read),
        "storage_writer": (Write, ClearStore, Recount),
        "storage_direct": (FetchDevice, SaveDevice),
        "flush_notifier": (Gained, Gone, Cleared),
        "prefix_index": (
            Offloaded,
            Loaded,
            Admitted,
            HostGained,
            HostGone,
            HostCleared,
            LayersLoaded,
            LoadStalled,
        ),
    }

    def started(self) -> None:
        """A life after a death begins with an empty host tier."""
        if self.life:
            self.tell(self.notifier, Cleared(Tier.HOST, Reason.RESTART))

    # -- offload

    @on(Offload)
    def offload(self, message: Offload) -> None:
        """Take what the host tier wants of evicted device blocks."""
        if message.era != self.era:
            self.tell(self.index, Offloaded(message.op, bytes(len(message.blocks))))
            return
        keys, parents = split_keys(message.keys), split_keys(message.parents)
        kept = bytearray(len(keys))
        fresh: list[int] = []
        for j, key in enumerate(keys):
            entry = self.host.usable(key)
            if entry is not None and (
                entry.place is SlotState.RESIDENT or self.host.resident < self.host.capacity
            ):
                self.host.move(entry, SlotState.RESIDENT)
                self.host.touch([key])
                kept[j] = 1
            elif key not in self.host.entries:
                fresh.append(j)
        entries = self._take_slots(fresh, keys, parents, message.lineages)
        first = len(fresh) - len(entries)

        def then(failed: frozenset[int]) -> None:
            good = self.arrive(entries, failed)
            for j, entry in zip(fresh[first:], entries, strict=True):
                kept[j] = entry.place is SlotState.RESIDENT and not entry.dropped
            for j in [j for j, key in enumerate(keys) if key not in self.host.lru]:
                kept[j] = 0  # it was here already, and has been evicted meanwhile
            # What only passes through counts as well, until it is written: between device and
            # storage it would be nowhere.
            copied = [entry.key for entry in good]
            done = set(copied)
            untold = [key for key in self._untold(keys, kept) if key not in done]
            self.gained(copied + untold)
            self.offloaded += sum(entry.place is SlotState.RESIDENT for entry in good)
            self.write([entry for entry in good if entry.place is SlotState.TRANSIT])
            self.tell(self.index, Offloaded(message.op, bytes(kept)))
            self.keep_watermarks()

        self.copy(Direction.TO_HOST, [message.blocks[j] for j in fresh[first:]], entries, then)

    def _take_slots(
        self,
        fresh: Sequence[int],
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        lineages: Lineages | None,
    ) -> list[HostBlock]:
        """Slots for evicted device blocks, for the last used of them if there are not enough. What
        exceeds the tier's capacity only passes through, on its way to storage."""
        self.make_room(len(fresh), len(fresh), keys)
        passing = max(0, len(fresh) - (self.host.capacity - self.host.resident))
        first = 0 if self.write_back else passing
        first = max(first, len(fresh) - self.host.free)
        return [
            self.host.add(
                keys[j],
                parents[j],
                SlotState.TRANSIT if i < passing else SlotState.RESIDENT,
                lineage(lineages, j, len(keys), parents[j]),
            )
            for i, j in enumerate(fresh)
            if i >= first
        ]

    def _untold(self, keys: Sequence[bytes], kept: bytearray) -> list[bytes]:
        """Kept without a copy, but reported gone before (they were being written back)."""
        found = [self.host.usable(key) for key, keep in zip(keys, kept, strict=True) if keep]
        return [
            entry.key
            for entry in found
            if entry is not None and not entry.told and not entry.arriving
        ]

    # -- load

    @on(Load)
    def load(self, message: Load) -> None:
        """Bring blocks back: secure what the host has, look for the rest in storage."""
        if message.era != self.era:
            self.tell(self.index, Loaded(message.op, 0, 0))
            return
        job = LoadJob(
            message.op,
            message.root,
            split_keys(message.keys),
            message.start,
            message.deadline,
            message.blocks,
            message.tokens,
            message.lineages,
        )
        self.loads[job.op] = job
        self.host.touch(reversed(job.keys))
        for key in job.wanted:
            entry = self.host.usable(key)
            if entry is None:
                break
            self._secure(job, entry)
        rest = [key for key in job.wanted[len(job.entries) :] if self.host.usable(key) is None]
        if rest and message.fetch and self.may_read and message.deadline > now():
            job.fetching = True
            job.timer = self.after(message.deadline - now(), Overdue(job.op))
            self.probe(rest, message.deadline, lambda found: self._fetch(job, found))
        elif rest and message.fetch and self.direct is not None and message.deadline > now():
            job.fetching = True
            self.fetch_direct(job)
        self._copy_in(job, 0)
        self._maybe_done(job)

    def load_moved(self, job: LoadJob) -> None:
        """See `Direct.load_moved`."""
        self._maybe_done(job)

    def _secure(self, job: LoadJob, entry: HostBlock) -> None:
        self.host.pin(entry)
        if self.exclusive and entry.place is SlotState.RESIDENT:
            self.host.move(entry, SlotState.LEAVING)
        job.entries.append(entry)
        job.from_host.append(True)

    def _fetch(self, job: LoadJob, found: int) -> None:
        """The store can give `found` of the blocks the host lacks, from the first one on: read them
        into slots."""
        if job.late or job.over:
            return
        if found < self.storage.min_fetch_blocks:
            found = 0  # not worth the trip
        first, reading = len(job.entries), []
        protected = job.keys
        if not self.exclusive:
            self.make_room(found, found, protected)
        for offset, key in enumerate(job.wanted[first:], first):
            entry = self.host.usable(key)
            if entry is not None:
                self._secure(job, entry)
                continue
            fits = self.host.free and (self.exclusive or self.host.resident < self.host.capacity)
            if found == 0 or not fits or key in self.host.entries:
                break
            found -= 1
            place = SlotState.TRANSIT if self.exclusive else SlotState.RESIDENT
            entry = self.host.add(
                key, job.parent(job.start + offset), place, job.lineage(job.start + offset)
            )
            self.host.pin(entry)
            job.entries.append(entry)
            job.from_host.append(False)
            reading.append(entry)
        self.host.touch(reversed(job.keys))
        if not reading:
            job.fetching = False
            self._copy_in(job, first)
            self._maybe_done(job)
            return
        self.read(
            reading, job.deadline, lambda outcomes: self._fetched(job, first, reading, outcomes)
        )

    def _fetched(self, job: LoadJob, first: int, reading: list[HostBlock], outcomes: bytes) -> None:
        job.fetching = False
        failed = frozenset(i for i, outcome in enumerate(outcomes) if outcome != Outcome.OK)
        good = self.arrive(reading, failed)
        self.fetched += len(good)
        if not self.exclusive:
            self.gained([entry.key for entry in good])
            self.hint(good)
        if job.over:
            for entry in good if self.exclusive else ():
                self.host.drop(entry)
            return
        bad = {reading[i] for i in failed}
        run = next((i for i, entry in enumerate(job.entries) if entry in bad), len(job.entries))
        self._release_tail(job, run)
        self._copy_in(job, first)
        self._maybe_done(job)

    def _copy_in(self, job: LoadJob, first: int) -> None:
        """Copy secured sources from `first` on to the device, once there are blocks to copy
        into."""
        sources = job.entries[first:]
        if (
            job.blocks is None
            or job.late
            or not sources
            or any(entry.arriving for entry in sources)
        ):
            return
        job.copies += 1

        def then(failed: frozenset[int]) -> None:
            job.copies -= 1
            job.arrived.update(first + i for i in range(len(sources)) if i not in failed)
            self._maybe_done(job)

        blocks = job.blocks[first : first + len(sources)]
        self.copy(Direction.TO_DEVICE, blocks, sources, then, self.progress_of(job, first))

    @on(Prefetch)
    def prefetch(self, message: Prefetch) -> None:
        """Look in storage for what the host lacks; it comes to the host tier, where a load will
        find it."""
        keys = split_keys(message.keys)
        first = next(
            (j for j in range(message.start, len(keys)) if keys[j] not in self.host.entries),
            len(keys),
        )
        if first == len(keys) or not (
            self.may_read and self.host.capacity and message.deadline > now()
        ):
            return

        def found(run: int) -> None:
            lacking = [j for j in range(first, first + run) if keys[j] not in self.host.entries]
            if run < self.storage.min_fetch_blocks or not lacking:
                return
            self.make_room(len(lacking), len(lacking), keys)
            room = min(self.host.free, self.host.capacity - self.host.resident)
            parents = {j: keys[j - 1] if j else message.root for j in lacking[:room]}
            entries = [
                self.host.add(
                    keys[j],
                    parent,
                    SlotState.RESIDENT,
                    lineage(message.lineages, j, len(keys), parent),
                )
                for j, parent in parents.items()
            ]
            if entries:
                self.read(
                    entries, message.deadline, lambda outcomes: self._prefetched(entries, outcomes)
                )

        self.probe(keys[first:], message.deadline, found)

    def _prefetched(self, entries: list[HostBlock], outcomes: bytes) -> None:
        good = self.arrive(
            entries, frozenset(i for i, outcome in enumerate(outcomes) if outcome != Outcome.OK)
        )
        self.fetched += len(good)
        self.gained([entry.key for entry in good])
        for entry in good:
            entry.hinted = True
        self.hint(good)
        self.keep_watermarks()

    @on(Place)
    def place(self, message: Place) -> None:
        """The device blocks of a load that went ahead without."""
        job = self.loads.get(message.op)
        if job is None:
            return
        job.blocks = message.blocks
        ready = next((i for i, entry in enumerate(job.entries) if entry.arriving), len(job.entries))
        waiting = job.entries[ready:]
        job.entries = job.entries[:ready]
        self._copy_in(job, 0)
        job.entries += waiting
        self.fetch_direct(job)
        self._maybe_done(job)

    @on(Cancel)
    def cancel(self, message: Cancel) -> None:
        """A load that was never placed is not wanted any more."""
        job = self.loads.pop(message.op, None)
        if job is not None:
            job.end()
            self._release_tail(job, 0)

    @on(Overdue)
    def overdue(self, message: Overdue) -> None:
        """The deadline of a load that looks in storage: what has not come by now is a miss."""
        job = self.loads.get(message.op)
        if job is not None:
            job.late = True
            self._maybe_done(job)

    def _maybe_done(self, job: LoadJob) -> None:
        waiting = job.copies or (job.fetching and not job.late)
        if not (job.over or waiting or job.blocks is None):
            self._answer(job)

    def _answer(self, job: LoadJob) -> None:
        """Say how much arrived. Sources that did go when the index discards them; the others are as
        before."""
        job.end()
        self.loads.pop(job.op, None)
        good = job.good()
        self.loaded += good
        self._release_tail(job, good)
        for entry in job.entries[:good]:
            if entry.place is SlotState.TRANSIT and not self._is_write(entry):
                self.let_go([entry])
            elif entry.place is SlotState.LEAVING:
                self.host.hand(entry)
            self.host.unpin(entry)
        job.entries = []
        self.tell(self.index, Loaded(job.op, good, sum(job.from_host[:good])))

    def _is_write(self, entry: HostBlock) -> bool:
        """Whether a write still needs this slot (it drops the entry itself)."""
        return entry.pins > 1

    def _release_tail(self, job: LoadJob, keep: int) -> None:
        """Unpin the sources from position `keep` on; those that were leaving stay after all, if
        there is room."""
        tail, job.entries = job.entries[keep:], job.entries[:keep]
        for entry in reversed(tail):
            if entry.place is SlotState.LEAVING and entry.pins == 1:
                self.stay_after_all(entry)
            elif entry.place is SlotState.TRANSIT and not entry.arriving and entry.pins == 1:
                self.let_go([entry])
            self.host.unpin(entry)

    # -- the whole tier

    @on(ClearHost)
    def clear(self, message: ClearHost) -> None:
        """Forget everything; copies in flight end on entries that nobody finds any more."""
        self.host.clear()
        self.clears += 1
        self.tell(self.notifier, Cleared(Tier.HOST, Reason.CLEAR))
        if message.storage:
            self.clear_store(message.op)

    def host_keys(self) -> list[bytes]:
        """Hashes of the blocks that a load finds on the host: see `HostTier.keys`."""
        return self.host.keys()

    def check(self) -> None:
        """AssertionError if the tier's state is wrong, or something is pinned although nothing is
        in flight."""
        for _ in self.check_steps():
            pass

    def check_steps(self) -> Iterator[None]:
        """`check` in steps of about a millisecond, between which turns may be taken."""
        if not (
            self._copies or self._probes or self._asks or self._reads or self._writes or self.loads
        ):
            assert not self.host.pinned, f"{self.host.pinned} slots pinned at rest"
            assert not self.host.passing, f"{self.host.passing} slots in passage at rest"
        yield from self.host.check_steps()

    def host_statistics(self) -> HostStatistics:
        """A moment's picture."""
        host = self.host
        return HostStatistics(
            host.num_slots,
            host.resident,
            host.free,
            host.pinned,
            self.evicted,
            self.offloaded,
            self.loaded,
            self.fetched,
            self.written,
            self.shed,
            self.copy_failures,
            self.write_failures,
        )
