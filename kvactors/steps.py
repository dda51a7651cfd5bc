"""One decode step of many leases in one message."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from kvactors.arguments import Media, added_media, check_int, extend_path, kind
from kvactors.device_events import Completion, Stream
from kvactors.errors import ActorFailed, KVActorsError, LeaseEnded
from kvactors.lease import Lease
from kvactors.native import Path
from kvactors.open_cache import OpenCache
from kvactors.prefix_index.messages import StepEntry, StepLeases, StepResult
from kvactors.types import Tokens

BATCH = 256
"""Leases that one message steps at most. Each takes a few microseconds of a turn."""


class SteppedLease(Protocol):
    """A `Lease`, or for `FromThread.step` a `ThreadLease`."""

    @property
    def request_id(self) -> str:
        """As `KVCache.acquire` was given it."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the request."""


class Step(NamedTuple):
    """An extend and a commit of one lease, as a part of a decode step.

    Attributes:
        lease: the lease.
        tokens: appended first, as by `Lease.extend`.
        computed_tokens: committed then, as by `Lease.commit`. None: nothing is committed.
        extra_keys: media among `tokens`, as in `Lease.extend`.
    """

    lease: SteppedLease
    tokens: Tokens = ()
    computed_tokens: int | None = None
    extra_keys: Sequence[Media] = ()


class Stepped(NamedTuple):
    """The outcome of a step for one lease.

    Attributes:
        blocks: the device blocks added to its table.
        committed_blocks: committed blocks of the lease.
        error: why the step did not happen for this lease, None if it did.
    """

    blocks: tuple[int, ...] = ()
    committed_blocks: int = 0
    error: KVActorsError | None = None


class _Plan:
    """A step with checked arguments."""

    def __init__(self, position: int, step: Any, cache: OpenCache) -> None:
        name = f"steps[{position}]"
        if not isinstance(step, Step):
            raise TypeError(f"{name} must be a Step, not {kind(step)}")
        lease = step.lease
        if not isinstance(lease, Lease):
            raise TypeError(f"{name}.lease must be a Lease, not {kind(lease)}")
        self.lease = lease
        if lease._hold.client is not cache._client:
            raise ValueError(f"{name}.lease is of another cache")
        self.added = added = Path(cache.block_size, lease._path.root)
        extend_path(added, f"{name}.tokens", step.tokens)
        self.extras, self.media = added_media(
            cache.block_size, lease.num_tokens, added.num_tokens, step.extra_keys
        )
        self.computed: int | None = None
        if step.computed_tokens is not None:
            most = lease.num_tokens + added.num_tokens
            self.computed = check_int(f"{name}.computed_tokens", step.computed_tokens, 0, most)
        self.outcome: Stepped | None = None
        self.happened = False

    def begin(self) -> bool:
        """Keep other calls from changing the lease. False if the step cannot be done."""
        try:
            self.lease._hold.check_ended()
            self.lease._hold.check_read(self.computed or 0)
            self.lease._hold.begin_change("step")
        except KVActorsError as error:
            self.outcome = Stepped(error=error)
        return self.outcome is None

    def entry(self) -> StepEntry:
        """For the message."""
        added = self.added if self.added.num_tokens else None
        hold, position = self.lease._hold, self.lease.num_tokens
        return StepEntry(hold.id, position, added, self.extras, self.computed)

    def apply(self, blocks: Sequence[int], committed: int) -> None:
        """The step has happened."""
        self.happened = True
        self.lease._appended(self.added, self.media, blocks)
        self.outcome = Stepped(tuple(blocks), committed)

    def fail(self, error: Exception) -> None:
        """The step has not happened."""
        if not isinstance(error, KVActorsError):
            raise error
        if isinstance(error, LeaseEnded):
            self.lease._hold.ended = True
        self.outcome = Stepped(error=error)

    def is_long(self, part_tokens: int) -> bool:
        """Whether one turn cannot handle it."""
        committed = self.lease._path.num_committed * self.added.block_size
        return max(self.added.num_tokens, (self.computed or 0) - committed) > part_tokens

    async def alone(self, at: float) -> None:
        """Carry out the step by its own messages."""
        lease = self.lease
        try:
            blocks = await lease._extend(self.added, self.extras, self.media, at)
            self.happened = True
            committed = lease._path.num_committed
            if self.computed is not None:
                committed = await lease._hold.commit_in_parts(
                    lease._path, self.computed, lease.num_tokens, at
                )
            self.outcome = Stepped(blocks, committed)
        except KVActorsError as error:
            self.outcome = Stepped(error=error)


