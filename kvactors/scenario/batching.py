"""Continuous batching with a model of step times: which requests a serving loop computes in each
step, on a clock that only the steps advance.

Pure state. The drivers (`serving.py` on a cache, `baseline.py` on models of caches) admit requests,
give them blocks, and carry out what the scheduler returns.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvactors.scenario.trace import TraceRequest


class Job:
    """A request of a trace in the serving loop.

    Attributes:
        number: in order of arrival.
        arrival: seconds on the trace's clock.
        ids: of the prompt's blocks.
        prompt_tokens: tokens of the prompt.
        output_tokens: tokens that the model decodes, at least one.
        produced: tokens decoded so far. A preempted request keeps them.
        missing: tokens to prefill before the next decode step.
        covered: tokens that its device blocks have place for.
        cached_tokens: tokens that its first admission found in the cache.
        admitted_at: when it had its blocks for the first time.
        first_token_at: when its first token was decoded.
    """

    __slots__ = (
        "admitted_at",
        "arrival",
        "cached_tokens",
        "covered",
        "first_token_at",
        "ids",
        "missing",
        "number",
        "output_tokens",
        "produced",
        "prompt_tokens",
    )

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
        """Tokens of the prompt and those decoded."""
        return self.prompt_tokens + self.produced

    @property
    def is_done(self) -> bool:
        """Whether all tokens are decoded."""
        return self.produced >= self.output_tokens

    @property
    def steps_covered(self) -> int:
        """Decode steps that it has blocks for. A step writes the token decoded before it."""
        return self.covered - self.num_tokens + 1

    def __lt__(self, other: Job) -> bool:
        return self.number < other.number


class Pace(NamedTuple):
    """The model's step times.

    Attributes:
        prefill_tokens_per_s: tokens of prompts computed in a second.
        decode_s: seconds that a step takes in which requests decode a token each.
        step_tokens: tokens of prompts in one step at most.
    """

    prefill_tokens_per_s: float
    decode_s: float
    step_tokens: int


class Stride(NamedTuple):
    """One step with prefill, or several decode steps in a row.

    Attributes:
        seconds: how long it takes.
        prefill: requests, and how many tokens of each are computed.
        decode_steps: tokens that each decoding request gets.
    """

    seconds: float
    prefill: tuple[tuple[Job, int], ...]
    decode_steps: int


class Outcome(NamedTuple):
    """Requests after a stride.

    Attributes:
        prefilled: whose prompts are computed now.
        done: that have all their tokens.
        full: that need another device block before the next step, the earliest first.
    """

    prefilled: list[Job]
    done: list[Job]
    full: list[Job]


class Scheduler:
    """Requests that wait, are admitted, prefill and decode.

    Attributes:
        now: seconds on the trace's clock.
        waiting: requests without blocks, a heap by arrival.
        prefilling: requests with missing tokens, in order of admission.
        decoding: requests that decode.
        figures: what is measured.
    """

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.now = 0.0
        self.waiting: list[Job] = []
        self.prefilling: deque[Job] = deque()
        self.decoding: dict[int, Job] = {}
        self.figures = Figures()

    @property
    def has_work(self) -> bool:
        """Whether a step can be computed."""
        return bool(self.prefilling or self.decoding)

    def arrive(self, job: Job) -> None:
        """A request arrives, or comes back after a preemption. It waits behind earlier ones."""
        heapq.heappush(self.waiting, job)

    def next_waiting(self) -> Job | None:
        """Take the earliest request that waits."""
        return heapq.heappop(self.waiting) if self.waiting else None

    def begin(self, job: Job, cached_tokens: int, covered: int) -> None:
        """A request has its blocks, and the bytes of the cached ones.

        Args:
            job: the request.
            cached_tokens: tokens that need not be computed.
            covered: see `Job`.
        """
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
        prefill, budget = list[tuple[Job, int]](), self.pace.step_tokens
        for job in self.prefilling:
            count = min(job.missing, budget)
            budget -= count
            prefill.append((job, count))
            if not budget:
                break
        decode_s = self.pace.decode_s if self.decoding else 0.0
        if prefill:
            computed = self.pace.step_tokens - budget
            seconds = decode_s + computed / self.pace.prefill_tokens_per_s
            return Stride(seconds, tuple(prefill), int(bool(self.decoding)))
        steps = min(
            min(job.output_tokens - job.produced, job.steps_covered)
            for job in self.decoding.values()
        )
        steps = max(1, min(steps, math.ceil((until - self.now) / decode_s)))
        return Stride(steps * decode_s, (), steps)

    def carry_out(self, stride: Stride) -> Outcome:
        """The stride has been computed."""
        self.now += stride.seconds
        self.figures.steps += max(1, stride.decode_steps)
        done, full = list[Job](), list[Job]()
        for job in self.decoding.values():
            job.produced += stride.decode_steps
            if job.is_done:
                done.append(job)
            elif job.steps_covered < 1:
                full.append(job)
        prefilled = list[Job]()
        for job, count in stride.prefill:
            job.missing -= count
            if not job.missing:
                prefilled.append(job)
        for job in prefilled:
            self.prefilling.remove(job)
            if not job.produced:
                job.produced, job.first_token_at = 1, self.now
            self.decoding[job.number] = job
            if job.is_done:
                done.append(job)
            elif job.steps_covered < 1:
                full.append(job)
        for job in done:
            del self.decoding[job.number]
            self.figures.finish(job, self.now)
        return Outcome(prefilled, done, sorted(full))

    def victim(self) -> Job:
        """The decoding request that gives its blocks up: the one that arrived last."""
        return max(self.decoding.values())

    def preempt(self, job: Job) -> None:
        """A decoding request has given its blocks up. It waits again, before later ones."""
        del self.decoding[job.number]
        self.figures.preemptions += 1
        self.arrive(job)


class Figures:
    """Measured times of the requests of one run.

    Attributes:
        first_token_s: seconds from arrival to the first token.
        queue_s: seconds from arrival until a request had its blocks and the cached bytes.
        total_s: seconds from arrival to the last token.
        prompt_tokens, output_tokens: of the finished requests.
        saved_tokens: tokens of prompts that were not computed, as they were cached.
        computed_tokens: tokens that were prefilled, those of preempted requests again.
        preemptions: requests that gave their blocks up.
        rejected: requests that the device can never hold, or that waited too long.
        steps: steps of the model.
        end: seconds on the trace's clock at the last finish.
    """

    def __init__(self) -> None:
        self.first_token_s: list[float] = []
        self.queue_s: list[float] = []
        self.total_s: list[float] = []
        self.prompt_tokens = self.output_tokens = self.saved_tokens = self.computed_tokens = 0
        self.preemptions = self.rejected = self.steps = 0
        self.end = 0.0

    def finish(self, job: Job, now: float) -> None:
        """A request has all its tokens."""
        self.first_token_s.append(job.first_token_at - job.arrival)
        self.queue_s.append(job.admitted_at - job.arrival)
        self.total_s.append(now - job.arrival)
        self.prompt_tokens += job.prompt_tokens
        self.output_tokens += job.output_tokens
        self.saved_tokens += job.cached_tokens
        self.end = now

    def as_dict(self) -> dict[str, Any]:
        """For reports."""
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
    found = np.percentile(np.array(values), [50, 90, 99]) if len(values) else (0.0, 0.0, 0.0)
    return {
        name: round(float(one), 4) for name, one in zip(("p50", "p90", "p99"), found, strict=True)
    }


def jobs_of(requests: Iterable[TraceRequest], block_size: int) -> list[Job]:
    """The requests of a trace, with times from the first one on."""
    jobs = [Job(number, request, block_size) for number, request in enumerate(requests)]
    start = jobs[0].arrival if jobs else 0.0
    for job in jobs:
        job.arrival -= start
    return jobs


def never_fits(job: Job, num_blocks: int, block_size: int) -> bool:
    """Whether the device is too small for all tokens of a request."""
    return job.prompt_tokens + job.output_tokens - 1 > num_blocks * block_size


def output_ids(job: Job, blocks: int) -> NDArray[np.uint64]:
    """Ids of the blocks of decoded tokens, which no prompt of a trace has.

    Args:
        job: the request.
        blocks: how many, from the first one on.
    """
    first = (1 << 63) + (job.number << 20)
    return np.arange(first, first + blocks, dtype=np.uint64)
