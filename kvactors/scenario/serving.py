"""A replay as a serving loop: requests of a trace arrive by its clock, wait in a queue, and are
computed by continuous batching. The cache is real, the model's step times are modelled.

The trace's clock advances by the steps, and, when no step can be computed, with the wall clock
times `speed`. A process that is too slow for the speed takes longer for the replay. Arrivals follow
the trace's clock, so the figures are those of a machine that keeps up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from kvactors.actor.uncancelled import wait_uncancelled
from kvactors.errors import DeadlineExceeded, KVActorsError, NoRoom
from kvactors.scenario.batching import (
    Figures,
    Job,
    Outcome,
    Pace,
    Scheduler,
    jobs_of,
    never_fits,
    output_ids,
)
from kvactors.scenario.engine import Engine, Request
from kvactors.scenario.report import Totals
from kvactors.scenario.trace import TraceRequest, tokens_of
from kvactors.steps import Step
from kvactors.threads import Workers

SLICE = 0.002
"""Seconds of the wall clock that a stride of decode steps lasts at most, so that requests whose
loads have arrived join soon."""

YIELD = 0.0005
"""Seconds that the clock may be ahead of the wall clock: a shorter sleep is not exact."""


PASSES = 8
"""Passes of the event loop for the cache between two strides, when strides are late."""


class ThreadModel:
    """Computes and verifies blocks in a thread, beside the loop."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._workers = Workers(1, "kvactors-model")

    async def _run(self, call: Callable[[], Any]) -> Any:
        return await wait_uncancelled(asyncio.wrap_future(self._workers.submit(call)))

    async def fill(self, blocks: Sequence[int], names: bytes) -> None:
        """See `Model.fill`."""
        await self._run(lambda: self._device.fill(blocks, names))

    async def check(self, blocks: Sequence[int], names: bytes) -> Sequence[int]:
        """See `Model.check`."""
        bad: list[int] = await self._run(lambda: self._device.check(blocks, names))
        return bad


