"""One decode step of many leases in one message."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import compress
from typing import Any, TypeAlias

import msgspec
import numpy as np

from kvactors.call_context import CallContext
from kvactors.checks import check_int, extend_path, kind
from kvactors.device.events import Completion, Stream
from kvactors.errors import ActorFailed, KVActorsError
from kvactors.from_thread import ThreadLease
from kvactors.lease import Lease, LeaseHandle
from kvactors.native import Path, StepTokens
from kvactors.prefix_index.messages import Extend, StepLeases, StepResult
from kvactors.types import Tokens

BATCH_LEASES = 256
"""Leases that one message steps at most. Each takes a fraction of a microsecond of a turn."""

OUTCOMES_KEPT = 8192
"""Outcomes that are kept for further steps."""

AnyLease: TypeAlias = Lease | ThreadLease
"""A lease, for `FromThread` that of a thread."""


class Step(msgspec.Struct, frozen=True):
    """An extend and a commit of one lease, as a part of a decode step.

    Attributes:
        lease: the lease.
        tokens: appended, as by `Lease.extend`.
        computed_tokens: committed, as by `Lease.commit`. `tokens` may be among them. None: nothing
            is committed.
    """

    lease: AnyLease
    tokens: Tokens = ()
    computed_tokens: int | None = None


class Stepped(msgspec.Struct, frozen=True):
    """The outcome of a step for one lease.

    Attributes:
        blocks: the device blocks added to its table.
        committed_blocks: committed blocks of the lease.
        error: why the step did not happen for this lease, None if it did. The lease has the tokens
            that it had before, or has ended.
    """

    blocks: tuple[int, ...] = ()
    committed_blocks: int = 0
    error: Exception | None = None


class _Outcomes(dict[int, Stepped | None]):
    """Outcomes without blocks, by the committed blocks: most of a step's. None for -1."""

    def __missing__(self, committed: int) -> Stepped:
        found = Stepped((), committed)
        if committed < OUTCOMES_KEPT:
            self[committed] = found
        return found


WITHOUT_BLOCKS = _Outcomes({-1: None})


async def step_batch(
    context: CallContext,
    steps: Sequence[Step],
    event: Completion | None,
    stream: Stream | None,
    at: float,
    make: type[StepCall],
) -> list[Stepped]:
    """`KVCache.step`. at: the absolute deadline."""
    given: Any = steps
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        raise TypeError(f"steps must be a list or tuple of Step, not {kind(given)}")
    call = make(context, list(given))
    if event is not None or stream is not None:
        await call.wait(event, stream, at)
    try:
        call.begin()
        await call.carry_out(at)
    except BaseException:
        call.give_up()
        raise
    finally:
        call.end()
    return call.outcomes


