"""Replay of a request trace: real blocks move, and every one that is loaded is verified."""

from __future__ import annotations

import asyncio
import gc
import heapq
import itertools
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import anyio
import msgspec
import numpy as np
from numpy.typing import NDArray

from kvactors.actor.uncancelled import wait_uncancelled
from kvactors.decode_batch import Step
from kvactors.errors import DeadlineExceeded, KVActorsError, NoRoom
from kvactors.observe.lag import LagMonitor
from kvactors.opening import open_cache
from kvactors.scenario.engine import Engine, Model, Observe, ScenarioRequest, reporting
from kvactors.scenario.output import in_unicode
from kvactors.scenario.report import Progress, Report, Totals, make_report
from kvactors.scenario.spec import Positive
from kvactors.scenario.sweep import lru_rates
from kvactors.scenario.trace import TraceRequest, read_trace, tokens_of
from kvactors.settings import Config
from kvactors.settings.check import Count, Number
from kvactors.threads import Workers, in_thread

Baseline = Literal["none", "lru"]


class ReplaySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a replay.

    Attributes:
        mode: sequential (a request ends, and everything it caused, before the next begins) or
            timed (arrivals by their time stamps).
        coarse: keep every so many-th block id, for blocks so many times as large.
        limit: maximum number of requests, 0 for all.
        speed: factor on the trace's clock.
        prefill_tokens_per_s: tokens of prompts that the model computes in a second, in timed mode.
        decode_tokens_per_s: decode steps in a second. Each running request gets a token a step.
        step_tokens: tokens of prompts computed in one step at most (chunked prefill).
        most_running: requests with device blocks at most.
        patience: seconds after which the earliest request that waits for blocks is given up.
        baselines: caches that the same requests are served on, as models, for comparison: none
            (every prompt is computed) and lru (an exact LRU of the same sizes whose loads take no
            time).
    """

    mode: Literal["sequential", "timed"] = "sequential"
    coarse: Count = 1
    limit: Number = 0
    speed: Positive = 1.0
    prefill_tokens_per_s: Positive = 50_000.0
    decode_tokens_per_s: Positive = 50.0
    step_tokens: Count = 8192
    most_running: Count = 256
    patience: Positive = 120.0
    baselines: tuple[Baseline, ...] = ("none", "lru")


# -- a timed replay: requests of a trace arrive by its clock, wait in a queue, and are computed by
# continuous batching. The cache is real, the model's step times are modelled.
#
# The trace's clock advances by the steps, and, when no step can be computed, with the wall clock
# times `speed`. A process that is too slow for the speed takes longer for the replay. Arrivals
# follow the trace's clock, so the figures are those of a machine that keeps up.


class ServingJob:
    """A request of a trace in the serving loop.

    Attributes:
        produced: tokens decoded so far. A preempted request keeps them.
        missing: tokens to prefill before the next decode step.
        covered: tokens that its device blocks have place for.
        cached_tokens: tokens that its first admission found in the cache.
    """

    def __init__(self, number: int, request: TraceRequest, block_size: int) -> None:
        self.number = number
        self.arrival = request.timestamp
        self.ids = request.ids
        self.prompt_tokens = len(request.ids) * block_size
        self.output_tokens = max(1, request.output_length)
        self.produced = self.missing = self.covered = self.cached_tokens = 0
        self.admitted_at = self.first_token_at = -1.0

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + self.produced

    @property
    def is_done(self) -> bool:
        return self.produced >= self.output_tokens

    @property
    def steps_covered(self) -> int:
        """Decode steps that it has blocks for. A step writes the token decoded before it."""
        return self.covered - self.num_tokens + 1

    def __lt__(self, other: ServingJob) -> bool:
        return self.number < other.number


class Stride(NamedTuple):
    """One step with prefill, or several decode steps in a row."""

    seconds: float
    prefill: tuple[tuple[ServingJob, int], ...]
    decode_steps: int


class RequestOutcome(NamedTuple):
    """Requests after a stride. full: that need another device block before the next step, the
    earliest first."""

    prefilled: list[ServingJob]
    done: list[ServingJob]
    full: list[ServingJob]


class Scheduler:
    """Requests that arrive, wait, are admitted, prefill and decode. device_tokens: that the device
    holds."""

    def __init__(
        self, settings: ReplaySettings, jobs: Sequence[ServingJob] = (), device_tokens: int = 0
    ) -> None:
        self._settings = settings
        self._arriving, self._device_tokens = list(reversed(jobs)), device_tokens
        self.now = 0.0
        self.waiting: list[ServingJob] = []  # a heap
        self.prefilling: deque[ServingJob] = deque()
        self.decoding: dict[int, ServingJob] = {}
        self.figures = ServingFigures()

    @property
    def has_work(self) -> bool:
        return bool(self.prefilling or self.decoding)

    @property
    def due(self) -> float:
        return self._arriving[-1].arrival if self._arriving else math.inf

    def arrive(self) -> None:
        """Requests that are due arrive, and wait behind earlier ones. Those that the device can
        never hold are rejected."""
        while self.due <= self.now:
            job = self._arriving.pop()
            if job.prompt_tokens + job.output_tokens - 1 > self._device_tokens:
                self.figures.rejected += 1
            else:
                heapq.heappush(self.waiting, job)

    def begin(self, job: ServingJob, cached_tokens: int, covered: int) -> None:
        """A request has its blocks, and the bytes of the cached ones. covered: see `ServingJob`."""
        if job.admitted_at < 0:
            job.admitted_at = self.now
            job.cached_tokens = cached_tokens
        job.covered = covered
        # the token decoded last has no keys and values: the next decode step computes it
        computed = job.num_tokens - (job.produced > 0)
        job.missing = max(0, computed - cached_tokens)
        self.figures.computed_tokens += job.missing
        self.prefilling.append(job)

    def plan(self, until: float) -> Stride:
        """The next stride. It ends at the time `until`, or after one step if that takes longer."""
        prefill, budget = list[tuple[ServingJob, int]](), self._settings.step_tokens
        for job in self.prefilling:
            count = min(job.missing, budget)
            budget -= count
            prefill.append((job, count))
            if not budget:
                break
        decode_s = 1.0 / self._settings.decode_tokens_per_s if self.decoding else 0.0
        if prefill:
            computed = self._settings.step_tokens - budget
            seconds = decode_s + computed / self._settings.prefill_tokens_per_s
            return Stride(seconds, tuple(prefill), int(bool(self.decoding)))
        steps = min(
            min(job.output_tokens - job.produced, job.steps_covered)
            for job in self.decoding.values()
        )
        if until < math.inf:
            steps = max(1, min(steps, math.ceil((until - self.now) / decode_s)))
        return Stride(steps * decode_s, (), steps)

    def carry_out(self, stride: Stride) -> RequestOutcome:
        self.now += stride.seconds
        self.figures.steps += max(1, stride.decode_steps)
        for job in self.decoding.values():
            job.produced += stride.decode_steps
        for job, count in stride.prefill:
            job.missing -= count
        prefilled = [job for job, _ in stride.prefill if not job.missing]
        for job in prefilled:
            self.prefilling.remove(job)
            if not job.produced:
                job.produced, job.first_token_at = 1, self.now
            self.decoding[job.number] = job
        done = [job for job in self.decoding.values() if job.is_done]
        full = [job for job in self.decoding.values() if not job.is_done and job.steps_covered < 1]
        for job in done:
            del self.decoding[job.number]
            self.figures.finish(job, self.now)
        return RequestOutcome(prefilled, done, sorted(full))

    def victim(self) -> ServingJob:
        return max(self.decoding.values())

    def preempt(self, job: ServingJob) -> None:
        del self.decoding[job.number]
        self.give_up(job)

    def give_up(self, job: ServingJob) -> None:
        """A request without blocks waits again, before later ones."""
        self.figures.preemptions += 1
        heapq.heappush(self.waiting, job)


class ServingFigures:
    """Measured times of the requests of one run. queue_s: seconds from arrival until a request had
    its blocks and the cached bytes. computed_tokens: tokens that were prefilled, those of preempted
    requests again."""

    def __init__(self) -> None:
        self.first_token_s: list[float] = []
        self.queue_s: list[float] = []
        self.total_s: list[float] = []
        self.prompt_tokens = self.output_tokens = self.saved_tokens = self.computed_tokens = 0
        self.preemptions = self.rejected = self.steps = 0
        self.end = 0.0

    def finish(self, job: ServingJob, now: float) -> None:
        self.first_token_s.append(job.first_token_at - job.arrival)
        self.queue_s.append(job.admitted_at - job.arrival)
        self.total_s.append(now - job.arrival)
        self.prompt_tokens += job.prompt_tokens
        self.output_tokens += job.output_tokens
        self.saved_tokens += job.cached_tokens
        self.end = now

    def as_dict(self) -> dict[str, Any]:
        seconds = max(self.end, 1e-9)
        return {
            "requests": len(self.first_token_s),
            "rejected": self.rejected,
            "first_token_s": percentiles(self.first_token_s),
            "queue_s": percentiles(self.queue_s),
            "request_s": percentiles(self.total_s),
            "seconds": round(self.end, 3),
            "requests_per_s": round(len(self.first_token_s) / seconds, 3),
            "prompt_tokens_per_s": round(self.prompt_tokens / seconds, 1),
            "output_tokens_per_s": round(self.output_tokens / seconds, 1),
            "prompt_tokens": self.prompt_tokens,
            "saved_tokens": self.saved_tokens,
            "computed_tokens": self.computed_tokens,
            "preemptions": self.preemptions,
            "steps": self.steps,
        }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99, zero without values."""
    found = np.percentile(np.array(values or [0.0]), [50, 90, 99]).tolist()
    return {f"p{share}": round(one, 4) for share, one in zip((50, 90, 99), found, strict=True)}