class Serving:
    """Serves a trace on a cache.

    Args:
        engine: the cache, the totals and the model.
        requests: of the trace.
        pace: of the model.
        speed: factor on the trace's clock.
        most_running: requests with blocks at most.
        patience: seconds that the earliest request waits for device blocks.
        progress: called with the totals a few times a second.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Iterable[TraceRequest],
        pace: Pace,
        *,
        speed: float,
        most_running: int,
        patience: float,
        progress: Callable[[Totals], None],
    ) -> None:
        self._engine, self._cache, self._totals = engine, engine.cache, engine.totals
        self._size = engine.cache.block_size
        self._speed, self._patience, self._progress = speed, patience, progress
        self._most_running = most_running
        self._scheduler = Scheduler(pace)
        self._arriving = jobs_of(requests, self._size)[::-1]
        self._requests: dict[int, Request] = {}
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._woken = self._loop.create_future()
        self._starting: set[asyncio.Task[None]] = set()
        self._admitting: asyncio.Task[None] | None = None
        self._running = 0  # requests with a lease, or about to have one
        self._shown = 0.0

    async def run(self) -> Figures:
        """Serve every request."""
        scheduler = self._scheduler
        try:
            while self._arriving or scheduler.waiting or self._running:
                self._arrive()
                self._admit()
                if scheduler.has_work:
                    await self._compute()
                else:
                    await self._wait()
                self._show()
        finally:
            tasks = [*self._starting, *([self._admitting] if self._admitting else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for request in self._requests.values():
                request.lease.abandon()
        self._progress(self._totals)
        return scheduler.figures

    def _show(self) -> None:
        if self._loop.time() - self._shown > 0.1:
            self._shown = self._loop.time()
            self._progress(self._totals)

    # -- the clock

    def _wall(self) -> float:
        """The latest time that the trace's clock may have."""
        return (self._loop.time() - self._began) * self._speed

    async def _reach(self, time: float) -> None:
        """Return when the wall clock has reached a time of the trace's clock."""
        ahead = (time - self._wall()) / self._speed - YIELD
        if ahead > 0:
            await asyncio.sleep(ahead)
            return
        for _ in range(PASSES):
            await asyncio.sleep(0)
        self._set_back(time)

    def _set_back(self, time: float) -> None:
        """If the wall clock has passed a time of the trace's clock, this process is too slow for
        the speed: set the wall clock back."""
        self._began += max(0.0, self._wall() - time) / self._speed

    async def _wait(self) -> None:
        """Nothing can be computed: wait for an arrival, or until a request has its blocks."""
        scheduler = self._scheduler
        self._set_back(scheduler.now)
        limit = None
        if self._arriving:
            limit = max(0.0, (self._arriving[-1].arrival - self._wall()) / self._speed)
        self._woken = self._loop.create_future()
        await asyncio.wait((self._woken,), timeout=limit)
        due = self._arriving[-1].arrival if self._arriving else float("inf")
        scheduler.now = max(scheduler.now, min(self._wall(), due))

    def _wake(self) -> None:
        if not self._woken.done():
            self._woken.set_result(None)

    # -- admission

    def _arrive(self) -> None:
        scheduler, device = self._scheduler, self._cache.device
        while self._arriving and self._arriving[-1].arrival <= scheduler.now:
            job = self._arriving.pop()
            if never_fits(job, device.num_blocks, self._size):
                self._reject()
            else:
                scheduler.arrive(job)

    def _reject(self) -> None:
        self._scheduler.figures.rejected += 1
        self._totals.rejected += 1

    def _admit(self) -> None:
        """Let the earliest request wait for its blocks. The others wait behind it."""
        if self._admitting is not None or self._running >= self._most_running:
            return
        if self._scheduler.waiting:
            self._admitting = self._loop.create_task(self._admit_all())

    async def _admit_all(self) -> None:
        try:
            while self._running < self._most_running:
                job = self._scheduler.next_waiting()
                if job is None:
                    return
                self._running += 1
                await self._acquire(job)
        finally:
            self._admitting = None
            self._wake()

    async def _acquire(self, job: Job) -> None:
        try:
            lease = await self._cache.acquire(
                str(job.number), self._tokens(job), wait_for_room=True, deadline=self._patience
            )
        except (NoRoom, DeadlineExceeded):
            self._running -= 1
            self._reject()
        except KVActorsError as error:
            self._fail(job, error)
        else:
            self._requests[job.number] = self._engine.request(lease)
            task = self._loop.create_task(self._start(job))
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    def _tokens(self, job: Job) -> np.ndarray:
        """The prompt, and the blocks of tokens that were decoded before a preemption."""
        blocks = -(-job.num_tokens // self._size) - len(job.ids)
        ids = np.concatenate([job.ids, output_ids(job, blocks)]) if blocks else job.ids
        return tokens_of(ids, self._size)

    async def _start(self, job: Job) -> None:
        """Wait for the loads, and verify what they brought."""
        request = self._requests[job.number]
        try:
            await self._engine.begin(request, resumed=job.admitted_at >= 0)
        except NoRoom:  # blocks of a load that failed could not be replaced
            request.lease.abandon()
            del self._requests[job.number]
            self._running -= 1
            self._scheduler.figures.preemptions += 1
            self._scheduler.arrive(job)
        except KVActorsError as error:
            self._fail(job, error)
        else:
            lease = request.lease
            self._scheduler.begin(job, lease.cached_tokens, lease.covered_tokens)
        finally:
            self._wake()

    def _fail(self, job: Job, error: KVActorsError) -> None:
        """A request ends with an error."""
        self._running -= 1
        request = self._requests.pop(job.number, None)
        if request is not None:
            request.lease.abandon()
        self._engine.failed(str(job.number), error)

    # -- steps

    async def _compute(self) -> None:
        """One stride of the model, and the calls of the cache that follow from it."""
        scheduler = self._scheduler
        until = scheduler.now + SLICE * self._speed
        if self._arriving:
            until = min(until, self._arriving[-1].arrival)
        stride = scheduler.plan(until)
        await self._reach(scheduler.now + stride.seconds)
        outcome = scheduler.carry_out(stride)
        await self._commit(outcome)
        await self._finish(outcome)
        await self._grow(outcome.full)

    async def _commit(self, outcome: Outcome) -> None:
        """The prompts that were computed become shareable."""
        for job in outcome.prefilled:
            request = self._requests[job.number]
            try:
                await request.compute()
                await request.lease.commit(job.prompt_tokens)
            except KVActorsError as error:
                self._drop(job, error)

    async def _finish(self, outcome: Outcome) -> None:
        for job in outcome.done:
            request = self._requests.pop(job.number, None)
            if request is None:
                continue  # its commit has failed
            self._running -= 1
            try:
                await request.lease.finish()
                self._totals.finished += 1
            except KVActorsError as error:
                self._engine.failed(str(job.number), error)

    def _drop(self, job: Job, error: KVActorsError) -> None:
        """A request that is being computed ends with an error."""
        self._scheduler.decoding.pop(job.number, None)
        self._fail(job, error)

    async def _grow(self, full: Sequence[Job]) -> None:
        """Take a block for each request that has filled its last one. Without a free block the
        requests that arrived last give theirs up."""
        decoding = self._scheduler.decoding
        while full := [job for job in full if job.number in decoding]:
            steps = []
            for job in full:
                number = job.covered // self._size - len(job.ids)
                tokens = tokens_of(output_ids(job, number + 1)[number:], self._size)
                steps.append(Step(self._requests[job.number].lease, tokens))
            without = list[Job]()
            for job, stepped in zip(full, await self._cache.step(steps), strict=True):
                if stepped.error is None:
                    job.covered += self._size
                elif isinstance(stepped.error, NoRoom):
                    without.append(job)
                elif isinstance(stepped.error, KVActorsError):
                    self._drop(job, stepped.error)
                else:
                    raise stepped.error
            full = without
            if full:
                await self._preempt(self._scheduler.victim())

    async def _preempt(self, job: Job) -> None:
        """A request gives its blocks up. The computed ones stay cached."""
        request = self._requests.pop(job.number)
        self._scheduler.preempt(job)
        self._running -= 1
        try:
            await request.compute()
            await request.lease.preempt(job.num_tokens - 1)
        except KVActorsError as error:
            request.lease.abandon()
            self._totals.complain(f"request {job.number}: {error}")
