"""The faults of a simulated cache: control of its copies, store and sink, by hand or by a plan with
times."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from msgspec.structs import replace

from kvactors.cache import KVCache
from kvactors.testing.fakes import SimBackend, SimExecutor, SimSink
from kvactors.testing.fault import STEPPED, Fault, Kind
from kvactors.testing.injection import Injectable, Injector
from kvactors.testing.plan import DRAWN, FaultPlan, Targets, draw

NEAR: tuple[Kind, ...] = (
    *(kind for kind in DRAWN if not kind.startswith("rank_") and kind not in STEPPED),
    "sink_slow",
    "sink_fail_every",
    "sink_lose_state",
    "client_leave",
)
"""The kinds that apply to a cache of one process used through its public API."""


FIRST_SPAN, SPANS = 0.1, 10
"""Seconds of the first span of drawn faults, and the number of spans, each twice as long as the one
before: 102 s in all."""

REQUESTS = 10_000
"""Requests whose clients may leave."""


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
        self._injector = Injector(self._target_of, self.befallen.append)
        self._cache: KVCache | None = None
        self._leaves: dict[float, Fault] = {}

    def draw(self, count: int = 3, *, leaves: float = 0.0) -> FaultPlan:
        """Faults for a test of any length, drawn from the seed.

        Args:
            count: faults that begin in the first 0.1 s, and in each of the spans after it, of which
                each is twice as long as the one before.
            leaves: share of the requests whose client leaves: the task that calls `acquire` is
                cancelled, up to 0.1 s later. The task that opened the cache does not leave.
        """
        rng = random.Random(f"faults {self.seed}")  # noqa: S311  (no cryptography)
        chosen: list[Fault] = []
        for number in range(SPANS):
            begin, span = FIRST_SPAN * (2**number - 1), FIRST_SPAN * 2**number
            targets, drawn = Targets(sinks=("sim",), store=True, span=span), list[Fault]()
            while len(drawn) < count:
                drawn += [fault for fault in draw(rng, 1, targets).fault if fault.kind in NEAR]
            chosen += [replace(fault, at=begin + fault.at) for fault in drawn]
        left = [number for number in range(REQUESTS) if leaves and rng.random() < leaves]
        chosen += [
            Fault("client_leave", number + 1.0, delay=10 ** rng.uniform(-4, -1)) for number in left
        ]
        return FaultPlan(tuple(sorted(chosen, key=lambda fault: fault.at)))

    def plan(self, plan: FaultPlan) -> FaultPlan:
        """Inject these faults into the cache: their times count from now if it is open, else from
        its opening. Returns the plan.

        Raises:
            ValueError: a kind in the plan does not apply to a cache of one process.
        """
        if far := sorted({fault.kind for fault in plan.fault} - set(NEAR)):
            raise ValueError(f"{', '.join(far)} cannot occur in this cache, only {', '.join(NEAR)}")
        self._plan = plan
        if self._cache is not None:
            self._start()
        return plan

    def begin(self, cache: KVCache) -> None:
        """The cache is open."""
        self._cache = cache
        self._main = asyncio.current_task()
        self._start()

    def _start(self) -> None:
        self._requests = 0
        self._leaves = {fault.at: fault for fault in self._plan.fault if fault.kind in STEPPED}
        self._injector.start(fault for fault in self._plan.fault if fault.kind not in STEPPED)
        self._plan = FaultPlan()

    def acquired(self, task: asyncio.Task[Any]) -> None:
        """A task has sent an acquire."""
        self._requests += 1
        fault = self._leaves.get(self._requests)
        if fault is not None and task is not self._main:
            task.get_loop().call_later(fault.delay or 0.0, self._leave, task, fault)

    def _leave(self, task: asyncio.Task[Any], fault: Fault) -> None:
        if task.cancel():
            self.befallen.append(fault)

    async def heal(self) -> None:
        """End every fault. Faults that have not begun are dropped. Damaged bytes stay damaged."""
        self._cache, self._leaves = None, {}
        await self._injector.stop()
        self.copies.heal()
        self.sink.heal()
        if self.store is not None:
            self.store.disk.heal()

    def _target_of(self, fault: Fault) -> Injectable | None:
        family = fault.kind.partition("_")[0]
        targets: dict[str, Injectable] = {"copy": self.copies, "sink": self.sink}
        return targets.get(family, self.store and self.store.disk)