class StepCall:
    """Checked copies of the arguments of a call, and the outcomes."""

    def __init__(self, context: CallContext, steps: list[Step]) -> None:
        for row, step in enumerate(steps):
            if type(step) is not Step:
                raise TypeError(f"steps[{row}] must be a Step, not {kind(step)}")
            lease = step.lease
            if not isinstance(lease, Lease):
                raise TypeError(f"steps[{row}].lease must be a Lease, not {kind(lease)}")
            if lease._handle.context is not context:
                raise ValueError(f"steps[{row}].lease is of another cache")
        self._context = context
        self.leases: list[Any] = [step.lease for step in steps]
        self._handles = [lease._handle for lease in self.leases]
        self._numbers = [handle.id for handle in self._handles]
        if len(set(self._numbers)) < len(steps):
            raise ValueError("steps has a lease twice")
        self._tokens = _copy(steps, context.block_size)
        self._counts = self._tokens.counts
        self._computed = computed = [step.computed_tokens for step in steps]
        self._positions = positions = [lease.num_tokens for lease in self.leases]
        row = -1
        while (row := self._tokens.find_beyond(positions, computed, row + 1)) >= 0:
            most = positions[row] + self._counts[row]
            computed[row] = check_int(f"steps[{row}].computed_tokens", computed[row], 0, most)
        self._begun: list[LeaseHandle] = []
        self._refused: dict[int, Stepped] = {}
        self._left: list[int] = []
        self.outcomes: list[Any] = [None] * len(steps)

    async def wait(self, event: Completion | None, stream: Stream | None, at: float) -> None:
        """Wait for an event or a stream. The tokens to be committed stay until then."""
        waiting = [
            (handle.committing, computed or 0)
            for handle, computed in zip(self._handles, self._computed, strict=True)
        ]
        for row, handle in enumerate(self._handles):
            if handle.changing == "truncate":
                self._check(row)
        for committing, computed in waiting:
            committing.append(computed)
        try:
            await self._context.wait_device(event, stream, at)
        finally:
            for committing, computed in waiting:
                committing.remove(computed)
        self._positions = [lease.num_tokens for lease in self.leases]

    def begin(self) -> None:
        """Keep other calls from changing the leases that can be stepped."""
        handles = self._handles
        for row, handle in enumerate(handles):
            if handle.ended or handle.changing or handle.unread:
                self._check(row)
        for row in self._refused:
            self._numbers[row] = 0
        self._begun = list(compress(handles, self._numbers))
        for handle in self._begun:
            handle.changing = "step"

    def _check(self, row: int) -> None:
        """Refuse to step a lease that has ended, or that another call changes."""
        handle = self._handles[row]
        try:
            handle.check_ended()
            handle.check_read(self._computed[row] or 0)
            handle.check_change()
        except KVActorsError as error:
            self._refused.setdefault(row, Stepped(error=error))

    def end(self) -> None:
        for handle in self._begun:
            handle.changing = ""

    async def carry_out(self, at: float) -> None:
        for first in range(0, len(self.leases), BATCH_LEASES):
            await self.send(first, at)
        await self.finish(at)

    async def send(self, first: int, at: float) -> None:
        """Step up to BATCH leases by one message, which leaves those that need more than blocks."""
        last = min(first + BATCH_LEASES, len(self.leases))
        leases, numbers = self.leases[first:last], self._numbers[first:last]

        def lost(result: StepResult) -> None:
            for lease, committed in zip(leases, result.committed, strict=True):
                if committed >= 0:
                    lease._handle.give_up()

        message = StepLeases(first, numbers, self._tokens, self._positions, self._computed)
        try:
            result = await self._context.index.ask(message, deadline=at, lost=lost)
        except KVActorsError as error:
            if isinstance(error, ActorFailed):
                self._context.raise_if_closed(error)
            self.outcomes[first:last] = [Stepped(error=error)] * len(leases)
            return
        done = result.committed
        for lease, count, committed in zip(leases, self._counts[first:last], done, strict=True):
            if committed >= 0:
                lease.num_tokens += count
        outcomes = [WITHOUT_BLOCKS[committed] for committed in done]
        for row, blocks in result.grown:
            outcomes[row] = Stepped(leases[row]._append_blocks(blocks), done[row])
        self.outcomes[first:last] = outcomes
        if min(done) < 0:
            self._left += [row for row, committed in enumerate(done, first) if committed < 0]

    async def finish(self, at: float) -> None:
        """Step each lease that was left by a separate commit and extend. Returns after the last
        one."""
        for row, outcome in self._refused.items():
            self.outcomes[row] = outcome
        left = [row for row in self._left if row not in self._refused]
        if left:
            async with asyncio.TaskGroup() as group:
                for row in left:
                    group.create_task(self._step_alone(row, at))

    async def _step_alone(self, row: int, at: float) -> None:
        lease, computed, count = self.leases[row], self._computed[row], self._counts[row]
        handle, path, position = lease._handle, lease._path, lease.num_tokens
        committed, blocks = path.num_committed, ()
        try:
            if computed is not None:  # first: a commit that is refused leaves the lease as it was
                await lease._commit_in_parts(min(computed, position), at)
            if count:
                added = Path(path.block_size, path.root)
                added.extend(np.frombuffer(self._tokens.row(row), np.uint32))
                granted = await handle.take(Extend(handle.id, position, added, ()), at)
                lease.num_tokens += count
                blocks = lease._append_blocks(granted.blocks)
            if computed is not None and computed > position:
                await lease._commit_in_parts(computed, at)
            self.outcomes[row] = Stepped(blocks, path.num_committed)
        except Exception as error:
            if lease.num_tokens > position:
                handle.give_up()
            self.outcomes[row] = Stepped(error=error)
        except BaseException:
            if lease.num_tokens > position or path.num_committed > committed:
                handle.give_up()
            raise

    def give_up(self) -> None:
        """The caller gets no outcome: the leases whose step has happened end."""
        for lease, outcome in zip(self.leases, self.outcomes, strict=True):
            if outcome is not None and outcome.error is None:
                lease._handle.give_up()


def _copy(steps: list[Step], block_size: int) -> StepTokens:
    """The tokens of the steps."""
    try:
        return StepTokens([step.tokens for step in steps])
    except (TypeError, ValueError):
        for row, step in enumerate(steps):  # names the step that is wrong
            extend_path(Path(block_size, bytes(32)), f"steps[{row}].tokens", step.tokens)
        raise
