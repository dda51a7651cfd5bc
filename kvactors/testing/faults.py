"""The vocabulary of faults, and the injectors of two seams: sinks and stores that fail on command,
around real ones."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import anyio
import msgspec

from kvactors.errors import SinkError, StoreUnavailable
from kvactors.flush_notifier.messages import FlushTask, GroupLabel
from kvactors.flush_notifier.sinks.base import Sink, SnapshotSource
from kvactors.flush_notifier.sinks.memory import MemorySink
from kvactors.storage.backend import Backend, Expired, ReadReport, WriteReport
from kvactors.storage.file.store import FileBackend
from kvactors.storage.messages import Outcome

CopyKind = Literal["copy_fail", "copy_slow", "copy_hang"]
StoreKind = Literal[
    "store_down", "store_slow", "store_hang", "torn_write", "bit_flip", "disk_full", "object_lost"
]
SinkKind = Literal["sink_down", "sink_hang", "sink_lose_answers", "sink_duplicate"]
RankKind = Literal["rank_silent", "rank_cut", "rank_lost"]
RunKind = Literal["actor_crash", "cancel", "clock_jump"]
OtherSinkKind = Literal["sink_slow", "sink_fail_every", "sink_lose_state"]
SdkKind = Literal["store_small", "store_refuse_block", "store_leak", "store_lose_answers"]
SdkCountKind = Literal["store_count_low", "store_count_invalid"]
ProcessKind = Literal["process_kill", "process_stop", "link_cut", "link_silent", "client_leave"]
Drawn = Literal[CopyKind, StoreKind, SinkKind, RankKind, RunKind]
"""The kinds that plans are drawn from. A seed draws the same plan as long as the list is the
same."""
Kind = Literal[Drawn, OtherSinkKind, SdkKind, SdkCountKind, ProcessKind]
KINDS: tuple[Kind, ...] = get_args(Kind)

STEPPED: frozenset[Kind] = frozenset({"actor_crash", "cancel", "client_leave"})
"""Kinds whose moment is a count: of an actor's turns, of a client's awaits, of requests."""

LASTING: frozenset[Kind] = frozenset(KINDS) - {
    "copy_fail",
    "torn_write",
    "bit_flip",
    "object_lost",
    "rank_cut",
    "actor_crash",
    "sink_lose_state",
    "link_cut",
    "client_leave",
}
"""Kinds for which `duration` means something: how long it lasts, by how much the clock jumps, how
long an await goes on before its cancellation."""


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing that goes wrong.

    Attributes:
        kind: the seam and what happens there.
        at: seconds since the work began, or, of an actor_crash, cancel or client_leave, which turn,
            await or request (from 1 on).
        target: an actor's or sink's name, the number of a rank or client, the first if empty.
        duration: seconds.
        amount: pairs, writes or objects concerned. Of store_small the blocks that a store has space
            for, of store_refuse_block a device block.
        every: of sink_fail_every which calls fail, of a file store's bit_flip which slots: every
            n-th.
        delay: seconds more that a call takes while its sink or store is slow. None for a store: in
            proportion to `amount`. Of an SDK's store_hang: seconds until a call goes on. Of a
            client_leave: seconds from the acquire until the task is cancelled.
    """

    kind: Kind
    at: float = 0.0
    target: str = ""
    duration: float = 0.0
    amount: int = 1
    every: int = 2
    delay: float | None = None


Latency = Callable[[], float]
"""Seconds the next operation takes."""

SLOWER = 0.03
"""Seconds more that a slow operation takes, for each of a fault's `amount`."""

TAIL = 20
"""A latency is at most so many times its mean."""


def instant() -> float:
    """No time at all."""
    return 0.0


def latency(rng: random.Random, mean: float) -> Latency:
    """Exponential, with its tail cut."""

    def draw() -> float:
        return min(TAIL * mean, rng.expovariate(1 / mean))

    return draw


