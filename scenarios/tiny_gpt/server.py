"""A serving loop with continuous batching, as an engine would embed kvactors: an admission queue,
and steps of the model that take the ready work of the running requests.

It is written against protocols, so that the same loop runs on `PlainCache`, which never
keeps anything.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import Any, NamedTuple, Protocol, Self

import anyio
import anyio.to_thread
import numpy as np
from anyio.abc import TaskGroup

from kvactors import Hits, NoRoom
from tiny_gpt.model import BLOCK, Chunk, Pass, Trunk

TRIES, PAUSE = 500, 0.01
"""Attempts, and seconds between them, for a request that finds too few free blocks although no
request is running."""

PASS_BLOCKS = 4
"""Blocks of a prompt that a pass computes at most."""


class LeaseLike(Protocol):
    """The part of `kvactors.Lease` that the loop uses."""

    block_tables: tuple[tuple[int, ...], ...]
    cached_tokens: int
    covered_tokens: int
    hits: Hits

    def pass_end(self, start: int, stop: int) -> int:
        """Where a pass must end that could go from token `start` to before `stop`."""

    async def next_chunk(self, num_tokens: int) -> tuple[int, ...]:
        """Blocks for the next tokens of the prompt, or NoRoom."""

    async def wait_ready(self) -> None:
        """Loads have landed."""

    async def extend(self, tokens: Any) -> tuple[int, ...]:
        """Blocks for more tokens, or NoRoom."""

    async def reserve(self, num_tokens: int) -> tuple[int, ...]:
        """Blocks for tokens to come, or NoRoom."""

    async def truncate(self, num_tokens: int) -> tuple[int, ...]:
        """Drop the tokens after so many, and the blocks that only they need."""

    async def fork(self, request_id: str) -> LeaseLike:
        """A second lease of the same tokens, or NoRoom."""

    async def commit(self, computed_tokens: int) -> int:
        """So many tokens are in device memory."""

    async def finish(self) -> None:
        """The request is over."""

    async def preempt(self, computed_tokens: int = 0) -> None:
        """The request gives way."""

    def abandon(self) -> None:
        """Give everything back at once."""


class CacheLike(Protocol):
    """The part of `kvactors.KVCache` that the loop uses."""

    async def acquire(
        self,
        request_id: str,
        tokens: Any,
        *,
        wait_for_room: bool,
        chunk_tokens: int | None,
        deadline: float,
    ) -> LeaseLike:
        """Blocks for a request, or for its cached tokens and a chunk, as soon as there are enough,
        or NoRoom."""


class PlainCache:
    """Device blocks without a memory: every request starts from nothing. A block has its number in
    every group of layers."""

    def __init__(self, num_blocks: int, groups: int = 1) -> None:
        self.free, self.groups = list(range(num_blocks)), groups

    async def acquire(
        self,
        request_id: str,
        tokens: Any,
        *,
        wait_for_room: bool,
        chunk_tokens: int | None,
        deadline: float,
    ) -> PlainLease:
        """See `CacheLike`. It never waits, and takes all blocks."""
        return PlainLease(self, self.take(-(-len(tokens) // BLOCK)), len(tokens))

    def take(self, needed: int) -> tuple[int, ...]:
        """So many blocks, or NoRoom."""
        if needed > len(self.free):
            raise NoRoom(needed, len(self.free))
        return tuple(self.free.pop() for _ in range(needed))


class PlainLease:
    """Some of a `PlainCache`'s blocks."""

    def __init__(self, cache: PlainCache, blocks: tuple[int, ...], tokens: int) -> None:
        self.block_table, self.cached_tokens, self.hits = blocks, 0, Hits(0, 0, 0)
        self._cache, self._tokens = cache, tokens

    @property
    def block_tables(self) -> tuple[tuple[int, ...], ...]:
        """See `LeaseLike`."""
        return (self.block_table,) * self._cache.groups

    @property
    def covered_tokens(self) -> int:
        """See `LeaseLike`."""
        return self._tokens

    def pass_end(self, start: int, stop: int) -> int:
        """See `LeaseLike`."""
        return stop

    async def next_chunk(self, num_tokens: int) -> tuple[int, ...]:
        """See `LeaseLike`. There are blocks for all tokens."""
        return ()

    async def wait_ready(self) -> None:
        """See `LeaseLike`."""

    async def extend(self, tokens: Any) -> tuple[int, ...]:
        """See `LeaseLike`."""
        missing = -(-(self._tokens + len(tokens)) // BLOCK) - len(self.block_table)
        added = self._cache.take(max(0, missing))
        self._tokens += len(tokens)
        self.block_table += added
        return added

    async def reserve(self, num_tokens: int) -> tuple[int, ...]:
        """See `LeaseLike`."""
        missing = -(-(self._tokens + num_tokens) // BLOCK) - len(self.block_table)
        added = self._cache.take(max(0, missing))
        self.block_table += added
        return added

    async def truncate(self, num_tokens: int) -> tuple[int, ...]:
        """See `LeaseLike`."""
        kept = -(-num_tokens // BLOCK)
        dropped, self.block_table = self.block_table[kept:], self.block_table[:kept]
        self._cache.free += dropped
        self._tokens = num_tokens
        return dropped

    async def fork(self, request_id: str) -> LeaseLike:
        """See `LeaseLike`. Nothing is shared: the other request is computed from its prompt."""
        raise NoRoom(len(self.block_table), 0)

    async def commit(self, computed_tokens: int) -> int:
        """See `LeaseLike`."""
        return computed_tokens // BLOCK

    async def finish(self) -> None:
        """See `LeaseLike`."""
        self.abandon()

    async def preempt(self, computed_tokens: int = 0) -> None:
        """See `LeaseLike`."""
        self.abandon()

    def abandon(self) -> None:
        """See `LeaseLike`."""
        self._cache.free += self.block_table
        self.block_table = ()


class Job(NamedTuple):
    """Something for the worker thread, and where its result goes."""

    work: Callable[[], Any]
    result: asyncio.Future[Any]


class Steps:
    """The model's thread. Each iteration takes up to `width` jobs: decoding first, but always a
    chunk of prefill if one waits."""

    def __init__(self, width: int, deadline: float) -> None:
        self.width, self.deadline = width, deadline
        self.iterations = self.widest = 0
        self._decode: deque[Job] = deque()
        self._prefill: deque[Job] = deque()
        self._bell = anyio.Event()

    async def submit(self, work: Callable[[], Any], *, decode: bool) -> Any:
        """Do the work in the next iteration that has capacity. TimeoutError after the deadline."""
        job = Job(work, asyncio.get_running_loop().create_future())
        (self._decode if decode else self._prefill).append(job)
        self._bell.set()
        try:
            with anyio.move_on_after(self.deadline):
                await asyncio.wait([job.result])
            if not job.result.done():
                raise TimeoutError(f"no step of the model within {self.deadline:g} s")
        except BaseException:
            await self._withdraw(job)
            raise
        return job.result.result()

    async def _withdraw(self, job: Job) -> None:
        """Withdraw a job. If it has begun, wait for its end: it writes to blocks that are about to
        be given back."""
        for queue in (self._decode, self._prefill):
            if job in queue:
                queue.remove(job)
                return
        with anyio.CancelScope(shield=True):
            await asyncio.wait([job.result])
        job.result.exception()  # retrieve the error: no other task does

    def _take(self) -> list[Job]:
        reserved = 1 if self._prefill else 0
        batch = [
            self._decode.popleft() for _ in range(min(len(self._decode), self.width - reserved))
        ]
        batch += [
            self._prefill.popleft() for _ in range(min(len(self._prefill), self.width - len(batch)))
        ]
        return batch

    async def run(self) -> None:
        """Iterate until cancelled."""
        while True:
            batch = self._take()
            if not batch:
                self._bell = anyio.Event()
                await self._bell.wait()
                continue
            self.iterations += 1
            self.widest = max(self.widest, len(batch))
            with anyio.CancelScope(shield=True):
                outcomes = await anyio.to_thread.run_sync(_outcomes, [job.work for job in batch])
            for job, (value, error) in zip(batch, outcomes, strict=True):
                if error is None:
                    job.result.set_result(value)
                else:
                    job.result.set_exception(error)


def _outcomes(work: Sequence[Callable[[], Any]]) -> list[tuple[Any, Exception | None]]:
    """In the thread: what each gives or raises."""
    found: list[tuple[Any, Exception | None]] = []
    for one in work:
        try:
            found.append((one(), None))
        except Exception as error:  # raised in the request that asked
            found.append((None, error))
    return found


class Totals:
    """The counts of a run. continued: chunks of prompts that took blocks after the first ones.

    logits: by request and position. text, bytes (digests of each group's blocks at the end, as far
    as its layers need them): by request."""

    def __init__(self) -> None:
        self.chunks = self.computed = self.reused = self.preemptions = self.refused = 0
        self.device = self.host = self.storage = 0
        self.drafted = self.accepted = self.continued = self.forks = 0
        self.logits: dict[tuple[str, int], np.ndarray] = {}
        self.text: dict[str, list[int]] = {}
        self.bytes: dict[str, list[bytes]] = {}


class Request:
    """A request of a number of new tokens. samples: how many there are of the prompt. The further
    ones are forks.

    cached_tokens: of its prompt, when it was first admitted. lease, logits: of a fork, what it
    begins with.
    """

    def __init__(self, name: str, prompt: Sequence[int], new: int, samples: int = 1) -> None:
        self.name, self.tokens = name, list(prompt)
        self.start, self.goal = len(prompt), len(prompt) + new
        self.cached_tokens: int | None = None
        self.forks = [Request(f"{name}/{number}", prompt, new) for number in range(1, samples)]
        self.lease: LeaseLike | None = None
        self.logits: np.ndarray | None = None


class Server:
    """Serves requests on a cache. running: how many at once. deadline: seconds any wait may take.

    drafts: tokens that a speculation proposes at most, 0 for none. chunk: tokens of a prompt that
    take blocks at once, 0 for all. sample: (request, position, logits) -> token. compare: keep
    logits, text and digests of blocks in `totals`. after_load: called with the block tables of a
    request, and with its blocks that came from lower tiers (a test's way in).
    """

    def __init__(
        self,
        cache: CacheLike,
        trunk: Trunk,
        sample: Callable[[str, int, np.ndarray], int],
        totals: Totals,
        *,
        drafts: int = 0,
        chunk: int = 0,
        running: int = 6,
        width: int = 4,
        deadline: float = 60.0,
        compare: bool = True,
        after_load: Callable[[Sequence[Sequence[int]], range], None] | None = None,
    ) -> None:
        self.cache, self.trunk, self.sample, self.totals = cache, trunk, sample, totals
        self.deadline, self.after_load, self.drafts = deadline, after_load, drafts
        self.chunk, self.compare = chunk, compare
        self.steps = Steps(width, deadline)
        self._slots = self._all = running
        self._numbers = count()
        self._waiting: asyncio.PriorityQueue[Ticket] = asyncio.PriorityQueue()
        self._departed = anyio.Event()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Self]:
        """The loop runs beside this block."""
        async with anyio.create_task_group() as group:
            group.start_soon(self.steps.run)
            group.start_soon(self._admit)
            yield self
            group.cancel_scope.cancel()

    async def generate(
        self, name: str, prompt: Sequence[int], new_tokens: int, samples: int = 1
    ) -> list[int]:
        """Tokens that follow the prompt. Returns the first sample when all are made."""
        request = Request(name, prompt, new_tokens, samples)
        await self.serve(request)
        return request.tokens[request.start :]

    async def serve(self, request: Request) -> None:
        """Sample all tokens of a request and of its forks."""
        async with anyio.create_task_group() as group:
            await self._answer(request, group)

    async def _answer(self, request: Request, group: TaskGroup) -> None:
        """Serve a request until its goal. One that must give way keeps its place in the queue."""
        tokens, number = request.tokens, next(self._numbers)
        while len(tokens) < request.goal:
            lease, request.lease = request.lease, None
            if lease is None:
                future = asyncio.get_running_loop().create_future()
                ticket = Ticket(number, request.name, tokens, future)
                self._waiting.put_nowait(ticket)
                lease = await self._admitted(ticket)
            if request.cached_tokens is None:
                request.cached_tokens = lease.cached_tokens
            try:
                await self._serve(lease, request, group)
            except BaseException:
                lease.abandon()
                raise
            finally:
                self._leave()
        if self.compare:
            self.totals.text[request.name] = tokens[request.start :]

    # -- admission

    async def _admit(self) -> None:
        """Admit in order of arrival. A request without free blocks waits until another leaves."""
        while True:
            ticket = await self._waiting.get()
            if ticket.lease.done():
                continue  # the request was cancelled
            left = self._departed
            try:
                lease = await self._acquire(ticket) if self._slots > 0 else None
            except Exception as error:  # the request's own
                if not ticket.lease.done():
                    ticket.lease.set_exception(error)
                continue
            if lease is None:
                self._waiting.put_nowait(ticket)
                if self._slots < self._all:
                    await left.wait()
                else:
                    await anyio.sleep(PAUSE)  # none runs: saves in flight will free blocks
            elif ticket.lease.done():
                lease.abandon()
            else:
                self._slots -= 1
                ticket.lease.set_result(lease)

    async def _admitted(self, ticket: Ticket) -> LeaseLike:
        try:
            with anyio.move_on_after(self.deadline):
                return await ticket.lease
            running = self._all - self._slots
            text = f"no device blocks within {self.deadline:g} s, running requests: {running}"
            raise TimeoutError(text)
        except BaseException:
            given = ticket.lease
            if given.done() and not given.cancelled() and given.exception() is None:
                given.result().abandon()
                self._leave()
            raise

    def _leave(self) -> None:
        """A request has stopped running: a waiting one may try again."""
        self._slots += 1
        bell, self._departed = self._departed, anyio.Event()
        bell.set()

    async def _acquire(self, ticket: Ticket) -> LeaseLike | None:
        try:
            lease = await self.cache.acquire(
                ticket.name,
                ticket.tokens,
                wait_for_room=True,  # behind the requests that wait already
                chunk_tokens=self.chunk or None,
                deadline=self.deadline,
            )
        except NoRoom:
            self.totals.refused += 1
            ticket.tries += self._slots == self._all
            if ticket.tries == TRIES:
                raise
            return None
        try:
            await lease.wait_ready()
            self._count(lease)
            loaded = range(lease.hits.device, lease.cached_tokens // BLOCK)
            if self.after_load is not None and len(loaded) > 1:
                damage = partial(self.after_load, lease.block_tables, loaded)
                await self.steps.submit(damage, decode=True)
        except BaseException:
            lease.abandon()
            raise
        return lease

    def _count(self, lease: LeaseLike) -> None:
        self.totals.reused += lease.cached_tokens
        self.totals.device += lease.hits.device
        self.totals.host += lease.hits.host
        self.totals.storage += lease.hits.storage

    # -- one request

    async def _serve(self, lease: LeaseLike, request: Request, group: TaskGroup) -> None:
        """Compute the missing rows and sample, until the goal, or until there is no block for the
        next chunk or token."""
        name, tokens, goal, at = request.name, request.tokens, request.goal, lease.cached_tokens
        while True:
            (logits, request.logits), drafts = (request.logits, None), list[int]()
            if logits is None:
                if not request.forks:
                    drafts = await self._propose(lease, tokens, goal)
                try:
                    logits = await self._compute(lease, tokens, drafts, at)
                except NoRoom:
                    self.totals.preemptions += 1
                    await lease.preempt(at)  # the blocks that were computed are committed already
                    return
            await self._fork(lease, request, logits, group)
            at = self._accept(name, tokens, drafts, logits, goal)
            if drafts:
                await lease.truncate(at)  # the rejected ones, and blocks that only they need
                await lease.commit(at)
            if len(tokens) == goal:
                if self.compare:
                    digest = partial(self.trunk.digest, lease.block_tables, at)
                    self.totals.bytes[name] = await self.steps.submit(digest, decode=True)
                await lease.finish()
                return
            try:
                await lease.extend(tokens[at:])
            except NoRoom:
                self.totals.preemptions += 1
                await lease.preempt(at)
                return

    async def _fork(
        self, lease: LeaseLike, request: Request, logits: np.ndarray, group: TaskGroup
    ) -> None:
        """Begin the further samples of a prompt, which is computed. One without a block for its
        fork is admitted as any request."""
        for fork in request.forks:
            try:
                fork.lease = await lease.fork(fork.name)
            except NoRoom:
                pass
            else:
                fork.logits = logits
                self.totals.forks += 1
                self._slots -= 1
            group.start_soon(self._answer, fork, group)
        request.forks = []

    async def _propose(self, lease: LeaseLike, tokens: list[int], goal: int) -> list[int]:
        """Drafts of the next tokens, appended to the lease. None without blocks for them: a
        speculation never takes the place of another request."""
        drafts = ngram_drafts(tokens, min(self.drafts, goal - len(tokens) - 1))
        if lease.covered_tokens < len(tokens):
            return []  # blocks for the prompt come chunk by chunk
        if drafts:
            try:
                await lease.reserve(len(drafts))
            except NoRoom:
                return []
            await lease.extend(drafts)
        return drafts

    def _accept(
        self, name: str, tokens: list[int], drafts: list[int], rows: np.ndarray, goal: int
    ) -> int:
        """Sample a token from each row, as long as the next row's draft is that token. Returns the
        tokens whose keys and values are right."""
        computed = len(tokens)
        self.totals.drafted += len(drafts)
        for logits, draft in zip(rows, [*drafts, -1], strict=True):
            at = len(tokens)
            token = self.sample(name, at, logits)
            if self.compare:
                self.totals.logits[name, at] = logits
            tokens.append(token)
            if token != draft or len(tokens) == goal:
                break
            self.totals.accepted += 1
            computed += 1
        return computed

    async def _compute(
        self, lease: LeaseLike, tokens: list[int], drafts: list[int], at: int
    ) -> np.ndarray:
        """Rows from `at` to the end of the drafts, pass by pass. Returns the logits of the last
        token and of each draft. Only passes without drafts are committed. NoRoom if there are no
        blocks for the next chunk."""
        decode, found = len(tokens) - at == 1, list[np.ndarray]()
        sure, every = len(tokens), tokens + drafts
        while at < len(every):
            if lease.covered_tokens <= at:
                await lease.next_chunk(self.chunk)
                self.totals.continued += 1
            most = (at // BLOCK + PASS_BLOCKS) * BLOCK
            stop = lease.pass_end(at, min(most, len(every), lease.covered_tokens))
            step = Pass(lease.block_tables, at, stop)
            for block in range(at // BLOCK, -(-stop // BLOCK)):
                first, start = block * BLOCK, max(at, block * BLOCK)
                end = min(stop, first + BLOCK)
                wanted = max(start, sure - 1)
                rows = slice(wanted - first, end - first) if wanted < end else None
                chunk = Chunk(step, block, tuple(every[first:end]), start - first, rows)
                logits = await self.steps.submit(partial(self.trunk.step, chunk), decode=decode)
                if rows is not None:
                    found.append(logits)
                self.totals.chunks += 1
            self.totals.computed += stop - at
            at = stop
            if at <= sure:
                await lease.commit(at)
        return np.concatenate(found)


NGRAM = 2
"""Tokens that a draft's context has in common with the end of a request."""


def ngram_drafts(tokens: Sequence[int], most: int) -> list[int]:
    """The tokens that followed the last earlier occurrence of the request's last ones."""
    end = tuple(tokens[-NGRAM:])
    for start in range(len(tokens) - NGRAM - 1, -1, -1) if most > 0 else ():
        if tuple(tokens[start : start + NGRAM]) == end:
            return list(tokens[start + NGRAM : start + NGRAM + most])
    return []


class Ticket:
    """A request that waits to be admitted. Earlier requests go first."""

    def __init__(
        self, number: int, name: str, tokens: list[int], lease: asyncio.Future[LeaseLike]
    ) -> None:
        self.number, self.name, self.tokens, self.lease = number, name, tokens, lease
        self.tries = 0

    def __lt__(self, other: Ticket) -> bool:
        return self.number < other.number
