"""A client that decodes many requests together, as an engine does: one `step` for 1 to 64 leases,
with bad entries, events, cancellations and other calls on the same leases.

`tests.simulation` and `tests.oracle`, and with it `tests.soak`, share it. Each defines how a
request is admitted, and how its blocks are computed and compared.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from kvactors import KVActorsError, KVCache, Lease, LeaseBusy, LeaseEnded, NoRoom, Step, Stepped
from kvactors.checks import Media, request_path
from kvactors.errors import DeadlineExceeded, DeviceError, TokensCommitted
from kvactors.native import Path

T = TypeVar("T")

PASSES = 12
"""Passes of the loop after which an event completes or a call is cancelled, at most."""

SIZES = (1, 2, 3, 8, 64)
"""Leases of a batch, if the device has blocks for them."""

BEFORE = {"nothing": 8, "next_chunk": 4, "reserve": 1, "fork": 1}
"""Calls on a lease before a step, and their weights."""

ENTRIES = {"token": 10, "tokens": 6, "media": 4, "long": 2, "commit": 3, "none": 1, "uncovered": 4}
"""Entries of a step: `uncovered` commits tokens that a chunked lease has no blocks for."""

EVENTS = {"none": 6, "future": 3, "query": 3, "fails": 1, "late": 1, "stream": 1}
"""Completions of the computed tokens, and their weights."""

BESIDE = {
    "nothing": 8,
    "extend": 3,
    "truncate": 2,
    "step": 2,
    "reserve": 1,
    "commit": 1,
    "fork": 1,
    "finish": 1,
    "abandon": 1,
}
"""Calls on a lease of a step that has not returned."""

WHEN = ("before", "with", "with", "after")
"""When that call begins: before the step, in the same pass of the loop, or once the step has
begun."""

LIBRARY = ("kvactors/decode_batch.py", "kvactors/lease.py", "kvactors/lease.py")
"""Files whose coroutines may be tasks of a step."""

ENDS = {"finish": 8, "preempt": 1, "abandon": 1, "leave": 1}

BAD: tuple[Callable[[Row], tuple[Any, ...]], ...] = (
    lambda row: ([1], len(row.tokens) + 2),
    lambda row: ([1], -1),
    lambda row: ([1], 1.0),
    lambda row: ("text",),
    lambda row: ([-1],),
    lambda row: ([1], None, ((0, 2, "beyond"),)),
)
"""Arguments for which a step raises in its caller, and changes nothing."""

Content = tuple[list[int], tuple[Media, ...]]
"""Tokens and media of a request."""


class Row:
    """A request of a batch.

    Attributes:
        lease: its lease.
        content: what the lease must have.
        solid: leading blocks that are committed.
        computed: leading tokens whose KV is in the blocks.
    """

    def __init__(self, lease: Lease, content: Content) -> None:
        self.lease = lease
        self.content = content
        self.solid = self.computed = 0

    @property
    def tokens(self) -> list[int]:
        """Its tokens."""
        return self.content[0]


class Entry(NamedTuple):
    """An entry of a step. buffer: of the caller, with the tokens that are added."""

    row: Row
    kind: str
    added: Content
    buffer: Any
    computed: int | None

    def step(self) -> Step:
        """For the call."""
        return Step(self.row.lease, self.buffer, self.computed, self.added[1])


class Event:
    """An event of a GPU's stream."""

    done = False

    def query(self) -> bool:
        """See `DeviceEvent`."""
        return self.done