class Gate:
    """Callers that pass wait while the gate is shut. waited: number of calls that waited."""

    def __init__(self) -> None:
        self.shut = False
        self.waited = 0
        self._waiters: list[asyncio.Future[None]] = []

    def close(self) -> None:
        self.shut = True

    def open(self) -> None:
        self.shut = False
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def passed(self) -> None:
        self.waited += self.shut
        while self.shut:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter


SINK_ATTRIBUTES = (
    *("name", "block_size", "filter", "takes_clear", "by_name", "announces_full"),
    *("ready_timeout", "by_tokens", "repeats", "takes_groups", "resync_interval", "live_view"),
)


class FaultySink(Sink):
    """A sink around another: the injector of the sinks' seam. twice: every delivery arrives twice.

    fault_mode: down (refuses every call), hang (never answers), slow (every call takes `delay`
    seconds more), fail_every (refuses every `every`-th call), lose_answers (carries out the call
    and then fails), or empty.
    """

    def __init__(self, inner: Sink) -> None:
        self.inner = inner
        for name in SINK_ATTRIBUTES:
            setattr(self, name, getattr(inner, name))
        self.fault_mode = ""
        self.every = 2
        self.delay = 0.0
        self.twice = False
        self.calls = self.troubled = self.doubled = 0

    @property
    def view(self) -> Any:
        return getattr(self.inner, "view", None)

    @property
    def num_acknowledged(self) -> int:
        """The inner sink's count, 0 during a fault since the answer is lost."""
        return 0 if self.fault_mode else self.inner.num_acknowledged

    @num_acknowledged.setter
    def num_acknowledged(self, count: int) -> None:
        self.inner.num_acknowledged = count

    async def open(self) -> None:
        await self.inner.open()

    def set_snapshot_source(self, source: SnapshotSource) -> None:
        self.inner.set_snapshot_source(source)

    def set_group_source(self, group: GroupLabel, source: SnapshotSource) -> None:
        self.inner.set_group_source(group, source)

    async def begin_epoch(self, epoch: int) -> None:
        await self._before()
        await self.inner.begin_epoch(epoch)
        self._after()

    async def deliver(self, tasks: Sequence[FlushTask]) -> None:
        await self._before()
        await self._pass_on(tasks)
        if self.twice:
            self.doubled += 1
            await self._pass_on(tasks)
        self._after()

    async def close(self) -> None:
        await self.inner.close()

    async def inject(self, fault: Fault) -> None:
        """See `Injectable`: sink_down, sink_hang, sink_slow, sink_fail_every, sink_lose_answers,
        sink_duplicate, sink_lose_state."""
        if fault.kind == "sink_duplicate":
            self.twice = True
        elif fault.kind == "sink_lose_state":
            self.lose_state()
        else:
            self.every, self.delay = fault.every, fault.delay or 0.0
            self.fault_mode = fault.kind.removeprefix("sink_")

    async def recover(self, fault: Fault) -> None:
        if fault.kind != "sink_lose_state":
            self.heal()

    def heal(self) -> None:
        self.fault_mode = ""
        self.twice = False

    def lose_state(self) -> None:
        """Empty the index behind the sink: a sink in memory, or a stand-in of AttentionStore."""
        inner: Any = self.inner
        if isinstance(inner, MemorySink):
            inner.lose_state()
        else:
            inner.sdk.connection.service.resident.clear()

    async def _pass_on(self, tasks: Sequence[FlushTask]) -> None:
        await self.inner.deliver(tasks)

    async def _before(self) -> None:
        self.calls += 1
        self.troubled += bool(self.fault_mode)
        if self.fault_mode == "hang":
            await anyio.sleep_forever()
        if self.fault_mode == "slow":
            await anyio.sleep(self.delay)
        if self.fault_mode == "down" or (
            self.fault_mode == "fail_every" and self.calls % self.every == 0
        ):
            raise SinkError(f"sink {self.name!r} was set to fail")

    def _after(self) -> None:
        if self.fault_mode == "lose_answers":
            raise SinkError(f"sink {self.name!r} was set to lose its answer")


