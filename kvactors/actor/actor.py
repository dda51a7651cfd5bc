"""An actor: one channel, a table of handlers, and turns that run to their end.

A turn is synchronous code over the actor's own state. What is slow runs as a child job whose result
comes back as a control message. What a turn tells goes out in order; if a receiver's lane is full
the actor takes no further turn until it has room, which is how pressure travels upstream along the
(acyclic) forward channels.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple, TypeVar

from kvactors.actor.channel import ChannelStatistics
from kvactors.actor.clock import now
from kvactors.actor.jobs import JOB_LIMIT, Job, JobBroken
from kvactors.actor.log import get_logger
from kvactors.actor.message import Control, Envelope, Message, PeerRestarted, Stop, bury
from kvactors.actor.ref import ActorRef
from kvactors.actor.uncancelled import uncancelled
from kvactors.errors import as_exception

T = TypeVar("T")
M = TypeVar("M", bound=Message)
Handler = Callable[..., None]

TURN_BUDGET = 64
"""Turns before an actor lets others run: a receive that finds a message does not yield by
itself."""

TURN_TIME = 0.0005
"""Seconds of turns before it does so."""


class State(IntEnum):
    """An actor's life; it only ever moves forward."""

    STARTING = 0
    RUNNING = 1
    STOPPING = 2
    STOPPED = 3


class ActorStatistics(NamedTuple):
    """A moment's picture of an actor in its present life."""

    name: str
    state: str
    life: int  # restarts so far
    turns: int
    told: int  # messages sent
    jobs: int  # child jobs running now
    outbox: int  # messages waiting for room at their receivers
    open_replies: int  # asks taken in and not answered yet
    late_replies: int  # answers nobody waited for any more
    skipped: int  # asks given up before their turn, or meant for an earlier life
    channel: ChannelStatistics


def on(message: type[Message]) -> Callable[[Handler], Handler]:
    """Mark a method as the handler of one message type: `(self, message)`, for an ask `(self,
    message, envelope)`."""

    def mark(method: Handler) -> Handler:
        method.__dict__.setdefault("handles", []).append(message)
        return method

    return mark


class Timer:
    """A message of an actor to itself in the future."""

    __slots__ = ("_active", "_handle")

    def __init__(
        self, active: set[Timer], delay: float, send: Callable[[Control], None], message: Control
    ) -> None:
        self._active = active
        self._handle = asyncio.get_running_loop().call_later(delay, self._due, send, message)
        active.add(self)

    def _due(self, send: Callable[[Control], None], message: Control) -> None:
        self._active.discard(self)
        send(message)

    def cancel(self) -> None:
        """The message will not come. Harmless on one that has come."""
        self._active.discard(self)
        self._handle.cancel()


