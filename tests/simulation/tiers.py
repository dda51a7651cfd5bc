"""A `TierCache` in virtual time: a seeded engine, a store with faults, sinks, and tiny limits.

    python -m tests.simulation.tiers [--seeds 100] [--first 0] [--seed N]

One thread runs all: the engine's calls, and between them the event loop of storage and sinks, which
is a `SimLoop`. So a seed replays exactly. Checked are wrong bytes, HITs that do not hold, look-ups
that stay PENDING, slots that are lost or given twice, events and sinks that differ from the tiers,
and trees with a loose block.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import logging
import random
import sys
from collections.abc import Sequence
from typing import Any

import anyio

from kvactors import Tier
from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.sinks.memory import MemorySink
from kvactors.settings.sinks import MemorySinkConfig
from kvactors.storage.memory import MemoryBackend
from kvactors.storage.messages import Outcome
from kvactors.testing.loop import SimLoop
from kvactors.tier_cache import Lookup, SlotMemory, StorageTier, TierCache, TierConfig
from kvactors.tier_cache.settings import checked_config
from kvactors.tier_cache.sinks import block_name
from tests.support.tree_reader import TreeReader

BLOCK, TOKENS, STEPS = 64, 4, 400
TIMEOUT, SLOT_TIMEOUT = 2.0, 1.0

STEP_TIMES = (0.0, 0.001, 0.05, 0.5, 2.0)

PENDING_LIMIT = SLOT_TIMEOUT + 2 * (TIMEOUT + 1.0) + 3 * STEP_TIMES[-1]
"""Virtual seconds for which a key of storage may be PENDING: a wait for a slot, a look-up, and a
fetch, each noticed in the step after."""


class Violation(AssertionError):
    """Something that must never be."""


def require(good: bool, text: str) -> None:
    if not good:
        raise Violation(text)


def payload(key: bytes) -> bytes:
    return hashlib.sha512(key).digest()


class SimStore(MemoryBackend):
    """A store that is slow, hangs, fails, forgets and flips bits by a seed."""

    def __init__(self, noise: random.Random, capacity: int, *, faults: float, lists: bool) -> None:
        self.is_complete = lists
        super().__init__(bytes(32), BLOCK, capacity)
        self.noise, self.faults = noise, faults

    async def _trouble(self) -> str:
        drawn = self.noise.random()
        await anyio.sleep(self.noise.choice((0.0, 0.001, 0.02)))
        if drawn >= self.faults:
            return ""
        kind = self.noise.choice(("raise", "fail", "hang", "hang", "slow", "flip", "lose"))
        if kind == "hang":
            await anyio.sleep(20 * TIMEOUT)
        elif kind == "slow":
            await anyio.sleep(0.6 * TIMEOUT)
        elif kind == "raise":
            raise OSError("planned")
        return kind

    async def load(self, key: bytes, into: memoryview) -> Outcome:
        kind = await self._trouble()
        into[:] = bytes(len(into))  # a slot with a second user would be noticed
        if kind == "fail":
            return Outcome.UNAVAILABLE
        if kind == "lose":
            self.objects.pop(key, None)
        if kind == "flip" and key in self.objects:
            data, checksum = self.objects[key]
            self.objects[key] = (bytes([data[0] ^ 1]) + data[1:], checksum)
        return await super().load(key, into)

    async def save(self, key: bytes, data: memoryview) -> Outcome:
        kind = await self._trouble()
        if kind in ("fail", "lose"):
            return self.noise.choice((Outcome.UNAVAILABLE, Outcome.NO_SPACE))
        return await super().save(key, data)


class SimThread:
    """In the place of `LoopThread`: its loop runs when the engine lets it."""

    alive = False

    def __init__(self, loop: SimLoop, services: Sequence[Any]) -> None:
        self._loop, self._services = loop, list(services)

    def open(self, limit: float) -> None:
        for service in self._services:
            self._loop.run_until_complete(service.open())

    def call(self, work: Any, *args: Any) -> bool:
        self._loop.call_soon(work, *args)
        return True

    def close(self, limit: float) -> None:
        for service in reversed(self._services):
            self._loop.run_until_complete(service.close(limit))

    def abandon(self) -> None:
        pass


class SimTier(StorageTier):
    """A storage tier on the loop of a simulation."""

    def __init__(self, loop: SimLoop, store: SimStore) -> None:
        super().__init__(lambda: store, bytes(32), BLOCK, TIMEOUT, clock=loop.time)
        self._sim = loop

    def _make_thread(self, services: Sequence[Any]) -> Any:
        return SimThread(self._sim, services)


class SimSink(MemorySink):
    """Fails by a seed. The tasks that it took form a tree."""

    def __init__(self, noise: random.Random, faults: float) -> None:
        super().__init__(MemorySinkConfig(tiers=("storage",)), TOKENS)
        self.reader, self._noise, self._faults = TreeReader(), noise, faults

    async def begin_epoch(self, epoch: int) -> None:
        self.reader.clear()
        await super().begin_epoch(epoch)

    async def deliver(self, tasks: Sequence[FlushTask]) -> None:
        await anyio.sleep(self._noise.choice((0.0, 0.01)))
        if self._noise.random() < self._faults:
            raise OSError("planned")
        self.reader.take(tasks)
        await super().deliver(tasks)


class SimEngine:
    """An engine with random requests, and a model of what the cache promised it."""

    def __init__(self, seed: int) -> None:
        noise = self.noise = random.Random(seed)
        self.loop = SimLoop(seed)
        self.faults = noise.choice((0.0, 0.05, 0.1, 0.3))
        self.pending_limit = PENDING_LIMIT
        self.num_slots = noise.choice((1, 2, 3, 4, 5, 6, 8, 64))
        lists = noise.random() < 0.7
        if not lists:  # an object that is evicted before its fetch is asked for again
            self.pending_limit *= 2
        store = SimStore(noise, noise.choice((1, 4, 30)), faults=self.faults, lists=lists)
        self.sink = SimSink(noise, self.faults)
        policies = ("write_through", "write_through", "write_through_selective", "write_back")
        config: TierConfig = checked_config(
            {
                "model": "m",
                "block_bytes": BLOCK,
                "num_slots": self.num_slots,
                "events": ["host"],
                "tokens_per_block": TOKENS,
                "storage": {
                    "backend": "memory",
                    "write_policy": noise.choice(policies),
                    "timeout_s": TIMEOUT,
                    "slot_timeout_s": SLOT_TIMEOUT,
                    "on_full": noise.choice(("wait", "wait", "shed")),
                    "on_full_wait_s": SLOT_TIMEOUT,
                },
            }
        )
        self.cache = TierCache(
            config,
            SlotMemory(self.num_slots, BLOCK),
            sinks=[self.sink],
            storage=SimTier(self.loop, store),
            clock=self.loop.time,
        )
        self.keys = [bytes([i]) * noise.choice((32, 36)) for i in range(noise.choice((4, 12, 40)))]
        self.stores: dict[bytes, int] = {}
        self.loads: list[tuple[bytes, int]] = []
        self.pending: dict[bytes, float] = {}
        self.offered: dict[bytes, float] = {}  # keys whose store waits for slots
        self.hits: set[bytes] = set()  # of this step
        self.request: list[bytes] = []  # that waits
        self.view: set[bytes] = set()  # of a reader of the events
        self.trace = hashlib.sha256()
        self.num_hits = 0

    def parent(self, i: int) -> bytes | None:
        return self.keys[(i - 1) // 2] if i else None

    # -- what an engine does

    def lookup(self) -> None:
        """The waiting request asks in every step, until none of its keys is PENDING."""
        if not self.request:
            start = self.noise.randrange(len(self.keys))
            self.request = self.keys[start : start + self.noise.randint(1, 4)]
        waits = False
        for key in self.request:
            found = self.cache.lookup(key)
            self.trace.update(bytes([found]))
            require(key not in self.hits or found is Lookup.HIT, "a HIT did not hold")
            waits = waits or found is Lookup.PENDING
            if found is Lookup.HIT:
                self.hits.add(key)
            if found is not Lookup.PENDING or key in self.stores:
                self.pending.pop(key, None)
                continue
            since = self.pending.setdefault(key, self.loop.time())
            waited = self.loop.time() - since
            require(waited <= self.pending_limit, f"a key is PENDING for {waited:.1f} s")
        if not waits:
            self.cache.touch(self.request)
            self.request = []
            self.pending.clear()

    def load(self) -> None:
        if not self.hits:
            return
        key = self.noise.choice(sorted(self.hits))
        (slot,) = self.cache.prepare_load([key])
        self.loads.append((key, slot))
        self.num_hits += 1

    def store(self) -> None:
        """Keys that wait for a slot are offered again before others."""
        first = self.noise.randrange(len(self.keys))
        chosen = range(first, min(len(self.keys), first + self.noise.randint(1, 4)))
        keys = list(self.offered) or [self.keys[i] for i in chosen]
        parents = None
        if not self.offered and self.noise.random() < 0.7:
            parents = [self.parent(i) for i in chosen]
        found = self.cache.prepare_store(keys, parents)
        now = self.loop.time()
        self.offered = {key: self.offered.get(key, now) for key in found.waiting}
        for since in self.offered.values():
            require(now - since <= TIMEOUT, f"a store waits for {now - since:.1f} s")
        require(self.hits.isdisjoint(found.evicted), "a HIT was evicted within its step")
        loading = {key for key, _ in self.loads}
        require(loading.isdisjoint(found.evicted), "a key was evicted while it is loaded")
        for key, slot in zip(found.keys, found.slots, strict=True):
            require(slot not in self.stores.values(), "a slot was given twice")
            self.stores[key] = slot
            self.cache.memory.view(slot)[:] = bytes(BLOCK)

    def complete(self, share: float) -> None:
        for key, slot in [*self.loads]:
            if self.noise.random() < share:
                data = bytes(self.cache.memory.view(slot))
                require(data == payload(key), "wrong bytes were loaded")
                self.loads.remove((key, slot))
                self.cache.complete_load([key])
        for key, slot in [*self.stores.items()]:
            if self.noise.random() < share:
                good = self.noise.random() < 0.95
                self.cache.memory.view(slot)[:] = payload(key) if good else bytes(BLOCK)
                del self.stores[key]
                self.cache.complete_store([key], good)

    def describe(self) -> None:
        for i in range(len(self.keys)):
            assert self.cache.sinks is not None
            self.cache.sinks.describe([self.keys[i]], [i] * TOKENS, self.parent(i))

    def end_step(self) -> None:
        self.cache.end_step()
        self.hits.clear()
        self.run_loop(self.noise.choice(STEP_TIMES))
        if self.offered:
            self.store()

    def run_loop(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def reset(self) -> None:
        self.cache.reset(storage=self.noise.random() < 0.5)
        self.hits.clear()
        self.pending.clear()
        self.offered.clear()

    # -- a run

    def check(self) -> None:
        self.cache.check()
        for event in self.cache.take_events():
            require(event.tier is Tier.HOST, "an event of another tier")
            fits = self.view.isdisjoint(event.keys) if event.stored else self.view >= {*event.keys}
            require(fits, "an event repeats or contradicts an earlier one")
            self.view ^= set(event.keys)
        table = self.cache._tier
        require(self.view == set(table.iter_hashes()), "events and slots differ")
        require(not self.sink.reader.violations, f"no tree: {self.sink.reader.violations[:1]}")

    def run(self) -> str:
        """Returns a digest of what happened."""
        actions = [self.lookup] * 8 + [self.store] * 2 + [self.load] * 2 + [self.end_step] * 6
        self.cache.start()
        for _ in range(STEPS):
            self.noise.choice(actions)()
            self.complete(self.noise.choice((0.0, 0.5)))
            if self.noise.random() < 0.006:
                self.reset()
            if self.noise.random() < 0.1:
                self.describe()
            self.check()
        self.settle()
        self.cache.shutdown()
        self.loop.close()
        return self.trace.hexdigest()

    def settle(self) -> None:
        self.faults = self.sink._faults = 0.0
        store: Any = self.cache._storage._loop.store.inner  # type: ignore[union-attr]
        store.faults = 0.0
        self.complete(2.0)
        self.offered.clear()
        self.describe()
        for _ in range(900):
            self.end_step()
            if not self.cache.has_pending_work():
                break
        require(not self.cache.has_pending_work(), "work stays pending")
        self.run_loop(60.0)  # back-offs of the sink
        self.end_step()
        self.run_loop(60.0)
        self.check()
        require(self.cache.statistics().pinned == 0, "slots stay pinned")
        feed: Any = self.cache._feed
        held = {name for name, tiers in feed._held.items() if Tier.STORAGE in tiers}
        due: set[bytes] = set()
        for i, key in enumerate(self.keys):
            parent = self.parent(i)
            if block_name(key) in held and (parent is None or block_name(parent) in due):
                due.add(block_name(key))
        require(self.sink.view()[Tier.STORAGE] == due, "the sink and the tiers differ")


def run_seed(seed: int) -> tuple[str, int]:
    """Digest and hits of one seed.

    Raises:
        Violation: something that must never be.
    """
    engine = SimEngine(seed)
    return engine.run(), engine.num_hits


def main(arguments: Sequence[str] | None = None) -> int:
    """Run seeds and print the violated ones. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int)
    given = parser.parse_args(arguments)
    seeds = range(given.first, given.first + given.seeds)
    logger = logging.getLogger("kvactors")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    violated = hits = 0
    try:
        for seed in seeds if given.seed is None else [given.seed]:
            try:
                hits += run_seed(seed)[1]
            except Exception as error:
                violated += 1
                print(f"violated: seed {seed}: {type(error).__name__}: {error}", file=sys.stderr)
                if given.seed is not None:
                    raise
    finally:
        logger.setLevel(level)
    print(f"{len(seeds) if given.seed is None else 1} seeds, {hits} hits, {violated} violated")
    return 1 if violated else 0


if __name__ == "__main__":
    sys.exit(main())