class StoreFaults:
    """Faults of one store: the injector of the stores' seam."""

    def __init__(self, latency: Latency = instant) -> None:
        self.latency = latency
        self.gate = Gate()
        self.down = self.full = False
        self.slower = 0.0
        self.troubled = self.flipped = self.vanished = 0

    async def delay(self) -> None:
        """Wait as long as one call takes."""
        self.troubled += self.slower > 0 or self.gate.shut or self.down
        await asyncio.sleep(self.latency() + self.slower)
        await self.gate.passed()

    async def inject(self, fault: Fault) -> None:
        """See `Injectable`: store_down, store_slow, store_hang, disk_full, and those of
        `damage`."""
        if fault.kind == "store_slow":
            self.slower = SLOWER * fault.amount if fault.delay is None else fault.delay
        elif fault.kind == "store_hang":
            self.gate.close()
        elif fault.kind == "store_down":
            self.down = True
        elif fault.kind == "disk_full":
            self.full = True
        else:
            self.damage(fault)

    def damage(self, fault: Fault) -> None:
        raise ValueError(f"{fault.kind} is no fault of this store")

    async def recover(self, fault: Fault) -> None:
        if fault.kind in ("store_down", "store_slow", "store_hang", "disk_full"):
            self.heal()

    def heal(self) -> None:
        """End every fault. Damaged objects stay damaged."""
        self.down = self.full = False
        self.slower = 0.0
        self.gate.open()


@Backend.register  # every call that is not here is the inner one's
class FaultyBackend(StoreFaults):
    """A store around another, which gets every call that no fault keeps from it. A new lasting
    fault replaces the last one."""

    exists_many = Backend.exists_many  # in parts, each of which may meet a fault

    def __init__(self, inner: Backend) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def delay(self) -> None:
        """See `StoreFaults.delay`. Without a fault, nothing is awaited."""
        if self.slower:
            await anyio.sleep(self.slower)
        await self.gate.passed()

    async def inject(self, fault: Fault) -> None:
        if fault.kind in LASTING:
            self.heal()
        await super().inject(fault)

    def damage(self, fault: Fault) -> None:
        if fault.kind != "bit_flip" or not isinstance(self.inner, FileBackend):
            super().damage(fault)
        else:
            self.flipped += corrupt_objects(self.inner, fault.every)

    def probe(self, keys: Sequence[bytes]) -> int | None:
        return 0 if self.down else self.inner.probe(keys)

    async def ask(self, keys: Sequence[bytes], expired: Expired) -> int:
        await self.delay()
        if self.down:
            raise StoreUnavailable("the store is down")
        return await self.inner.ask(keys, expired)

    async def read(self, keys: Sequence[bytes], *rest: Any) -> ReadReport:
        await self.delay()
        if self.down:
            return ReadReport(bytes([Outcome.UNAVAILABLE]) * len(keys), [])
        return await self.inner.read(keys, *rest)

    async def write(self, keys: Sequence[bytes], *rest: Any, **named: Any) -> WriteReport:
        await self.delay()
        if self.down or self.full:
            outcome = Outcome.UNAVAILABLE if self.down else Outcome.NO_SPACE
            return WriteReport(bytes([outcome]) * len(keys), [])
        return await self.inner.write(keys, *rest, **named)


def corrupt_objects(store: FileBackend, every: int) -> int:
    """Flip a bit in the payload of every n-th slot of a file store, on the disk.
    Returns the number of slots."""
    files, flipped = store.files, 0
    for slot in range(0, len(files.slabs) * files.meta.slots_per_slab, every):
        slab, index = divmod(slot, files.meta.slots_per_slab)
        with (files.folder / f"slab-{slab:04}").open("r+b", buffering=0) as file:
            at = index * files.meta.stride + slot % files.meta.block_bytes
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1 << slot % 8]))
        flipped += 1
    return flipped
