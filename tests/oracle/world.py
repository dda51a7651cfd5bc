"""One open cache, the engine on it, and the checks that both agree."""

from __future__ import annotations

import asyncio
import gc
import random
from typing import Any

from kvactors import (
    ActorFailed,
    CacheAsleep,
    DeadlineExceeded,
    KVActorsError,
    KVCache,
    LeaseEnded,
    NoRoom,
    Paused,
)
from kvactors.cpu_evictor.memory import NOT_FETCHED
from kvactors.errors import StoreUnsupported
from kvactors.testing.sim import problems_at_rest

from .draw import MODEL, Draw
from .history import History
from .model import Memory, Prompt, Scope
from .record import Record
from .sharing import Pins, clear_part, compare_clears, count_statistics, set_quota, sleep

REST = 60.0
"""Seconds within which a cache without work must be idle. Only a hang takes as long."""


class World:
    """weights: the namespace that the engine computes with. leases: granted and not ended.
    draining: requests end as soon as they can."""

    def __init__(
        self, cache: KVCache, drawn: Draw, history: History, record: Record, rng: random.Random
    ) -> None:
        self.cache = cache
        self.drawn = drawn
        self.history = history
        self.record = record
        self.rng = rng
        self.weights: str = drawn.tables["cache"]["namespace"]
        self.leases = 0
        self.draining = False
        self.pins = Pins(self)
        self.prompts: list[Prompt] = []  # of finished requests, without media
        self._sharing_rng = random.Random(f"sharing {drawn.seed}")
        self._memory: tuple[Any, Memory] | None = None

    @property
    def memory(self) -> Memory:
        """The device memory. After a sleep it is another."""
        device, found = self.cache.device, self._memory
        if found is None or found[0] is not device:
            layers = range(self.drawn.tables["layout"]["num_layers"])
            # One assignment: clients in threads read it.
            found = self._memory = device, Memory(device, layers, ("key", "value"))
        return found[1]

    @property
    def seen(self) -> Any:
        """See `Record`."""
        return self.record.seen

    def fail(self, what: str) -> None:
        """A failure, with the seed it was found in."""
        self.record.fail(f"seed {self.drawn.seed} ({self.drawn.store}): {what}")

    def scope(self, lora: str | None, salt: str | None) -> Scope:
        """The scope of a request that is admitted now."""
        return Scope(MODEL, self.weights, lora, salt)

    def verify(
        self, what: str, blocks: Any, prompt: Prompt, until: int, layers: Any = None
    ) -> None:
        """The first blocks of a prompt hold its bytes, and none is older than a clear that returned
        before `until`."""
        digests = prompt.digests[: len(blocks)]
        found = self.memory.read(blocks, digests, layers)
        self.record.verified += len(found)
        for position, stamp in enumerate(found):
            if stamp is None:
                self.record.wrong += 1
                self.fail(f"{what}: a block holds other bytes (block {position} of {len(found)})")
            elif self.history.stale(stamp, until, prompt.scope):
                self.record.wrong += 1
                self.fail(
                    f"{what}: a block computed before a clear (block {position} of {len(found)})"
                )

    def judge(self, what: str, error: BaseException, *, cut: bool = False) -> None:
        """Whether a call may end with this error. cut: whether a call on the same lease was
        cancelled before."""
        self.seen[f"{what} {type(error).__name__}"] += 1
        if isinstance(error, StoreUnsupported) and self.drawn.store == "attention_store":
            return
        if isinstance(error, CacheAsleep) and self.drawn.sleeps:
            return
        if isinstance(error, NoRoom | DeadlineExceeded | Paused) or (
            isinstance(error, LeaseEnded) and cut
        ):
            return
        if isinstance(error, ActorFailed):
            self.fail(f"{what}: an actor failed: {error!r}; last: {self._last_failure()}")
            return
        self.fail(f"{what} raised {error!r}")

    def _last_failure(self) -> str:
        return repr(self.cache.statistics().supervisor)

    # -- the controller

    async def control(self) -> None:
        """Clears, pauses and changes of weights, until cancelled."""
        drawn, rng = self.drawn, self.rng
        kinds = (
            ["clear"] * drawn.clears
            + ["clear storage"] * drawn.clears
            + ["pause"] * drawn.pauses
            + ["weights"] * drawn.weights
            + ["clear part"] * drawn.salt_clears
            + ["quota"] * drawn.quotas
            + ["unpin"] * (drawn.pins > 0 and drawn.hints > 0)
            + ["sleep"] * drawn.sleeps
        )
        while True:
            await asyncio.sleep(rng.choice((0.002, 0.01, 0.05)))
            under_load = self.cache.check()
            if under_load:
                self.fail(f"check under load: {under_load[:3]}")
            self.pins.check()
            if not kinds:
                continue
            kind = rng.choice(kinds)
            self.seen[kind] += 1
            try:
                await self._order(kind)
            except (DeadlineExceeded, Paused) as error:
                self.seen[f"{kind} {type(error).__name__}"] += 1
            except KVActorsError as error:
                self.judge(kind, error)

    async def _order(self, kind: str) -> None:
        if kind in ("clear", "clear storage"):
            await self.clear(storage=kind == "clear storage")
        elif kind == "pause":
            await self.pause(None)
        elif kind == "clear part":
            await clear_part(self, self._sharing_rng)
        elif kind == "quota":
            await set_quota(self, self._sharing_rng)
        elif kind == "unpin":
            await self.pins.unpin(self._sharing_rng)
        elif kind == "sleep":
            await sleep(self, self._sharing_rng)
        else:
            await self.pause(self.rng.choice(("weights-0", "weights-1", "weights-2")))

    async def clear(self, *, storage: bool) -> None:
        """Clear the cache. From its return on no block computed before may be hit, unless a store
        was kept."""
        everything = storage or self.drawn.store == "none"
        open_at = self.history.open_now()
        number = self.history.clear() if everything else 0
        with self.pins.ending():
            await self.cache.clear(storage=storage, deadline=30.0)
        if everything:
            self.history.cleared(number, open_at)
            await self.history.settle()

    async def pause(self, weights: str | None) -> None:
        """Pause, change the weights unless None, and resume."""
        self.draining = weights is not None
        try:
            await self.cache.pause(deadline=self.rng.choice((0.05, 10.0)))
            if weights is not None:
                for attempt in range(20_000):
                    # The cache's own count has the leases whose `acquire` has been answered, and
                    # has not returned to its client yet.
                    if not self.leases and not self.cache.statistics().prefix.leases:
                        break
                    if attempt % 100 == 99:
                        gc.collect()  # forgotten leases in the cycle of an exception
                    await asyncio.sleep(0.001)
                else:
                    self.fail("leases do not end while the cache is paused")
                    return
                await self.cache.set_namespace(weights, deadline=30.0)
                self.weights = weights
            await asyncio.sleep(self.rng.choice((0.0, 0.002, 0.01)))
        finally:
            self.draining = False
            await self.cache.resume(deadline=30.0)

    # -- at rest

    async def rest(self) -> None:
        """Nothing is left over, invariants hold, sinks agree."""
        cache = self.cache
        gc.collect()  # forgotten leases that an exception's traceback still referred to
        try:
            await cache.wake(deadline=30.0)  # the controller may have been cancelled in its wake
            await cache.resume(deadline=30.0)
            problems = await problems_at_rest(cache, REST)
            self.pins.check()
            await compare_clears(self)
            problems += await problems_at_rest(cache, REST)
        except KVActorsError as error:
            problems = [f"not idle: {error!r}"]
        for problem in problems:
            self.fail(f"at rest: {problem}")
        count_statistics(self)
        statistics = cache.statistics()
        for name in NOT_FETCHED:
            self.seen[name] += getattr(statistics.host, name)
        if statistics.host.not_fetched_no_slot:
            self.fail(f"stored blocks found no slot: {statistics.host}")
        if statistics.supervisor.restarts:
            self.record.restarts += statistics.supervisor.restarts
            self.fail(f"actors restarted: {statistics.supervisor}")
