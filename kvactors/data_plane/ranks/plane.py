"""The data plane of the leader of tensor-parallel ranks: every rank carries out its share, and the
stores of the ranks are one: an object is there if every rank has its share of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Literal

from kvactors.actor.log import get_logger
from kvactors.attention_sdk import store_identity
from kvactors.data_plane.base import DataPlane, Direction, Progress, StatusChanged
from kvactors.data_plane.ranks.leader import RankGroup, RankState, RankStatistics
from kvactors.data_plane.ranks.names import RankNames, in_slices
from kvactors.data_plane.ranks.protocol import FAILED, CopyBlocks, MoveDevice, StoreObjects
from kvactors.device.arena import HostSlots
from kvactors.device.base import DeviceBlocks
from kvactors.errors import ConfigError, StoreUnavailable, StoreUnsupported
from kvactors.flush_notifier.messages import PathPart
from kvactors.identity import Lineage
from kvactors.layout.base import Layout
from kvactors.lifecycle import Opening
from kvactors.settings import Config, StorageConfig
from kvactors.settings.tables import SHARED
from kvactors.storage.backend import Backend, Expired, ReadReport, SlotViews, WriteReport
from kvactors.storage.device_store import DeviceStore
from kvactors.storage.factory import has_device_store, object_layout
from kvactors.storage.messages import Outcome
from kvactors.tables import SHARDS
from kvactors.types import join_hashes, split_hashes

log = get_logger()

PATHS = 32
"""Blocks whose paths a rank sends in one message."""

WORST = len(Outcome) - 1
"""The greatest value of an outcome."""

BADNESS = (
    Outcome.OK,
    Outcome.EXISTS,
    Outcome.MISS,
    Outcome.NO_SPACE,
    Outcome.LATE,
    Outcome.REFUSED,
    Outcome.CORRUPT,
    Outcome.UNAVAILABLE,
)
"""Outcomes from best to worst: the whole is as its worst share."""


class RankStore(Backend):
    """exclusive: as its ranks' stores. shared: whether the stores are a pool of many nodes, which
    must be queried and which no node can list. seconds: limit of a batch. Slots are numbers here:
    the bytes never come to this process.

    names: keys that the stores of all ranks hold, about 130 bytes for each object.
    """

    def __init__(
        self,
        group: RankGroup,
        block_bytes: int,
        seconds: float,
        *,
        exclusive: bool,
        shared: bool = False,
        keeps_lineages: bool = False,
    ) -> None:
        super().__init__(b"", block_bytes)
        self._trouble = ""
        self.exclusive = exclusive
        self.shared = shared
        self.keeps_lineages = keeps_lineages
        self._begun = False  # rank 0 reads paths for this reading
        self._reading = False
        self.group = group
        self.seconds = seconds
        self.names_held = RankNames(group.config.count)
        self._uncleared = False
        self._clears = 0
        group.names = None if shared else self.names_held

    @property
    def clear_pending(self) -> bool:  # type: ignore[override]
        """Whether a store of a rank has not been cleared as often as another, or a clear failed."""
        return self._uncleared or self.names_held.uneven

    @property
    def is_complete(self) -> bool:  # type: ignore[override]
        """See `Backend.is_complete`. The leader has the names that all ranks hold."""
        return not self.shared

    def take_removed(self) -> list[bytes]:
        """See `Backend.take_removed`. Returns one page."""
        return self.names_held.lost()

    def acknowledge_removed(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.names_held.departed.discard(key)

    async def open(self) -> None:
        """The ranks open their stores themselves."""

    def probe(self, keys: Sequence[bytes]) -> int | None:
        if not self.group.healthy:
            return 0
        if self.shared:
            return None
        return next((i for i, key in enumerate(keys) if key not in self.names_held), len(keys))

    async def ask(self, keys: Sequence[bytes], expired: Expired) -> int:
        """See `Backend.ask`: the shortest run of all ranks."""
        if expired():
            return 0
        outcomes, _ = await self._all("ask", keys)
        if outcomes[:1] == bytes([Outcome.UNAVAILABLE]):
            raise StoreUnavailable(self.trouble())
        return next((i for i, outcome in enumerate(outcomes) if outcome != Outcome.OK), len(keys))

    async def _all(
        self,
        kind: Literal["read", "write", "ask", "remove"],
        keys: Sequence[bytes],
        slots: Sequence[int] = (),
        lineages: Sequence[Lineage | None] = (),
    ) -> tuple[bytes, list[bytes]]:
        """One outcome a key for all ranks together, and the names that any of them does not hold
        any more."""
        joined = join_hashes(keys)
        answers = await self.group.scatter(
            lambda op: StoreObjects(
                op, kind, joined, tuple(slots), self.seconds, lineages=tuple(lineages)
            ),
            outcomes=len(keys),
            worst=WORST,
        )
        self.counters.without_checksum += max(
            answer.without_checksum if answer is not None else 0 for answer in answers
        )
        worst = [0] * len(keys)
        gone: set[bytes] = set()
        failed = []
        for rank, answer in enumerate(answers):
            missing = bytes([Outcome.UNAVAILABLE]) * len(keys)
            outcomes = missing if answer is None else answer.outcomes
            for i, outcome in enumerate(outcomes):
                worst[i] = max(worst[i], BADNESS.index(Outcome(outcome)))
            if answer is None or Outcome.UNAVAILABLE in outcomes:
                failed.append(rank)
            if answer is not None:
                gone.update(split_hashes(answer.gone))
        self._trouble = f"ranks {failed} failed, or did not answer" if failed else ""
        return bytes(BADNESS[i] for i in worst), list(gone)

    def trouble(self) -> str:
        return self._trouble

    async def read(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired
    ) -> ReadReport:
        if expired():
            return ReadReport(bytes([Outcome.LATE]) * len(keys), [])
        outcomes, gone = await self._all("read", keys, slots_of(views))
        bad = {
            key
            for key, o in zip(keys, outcomes, strict=True)
            if o in (Outcome.MISS, Outcome.CORRUPT)
        }
        held = [key for key in {*gone, *bad} if key in self.names_held]
        self.names_held.take(held)
        return ReadReport(outcomes, held)

    async def write(
        self,
        keys: Sequence[bytes],
        views: Sequence[memoryview],
        expired: Expired,
        lineages: Sequence[Lineage | None] = (),
        salts: Sequence[int | None] = (),
    ) -> WriteReport:
        if expired():
            return WriteReport(bytes([Outcome.LATE]) * len(keys), [])
        generation = self.group.memory_generation
        if self.clear_pending:
            await self.clear()
        if self.clear_pending or generation != self.group.memory_generation:
            return WriteReport(bytes([Outcome.UNAVAILABLE]) * len(keys), [])
        clears = self._clears
        outcomes, gone = await self._all("write", keys, slots_of(views), lineages)
        evicted = [key for key in gone if key in self.names_held]
        self.counters.evicted += len(evicted)
        self.names_held.take(evicted)
        for key, outcome in zip(keys, outcomes, strict=True):
            if (
                outcome in (Outcome.OK, Outcome.EXISTS)
                and key not in gone
                and clears == self._clears
                and not self.shared
            ):
                self.names_held.add(key)
        return WriteReport(outcomes, evicted)

    async def remove(self, keys: Sequence[bytes]) -> None:
        self.names_held.take(keys)
        if keys:
            await self._all("remove", keys)

    async def clear(self, generation: int = 0) -> None:
        """See `Backend.clear`. Nothing from before is held afterwards, in this process or the next:
        ranks that were not reached keep an older generation, by which this and every later leader
        recognizes them, and nothing is held or written before they have been cleared.

        StoreUnavailable if that cannot be promised: no rank has confirmed (of a shared pool: not
        all have).
        """
        self._clears += 1  # writes in flight are cleared, too
        self._uncleared = True  # until all ranks have confirmed
        await in_slices(self.names_held.drop_all().empty())
        generation = max(generation, self.names_held.next_generation)
        answers = await self.group.scatter(
            lambda op: StoreObjects(op, "clear", generation=generation),
            outcomes=1,
            worst=WORST,
            incomplete=True,
        )
        done = [
            rank
            for rank, answer in enumerate(answers)
            if answer is not None and answer.outcomes == bytes([Outcome.OK])
        ]
        self.names_held.have(done, generation)
        self._uncleared = len(done) < len(answers)
        missing = [rank for rank in range(len(answers)) if rank not in done]
        if missing and (self.shared or not done):
            raise StoreUnavailable(
                f"ranks {missing} of {len(answers)} did not confirm that their stores are empty"
            )
        if missing:
            log.warning("clear incomplete", missing=missing, ranks=len(answers))

    # -- paths: rank 0 keeps lineages, for objects that all ranks hold

    def begin_paths(self) -> None:
        self._reading, self._begun = True, False

    async def next_paths(self, most: int) -> list[PathPart] | None:
        """See `Backend.next_paths`. A disconnected rank ends the reading. A part from which its key
        does not follow is left out: a rank is not trusted."""
        if not self._reading:
            return None
        kind: Literal["begin_paths", "paths"] = "paths" if self._begun else "begin_paths"
        self._begun = True
        most = min(most, PATHS)
        answers = await self.group.scatter(
            lambda op: StoreObjects(op, kind, most=most), outcomes=1, worst=WORST, only=0
        )
        if answers[0] is None or answers[0].outcomes != bytes([Outcome.OK]):
            self._reading = False
            return None
        return [part for part in answers[0].paths if proved(part)]

    def end_paths(self) -> None:
        self._reading = False

    async def close(self) -> None:
        """The ranks close their stores themselves."""

    def keys(self) -> list[bytes]:
        return list(self.names_held.held)

    def key_slices(self) -> Iterator[list[bytes]]:
        return (list(self.names_held.held.shards[number]) for number in range(SHARDS))

    def count(self) -> int:
        return len(self.names_held)

    def holds(self, key: bytes) -> bool:
        return key in self.names_held


def slots_of(views: Sequence[memoryview]) -> Sequence[int]:
    """The ranks move slots of memory in their processes: the bytes never come to this one."""
    if isinstance(views, SlotViews):
        return views.slots
    raise StoreUnsupported("the bytes of ranks are not in reach of this process")


def proved(part: PathPart) -> bool:
    """Whether the keys of a part follow from its fields."""
    if not part.whole():
        return False
    parent, size, extra_keys = part.parent, len(part.tokens) // part.blocks, dict(part.extra_keys)
    for i, key in enumerate(split_hashes(part.hashes)):
        if (
            Lineage(
                parent, part.tokens[i * size : (i + 1) * size], extra_keys.get(i, b"")
            ).block_hash()
            != key
        ):
            return False
        parent = key
    return True


# -- The stores of ranks that move the ranks' own device memory, as one: a block is there if every
# rank has its share of it.


class RanksDeviceStore(DeviceStore):
    """Every move is sent to all ranks. The number of blocks that arrived, or are stored, is the
    smallest of all ranks. A disconnected or silent rank counts as zero."""

    def __init__(self, group: RankGroup, block_bytes: int) -> None:
        super().__init__(block_bytes)
        self.group = group

    async def open(self) -> None:
        """The ranks open their stores themselves."""

    async def fetch(
        self, tokens: bytes, start: int, blocks: tuple[int, ...], seconds: float
    ) -> int:
        good = await self._all("fetch", tokens, start, blocks, seconds)
        self.reads += good
        return good

    async def save(self, tokens: bytes, start: int, blocks: tuple[int, ...], seconds: float) -> int:
        good = await self._all("save", tokens, start, blocks, seconds)
        self.writes += good
        return good

    async def _all(
        self,
        kind: Literal["fetch", "save"],
        tokens: bytes,
        start: int,
        blocks: tuple[int, ...],
        seconds: float,
    ) -> int:
        attempts = self.attempts.reads if kind == "fetch" else self.attempts.writes
        if not attempts.allow():
            return self._unavailable(len(blocks))
        answers = await self.group.scatter(
            lambda op: MoveDevice(op, kind, tokens, start, blocks, seconds),
            outcomes=len(blocks),
            worst=FAILED,
        )
        counts = [0 if answer is None else leading(answer.outcomes) for answer in answers]
        failed = [
            rank
            for rank, answer in enumerate(answers)
            if answer is None or FAILED in answer.outcomes
        ]
        good = min(counts, default=0)
        if good:
            attempts.worked()
        elif failed:
            attempts.failed(f"device stores of ranks {failed} failed, or did not answer")
        elif kind == "save":
            attempts.failed("the ranks stored no block", Outcome.NO_SPACE)
        if failed:
            log.warning(
                "device stores of ranks failed",
                call=kind,
                ranks=failed,
                blocks=len(blocks),
                moved=good,
            )
            self.unavailable += len(blocks) - good
        elif kind == "fetch":
            self.misses += len(blocks) - good
        return good

    async def close(self) -> None:
        """The ranks close their stores themselves."""


def leading(outcomes: bytes) -> int:
    """How many blocks, from the first on, were moved."""
    return next((i for i, outcome in enumerate(outcomes) if outcome), len(outcomes))


# -- The plane.


class RanksPlane(DataPlane):
    """A pair has arrived if it has on every rank. The memory of all ranks is lost when a connection
    to one of them is."""

    def __init__(
        self,
        group: RankGroup,
        device: DeviceBlocks,
        slots: HostSlots,
        backend: Backend | None = None,
        device_store: DeviceStore | None = None,
        *,
        store_timeout: float,
    ) -> None:
        super().__init__(device, slots, backend, device_store, store_timeout=store_timeout)
        self.group = group
        group.changed = lambda _, health: self.report_status(lost=health is RankState.DISCONNECTED)

    @property
    def generation(self) -> int:
        return self.group.memory_generation

    @property
    def available(self) -> bool:
        return self.group.healthy

    def on_status(self, changed: StatusChanged) -> None:
        self.group.used = self.device.num_blocks > 0
        super().on_status(changed)

    def abandon_pending(self) -> None:
        self.group.abandon_pending()

    def statistics(self) -> tuple[RankStatistics, ...]:
        return self.group.statistics()

    async def copy_pairs(
        self,
        direction: Direction,
        blocks: Sequence[int],
        slots: Sequence[int],
        progress: Progress | None = None,
    ) -> tuple[int, ...]:
        layerwise, pairs = progress is not None, (tuple(blocks), tuple(slots))
        answers = await self.group.scatter(
            lambda op: CopyBlocks(op, direction, *pairs, layerwise), progress, outcomes=len(blocks)
        )
        failed = set()
        for answer in answers:
            if answer is None:
                return tuple(range(len(blocks)))
            failed |= {j for j, outcome in enumerate(answer.outcomes) if outcome}
        return tuple(sorted(failed))

    async def _open(self, stack: AsyncExitStack, opening: Opening) -> None:
        stack.push_async_callback(opening.shutdown.step, "ranks", self.group.close)
        if self.device.num_blocks:
            await self.group.open()
        await self._open_stores(stack, opening)

    async def set_num_blocks(self, num_blocks: int) -> None:
        """Listen for ranks with so many device blocks, and wait until all have joined. RankError if
        they do not in time: nothing was changed."""
        self.group.blocks = num_blocks
        await self.group.open()
        self.group.used = True
        self.device = DeviceBlocks("ranks", self.device.layout, num_blocks)


def make_ranks_plane(config: Config, storage: StorageConfig, layout: Layout) -> RanksPlane:
    """Make the data plane of a leader."""
    token_addressed = has_device_store(config)
    if token_addressed and not config.device.num_blocks:
        raise ConfigError(
            "device.num_blocks is 0, and attention_store registers the device memory when the "
            "cache is opened: set the number of blocks"
        )
    stored = storage.backend != "none" and not token_addressed
    num_slots = config.host.arena_slots(stored=stored)
    count = config.ranks.count
    group = RankGroup(
        config.ranks,
        store_identity(config, storage, object_layout(storage, layout, count), 0, count),
        config.device.num_blocks,
        num_slots,
        storage=storage.backend,
        layers=layout.num_layers + layout.extra_layers,
    )
    backend = None
    if stored:
        backend = RankStore(
            group,
            layout.block_bytes,
            storage.timeout_s,
            exclusive=storage.exclusive,
            shared=storage.backend in SHARED,
            keeps_lineages=storage.backend == "file" and storage.keep_tokens,
        )
    return RanksPlane(
        group,
        DeviceBlocks("ranks", layout, config.device.num_blocks),
        HostSlots(num_slots, layout.block_bytes),
        backend,
        RanksDeviceStore(group, layout.block_bytes) if token_addressed else None,
        store_timeout=config.storage.timeout_s,
    )
