"""A call of `step` for the leases of a batch, and a call beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from kvactors import KVActorsError, LeaseBusy, LeaseEnded, NoRoom, Step, Stepped
from kvactors.errors import DeadlineExceeded, DeviceError, NotReady, TokensCommitted
from tests.load.calls import draw, passes, spoil, started
from tests.load.ground import Content, Row, extended, truncated

if TYPE_CHECKING:
    from tests.load.batch import Batch

EVENTS = {"none": 6, "future": 3, "query": 3, "fails": 1, "late": 1, "stream": 1}
"""Completions of the computed tokens, and their weights."""


class Entry(NamedTuple):
    """An entry of a step. buffer: of the caller, with the tokens that are added."""

    row: Row
    kind: str
    added: Content
    buffer: Any
    computed: int | None

    def step(self) -> Step:
        """For the call."""
        return Step(self.row.lease, self.buffer, self.computed)


class Event:
    """An event of a GPU's stream."""

    done = False

    def query(self) -> bool:
        """See `DeviceEvent`."""
        return self.done


async def step(batch: Batch, steps: list[Step], **options: Any) -> list[Stepped]:
    """Call the cache, and count the call."""
    Call.open += 1
    try:
        return await batch.cache.step(steps, **options)
    finally:
        Call.open -= 1


class Call:
    """A call of `step`: its caller uses its buffers and its list again once the call has begun."""

    open: ClassVar[int] = 0
    """Calls that have not ended, of all batches."""

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
        stream = 7 if self.kind == "stream" else None

        async def call() -> Any:
            if other is not None and other.when == "with":
                other.begin_soon()  # after the first step of this task, before those that it makes
            return await step(batch, steps, event=event, stream=stream, deadline=seconds)

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
            outcomes = await batch.client.ask("step", lambda: task, seconds, cuts=False)
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
        back = when != "before" and not batch.has_states
        least = row.solid * batch.cache.block_size if back else row.computed
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
            (outcome,) = await step(batch, [Step(lease, tokens)], deadline=2.0)
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
        except NotReady as error:
            if not (self.kind == "fork" and self.batch.has_states):
                self.batch.judge(self.kind, error)
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
        return truncated(content, self._kept)
