"""Models of caches for comparison with a replay: no cache, and an exact LRU of the same sizes whose
loads take no time. Serving a trace on them takes no time of the wall clock."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Literal, NamedTuple

from kvactors.config import Config
from kvactors.scenario.batching import Figures, Job, Pace, Scheduler, jobs_of, never_fits
from kvactors.scenario.trace import TraceRequest

Baseline = Literal["none", "lru"]

LONGEST = 3600.0
"""Seconds of a stride after the last arrival at most."""


class Sizes(NamedTuple):
    """Sizes of a modelled cache.

    Attributes:
        block_size: tokens of a block.
        num_blocks: device blocks.
        cached: blocks in all tiers, 0 for no cache, None for no limit.
        recompute_last_token: a prompt is never hit as a whole.
    """

    block_size: int
    num_blocks: int
    cached: int | None
    recompute_last_token: bool


def sizes_of(config: Config, baseline: Baseline) -> Sizes:
    """The sizes of the cache that a config describes. Exclusive tiers hit like one tier of their
    sum, inclusive ones like the largest."""
    device, host, storage = config.device.num_blocks, config.host.slots, config.storage
    stored: int | None = 0
    if storage.backend != "none" and not config.flush.flush_only:
        stored = storage.capacity_blocks if storage.capacity_bytes is None else None
    cached = None
    if stored is not None:
        each = (device, host, stored)
        exclusive = config.host.mode == "exclusive" or not host
        cached = sum(each) if exclusive else max(each)
    cache = config.cache
    return Sizes(
        cache.block_size,
        device,
        0 if baseline == "none" else cached,
        cache.recompute_last_token,
    )


class ModelCache:
    """Device blocks of running requests, shared by those with the same ids, and an LRU of ids in
    any tier. A path is touched deepest first, so that a block is younger than those after it."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.free = sizes.num_blocks
        self._uses: Counter[int] = Counter()  # of blocks of prompts
        self._own: dict[int, int] = {}  # other blocks, by request
        self._cached: OrderedDict[int, None] = OrderedDict()

    def acquire(self, job: Job) -> int | None:
        """Give a request its blocks. Returns the cached tokens, None without enough free blocks."""
        size = self.sizes
        ids: list[int] = job.ids.tolist()
        own = -(-job.num_tokens // size.block_size) - len(ids)
        shared = size.cached != 0
        new = sum(not self._uses[one] for one in ids) if shared else len(ids)
        if new + own > self.free:
            return None
        if not shared:
            self.free -= new + own
            self._own[job.number] = new + own
            return 0
        self.free -= new + own
        self._own[job.number] = own
        self._uses.update(ids)
        hit = next((at for at, one in enumerate(ids) if one not in self._cached), len(ids))
        if hit == len(ids) and size.recompute_last_token and not job.produced:
            hit -= 1
        self._touch(ids[:hit])
        return hit * size.block_size

    def _touch(self, ids: Iterable[int]) -> None:
        for one in reversed(list(ids)):
            self._cached[one] = None
            self._cached.move_to_end(one)

    def computed(self, job: Job) -> None:
        """The prompt of a request is computed: it is cached."""
        cached = self.sizes.cached
        if cached == 0:
            return
        self._touch(job.ids.tolist())
        while cached is not None and len(self._cached) > cached:
            self._cached.popitem(last=False)

    def grow(self, job: Job) -> bool:
        """Give a request another block. False without a free one."""
        if not self.free:
            return False
        self.free -= 1
        self._own[job.number] += 1
        return True

    def release(self, job: Job) -> None:
        """A request gives its blocks up."""
        self.free += self._own.pop(job.number)
        if self.sizes.cached == 0:
            return
        for one in job.ids.tolist():
            self._uses[one] -= 1
            if not self._uses[one]:
                del self._uses[one]
                self.free += 1


def serve_on_model(
    requests: Iterable[TraceRequest], sizes: Sizes, pace: Pace, most_running: int
) -> Figures:
    """Serve a trace on a modelled cache.

    Args:
        requests: of the trace.
        sizes: of the cache.
        pace: of the model.
        most_running: requests with blocks at most.
    """
    return _Run(requests, sizes, pace, most_running).run()


class _Run:
    def __init__(
        self, requests: Iterable[TraceRequest], sizes: Sizes, pace: Pace, most_running: int
    ) -> None:
        self._cache, self._scheduler, self._sizes = ModelCache(sizes), Scheduler(pace), sizes
        self._arriving = jobs_of(requests, sizes.block_size)[::-1]
        self._most_running = most_running
        self._running = 0

    def run(self) -> Figures:
        """Serve every request."""
        scheduler, arriving = self._scheduler, self._arriving
        while arriving or scheduler.waiting or self._running:
            self._arrive()
            self._admit()
            if scheduler.has_work:
                self._compute()
            elif arriving:
                scheduler.now = max(scheduler.now, arriving[-1].arrival)
            else:
                raise RuntimeError(f"{len(scheduler.waiting)} requests wait, and none runs")
        return scheduler.figures

    def _arrive(self) -> None:
        scheduler, sizes = self._scheduler, self._sizes
        while self._arriving and self._arriving[-1].arrival <= scheduler.now:
            job = self._arriving.pop()
            if never_fits(job, sizes.num_blocks, sizes.block_size):
                scheduler.figures.rejected += 1
            else:
                scheduler.arrive(job)

    def _admit(self) -> None:
        scheduler, size = self._scheduler, self._sizes.block_size
        while scheduler.waiting and self._running < self._most_running:
            job = scheduler.waiting[0]
            cached = self._cache.acquire(job)
            if cached is None:
                return
            scheduler.next_waiting()
            self._running += 1
            scheduler.begin(job, cached, -(-job.num_tokens // size) * size)

    def _compute(self) -> None:
        scheduler, cache = self._scheduler, self._cache
        until = self._arriving[-1].arrival if self._arriving else scheduler.now + LONGEST
        outcome = scheduler.carry_out(scheduler.plan(until))
        for job in outcome.prefilled:
            cache.computed(job)
        for job in outcome.done:
            cache.release(job)
            self._running -= 1
        for job in outcome.full:
            self._grow(job)

    def _grow(self, job: Job) -> None:
        """Take a block for a request. Without a free one the requests that arrived last give
        theirs up."""
        while job.number in self._scheduler.decoding:
            if self._cache.grow(job):
                job.covered += self._sizes.block_size
                return
            victim = self._scheduler.victim()
            self._cache.release(victim)
            self._scheduler.preempt(victim)
            self._running -= 1
