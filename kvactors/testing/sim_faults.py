"""The faults of a simulated cache: its copies, store and sink to misuse by hand, or a plan that
does it at its times."""

from __future__ import annotations

import asyncio
import random
from typing import get_args

from kvactors.cache import KVCache
from kvactors.testing.fakes import SimBackend, SimExecutor, SimSink
from kvactors.testing.loop import SimLoop
from kvactors.testing.plan import Fault, FaultPlan, Kind, Targets, draw

FAR = frozenset({"actor_crash", "cancel", "rank_silent", "rank_cut", "rank_lost"})
"""Kinds of faults that are not for a cache of one process seen from its door."""

NEAR: tuple[Kind, ...] = tuple(kind for kind in get_args(Kind) if kind not in FAR)
"""The others."""

SLOWER = 0.03
"""Seconds more that a slow copy or access takes, for each of a fault's amount."""


class SimFaults:
    """copies, store, sink: the fakes of the cache that is open (see `kvactors.testing.fakes`);
    store is None without a storage tier.

    befallen: faults of a plan that have begun, in order.
    """

    copies: SimExecutor
    sink: SimSink

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.reset()

    def reset(self) -> None:
        """As before the first fault, with an empty store."""
        self.store: SimBackend | None = None
        self.befallen: list[Fault] = []
        self._plan = FaultPlan()
        self._tasks: list[asyncio.Task[None]] = []
        self._cache: KVCache | None = None

    def draw(self, count: int = 3, *, span: float = 0.1) -> FaultPlan:
        """`count` faults, drawn from the seed, that begin within `span` seconds."""
        rng = random.Random(f"faults {self.seed}")  # noqa: S311  (what goes wrong is no secret)
        targets = Targets(sinks=("sim",), store=True, span=span)
        chosen: list[Fault] = []
        while len(chosen) < count:
            chosen += [fault for fault in draw(rng, 1, targets).fault if fault.kind in NEAR]
        return FaultPlan(tuple(sorted(chosen, key=lambda fault: fault.at)))

    def plan(self, plan: FaultPlan) -> FaultPlan:
        """These faults befall the cache: their times count from now if it is open, else from its
        opening. Returns the plan.

        ValueError for a kind that is not for a cache of one process seen from its door.
        """
        if far := sorted({fault.kind for fault in plan.fault} - set(NEAR)):
            raise ValueError(
                f"{', '.join(far)} cannot befall this cache; what can: {', '.join(NEAR)}"
            )
        self._plan = plan
        if self._cache is not None:
            self._start()
        return plan

    def begin(self, cache: KVCache) -> None:
        """The cache is open."""
        self._cache = cache
        self._start()

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks += [
            loop.create_task(self._befall(fault), name=f"fault {fault.kind}")
            for fault in self._plan.fault
        ]
        self._plan = FaultPlan()

    async def heal(self) -> None:
        """No more trouble. What has not come yet never will; what has rotted stays so."""
        self._cache = None
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.copies.failing, self.copies.slower = 0, 0.0
        self.copies.gate.open()
        self.sink.heal()
        if self.store is not None:
            self.store.heal()

    async def _befall(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at)
        self.befallen.append(fault)
        loop = asyncio.get_running_loop()
        if fault.kind == "clock_jump":
            assert isinstance(loop, SimLoop), "only a simulated clock jumps"
            loop.jump(fault.duration)
            return
        family = fault.kind.partition("_")[0]
        act = {"copy": self._copies, "sink": self._sink}.get(family, self._store)
        act(fault, True)
        await asyncio.sleep(fault.duration)
        act(fault, False)

    def _copies(self, fault: Fault, begins: bool) -> None:
        if fault.kind == "copy_fail":
            self.copies.failing += fault.amount if begins else 0
        elif fault.kind == "copy_slow":
            self.copies.slower = SLOWER * fault.amount if begins else 0.0
        elif begins:
            self.copies.gate.close()
        else:
            self.copies.gate.open()

    def _sink(self, fault: Fault, begins: bool) -> None:
        self.sink.heal()
        if begins and fault.kind == "sink_duplicate":
            self.sink.twice = True
        elif begins:
            self.sink.misdeed = {"sink_down": "down", "sink_hang": "hang"}.get(
                fault.kind, "lose_answers"
            )  # type: ignore[assignment]

    def _store(self, fault: Fault, begins: bool) -> None:
        store = self.store
        if store is None:
            return
        if fault.kind in ("torn_write", "bit_flip", "object_lost"):
            if begins:
                store.tearing += fault.amount if fault.kind == "torn_write" else 0
                store.flip(fault.amount if fault.kind == "bit_flip" else 0)
                store.lose(fault.amount if fault.kind == "object_lost" else 0)
        elif not begins:
            store.heal()
        elif fault.kind == "store_slow":
            store.slower = SLOWER * fault.amount
        elif fault.kind == "store_hang":
            store.gate.close()
        else:
            store.down, store.full = fault.kind == "store_down", fault.kind == "disk_full"
