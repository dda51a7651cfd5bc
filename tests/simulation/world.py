"""One simulated world: a system, the fakes below and beside it, and the faults of the plan as they
come and go."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import anyio

from kvactors.attention_sdk import SHARED, Sdk, Shared, sdk_settings
from kvactors.cache import KVCache
from kvactors.data_plane.local import LocalPlane
from kvactors.device.base import Device
from kvactors.device.host import HostDevice
from kvactors.errors import (
    ActorFailed,
    CacheClosed,
    ChannelClosed,
    KVActorsError,
    LeaseEnded,
    NoRoom,
    NotReady,
    RankLost,
    StoreUnsupported,
)
from kvactors.flush_notifier.sinks.attention_store import AttentionStoreSink
from kvactors.flush_notifier.sinks.memory import MemorySink
from kvactors.layout import make_layout
from kvactors.settings.sinks import AttentionStoreSinkConfig
from kvactors.storage.attention_store import AttentionStoreBackend
from kvactors.testing.fakes import SimBackend, SimExecutor
from kvactors.testing.faults import STEPPED, Fault, Latency, StoreFaults, latency
from kvactors.testing.plan import Injectable, Injector
from kvactors.threads import Workers
from tests.load.client import Client
from tests.load.ground import Ground, Row
from tests.simulation.draw import INDEX, Draw
from tests.simulation.limits import STEP
from tests.simulation.recorder import Recorder, SimSystem
from tests.support.attentionstore_sdk import services
from tests.support.rank_model import RankModel
from tests.support.sim_pool import SimPool
from tests.support.sim_rank import SimRank
from tests.support.sim_service import SimService, SimThread
from tests.support.tree_reader import ReadSink

SLACK = 0.25
"""Seconds past its deadline by which an ask must be over: the sweeps of open asks come every 0.05
s, and the second one decides."""

DOUBT = 8.0
"""Seconds in which the loss of a rank must have been detected."""


class World(Ground):
    """The ground of a simulation. Awaits are timed, and cancelled as the plan has it.

    Args:
        keep: lines of the trace that are remembered.
        stores: of an earlier world.

    Attributes:
        violations: what was found wrong so far.
        jumped: seconds the clock has leapt.
    """

    deadlines = (0.02, 0.2, 1.0, 3.0)
    moments = (0.0, 0.001, 0.01, 0.05)
    patience = 2.0

    def __init__(
        self, drawn: Draw, keep: int = 200, stores: list[SimBackend] | None = None
    ) -> None:
        config = drawn.config
        self.drawn = drawn
        self.rng = random.Random(drawn.seed + 1)
        self.service_rng = random.Random(drawn.seed + 2)
        self.violations: list[str] = []
        self.jumped = 0.0
        self.recorder = Recorder(
            [fault for fault in drawn.plan.fault if fault.kind == "actor_crash"],
            keep,
            drawn.limits[STEP],
        )
        super().__init__(None, drawn.mix, self.recorder.seen)
        self.faulty = bool(drawn.plan.fault) or config.ranks.count > 1 or drawn.stop_at is not None
        self._awaits = Counter[str]()
        self._cancels = {(f.target, int(f.at)): f for f in drawn.plan.fault if f.kind == "cancel"}
        self.layout = make_layout(config.layout, config.cache.block_size)
        stored = config.storage.backend != "none" and not config.flush.flush_only
        count = config.ranks.count
        direct = stored and config.storage.backend == "attention_store"
        self.service = SimService(self._lag(1)) if direct or drawn.token_index else None
        self.stores = stores or (
            [self._make_store() for _ in range(count)] if stored and not direct else []
        )
        for store in self.stores:
            store.heal()
            if isinstance(store, SimPool):
                store.others = random.Random(f"others {drawn.seed}")
        self.sinks = [
            ReadSink(MemorySink(one, config.cache.block_size), self._lag(2)) for one in drawn.sinks
        ]
        if drawn.token_index:
            self.sinks.append(ReadSink(self._make_index_sink(), self._lag(2)))
        if direct and count > 1:
            for number in range(count):
                self._rank_on_service(number, count)
        self.ranks = [self._make_rank(number) for number in range(count)] if count > 1 else []
        local = self.stores[0] if self.stores and count == 1 else None
        self.system = SimSystem(config, list(self.sinks), local, self.recorder)
        backend = self.system.device_store
        if isinstance(backend, AttentionStoreBackend):
            self._on_service(backend.sdk)
        self.executor: SimExecutor | None = None
        if count == 1:
            plane = self.system.plane
            assert isinstance(plane, LocalPlane)
            assert isinstance(plane.device, HostDevice)
            plane.engine = self.executor = SimExecutor(plane.device, plane.arena, self._lag(0))
            plane.make_engine = self._make_engine
        self.model = RankModel(self.layout, self._devices)
        shared = self.system.store
        self.keeps_quotas = shared is not None and shared.shares is not None
        self._injector = Injector(self._target_of, self._fault_begins)

    def _make_engine(self, device: Device) -> SimExecutor:
        """The copy engine after a sleep."""
        assert self.executor is not None
        self.executor = SimExecutor(device, self.system.arena, self.executor.latency)
        return self.executor

    def _lag(self, which: int) -> Latency:
        return latency(self.rng, self.drawn.lags[which])

    def _make_store(self) -> SimBackend:
        kind = SimPool if self.drawn.shared else SimBackend
        return kind(
            self.layout.fingerprint, self.layout.block_bytes, self.drawn.capacity, self._lag(1)
        )

    def _make_index_sink(self) -> AttentionStoreSink:
        settings = AttentionStoreSinkConfig(
            name=INDEX, announce=self.service_rng.choice(("difference", "full"))
        )
        sink = AttentionStoreSink(settings, sdk_settings(self.drawn.config, self.layout))
        self._on_service(sink.sdk)
        return sink

    def _on_service(self, sdk: Sdk) -> None:
        assert self.service is not None
        sdk.thread = sdk.shared.threads["open"] = cast("Workers", SimThread(self.service))

    def _rank_on_service(self, number: int, count: int) -> None:
        """The handle that a rank will open calls the service in virtual time."""
        assert self.service is not None
        shard = sdk_settings(self.drawn.config, self.layout, shard=(number, count)).shard
        threads: dict[str, Any] = SHARED.setdefault(shard, Shared(f"shard {number}")).threads
        threads["storage"] = threads["open"] = SimThread(self.service)

    def _make_rank(self, number: int) -> SimRank:
        store = self.stores[number] if self.stores else None
        return SimRank(self.drawn.config, number, store=store, latency=self._lag(3))

    def _devices(self) -> Sequence[HostDevice | None]:
        if not self.ranks:
            assert isinstance(self.system.device, HostDevice)
            return [self.system.device]
        return [rank.device if rank.serving is not None else None for rank in self.ranks]

    # -- see `Ground`

    def fail(self, what: str) -> None:
        self.recorder.note(f"VIOLATED {what}")
        if what not in self.violations:
            self.violations.append(what)

    def began(self, client: Client) -> Any:
        loop = asyncio.get_running_loop()
        self._awaits[client.name] += 1
        number = client.name.rpartition(" ")[2]
        fault = self._cancels.pop((number, self._awaits[client.name]), None)
        if fault is not None and client.task is not None:
            self.seen["fault cancel"] += 1
            loop.call_later(fault.duration, client.task.cancel)
        return loop.time() - self.jumped

    def ended(self, client: Client, what: str, outcome: str, seconds: float, began: Any) -> None:
        self.recorder.note(f"{client.name} {what} {outcome}")
        took = asyncio.get_running_loop().time() - self.jumped - began
        if took > seconds + SLACK:
            self.fail(f"{what} took {took:.3f} s of {seconds:.3f} and ended with {outcome}")

    def judge(self, what: str, error: KVActorsError, row: Row | None) -> None:
        """Some errors need a reason."""
        if self.closing:
            return
        kinds = {fault.kind for fault in self.drawn.plan.fault}
        crashed = self.recorder.failures > 0
        cut = row is not None and row.cut
        unfounded = (
            (isinstance(error, ActorFailed) and not crashed)
            or (isinstance(error, LeaseEnded) and not (crashed or cut))
            or (isinstance(error, RankLost) and not kinds & {"rank_cut", "rank_lost"})
            or isinstance(error, CacheClosed | ChannelClosed | NotReady)
            or (isinstance(error, StoreUnsupported) and self.system.device_store is None)
        )
        if unfounded:
            self.fail(f"{what} ended with {error!r}, and nothing accounts for that")

    def asked(self) -> int:
        """The incarnation of the index that will give the lease."""
        return self.system.index.incarnation

    async def own(self, client: Client, row: Row) -> None:
        """An engine detects the failure of the index that gave a lease at once, and leaves the
        blocks alone, which have other owners then. The next incarnation refuses every call."""
        if self.system.index.incarnation == row.ticket:
            return
        lease = row.lease
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "commit": lambda: lease.commit(0, deadline=2.0),
            "extend": lambda: lease.extend([1], deadline=2.0),
            "preempt": lambda: lease.preempt(deadline=2.0),
            "finish": lambda: lease.finish(deadline=2.0),
        }
        what = client.rng.choice((*calls, ""))
        if what:
            await client.ask(what, calls[what], 2.0, row, cuts=False)
            self.fail(f"{what} of a lease of a dead index was answered")
        raise LeaseEnded("the index of this lease has failed")

    async def write(self, row: Row, start: int, names: Sequence[bytes]) -> None:
        blocks = row.lease.block_table[start : start + len(names)]
        await self.model.fill(blocks, b"".join(names))

    async def differing(
        self, row: Row, start: int, names: Sequence[bytes], *, hits: bool = False
    ) -> Sequence[int]:
        blocks = row.lease.block_table[start : start + len(names)]
        return await self.model.check(blocks, b"".join(names))

    async def differing_layer(self, row: Row, layer: int, names: Sequence[bytes]) -> Sequence[int]:
        if self.ranks:
            return ()
        return self.model.check_layer(layer, row.lease.block_table[: len(names)], b"".join(names))

    async def wrong(self, row: Row, what: str) -> None:
        """Wrong bytes are a violation, unless a rank lost its memory and the cache reports it
        before the lease is used."""
        gone = any(rank.serving is None or rank.starts > 1 for rank in self.ranks)
        for _ in range(int(DOUBT / 0.1) if gone else 0):
            await asyncio.sleep(0.1)
            try:
                await row.lease.commit(0, deadline=2.0)
            except RankLost:
                self.seen["lease ready to lost"] += 1
                raise
            except NoRoom:
                break
        await super().wrong(row, what)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[KVCache]:
        """The whole of it, and the plan's faults."""
        for rank in self.ranks:
            await rank.start()
        try:
            async with self.system.running():
                self.cache = KVCache(self.system)
                for one in services.values():
                    one.capacity = self.service_rng.choice((1, 4, 20, 1 << 16))
                    one.from_root = self.service_rng.random() < 0.3
                self._injector.start(
                    fault for fault in self.drawn.plan.fault if fault.kind not in STEPPED
                )
                yield self.cache
                self.closing = True
                self.cache.close()
        finally:
            await self._end_faults()
            for rank in self.ranks:
                await rank.close()

    # -- faults

    def _fault_begins(self, fault: Fault) -> None:
        self.recorder.note(f"fault {fault.kind} {fault.target} {fault.duration} {fault.amount}")
        self.seen[f"fault {fault.kind}"] += 1
        if fault.kind == "clock_jump":
            self.jumped += fault.duration

    def _target_of(self, fault: Fault) -> Injectable | None:
        family, number = fault.kind.partition("_")[0], fault.target
        if family == "sink":
            return next(one for one in self.sinks if one.name == fault.target)
        if family == "rank" or (family == "copy" and self.executor is None):
            return self.ranks[int(number or 0)]
        if family == "copy":
            return self.executor
        return self.stores[int(number or 0)] if self.stores else self.service

    def _troublesome(self) -> list[StoreFaults]:
        return [*self.stores, *([] if self.service is None else [self.service])]

    # -- the end of all faults

    async def heal(self) -> None:
        """Nothing goes wrong from now on. Faults that have not come yet never will."""
        self.recorder.disarm()
        await self._end_faults()
        self._count_hits()
        if self.executor is not None:
            self.executor.heal()
        for store in self._troublesome():
            store.heal()
        for sink in self.sinks:
            sink.heal()
        for rank in self.ranks:
            rank.device.failing = 0
            await rank.heal()
        if self.system.ranks is not None:
            with anyio.move_on_after(30.0):
                while not self.system.ranks.healthy:
                    await asyncio.sleep(0.05)
            if not self.system.ranks.healthy:
                self.fail(
                    "ranks are not healthy 30 s after the last fault: "
                    f"{self.system.ranks.statistics()}"
                )

    async def _end_faults(self) -> None:
        for error in await self._injector.stop():
            self.fail(f"a fault broke: {error!r}")

    def _count_hits(self) -> None:
        """Count the faults that had an effect."""
        executor, stores, sinks, ranks = self.executor, self.stores, self.sinks, self.ranks
        everything = self._troublesome()
        hits = {
            "copy_fail": (executor.failed if executor else 0)
            + sum(rank.device.failed for rank in ranks),
            "copy_slow": executor.delayed if executor else 0,
            "copy_hang": executor.gate.waited if executor else 0,
            "store": sum(store.troubled for store in everything),
            "store_hang": sum(store.gate.waited for store in everything),
            "torn_write": sum(store.torn for store in stores),
            "bit_flip": sum(store.flipped for store in stores),
            "object_lost": sum(store.vanished for store in everything),
            "sink": sum(sink.troubled for sink in sinks),
            "sink_duplicate": sum(sink.doubled for sink in sinks),
            "rank_silent": sum(rank.gate.waited for rank in ranks),
            "rank_lost": sum(rank.starts - 1 for rank in ranks),
        }
        for what, count in hits.items():
            self.seen[f"met {what}"] += count