class Batch(ABC):
    """Requests that are stepped together, each of which ends in a drawn way.

    Args:
        cache: the cache.
        rng: draws everything.
        seen: counts of what was reached.
        fail: called with a text for each violation.
        left: contents of ended requests, for later prompts.
    """

    stepping: ClassVar[int] = 0
    """Calls of `step` that have not ended, of all batches."""

    def __init__(
        self,
        cache: KVCache,
        rng: random.Random,
        seen: Counter[str],
        fail: Callable[[str], None],
        left: list[list[int]],
    ) -> None:
        self.cache = cache
        self.rng = rng
        self.seen = seen
        self.fail = fail
        self.left = left
        self.rows: list[Row] = []
        self.ended: list[Row] = []
        self.finished = 0

    # -- of the world

    @abstractmethod
    async def admit(self) -> Row:
        """A request that was granted a lease, whose cached blocks are verified and computed."""

    def branch(self, row: Row, lease: Lease) -> Row:
        """The request of a fork."""
        one = type(row).__new__(type(row))
        vars(one).update(vars(row))
        one.lease = lease
        return one

    @abstractmethod
    async def fill(self, row: Row, content: Content, start: int, stop: int) -> None:
        """Compute blocks of a request. LeaseEnded if they are not its own any more."""

    @abstractmethod
    async def check(self, row: Row, stop: int) -> None:
        """The first blocks of a request hold its bytes."""

    @abstractmethod
    def judge(self, what: str, error: KVActorsError) -> None:
        """Fail unless the state of the world accounts for an error."""

    async def ask(self, what: str, make: Callable[[], Awaitable[T]], _seconds: float) -> T:
        """Await a call of the cache."""
        return await make()

    def over(self) -> bool:
        """Whether the batch is to end soon."""
        return False

    # -- from admission to the end

    async def run(self) -> None:
        """Admit, step, end."""
        rng, size = self.rng, self.rng.choice(SIZES)
        spare = rng.choice((0, 0, 4, self.cache.device.num_blocks // 2))
        try:
            while len(self.rows) < size and not self.over():
                if self.rows and self.cache.free_blocks().available <= spare:
                    break
                try:
                    self.rows.append(await self.admit())
                except NoRoom:
                    break
            for _ in range(rng.choice((1, 2, 4, 8))):
                if not self.rows or self.over():
                    break
                for row in tuple(self.rows):
                    await self._before(row)
                if self.rows and rng.random() < 0.3:
                    await self._pass()
                if self.rows:
                    await self._step()
            while self.rows:
                await self._end(self.rows.pop())
        finally:
            for row in (*self.rows, *self.ended):
                row.lease.abandon()

    async def _before(self, row: Row) -> None:
        rng, lease, kind = self.rng, row.lease, draw(self.rng, BEFORE)
        covered, seconds = lease.covered_tokens, rng.choice((0.05, 1.0))
        try:
            if kind == "next_chunk" and covered < lease.num_tokens:
                count = rng.randint(1, lease.num_tokens - covered)
                await self.ask(kind, lambda: lease.next_chunk(count, deadline=seconds), seconds)
            elif kind == "reserve":
                count = rng.randint(0, self.cache.block_size)
                await self.ask(kind, lambda: lease.reserve(count, deadline=seconds), seconds)
            elif kind == "fork" and len(self.rows) < SIZES[-1]:
                made = await self.ask(kind, lambda: lease.fork(deadline=seconds), seconds)
                self.rows.append(self.branch(row, made))
                self.seen["batch fork"] += 1
            if lease.covered_tokens > covered:  # also by `reserve`
                await self._compute(row)
        except (NoRoom, DeadlineExceeded):
            pass
        except KVActorsError as error:
            self.judge(kind, error)
            self._drop(row)

    async def _pass(self) -> None:
        """A pass of the device. Some of its requests end before it is over."""
        rng, loop = self.rng, asyncio.get_running_loop()
        rows = rng.sample(self.rows, rng.randint(1, len(self.rows)))
        event: asyncio.Future[None] = loop.create_future()
        over = self.cache.record_pass([row.lease for row in rows], event=event)
        self._writing = loop.create_task(self._write(rows, event))
        await asyncio.sleep(0)
        for row in rng.sample(rows, rng.choice((0, 0, 1, len(rows)))):
            self.seen["ended in a pass"] += 1
            self._drop(row)
        await over

    async def _write(self, rows: list[Row], event: asyncio.Future[None]) -> None:
        """The device writes the blocks of a pass, those of ended requests too."""
        await asyncio.sleep(self.rng.choice((0.0, 0.002, 0.02)))
        try:
            for row in rows:
                stop = row.computed // self.cache.block_size
                await self.fill(row, row.content, row.solid, stop)
        except KVActorsError as error:  # the index or a rank has failed
            self.seen[f"pass {type(error).__name__}"] += 1
        event.set_result(None)

    async def _end(self, row: Row) -> None:
        lease, kind = row.lease, draw(self.rng, ENDS)
        self.ended.append(row)
        await self.check(row, row.computed // self.cache.block_size)
        if kind == "finish":
            await self.ask(kind, lambda: lease.finish(row.computed, deadline=2.0), 2.0)
            self.finished += 1
        elif kind == "preempt":
            await self.ask(kind, lambda: lease.preempt(row.computed, deadline=2.0), 2.0)
        elif kind == "leave":
            async with lease:
                pass
        self.left.append(row.tokens)
        del self.left[:-8]

    def _drop(self, row: Row) -> None:
        row.lease.abandon()
        self.rows.remove(row)
        self.ended.append(row)

    async def _compute(self, row: Row) -> None:
        """Compute the blocks that are not committed, and compare all."""
        size = self.cache.block_size
        row.computed = row.lease.covered_tokens
        await self.fill(row, row.content, row.solid, row.computed // size)
        await self.check(row, row.computed // size)

    # -- a step

    async def _entry(self, row: Row, *, alone: bool) -> Entry:
        """Draw an entry. Some tokens are computed before the call: their blocks are there. Beside
        another call, which may come first, only what it leaves is committed."""
        rng, size, lease = self.rng, self.cache.block_size, row.lease
        kind, known = draw(rng, ENTRIES), len(row.tokens)
        if not alone and rng.random() < 0.4:
            kind = "media"  # whose position the other call changes
        chunked = lease.covered_tokens < known
        if kind == "uncovered" and not (chunked and alone):
            kind = "token"
        count = {
            "token": 1,
            "tokens": rng.randint(1, 2 * size),
            "media": rng.randint(1, 2 * size),
            "long": rng.choice((1, 1, 4)) * rng.randint(1, 4 * size),
        }.get(kind, 0)
        tokens = [rng.randrange(4) for _ in range(count)]
        media: tuple[Media, ...] = ()
        if kind == "media":
            offset = rng.randrange(count)
            media = ((offset, rng.randint(1, count - offset), rng.choice(("still", 9))),)
        computed = rng.choice((None, row.computed, row.computed, rng.randint(0, row.computed)))
        if kind == "uncovered":
            computed = rng.choice((known, rng.randint(lease.covered_tokens + 1, known)))
        elif count and alone and not chunked and known + count <= len(lease.block_table) * size:
            content = extended(row.content, (tokens, media))
            await self.fill(row, content, known // size, (known + count) // size)
            computed = rng.choice((computed, known + count, known + count))
            self.seen["tokens computed before a step"] += 1
        buffer = rng.choice((list, np.array))(tokens) if count else rng.choice(((), []))
        return Entry(row, kind, (tokens, media), buffer, computed)

    async def step(self, steps: list[Step], **options: Any) -> list[Stepped]:
        """Call the cache, and count the call."""
        Batch.stepping += 1
        try:
            return await self.cache.step(steps, **options)
        finally:
            Batch.stepping -= 1

    async def _step(self) -> None:
        """One step, some calls beside it, and everything that must be so afterwards."""
        rng, rows = self.rng, self.rows
        picked = rng.sample(rows, rng.choice((len(rows), rng.randint(1, len(rows)))))
        if rng.random() < 0.05:
            await self._refused(rng.choice(picked))
        beside = draw(rng, BESIDE)
        when = rng.choice(WHEN)
        other = Beside(self, beside, rng.choice(picked), when) if beside != "nothing" else None
        entries = []
        for row in picked:
            alone = other is None or other.row is not row
            entries.append(await self._entry(row, alone=alone))
        for row in rng.sample(self.ended, min(len(self.ended), rng.choice((0, 0, 0, 1)))):
            tokens = [rng.randrange(4)]
            entry = Entry(row, "ended", (tokens, ()), list(tokens), None)
            entries.insert(rng.randrange(len(entries) + 1), entry)
        before = {id(row): len(row.lease.block_table) for row in picked}
        self._count(entries)
        if other is not None and when == "before":
            await other.begin()
        call = Call(self, entries, cut=rng.random() < 0.15)
        try:
            await call.run(other)
        finally:
            if other is not None:
                await other.end()
        await self._orphans()
        for number, entry in enumerate(entries):
            if entry.kind == "ended":
                call.judge_ended(number)
            else:
                beside_row = other if other is not None and other.row is entry.row else None
                await self._settle(call, number, beside_row, before[id(entry.row)])

    def _count(self, entries: list[Entry]) -> None:
        size, needed = self.cache.block_size, 0
        for one in entries:
            self.seen[f"entry {one.kind}"] += 1
            tokens = len(one.row.tokens) + len(one.added[0])
            needed += max(0, -(-tokens // size) - len(one.row.lease.block_table))
        blocks = self.cache.free_blocks()
        self.seen["steps"] += 1
        self.seen["steps of 8 or more"] += len(entries) >= 8
        self.seen["steps that evict"] += blocks.free < needed <= blocks.available

    async def _refused(self, row: Row) -> None:
        """A step with a bad argument raises in its caller. Nothing changes."""
        rng, rows = self.rng, self.rows
        steps: list[Any] = [Step(one.lease, [1]) for one in rows if one is not row]
        bad = rng.choice(
            (Step(row.lease, *rng.choice(BAD)(row)), *([steps[0]] if steps else []), row.lease)
        )
        steps.insert(rng.randrange(len(steps) + 1), bad)
        try:
            await self.cache.step(steps)
        except (TypeError, ValueError):
            self.seen["steps refused"] += 1
        else:
            self.fail(f"a step with {bad!r} was accepted")
        for one in rows:
            if one.lease.num_tokens != len(one.tokens):
                self.fail("a refused step changed a lease")

    async def _orphans(self) -> None:
        """No task of the library is left when every call of `step` has ended."""
        await asyncio.sleep(0)
        if Batch.stepping:
            return
        for task in asyncio.all_tasks():
            code = getattr(task.get_coro(), "cr_code", None)
            if (
                code is not None
                and code.co_filename.endswith(LIBRARY)
                and (
                    code.co_name.startswith("_") > code.co_name.startswith("__")
                    or code.co_filename.endswith(LIBRARY[0])
                )
            ):
                self.fail(f"a step has left a task: {code.co_qualname}")

    async def _settle(self, call: Call, number: int, other: Beside | None, before: int) -> None:
        """The lease and the index agree on one of the contents that the calls can have led to."""
        entry = call.entries[number]
        row, lease = entry.row, entry.row.lease
        happened = call.judge(number, other)
        outcome = call.outcome(number)
        about = (
            f"entry {entry.kind} {outcome and type(outcome.error).__name__}, event {call.kind} "
            f"{type(call.error).__name__}, beside it {other and other.kind}"
        )
        try:
            row.solid = await lease.commit(0, deadline=2.0)  # answered after the calls before
        except LeaseEnded as error:
            if not (call.may_end(number) or (other is not None and other.ends)):
                self.judge("step", error)
            self._drop(row)
            return
        except KVActorsError as error:
            self.judge("commit", error)
            self._drop(row)
            return
        contents = [row.content]
        changes = [lambda one: extended(one, entry.added)] if happened else []
        if other is not None and other.happened:
            changes.append(other.change)
        if changes:
            contents = [changes[0](row.content)]
        if len(changes) == 2:
            contents = [changes[1](changes[0](row.content)), changes[0](changes[1](row.content))]
        names = [named(lease, one) for one in contents]
        found = content_of(lease._path)
        if found not in names:
            differ = [
                field
                for field, one, other_one in zip(Named._fields, found, names[0], strict=True)
                if one != other_one
            ]
            self.fail(f"a lease has other {differ} than the calls gave it: {about}")
            self._drop(row)
            return
        row.content = contents[names.index(found)]
        for what in differences(self.cache, row):
            self.fail(f"{what}: {about}")
        if happened and other is None:
            self._judge_outcome(outcome, entry, before)
        if lease.num_tokens == len(row.tokens):
            await self._compute(row)
        else:
            self._drop(row)

    def _judge_outcome(self, outcome: Any, entry: Entry, before: int) -> None:
        """The blocks and the count of a step that happened alone."""
        row, size = entry.row, self.cache.block_size
        table = row.lease.block_table
        needed = max(0, -(-len(row.tokens) // size) - before) if entry.added[0] else 0
        if len(outcome.blocks) != needed or table[before:] != outcome.blocks:
            self.fail(f"{entry.kind}: {len(outcome.blocks)} blocks for a step that needs {needed}")
        most = max(row.computed, entry.computed or 0) // size
        if outcome.committed_blocks > max(most, row.solid):
            self.fail(f"{entry.kind}: {outcome.committed_blocks} blocks committed of {most}")


class Call:
    """A call of `step`: its caller uses its buffers and its list again once the call has begun."""

    def __init__(self, batch: Batch, entries: list[Entry], *, cut: bool) -> None:
        self.batch = batch
        self.entries = entries
        self.kind = draw(batch.rng, EVENTS)
        self.cut = cut
        self.error: BaseException | None = None
        self.outcomes: Sequence[Any] | None = None

    async def run(self, other: Beside | None) -> None:
        """Call, and wait for the end."""
        batch, rng = self.batch, self.batch.rng
        seconds = 0.02 if self.kind == "late" else rng.choice((0.05, 2.0, 2.0))
        event: Any = Event() if self.kind == "query" else None
        if self.kind in ("future", "fails", "late"):
            event = asyncio.get_running_loop().create_future()
        steps = [one.step() for one in self.entries]
        Batch.stepping += 1
        stream = 7 if self.kind == "stream" else None

        async def call() -> Any:
            if other is not None and other.when == "with":
                other.begin_soon()  # after the first step of this task, before those that it makes
            return await batch.step(steps, event=event, stream=stream, deadline=seconds)

        task = await started(call())
        try:
            for one in self.entries:
                spoil(one.buffer)
            if other is not None:
                await other.begin()
            await passes(rng)
            if rng.random() < 0.5:
                steps.clear()
            if self.kind == "query":
                event.done = True
            elif self.kind == "future":
                event.set_result(None)
            elif self.kind == "fails":
                event.set_exception(RuntimeError("the device has failed"))
            if self.cut:
                await passes(rng)
                task.cancel()
            outcomes = await batch.ask("step", lambda: task, seconds)
            if len(outcomes) == len(self.entries):
                self.outcomes = outcomes
            else:
                batch.fail(f"{len(outcomes)} outcomes for {len(self.entries)} entries")
        except asyncio.CancelledError as error:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            batch.seen["steps cancelled"] += 1
            self.error = error
        except (KVActorsError, TypeError, ValueError) as error:
            self.error = error
            self._judge_error(error)
        finally:
            task.cancel()
            if self.kind in ("future", "fails", "late"):
                event.cancel()

    def _judge_error(self, error: Exception) -> None:
        """Errors of the whole call: of its event."""
        batch = self.batch
        batch.seen[f"step {type(error).__name__}"] += 1
        if isinstance(error, DeviceError) and self.kind in ("fails", "stream"):
            return
        if isinstance(error, DeadlineExceeded) and self.kind != "none":
            return
        if isinstance(error, KVActorsError):
            batch.judge("step", error)
            return
        batch.fail(f"step raised {error!r}")

    def outcome(self, number: int) -> Any:
        """Of an entry, None if the call raised."""
        return None if self.outcomes is None else self.outcomes[number]

    def judge(self, number: int, other: Beside | None) -> bool:
        """Whether a step happened for an entry, if its lease has not ended. Its error must be its
        own."""
        outcome, entry, batch = self.outcome(number), self.entries[number], self.batch
        if outcome is None:
            return False
        error = outcome.error
        if error is None:
            if entry.kind == "uncovered":
                batch.fail("a step has committed tokens without blocks")
            return True
        batch.seen[f"entry {entry.kind} {type(error).__name__}"] += 1
        if entry.kind == "uncovered" or isinstance(error, NoRoom | DeadlineExceeded):
            return False
        if other is not None and isinstance(error, LeaseBusy | ValueError):
            return False
        if other is None or not (other.ends and isinstance(error, LeaseEnded)):
            if isinstance(error, KVActorsError) and not isinstance(error, LeaseBusy):
                batch.judge("step", error)
            else:
                batch.fail(f"entry {entry.kind}: {error!r}")
        return False

    def judge_ended(self, number: int) -> None:
        """An entry of a lease that has ended has that error."""
        outcome = self.outcome(number)
        if outcome is not None and not isinstance(outcome.error, LeaseEnded):
            self.batch.fail(f"a step of an ended lease: {outcome}")

    def may_end(self, number: int) -> bool:
        """Whether the call may have ended the lease of an entry: its outcome was lost."""
        outcome = self.outcome(number)
        if outcome is None:
            return isinstance(self.error, asyncio.CancelledError)
        return isinstance(outcome.error, LeaseEnded | DeadlineExceeded)


class Beside:
    """Another call on a lease of a step. ends: it may end the lease. happened: whether it changed
    the lease."""

    def __init__(self, batch: Batch, kind: str, row: Row, when: str) -> None:
        self.when = when
        self.batch = batch
        self.kind = kind
        self.row = row
        self.ends = kind in ("finish", "abandon")
        self.happened = False
        self._task: asyncio.Task[Any] | None = None
        rng = batch.rng
        self._tokens = [rng.randrange(4) for _ in range(rng.randint(1, batch.cache.block_size))]
        least = row.computed if when == "before" else row.solid * batch.cache.block_size
        self._kept = rng.randint(max(1, least), len(row.tokens))

    def begin_soon(self) -> None:
        """Begin the call in the next task that runs."""
        self._task = asyncio.get_running_loop().create_task(self._call())

    async def begin(self) -> None:
        """Begin the call, unless it has begun."""
        if self._task is None:
            self._task = await started(self._call())

    async def _call(self) -> None:
        lease, batch, tokens, kept = self.row.lease, self.batch, list(self._tokens), self._kept
        if self.kind == "extend":
            await lease.extend(tokens, deadline=2.0)
        elif self.kind == "truncate":
            await lease.truncate(kept, deadline=2.0)
        elif self.kind == "step":
            (outcome,) = await batch.step([Step(lease, tokens)], deadline=2.0)
            if outcome.error is not None:
                raise outcome.error
        elif self.kind == "reserve":
            await lease.reserve(1, deadline=2.0)
        elif self.kind == "commit":
            await lease.commit(self.row.computed, deadline=2.0)
        elif self.kind == "fork":
            (await lease.fork(deadline=2.0)).abandon()
        elif self.kind == "finish":
            await lease.finish(deadline=2.0)
        else:
            lease.abandon()

    async def end(self) -> None:
        """Wait for it, and judge its error."""
        await self.begin()
        assert self._task is not None
        try:
            await self._task
        except (LeaseBusy, LeaseEnded, NoRoom, DeadlineExceeded, TokensCommitted) as error:
            self.batch.seen[f"beside {self.kind} {type(error).__name__}"] += 1
            return
        except KVActorsError as error:
            self.batch.judge(self.kind, error)
            return
        except ValueError as error:
            if self.kind != "truncate":
                self.batch.fail(f"{self.kind} beside a step raised {error!r}")
            return
        finally:
            self._task.cancel()
        self.happened = True
        self.batch.seen[f"beside {self.kind}"] += 1

    def change(self, content: Content) -> Content:
        """The content after the call."""
        if self.kind in ("extend", "step"):
            return extended(content, (self._tokens, ()))
        if self.kind != "truncate":
            return content
        tokens, media = content
        return tokens[: self._kept], tuple(one for one in media if one[0] < self._kept)


# -- contents


def extended(content: Content, added: Content) -> Content:
    """A content with tokens and media appended."""
    start = len(content[0])
    media = tuple((start + offset, length, digest) for offset, length, digest in added[1])
    return content[0] + added[0], content[1] + media


class Named(NamedTuple):
    """Everything that names the tokens and blocks of a path. last: the extra key of the last
    block."""

    num_tokens: int
    tokens: bytes
    hashes: bytes
    last: bytes


def content_of(path: Path) -> Named:
    """The names of a path."""
    size, blocks = path.block_size, -(-path.num_tokens // path.block_size)
    padded = Path(size, path.root)  # tokens are read by full blocks
    padded.append(path)
    padded.extend([0] * (blocks * size - path.num_tokens))
    hashes = path.hashes(0, path.num_full_blocks)
    return Named(path.num_tokens, padded.tokens(0, blocks), hashes, path.extra_key(blocks - 1))


def named(lease: Lease, content: Content) -> Named:
    """`content_of` the same request made at once."""
    path, _ = request_path(lease._path.block_size, lease._path.root, *content)
    return content_of(path)


def differences(cache: KVCache, row: Row) -> list[str]:
    """Facts that a lease and the index disagree on."""
    lease, found = row.lease, []
    state = cache.system.index_actor.leases.get(lease._handle.id)
    if state is None:
        return ["the index has no such lease"]
    if lease.num_tokens != state.path.num_tokens:
        found.append(f"{lease.num_tokens} tokens of a lease, the index has {state.path.num_tokens}")
    if lease.block_table != tuple(state.path.blocks()):
        found.append("a lease has other blocks than the index has for it")
    if lease._handle.changing or lease._handle.committing:
        found.append(f"a lease without a call is busy with {lease._handle.changing!r}")
    if len(set(lease.block_table)) < len(lease.block_table):
        found.append("a block stands twice in a table")
    return found


# -- calls


def draw(rng: random.Random, weights: Mapping[str, int]) -> str:
    """A name, by weight."""
    return rng.choices(tuple(weights), tuple(weights.values()))[0]


async def passes(rng: random.Random) -> None:
    """Let a drawn number of passes of the loop go by."""
    for _ in range(rng.choice((0, 1, 2, rng.randrange(PASSES)))):
        await asyncio.sleep(0)


def spoil(buffer: Any) -> None:
    """The caller uses its buffer for other data."""
    for i in range(len(buffer)):
        buffer[i] = 7


async def started(call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task of a call that has taken its first step. A loop of virtual time runs new tasks in a
    drawn order."""
    loop = asyncio.get_running_loop()
    begun: list[bool] = []
    waiter: asyncio.Future[None] = loop.create_future()

    async def work() -> T:
        begun.append(True)
        if not waiter.done():
            waiter.set_result(None)  # its task runs after this step, which begins the call
        return await call

    task = loop.create_task(work())
    try:
        await waiter
    except BaseException:
        task.cancel()
        if not begun:
            call.close()
        raise
    return task