def jobs_of(requests: Iterable[TraceRequest], block_size: int) -> list[ServingJob]:
    """The requests of a trace, with times from the first one on."""
    jobs = [ServingJob(number, request, block_size) for number, request in enumerate(requests)]
    start = jobs[0].arrival if jobs else 0.0
    for job in jobs:
        job.arrival -= start
    return jobs


def output_ids(job: ServingJob, blocks: int) -> NDArray[np.uint64]:
    """Ids of the first blocks of decoded tokens, which no prompt of a trace has."""
    first = (1 << 63) + (job.number << 20)
    return np.arange(first, first + blocks, dtype=np.uint64)


SLICE = 0.002
"""Seconds of the wall clock that a stride of decode steps lasts at most, so that requests whose
loads have arrived join soon."""

YIELD = 0.0005
"""Seconds that the clock may be ahead of the wall clock: a shorter sleep is not exact."""

PASSES = 8
"""Passes of the event loop for the cache before a stride, so that requests that wait for no load
join it."""


class ThreadModel(Model):
    """Computes and verifies blocks in a thread, beside the loop."""

    def __init__(self, device: Any) -> None:
        super().__init__(device)
        self._workers = Workers(1, "kvactors-model")

    async def run(self, call: Callable[[], Any]) -> Any:
        return await wait_uncancelled(asyncio.wrap_future(self._workers.submit(call)))


