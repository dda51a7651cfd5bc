"""The faults of a simulated cache: control of its copies, store and sink, by hand or by a plan with
times."""

from __future__ import annotations

import random

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
)
"""The kinds that apply to a cache of one process used through its public API."""


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

    def draw(self, count: int = 3, *, span: float = 0.1) -> FaultPlan:
        """`count` faults, drawn from the seed, that begin within `span` seconds."""
        rng = random.Random(f"faults {self.seed}")  # noqa: S311  (no cryptography)
        targets = Targets(sinks=("sim",), store=True, span=span)
        chosen: list[Fault] = []
        while len(chosen) < count:
            chosen += [fault for fault in draw(rng, 1, targets).fault if fault.kind in NEAR]
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
        self._start()

    def _start(self) -> None:
        self._injector.start(self._plan.fault)
        self._plan = FaultPlan()

    async def heal(self) -> None:
        """End every fault. Faults that have not begun are dropped. Damaged bytes stay damaged."""
        self._cache = None
        await self._injector.stop()
        self.copies.heal()
        self.sink.heal()
        if self.store is not None:
            self.store.disk.heal()

    def _target_of(self, fault: Fault) -> Injectable | None:
        family = fault.kind.partition("_")[0]
        targets: dict[str, Injectable] = {"copy": self.copies, "sink": self.sink}
        return targets.get(family, self.store and self.store.disk)