async def step(  # noqa: D417  (a method of the cache)
    self: OpenCache,
    steps: Sequence[Step],
    *,
    event: Completion | None = None,
    stream: Stream | None = None,
    deadline: float | None = None,
) -> list[Stepped]:
    """Extend and commit many leases with one message, as one decode step needs it.

    A lease that must wait for device blocks does not hold up the others: its step is carried out
    by separate messages. After a cancellation the leases whose step happened have ended.

    Args:
        steps: one per lease. A lease occurs once.
        event: completes when the device has computed the tokens that are committed. Nothing happens
            before. See `Lease.commit`.
        stream: the engine's CUDA stream, in place of an event. See `Lease.commit`.
        deadline: seconds from now, for the event as well.

    Returns:
        An outcome per step, in the same order. An error in it concerns its lease alone.

    Raises:
        DeviceError: the event has failed, or the device has no CUDA streams. Nothing changed.
    """
    at = self._client.deadline(deadline)
    plans = _plan(self, steps)
    if event is not None or stream is not None:
        await _wait(self, plans, event, stream, at)
        plans = _plan(self, steps)
    begun: list[_Plan] = []
    try:
        begun += [plan for plan in plans if plan.begin()]
        await _carry_out(self, plans, at)
    except BaseException:
        for plan in plans:
            if plan.happened:
                plan.lease._hold.give_up()  # the caller gets no outcome
        raise
    finally:
        for plan in begun:
            if plan.lease._hold.changing == "step":
                plan.lease._hold.changing = ""
    return [plan.outcome or Stepped() for plan in plans]


def _plan(cache: OpenCache, steps: Any) -> list[_Plan]:
    """Check the arguments of a call."""
    if isinstance(steps, (str, bytes)) or not isinstance(steps, Sequence):
        raise TypeError(f"steps must be a list or tuple of Step, not {kind(steps)}")
    plans = [_Plan(position, one, cache) for position, one in enumerate(steps)]
    if len({plan.lease._hold.id for plan in plans}) < len(plans):
        raise ValueError("steps has a lease twice")
    return plans


async def _carry_out(cache: OpenCache, plans: list[_Plan], at: float) -> None:
    """Send the messages, and note the outcomes."""
    part = cache._client.part_tokens
    short = [plan for plan in plans if plan.outcome is None and not plan.is_long(part)]
    for start in range(0, len(short), BATCH):
        await _step_batch(cache, short[start : start + BATCH], at)
    left = [plan for plan in plans if plan.outcome is None]
    for plan in left:
        plan.lease._hold.changing = ""  # each begins its own change, in the same step of the loop
    if left:
        await asyncio.gather(*(plan.alone(at) for plan in left))


async def _wait(
    cache: OpenCache,
    plans: list[_Plan],
    event: Completion | None,
    stream: Stream | None,
    at: float,
) -> None:
    """Wait for an event or a stream. The tokens to be committed stay until then."""
    waiting = [(plan.lease._hold, plan.computed or 0) for plan in plans]
    for hold, computed in waiting:
        hold.committing.append(computed)
    try:
        await cache._client.wait_device(event, stream, at)
    finally:
        for hold, computed in waiting:
            hold.committing.remove(computed)


async def _step_batch(cache: OpenCache, batch: list[_Plan], at: float) -> None:
    """Send one message, and note its outcomes. Entries that must wait have none."""

    def lost(result: StepResult) -> None:
        for plan, outcome in zip(batch, result.outcomes, strict=True):
            if isinstance(outcome, tuple):
                plan.lease._hold.give_up()

    message = StepLeases(tuple([plan.entry() for plan in batch]))
    try:
        result = await cache._client.index.ask(message, deadline=at, lost=lost)
    except KVActorsError as error:
        if isinstance(error, ActorFailed):
            cache._client.refine(error)
        for plan in batch:
            plan.fail(error)
        return
    for plan, outcome in zip(batch, result.outcomes, strict=True):
        if isinstance(outcome, tuple):
            plan.apply(*outcome)
        elif outcome is not None:
            plan.fail(outcome)
