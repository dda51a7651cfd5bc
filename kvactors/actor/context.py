"""An actor's side of the runtime: messages, answers, jobs and timers of one incarnation.

`Actor` hands the methods of its context to its subclasses. A test that steps an actor by hand gives
it another context (see `ActorRef.make_context`)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias, TypeVar
from weakref import WeakSet

from kvactors.actor.instrument import Turn
from kvactors.actor.message import Control, Envelope, InlineReply, Message
from kvactors.actor.ref import ActorRef, InFlight, Waiters
from kvactors.errors import as_exception

T = TypeVar("T")

JOB_LIMIT, MEMORY_LIMIT = 5.0, 60.0
"""Seconds in which a job must end after its actor failed: any job, and one that accesses memory
which cannot be withheld from reuse."""


class Job(NamedTuple):
    """counted: whether it is in flight. slots, keys: host slots and blocks that it is about."""

    counted: bool
    slots: Sequence[int]
    keys: bytes


class JobBroken(Control, frozen=True, eq=False):
    """The completion of a job could not be built: the actor fails."""

    error: Exception


class JobsRunOn(RuntimeError):
    """Jobs of a failed actor access memory and do not end: it may not be handed out again."""


class Jobs:
    """The running jobs of one incarnation of an actor."""

    __slots__ = ("_deliver", "_in_flight", "_name", "running")

    def __init__(self, actor: str, in_flight: InFlight, deliver: Callable[[Control], None]) -> None:
        self.running: dict[asyncio.Task[None], Job] = {}
        self._name = actor + JOB
        self._in_flight = in_flight
        self._deliver = deliver

    def start(
        self,
        work: Coroutine[Any, Any, T],
        done: Callable[[T], Control],
        failed: Callable[[Exception], Control],
        job: Job,
    ) -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._run(work, done, failed), name=self._name)
        self.running[task] = job
        if job.counted:
            self._in_flight.begin()
        task.add_done_callback(self._ended)
        # The coroutine of a task that was cancelled before its first step is still open.
        task.add_done_callback(lambda _: work.close())

    async def end(self, limit: float | None) -> None:
        """Cancel every job and wait for at most `limit` seconds. `running` has those that go on."""
        for task in list(self.running):
            task.cancel()
        if self.running:
            await asyncio.wait(list(self.running), timeout=limit)

    def abandon(self) -> dict[asyncio.Task[None], Job]:
        """Stop counting the running jobs as in flight. Returns them."""
        late = dict(self.running)
        self._in_flight.end(sum(job.counted for job in late.values()))
        self.running = {task: job._replace(counted=False) for task, job in late.items()}
        return late

    async def _run(
        self,
        work: Coroutine[Any, Any, T],
        done: Callable[[T], Control],
        failed: Callable[[Exception], Control],
    ) -> None:
        try:
            message: Control = done(await work)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a job's failure is a message like any other
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
                raise
            message = _failure(as_exception(error), failed)
        self._deliver(message)

    def _ended(self, task: asyncio.Task[None]) -> None:
        job = self.running.pop(task, None)
        if job is not None and job.counted:
            self._in_flight.end()
        if not task.cancelled():
            task.exception()  # Ctrl-C or an exit, which the loop itself has raised


JOB = "'s job"


def is_job(task: asyncio.Task[Any]) -> bool:
    """Whether a task is an actor's job: its name is the actor's name followed by `JOB`."""
    return task.get_name().endswith(JOB)


def _failure(error: Exception, failed: Callable[[Exception], Control]) -> Control:
    try:
        return failed(error)
    except Exception as second:  # without an answer the work would stay in flight without end
        return JobBroken(second)


M = TypeVar("M", bound=Message)


class State(IntEnum):
    """The stages of an incarnation, in order."""

    STARTING = 0
    RUNNING = 1
    STOPPING = 2
    STOPPED = 3


class Outbox:
    """Messages of an actor that wait for a place in their receivers' channels, in order. Each
    counts as in flight until it is sent or dropped. waiting: the messages. The actor takes no turn
    before this is empty."""

    __slots__ = ("_channel", "_empty", "_in_flight", "_instruments", "waiting")

    def __init__(self, sender: ActorRef) -> None:
        self.waiting: deque[tuple[ActorRef, Envelope[Any], Turn | None]] = deque()
        self._in_flight, self._channel = sender.in_flight, sender.channel
        self._instruments = sender.instruments
        self._empty = Waiters()

    def add(self, to: ActorRef, envelope: Envelope[Any]) -> None:
        """Keep a message until the channel of `to` has a place."""
        self.waiting.append((to, envelope, self._instruments.turn))
        self._in_flight.begin()
        self._channel.wake()  # after an inline turn the actor's task sends it

    async def flush(self) -> None:
        waiting = self.waiting
        while waiting:
            to, envelope, turn = waiting[0]
            await to.channel.put(envelope)
            if to.instruments.active:
                to.instruments.notify("sent", to, envelope, turn)
            waiting.popleft()
        self._empty.wake()

    def clear(self) -> None:
        self._in_flight.end(len(self.waiting))
        self.waiting.clear()
        self._empty.wake()

    async def wait_empty(self) -> None:
        while self.waiting:
            await self._empty.wait()


Timer: TypeAlias = asyncio.TimerHandle
"""A message of an actor to itself in the future."""


class Context:
    """The record of one incarnation of an actor: messages sent, jobs and timers started, asks
    accepted. peer_incarnations: the incarnations of the other actors that this one has been
    notified of. A message carries the receiver's, so that a later incarnation drops it."""

    def __init__(self, ref: ActorRef) -> None:
        self.ref = ref
        self.incarnation = ref.incarnation
        self.peer_incarnations: dict[str, int] = {}
        self.state = State.STARTING
        self.outbox = Outbox(ref)
        self.jobs = Jobs(ref.name, ref.in_flight, self.to_self)
        self.timers: WeakSet[Timer] = WeakSet()  # one that nothing keeps is due or over
        self.unanswered: dict[Envelope[Any], None] = {}
        self.sent = self.late = 0

    def tell(self, to: ActorRef[M], message: M) -> None:
        """Send a message from within a turn. Messages are sent in order."""
        self.sent += 1
        envelope: Envelope[Any] = Envelope(
            message, None, None, self.peer_incarnations.get(to.name, to.incarnation)
        )
        outbox = self.outbox
        if (outbox.waiting and not isinstance(message, Control)) or not to.try_send(envelope):
            outbox.add(to, envelope)

    def answer(self, envelope: Envelope[T], value: T) -> bool:
        """Answer an ask. False, and counted as late, if its asker no longer waits."""
        reply: Any = envelope.reply
        if type(reply) is InlineReply and not reply.is_done:
            reply.value, reply.is_done = value, True  # as `set_result`, which takes longer
            return True
        self.unanswered.pop(envelope, None)
        if self.ref.reply(envelope, value):
            return True
        self.late += 1
        return False

    def refuse(self, envelope: Envelope[Any], error: Exception) -> bool:
        """Answer an ask with an error. False, and counted as late, if its asker no longer waits."""
        self.unanswered.pop(envelope, None)
        if self.ref.reply_error(envelope, error):
            return True
        self.late += 1
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
        """Run slow work beside the turns. Its result, or its error, comes back as a message.

        Jobs are cancelled when the actor fails or stops, and waited for within `Actor.job_limit`.
        The result of a job that ends later is dropped. counted: whether the system counts as busy
        until the job ends."""
        self.jobs.start(job, done, failed, Job(counted, slots, keys))

    def after(self, delay: float, message: Control) -> Timer:
        """Send this actor a message `delay` seconds from now. The timer ends with the actor. Cancel
        it when the message is no longer needed."""
        timer = asyncio.get_running_loop().call_later(delay, self.to_self, message)
        self.timers.add(timer)
        return timer

    def to_self(self, message: Control) -> None:
        """Send this actor a message, on the loop. Dropped once the incarnation has ended."""
        if self.state <= State.RUNNING and self.incarnation == self.ref.incarnation:
            self.ref.try_send(Envelope(message, None, None, self.incarnation))


class Effects:
    """Collector of the effects of turns, handed to the objects that decide.

    Each effect takes place at once, in the order of the calls. A turn is synchronous, so no other
    turn runs between two of them. `reply` and `refuse` return whether the asker still waited. After
    them `Envelope.abandoned` is true.

    The attributes are the methods of a `Context`, bound here because most turns call several.
    """

    __slots__ = ("after", "refuse", "reply", "send", "to_self")

    def __init__(self, context: Context) -> None:
        self.send, self.to_self = context.tell, context.to_self
        self.reply, self.refuse = context.answer, context.refuse
        self.after = context.after