class Serving:
    """Serves the requests of a trace on a cache."""

    def __init__(
        self, engine: Engine, requests: Iterable[TraceRequest], settings: ReplaySettings
    ) -> None:
        self._engine, self._cache, self._totals = engine, engine.cache, engine.totals
        self._size = engine.cache.block_size
        self._settings, self._speed = settings, settings.speed
        self._scheduler = Scheduler(
            settings, jobs_of(requests, self._size), self._cache.device.num_blocks * self._size
        )
        self._requests: dict[int, ScenarioRequest] = {}
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._woken = self._loop.create_future()
        self._starting: set[asyncio.Task[None]] = set()
        self._admitting: asyncio.Task[None] | None = None

    @property
    def _running(self) -> int:
        return len(self._requests) + (self._admitting is not None)

    async def run(self) -> ServingFigures:
        scheduler = self._scheduler
        try:
            while scheduler.due < math.inf or scheduler.waiting or self._running:
                scheduler.arrive()
                self._admit()
                if scheduler.has_work:
                    await self._compute()
                else:
                    await self._wait()
        finally:
            tasks = [*self._starting, *([self._admitting] if self._admitting else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for request in self._requests.values():
                request.lease.abandon()
        self._totals.rejected = scheduler.figures.rejected
        return scheduler.figures

    # -- the clock

    def _wall(self) -> float:
        """The latest time that the trace's clock may have."""
        return (self._loop.time() - self._began) * self._speed

    async def _reach(self, time: float) -> None:
        """Return when the wall clock has reached a time of the trace's clock."""
        ahead = (time - self._wall()) / self._speed - YIELD
        if ahead > 0:
            await asyncio.sleep(ahead)
        else:
            self._set_back(time)

    def _set_back(self, time: float) -> None:
        """If the wall clock has passed a time of the trace's clock, this process is too slow for
        the speed: set the wall clock back."""
        self._began += max(0.0, self._wall() - time) / self._speed

    async def _wait(self) -> None:
        """Nothing can be computed: wait for an arrival, or until a request has its blocks."""
        scheduler = self._scheduler
        self._set_back(scheduler.now)
        self._woken = self._loop.create_future()
        with anyio.move_on_after(max(0.0, (scheduler.due - self._wall()) / self._speed)):
            await self._woken
        scheduler.now = max(scheduler.now, min(self._wall(), scheduler.due))

    def _wake(self) -> None:
        if not self._woken.done():
            self._woken.set_result(None)

    # -- admission

    def _admit(self) -> None:
        if self._admitting is not None or self._running >= self._settings.most_running:
            return
        if self._scheduler.waiting:
            self._admitting = self._loop.create_task(self._admit_all())

    async def _admit_all(self) -> None:
        try:
            waiting = self._scheduler.waiting
            while waiting and len(self._requests) < self._settings.most_running:
                await self._acquire(heapq.heappop(waiting))
        finally:
            self._admitting = None
            self._wake()

    async def _acquire(self, job: ServingJob) -> None:
        try:
            lease = await self._cache.acquire(
                str(job.number),
                self._tokens(job),
                wait_for_room=True,
                deadline=self._settings.patience,
            )
        except (NoRoom, DeadlineExceeded):
            self._scheduler.figures.rejected += 1
        except KVActorsError as error:
            self._fail(job, error)
        else:
            self._requests[job.number] = self._engine.request(lease)
            task = self._loop.create_task(self._start(job))
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    def _tokens(self, job: ServingJob) -> np.ndarray:
        """The prompt, and the blocks of tokens that were decoded before a preemption."""
        blocks = -(-job.num_tokens // self._size) - len(job.ids)
        ids = np.concatenate([job.ids, output_ids(job, blocks)]) if blocks else job.ids
        return tokens_of(ids, self._size)

    async def _start(self, job: ServingJob) -> None:
        """Wait for the loads, and verify what they brought."""
        request = self._requests[job.number]
        try:
            await self._engine.begin(request, resumed=job.admitted_at >= 0)
        except NoRoom:  # blocks of a load that failed could not be replaced
            request.lease.abandon()
            del self._requests[job.number]
            self._scheduler.give_up(job)
        except KVActorsError as error:
            self._fail(job, error)
        else:
            lease = request.lease
            self._scheduler.begin(job, lease.cached_tokens, lease.covered_tokens)
        finally:
            self._wake()

    def _fail(self, job: ServingJob, error: KVActorsError) -> None:
        self._scheduler.decoding.pop(job.number, None)
        request = self._requests.pop(job.number, None)
        if request is not None:
            request.lease.abandon()
        self._engine.failed(str(job.number), error)

    # -- steps

    async def _compute(self) -> None:
        scheduler = self._scheduler
        for _ in range(PASSES):
            await asyncio.sleep(0)
        stride = scheduler.plan(min(scheduler.now + SLICE * self._speed, scheduler.due))
        await self._reach(scheduler.now + stride.seconds)
        outcome = scheduler.carry_out(stride)
        for job in outcome.prefilled:  # their prompts become shareable
            request = self._requests[job.number]
            try:
                await request.compute(job.prompt_tokens)
                await request.lease.commit(job.prompt_tokens)
            except KVActorsError as error:
                self._fail(job, error)
        for job in outcome.done:
            if job.number not in self._requests:
                continue  # its commit has failed
            try:
                await self._requests.pop(job.number).lease.finish()
                self._totals.finished += 1
            except KVActorsError as error:
                self._engine.failed(str(job.number), error)
        await self._grow(outcome.full)

    async def _grow(self, full: Sequence[ServingJob]) -> None:
        """Take a block for each request that has filled its last one. Without a free block the
        requests that arrived last give theirs up."""
        decoding = self._scheduler.decoding
        while full := [job for job in full if job.number in decoding]:
            steps = []
            for job in full:
                number = job.covered // self._size - len(job.ids)
                tokens = tokens_of(output_ids(job, number + 1)[number:], self._size)
                steps.append(Step(self._requests[job.number].lease, tokens))
            without = list[ServingJob]()
            for job, stepped in zip(full, await self._cache.step(steps), strict=True):
                if stepped.error is None:
                    job.covered += self._size
                elif isinstance(stepped.error, NoRoom):
                    without.append(job)
                elif isinstance(stepped.error, KVActorsError):
                    self._fail(job, stepped.error)
                else:
                    raise stepped.error
            full = without
            if full:
                await self._preempt(self._scheduler.victim())

    async def _preempt(self, job: ServingJob) -> None:
        request = self._requests.pop(job.number)
        self._scheduler.preempt(job)
        try:
            await request.compute(job.num_tokens - 1)
            await request.lease.preempt(job.num_tokens - 1)
        except KVActorsError as error:
            request.lease.abandon()
            self._totals.complain(f"request {job.number}: {error}")


# -- models of caches, for comparison


class ModelCache:
    """Device blocks of running requests, shared by those with the same ids, and an LRU of ids in
    any tier. A path is touched deepest first, so that a block is younger than those after it.

    Exclusive tiers of a config hit like one tier of their sum, inclusive ones like the largest.
    """

    def __init__(self, config: Config, baseline: Baseline) -> None:
        self.block_size = config.cache.block_size
        self.free = config.device.num_blocks
        self._recompute_last_token = config.cache.recompute_last_token
        self._uses: Counter[Hashable] = Counter()  # of blocks of prompts
        self.own: dict[int, int] = {}  # other blocks, by request
        self._cached: OrderedDict[Hashable, None] = OrderedDict()
        self._shares = baseline == "lru"
        storage, tiers = config.storage, [config.device.num_blocks, config.host.slots]
        is_stored = storage.backend != "none" and not config.flush.flush_only
        if is_stored and storage.capacity_blocks is not None:
            tiers.append(storage.capacity_blocks)
        exclusive = config.host.mode == "exclusive" or not config.host.slots
        self._capacity: float = sum(tiers) if exclusive else max(tiers)
        if baseline == "none":
            self._capacity = 0
        elif is_stored and (storage.capacity_blocks is None or storage.capacity_bytes is not None):
            self._capacity = math.inf

    def _ids(self, job: ServingJob) -> list[Hashable]:
        """The ids of a prompt. Without a cache no request has those of another."""
        ids: list[Hashable] = job.ids.tolist()
        return ids if self._shares else [(job.number, one) for one in ids]

    def acquire(self, job: ServingJob) -> int | None:
        """Give a request its blocks. Returns the cached tokens, None without enough free blocks."""
        ids = self._ids(job)
        own = -(-job.num_tokens // self.block_size) - len(ids)
        new = sum(not self._uses[one] for one in ids) + own
        if new > self.free:
            return None
        self.free -= new
        self.own[job.number] = own
        self._uses.update(ids)
        hit = next((at for at, one in enumerate(ids) if one not in self._cached), len(ids))
        if hit == len(ids) and self._recompute_last_token and not job.produced:
            hit -= 1
        self._touch(ids[:hit])
        return hit * self.block_size

    def _touch(self, ids: Sequence[Hashable]) -> None:
        for one in reversed(ids):
            self._cached[one] = None
            self._cached.move_to_end(one)

    def computed(self, job: ServingJob) -> None:
        self._touch(self._ids(job))
        while len(self._cached) > self._capacity:
            self._cached.popitem(last=False)

    def grow(self, job: ServingJob) -> bool:
        if not self.free:
            return False
        self.free -= 1
        self.own[job.number] += 1
        job.covered += self.block_size
        return True

    def release(self, job: ServingJob) -> None:
        self.free += self.own.pop(job.number)
        for one in self._ids(job):
            self._uses[one] -= 1
            if not self._uses[one]:
                del self._uses[one]
                self.free += 1


def serve_on_model(
    requests: Iterable[TraceRequest], config: Config, baseline: Baseline, settings: ReplaySettings
) -> ServingFigures:
    """Serve a trace on a modelled cache of a config's sizes."""
    cache, size = ModelCache(config, baseline), config.cache.block_size
    scheduler = Scheduler(settings, jobs_of(requests, size), config.device.num_blocks * size)
    while scheduler.due < math.inf or scheduler.waiting or cache.own:
        scheduler.arrive()
        while scheduler.waiting and len(cache.own) < settings.most_running:
            job = scheduler.waiting[0]
            cached = cache.acquire(job)
            if cached is None:
                break
            heapq.heappop(scheduler.waiting)
            scheduler.begin(job, cached, -(-job.num_tokens // size) * size)
        if scheduler.has_work:
            outcome = scheduler.carry_out(scheduler.plan(scheduler.due))
            for job in outcome.prefilled:
                cache.computed(job)
            for job in outcome.done:
                cache.release(job)
            for job in outcome.full:
                while job.number in scheduler.decoding and not cache.grow(job):
                    victim = scheduler.victim()
                    cache.release(victim)
                    scheduler.preempt(victim)
        elif scheduler.due < math.inf:
            scheduler.now = max(scheduler.now, scheduler.due)
        else:
            raise RuntimeError(f"{len(scheduler.waiting)} requests wait, and none runs")
    return scheduler.figures


class ReplayConfig(Config, frozen=True, forbid_unknown_fields=True):
    """A cache's config and a `[replay]` table."""

    replay: ReplaySettings = ReplaySettings()

    @classmethod
    def check_mapping(cls, data: Any) -> tuple[Self, list[str]]:
        config, faults = super().check_mapping(data)
        if not faults and not config.device.num_blocks:
            faults = ["device.num_blocks must be at least 1: a replay sets it nowhere else"]
        return config, faults


def cache_config(config: Config) -> Config:
    """The cache's part of a larger config."""
    return Config(**{name: getattr(config, name) for name in Config.__struct_fields__})


async def replay(
    trace: str | Path,
    config: ReplayConfig,
    progress: Progress = lambda _: None,
    observe: Observe = nullcontext,
) -> Report:
    """Replay a trace."""
    settings, totals, served = config.replay, Totals(), ServingFigures()
    read = partial(read_trace, trace, coarse=settings.coarse, limit=settings.limit)
    timed = settings.mode == "timed"
    arrivals = await in_thread(lambda: list(read()), "kvactors-trace") if timed else []
    clock = TraceClock()
    async with open_cache(cache_config(config), clock=None if timed else clock) as cache:
        engine = Engine(cache, totals, ThreadModel(cache.device) if timed else None)
        with uncollected() if timed else nullcontext():
            async with LagMonitor().running() as lag, observe(cache):
                began = time.monotonic()
                if timed:
                    async with reporting(totals, progress):
                        served = await Serving(engine, arrivals, settings).run()
                else:
                    await replay_in_order(engine, read(), progress, clock)
                await engine.settle()
                wall = time.monotonic() - began
        report = make_report(in_unicode(Path(trace).name), totals, cache, lag.results(), wall=wall)
        used = cache.config
    if not timed:
        report.hit_rate_lru = await in_thread(lambda: lru_rates(read(), used), "kvactors-lru")
    else:

        def all_figures() -> dict[str, dict[str, Any]]:
            models = {
                name: serve_on_model(arrivals, used, name, settings) for name in settings.baselines
            }
            return {name: one.as_dict() for name, one in ({"cache": served} | models).items()}

        report.serving = await in_thread(all_figures, "kvactors-baselines")
    return report


class TraceClock:
    """The time stamp of the request that is being served, in seconds."""

    at = 0.0

    def __call__(self) -> float:
        return self.at


async def replay_in_order(
    engine: Engine, requests: Iterable[TraceRequest], progress: Progress, clock: TraceClock
) -> None:
    """One request after another, each with everything it caused. clock: of the cache."""
    cache = engine.cache
    read = partial(next, iter(requests), None)
    for number in itertools.count():
        if (request := await anyio.to_thread.run_sync(read)) is None:
            return
        clock.at = request.timestamp
        tokens = tokens_of(request.ids, cache.block_size)
        rest = request.input_length - len(tokens)
        if 0 < rest < cache.block_size:  # a prompt that ends in a block can be cached as a whole
            tokens = np.append(tokens, np.zeros(rest, np.uint32))
        try:
            await engine.serve(str(number), tokens, output_tokens=request.output_length)
            await cache.wait_idle()
        except NoRoom:
            engine.totals.rejected += 1
        except KVActorsError as error:
            engine.failed(str(number), error)
        progress(engine.totals)


@contextmanager
def uncollected() -> Iterator[None]:
    """Without Python's cyclic garbage collector, whose passes over a large cache's objects stop the
    loop for hundreds of milliseconds."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
