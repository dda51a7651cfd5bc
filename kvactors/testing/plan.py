"""Plans of faults and their times: pure data, drawn from a seed or written by hand as TOML
([[fault]] tables) or JSON."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, get_args

import msgspec
from msgspec.structs import replace

from kvactors.cache import KVCache
from kvactors.testing.fakes import SimBackend, SimExecutor, SimSink
from kvactors.testing.faults import LASTING, STEPPED, Drawn, Fault, Kind, RankKind, SinkKind
from kvactors.testing.loop import SimLoop

DRAWN: tuple[Kind, ...] = get_args(Drawn)
SINK_KINDS: tuple[Kind, ...] = get_args(SinkKind)


class FaultPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every fault of a run, in order of `at`."""

    fault: tuple[Fault, ...] = ()


def draw_one(
    rng: random.Random, kind: Kind, aims: Sequence[str], span: float, steps: int = 200
) -> Fault:
    """A fault at one of some targets. span: seconds in which it begins. steps: turns or awaits
    among which it does."""
    at = (
        float(int(rng.triangular(1, steps, 1)))
        if kind in STEPPED
        else round(rng.uniform(0, span), 4)
    )
    duration = round(min(3.0, rng.expovariate(3.0)), 4) if kind in LASTING else 0.0
    if kind == "cancel":
        duration = round(rng.choice((0.0, 0.0, rng.expovariate(200.0), rng.expovariate(20.0))), 4)
    return Fault(kind, at, rng.choice(aims), duration, rng.randint(1, 8))


# -- carrying a plan out


class Injectable(Protocol):
    """A fake that faults can be injected into."""

    async def inject(self, fault: Fault) -> None:
        """Begin the failure that `fault` describes."""

    async def recover(self, fault: Fault) -> None:
        """End a fault that lasts. One that happens once has no end."""


class Injector:
    """Runs the timed faults of plans on a simulated loop."""

    def __init__(
        self, target_of: Callable[[Fault], Injectable | None], begun: Callable[[Fault], None]
    ) -> None:
        self._target_of = target_of
        self._begun = begun
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, faults: Iterable[Fault]) -> None:
        loop = asyncio.get_running_loop()
        self._tasks += [
            loop.create_task(self._carry_out(fault), name=f"fault {fault.kind}") for fault in faults
        ]

    async def stop(self) -> list[Exception]:
        """Cancel the faults that have not begun or ended yet."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        return [result for result in results if isinstance(result, Exception)]

    async def _carry_out(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at)
        self._begun(fault)
        if fault.kind == "clock_jump":
            loop = asyncio.get_running_loop()
            if not isinstance(loop, SimLoop):
                raise TypeError("only the clock of a SimLoop jumps")
            loop.jump(fault.duration)
            return
        target = self._target_of(fault)
        if target is None:
            return
        await carry_out(target, fault)


async def carry_out(target: Injectable, fault: Fault) -> None:
    """Inject a fault, let its duration pass, and end it."""
    await target.inject(fault)
    await asyncio.sleep(fault.duration)
    await target.recover(fault)


# -- the faults of a simulated cache


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
        kinds = [kind for kind in DRAWN if kind not in ("actor_crash", *get_args(RankKind))]
        chosen: list[Fault] = []
        for number in range(SPANS):
            begin, span = FIRST_SPAN * (2**number - 1), FIRST_SPAN * 2**number
            drawn: list[Fault] = []
            while len(drawn) < count:
                kind = rng.choice(kinds)
                fault = draw_one(rng, kind, ("sim",) if kind in SINK_KINDS else ("0",), span)
                if kind in NEAR:
                    drawn.append(replace(fault, at=begin + fault.at))
            chosen += drawn
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
        self._cache = cache
        self._main = asyncio.current_task()
        self._start()

    def _start(self) -> None:
        self._requests = 0
        self._leaves = {fault.at: fault for fault in self._plan.fault if fault.kind in STEPPED}
        self._injector.start(fault for fault in self._plan.fault if fault.kind not in STEPPED)
        self._plan = FaultPlan()

    def acquired(self, task: asyncio.Task[Any]) -> None:
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
            self.store.heal()

    def _target_of(self, fault: Fault) -> Injectable | None:
        family = fault.kind.partition("_")[0]
        targets: dict[str, Injectable] = {"copy": self.copies, "sink": self.sink}
        return targets.get(family, self.store)
