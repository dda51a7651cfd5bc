"""Base class of all actors: a table of handlers over a context.

A turn is synchronous code over the actor's own state. Slow work runs as a job, whose result comes
back as a message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar, overload

from kvactors.actor.channel import ChannelStatistics
from kvactors.actor.context import JOB_LIMIT, Context, Job, State
from kvactors.actor.log import get_logger
from kvactors.actor.loop import MailboxLoop
from kvactors.actor.message import Ask, Envelope, Message
from kvactors.actor.ref import ActorRef

# -- handlers, which mypy checks where `@on` marks them

Handler = Callable[..., None]

S = TypeVar("S")
M = TypeVar("M", bound=Message)
A = TypeVar("A", bound=Ask[Any])
Y = TypeVar("Y", bound=Message)

Tells: TypeAlias = Callable[[S, M | Y], None]
"""A handler of `M`. Its parameter may also be a union that contains the message."""

Asks: TypeAlias = Callable[[S, A, Envelope[Any]], None]


@overload
def on(message: type[A]) -> Callable[[Asks[S, A]], Asks[S, A]]: ...  # type: ignore[overload-overlap]
@overload
def on(message: type[M]) -> Callable[[Tells[S, M, Y]], Tells[S, M, Y]]: ...
def on(message: type[Any]) -> Any:
    """Mark a method as the handler of a message, `(self, message)`, or ask, `(.., envelope)`."""

    def mark(method: Any) -> Any:
        method.__dict__.setdefault("handles", []).append(message)
        return method

    return mark


# -- statistics

Count: TypeAlias = int
Seconds: TypeAlias = float
"""Types of the fields of a record that count from the start of an incarnation. The other fields
describe the present."""


def counters_of(record: type[Any]) -> list[str]:
    """The counters of a record."""
    hints = record.__annotations__.items()
    return [name for name, hint in hints if hint.__forward_arg__ in ("Count", "Seconds")]


class ActorStatistics(NamedTuple):
    """A moment's picture of an actor's present incarnation.

    Attributes:
        name: its name.
        state: starting, running, stopping or stopped.
        restarts: restarts.
        turns: messages handled.
        sent: messages sent.
        jobs: child jobs running.
        outbox: messages waiting for a place in a channel.
        open_replies: asks not answered yet.
        late_replies: answers whose asker no longer waited.
        skipped: asks given up before their turn, or meant for an earlier incarnation.
        channel: its channel.
    """

    name: str
    state: str
    restarts: int
    turns: Count
    sent: Count
    jobs: int
    outbox: int
    open_replies: int
    late_replies: Count
    skipped: Count
    channel: ChannelStatistics


class Actor:
    """Base of all actors.

    ROLE names the class in the channel graph. SENDS declares, for each receiver's role, the message
    types that this class sends it. The supervisor checks the whole graph before anything starts.

    `tell`, `answer`, `refuse`, `start_job`, `after` and `to_self` are those of its `Context`.
    """

    ROLE: ClassVar[str]
    SENDS: ClassVar[Mapping[str, tuple[type[Message], ...]]] = {}
    HANDLERS: ClassVar[dict[type[Message], str]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        marked = {
            message: name
            for name, member in vars(cls).items()
            for message in getattr(member, "handles", ())
        }
        cls.HANDLERS = {**cls.HANDLERS, **marked}

    def __init__(self, ref: ActorRef) -> None:
        self.ref = ref
        self.log = get_logger(actor=ref.name)
        self.context = context = (ref.make_context or Context)(ref)
        self.handlers: dict[type[Message], Handler] = {
            message: getattr(self, name) for message, name in self.HANDLERS.items()
        }
        self.mailbox = MailboxLoop(self)
        # Bound here: a call through a method of this class would cost each message another call.
        self.tell, self.to_self, self.answer = context.tell, context.to_self, context.answer
        self.refuse, self.start_job, self.after = context.refuse, context.start_job, context.after

    # -- for subclasses

    def started(self) -> None:
        """First turn of an incarnation, before any message. May send messages and start jobs."""

    async def stopped(self) -> None:
        """Last step of an incarnation, after its jobs: close the actor's resources, briefly."""

    def job_limit(self, *, failed: bool) -> float | None:
        """Seconds in which the jobs must end after the actor, None for no limit. failed: whether
        the actor itself has failed."""
        return JOB_LIMIT

    def left_behind(self, jobs: Mapping[asyncio.Task[None], Job], *, restart: bool) -> None:
        """Jobs have not ended within the limit. Keeps the memory that they access from reuse until
        they have, or raises JobsRunOn: then the system fails. restart: whether the memory will be
        handed out again."""

    def check(self) -> None:
        """Recompute this actor's invariants. Raises AssertionError with the difference."""

    def check_steps(self) -> Iterator[None]:
        """`check` in steps of at most a millisecond. Other turns may run between the steps."""
        self.check()
        yield

    async def sent(self) -> None:
        """Return when every message sent so far is in a channel, or the incarnation has ended."""
        await self.context.outbox.wait_empty()

    # -- for the supervisor, and for inspection of a running system

    @property
    def incarnation(self) -> int:
        return self.context.incarnation

    @property
    def state(self) -> State:
        return self.context.state

    @property
    def turns(self) -> int:
        return self.mailbox.turns

    def statistics(self) -> ActorStatistics:
        context = self.context
        return ActorStatistics(
            self.ref.name,
            context.state.name.lower(),
            context.incarnation,
            self.mailbox.turns,
            context.sent,
            len(context.jobs.running),
            len(context.outbox.waiting),
            len(context.unanswered),
            context.late,
            self.mailbox.skipped,
            self.ref.channel.statistics(),
        )