class Actor:
    """Base of all actors.

    ROLE names the class in the channel graph. SENDS declares, for each receiver's role, the message
    types this class tells it; the supervisor checks the whole graph before anything starts, and
    `tell` checks each message.
    """

    ROLE: ClassVar[str]
    SENDS: ClassVar[Mapping[str, tuple[type[Message], ...]]] = {}
    HANDLERS: ClassVar[dict[type[Message], str]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        table = dict(cls.HANDLERS)
        for name, member in vars(cls).items():
            for message in getattr(member, "handles", ()):
                table[message] = name
        cls.HANDLERS = table

    def __init__(self, ref: ActorRef) -> None:
        self.ref = ref
        self.life = ref.life
        # The others' lives, as far as this one knows: what was told to a dead one is not for the
        # next.
        self.lives: dict[str, int] = {}
        self.log = get_logger(actor=ref.name)
        self.state = State.STARTING
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._table: dict[type[Message], Handler] = {
            m: getattr(self, n) for m, n in self.HANDLERS.items()
        }
        self._allowed = {role: frozenset(types) for role, types in self.SENDS.items()}
        self._outbox: deque[tuple[ActorRef, Envelope[Any]]] = deque()
        self._waiters: list[asyncio.Future[None]] = []  # in `sent`
        self._unanswered: dict[Envelope[Any], None] = {}
        self._jobs: dict[asyncio.Task[None], Job] = {}
        self.ended_at: float | None = None  # when the failure or the stop came, on the loop's clock
        self._timers: set[Timer] = set()
        # The failure of another actor, if it is the reason why this one is cancelled.
        self.failed_peer: Callable[[], tuple[str, BaseException] | None] = lambda: None
        self._turns = self._told = self._late = self._skipped = 0

    # -- for subclasses

    def started(self) -> None:
        """First turn of a life, before any message; may tell and start jobs."""

    async def stopped(self) -> None:
        """Last thing of a life, after its jobs ended: close what the actor owns. Must be brief."""

    def job_limit(self, *, failed: bool) -> float | None:
        """Seconds in which its jobs must end after it; None for no limit. failed: whether it has
        failed itself."""
        return JOB_LIMIT

    def left_behind(self, jobs: Mapping[asyncio.Task[None], Job], *, restart: bool) -> None:
        """Jobs have not ended within the limit. Keeps the memory that they access from reuse until
        they have, or raises JobsRunOn: then the system fails. restart: whether the memory will be
        handed out again."""

    def check(self) -> None:
        """Recompute this actor's invariants; AssertionError says what differs."""

    def check_steps(self) -> Iterator[None]:
        """`check` in steps of at most a millisecond; turns may come between them."""
        self.check()
        yield

    @property
    def turns(self) -> int:
        """Turns taken so far."""
        return self._turns

    def tell(self, to: ActorRef, message: Message) -> None:
        """Send from within a turn, in order. WiringError-like AssertionError for an undeclared
        message."""
        assert type(message) in self._allowed.get(to.role, ()), (
            f"{self.ROLE} does not declare {type(message)} to {to.role}"
        )
        self._told += 1
        envelope: Envelope[Any] = Envelope(message, None, None, self.lives.get(to.name, to.life))
        if (self._outbox and not isinstance(message, Control)) or not to.try_send(envelope):
            self._outbox.append((to, envelope))
            self.ref.activity.begin()

    def answer(self, envelope: Envelope[T], value: T) -> bool:
        """Answer an ask; False (and counted) if nobody waits any more."""
        self._unanswered.pop(envelope, None)
        if envelope.answer(value):
            return True
        self._late += 1
        return False

    def refuse(self, envelope: Envelope[Any], error: Exception) -> bool:
        """Answer an ask with an error; False (and counted) if nobody waits any more."""
        self._unanswered.pop(envelope, None)
        if envelope.fail(error):
            return True
        self._late += 1
        return False

    def start_job(
        self,
        job: Coroutine[Any, Any, T],
        done: Callable[[T], Control],
        failed: Callable[[Exception], Control],
        *,
        counted: bool = True,
        slots: Sequence[int] = (),
        keys: bytes = b"",
    ) -> None:
        """Run slow work beside the turns; its result, or its error, comes back as a control
        message.

        counted: whether the system counts as busy until it ends. slots, keys: see `Job`. When the
        actor fails or stops its jobs are cancelled and waited for, at most as long as `job_limit`
        says; the result of a job that ends later is dropped.
        """
        task = asyncio.get_running_loop().create_task(self._run_job(job, done, failed))
        self._jobs[task] = Job(counted, slots, keys)
        if counted:
            self.ref.activity.begin()
        task.add_done_callback(self._job_ended)
        task.add_done_callback(
            lambda _: job.close()
        )  # one that was cancelled before its first step

    def after(self, delay: float, message: Control) -> Timer:
        """Send this actor a control message `delay` seconds from now. The timer ends with its
        actor; cancel it when it is of no use any more."""
        return Timer(self._timers, delay, self.to_self, message)

    # -- the loop

    async def run(self) -> None:
        """Take turns until stopped. An exception out of a turn ends the life: every ask taken in
        fails, then it is raised."""
        cause: BaseException | None = None
        try:
            try:
                self.started()
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                self._fail(error)
            self.ref.revived()
            self.state = State.RUNNING
            await self._take_turns()
            self.state = State.STOPPING
        except BaseException as error:
            cause = error
            raise
        finally:
            await self._end(cause)

    async def _take_turns(self) -> None:
        channel, budget, time = self.ref.channel, TURN_BUDGET, asyncio.get_running_loop().time
        activity = self.ref.activity
        until = time() + TURN_TIME
        while self.state is State.RUNNING:
            if self._outbox:
                await self._flush_outbox()
            envelope = channel.get_nowait()
            if envelope is None:
                envelope, budget = await channel.get(), TURN_BUDGET
                until = time() + TURN_TIME
            elif budget == 0 or time() > until:
                try:
                    await asyncio.sleep(0)
                except BaseException:
                    activity.end()
                    bury(envelope, self.ref.name, None)
                    raise
                budget, until = TURN_BUDGET, time() + TURN_TIME
            budget -= 1
            try:
                self._turn(envelope)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                self._fail(error)
            finally:
                activity.end()

    @staticmethod
    def _fail(error: BaseException) -> None:
        """Raise an error of a synchronous step. No cancellation can arrive in one: any error but
        Ctrl-C and an exit is a failure of this actor."""
        failure = as_exception(error)
        if failure is error:
            raise failure
        raise failure from error

    def _turn(self, envelope: Envelope[Any]) -> None:
        message = envelope.message
        if envelope.life != self.life or envelope.abandoned:
            self._skipped += 1
            bury(envelope, self.ref.name, None)
            return
        kind = type(message)
        if isinstance(message, PeerRestarted) and message.life >= 0:
            self.lives[message.name] = message.life
        self._turns += 1
        handler = self._table.get(kind)
        if handler is not None:
            if envelope.reply is None:
                handler(message)
            else:
                self._unanswered[envelope] = None
                handler(message, envelope)
        elif isinstance(message, JobBroken):
            raise message.error
        elif kind is Stop:
            self.state = State.STOPPING
        elif kind is not PeerRestarted:
            raise TypeError(f"{self.ref.name} has no handler for {kind.__name__}")

    async def _flush_outbox(self) -> None:
        while self._outbox:
            to, envelope = self._outbox[0]
            await to.channel.put(envelope)
            self._outbox.popleft()
        self._outbox_empty()

    def _outbox_empty(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def sent(self) -> None:
        """Return when everything told so far is in its receivers' channels (or this life has
        ended)."""
        while self._outbox:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    async def _run_job(
        self,
        job: Coroutine[Any, Any, T],
        done: Callable[[T], Control],
        failed: Callable[[Exception], Control],
    ) -> None:
        try:
            message: Control = done(await job)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a job's failure is a message like any other
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
                raise
            message = self._failure_of(as_exception(error), failed)
        self.to_self(message)

    def _failure_of(self, error: Exception, failed: Callable[[Exception], Control]) -> Control:
        try:
            return failed(error)
        except Exception as second:  # without an answer the work would stay in flight without end
            return JobBroken(second)

    def to_self(self, message: Control) -> None:
        """Send this actor a control message from a callback on the loop (lost if it is another life
        by then)."""
        if self.state <= State.RUNNING and self.life == self.ref.life:
            self.ref.try_send(Envelope(message, None, None, self.life))

    def _job_ended(self, task: asyncio.Task[None]) -> None:
        job = self._jobs.pop(task, None)
        if job is not None and job.counted:
            self.ref.activity.end()
        if not task.cancelled():
            task.exception()  # Ctrl-C or an exit, which the loop itself has raised

    async def _end(self, cause: BaseException | None) -> None:
        """Leave nothing behind: jobs cancelled and awaited, unsent messages uncounted, open asks
        failed."""
        self.ended_at = now()
        if self.state < State.STOPPING:
            self.state = State.STOPPING
        if isinstance(cause, Exception):
            self.ref.reviving()
        name, peer = self.ref.name, self.failed_peer()
        if peer is not None and isinstance(cause, asyncio.CancelledError):
            name, cause = peer
        for envelope in self._unanswered:
            bury(envelope, name, cause)
        self._unanswered.clear()
        self.ref.activity.end(len(self._outbox))
        self._outbox.clear()
        self._outbox_empty()
        for timer in list(self._timers):
            timer.cancel()
        try:
            await uncancelled(self._end_jobs(cause))
        finally:
            self.state = State.STOPPED
            if not self.ended.done():
                self.ended.set_result(None)

    async def _end_jobs(self, cause: BaseException | None) -> None:
        try:
            limit = self.job_limit(failed=isinstance(cause, Exception))
            for task in list(self._jobs):
                task.cancel()
            if self._jobs:
                await asyncio.wait(list(self._jobs), timeout=limit)
            if self._jobs:
                self._leave_behind(
                    limit, restart=isinstance(cause, Exception) or self.failed_peer() is not None
                )
        finally:
            await self.stopped()

    def _leave_behind(self, limit: float | None, *, restart: bool) -> None:
        late = dict(self._jobs)
        self.log.error("jobs do not end", jobs=len(late), seconds=limit)
        self.ref.activity.end(sum(job.counted for job in late.values()))
        self._jobs = {task: job._replace(counted=False) for task, job in late.items()}
        self.left_behind(late, restart=restart)

    def statistics(self) -> ActorStatistics:
        """A moment's picture."""
        return ActorStatistics(
            self.ref.name,
            self.state.name.lower(),
            self.life,
            self._turns,
            self._told,
            len(self._jobs),
            len(self._outbox),
            len(self._unanswered),
            self._late,
            self._skipped,
            self.ref.channel.statistics(),
        )
