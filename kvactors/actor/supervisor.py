"""Supervision: starts actors in flow order, restarts groups of them after failures, drains and
stops them in reverse.

Actors whose states depend on each other form a group and restart together. Groups nest. Every other
running actor receives `PeerRestarted` and writes off its work in flight with the failed actors."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

import anyio

from kvactors.actor.actor import Actor
from kvactors.actor.channel import Channel
from kvactors.actor.clock import now
from kvactors.actor.context import JobsRunOn, State
from kvactors.actor.instrument import Instruments
from kvactors.actor.log import described, frames, get_logger
from kvactors.actor.message import Control, Envelope, Message, PeerRestarted, Stop
from kvactors.actor.ref import ActorRef, InFlight
from kvactors.actor.uncancelled import uncancelled
from kvactors.errors import ActorFailed, CacheFailed, ChannelClosed, WiringError

log = get_logger()

# -- the channel graph, as the actor classes declare it, and the check that it cannot deadlock


class Edge(NamedTuple):
    """Actors of role `sender` tell actors of role `receiver` this message."""

    sender: str
    receiver: str
    message: type[Message]
    forward: bool  # True: takes a place in the bounded data lane. False: control lane


def edges(actors: Iterable[type[Actor]]) -> list[Edge]:
    """Every declared edge."""
    return [
        Edge(actor.ROLE, receiver, message, not issubclass(message, Control))
        for actor in actors
        for receiver, messages in actor.SENDS.items()
        for message in messages
    ]


def check_graph(actors: Iterable[type[Actor]]) -> list[str]:
    """The roles in flow order (receivers of forward messages after their senders).

    WiringError lists every misfit: a receiver that is not there, a message it has no handler for,
    and a cycle among the bounded forward channels, which under load could leave every actor on it
    waiting for the next.
    """
    by_role = {actor.ROLE: actor for actor in actors}
    misfits: list[str] = []
    feeds: dict[str, set[str]] = {role: set() for role in by_role}
    for edge in edges(by_role.values()):
        receiver = by_role.get(edge.receiver)
        if receiver is None:
            misfits.append(f"{edge.sender} tells {edge.receiver}, which is not wired")
        elif edge.message not in receiver.HANDLERS:
            misfits.append(
                f"{edge.receiver} has no handler for {edge.message.__name__} from {edge.sender}"
            )
        elif edge.forward:
            feeds[edge.receiver].add(edge.sender)
    if misfits:
        raise WiringError("; ".join(misfits))
    try:
        return list(TopologicalSorter(feeds).static_order())
    except CycleError as error:
        raise WiringError("forward channels form a cycle: " + " -> ".join(error.args[1])) from error


# -- the plan of a system: its actors, and the groups of them that restart together


class ActorSpec(NamedTuple):
    """One actor to be: `factory(ref)` makes it, at the start and after every failure.

    Attributes:
        substitute: for an actor that the system can do without, alone in its group: makes the one
            that runs in its place while it is switched off (`ActorRef.switched_off`), and answers
            every message at once.
    """

    kind: type[Actor]
    factory: Callable[[ActorRef], Actor]
    ref: ActorRef
    substitute: Callable[[ActorRef], Actor] | None = None


class Group(NamedTuple):
    """Actors (or groups) that restart together, in flow order."""

    name: str
    members: tuple[ActorSpec | Group, ...]

    def specs(self) -> Iterator[ActorSpec]:
        for member in self.members:
            if isinstance(member, Group):
                yield from member.specs()
            else:
                yield member


class RestartBudget(NamedTuple):
    """A group may have this many `failures` in `within` seconds. At the next one an optional actor
    is switched off. Any other failure passes to the enclosing group."""

    failures: int = 5
    within: float = 60.0


# -- optional actors: switched off when they fail too often, and on again some time later

SWITCHED_OFF, SWITCHED_OFF_MOST = 30.0, 600.0
"""Seconds an optional actor stays switched off at first, and at most. Doubled each time it fails
again soon."""


class SwitchedOff(NamedTuple):
    """An optional actor that failed more often than its budget allows. Times of the loop."""

    name: str
    cause: str
    since: float
    again_at: float


class Switch:
    """Whether a group's optional actor runs, or its substitute. Has no effect on other groups."""

    def __init__(self, group: Group, supervisor: Supervisor) -> None:
        first = group.members[0]
        self._ref: ActorRef | None = None
        if isinstance(first, ActorSpec) and first.substitute is not None:
            self._ref = first.ref
        self._supervisor = supervisor
        self._delay = SWITCHED_OFF
        self._on_since: float | None = None  # on trial after it was switched off
        self._timer: asyncio.TimerHandle | None = None

    @property
    def _record(self) -> SwitchedOff | None:
        return None if self._ref is None else self._supervisor.switched_off.get(self._ref.name)

    def factory(self, spec: ActorSpec) -> Callable[[ActorRef], Actor]:
        """The factory of the next incarnation. Starts the timer that ends a substitute."""
        record = self._record
        spec.ref.switched_off = record is not None
        if record is None or spec.substitute is None:
            return spec.factory
        self._timer = asyncio.get_running_loop().call_at(record.again_at, self._end_substitute)
        return spec.substitute

    def _end_substitute(self) -> None:
        if self._ref is not None and not self._supervisor.stopping:
            self._ref.try_tell(Stop())

    def stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def relapse(self, budget: RestartBudget) -> bool:
        """Whether it failed soon after it was switched on again: off at once, for longer."""
        if self._record is not None or self._on_since is None:
            return False
        again = now() - self._on_since < budget.within
        self._delay = min(SWITCHED_OFF_MOST, 2 * self._delay) if again else SWITCHED_OFF
        self._on_since = None
        return again

    def off(self, cause: BaseException) -> bool:
        """Switch off; False if that cannot be done, or the substitute itself has failed."""
        if self._ref is None or self._record is not None:
            return False
        name, again_at = self._ref.name, now() + self._delay
        self._supervisor.switched_off[name] = SwitchedOff(name, described(cause), now(), again_at)
        log.error("actor switched off", actor=name, error=described(cause), again_in=self._delay)
        return True

    def on(self) -> bool:
        """Switch on again, if the time of the substitute is over."""
        record = self._record
        if record is None or now() < record.again_at or self._supervisor.stopping:
            return False
        del self._supervisor.switched_off[record.name]
        self._on_since = now()
        log.warning("actor switched on again", actor=record.name)
        return True


LEAST_STEP = 0.1
"""Seconds each step of a shutdown has at least, however little is left."""


class SupervisorStatistics(NamedTuple):
    """Counts of failures and restarts.

    Attributes:
        failures: failures.
        restarts: restarts.
        last_failure: actor and cause, or empty.
    """

    failures: int
    restarts: int
    last_failure: str


class Supervisor:
    """Runs one system. Use `running()`, which checks the channel graph before any actor starts."""

    def __init__(
        self,
        in_flight: InFlight,
        budget: RestartBudget | None = None,
        closed: Callable[[], Exception] | None = None,
    ) -> None:
        self.in_flight = in_flight
        self.instruments = Instruments()
        self.on_replaced: Callable[[Actor], None] | None = None  # of an incarnation that has ended
        self._closed = closed
        self.failed: BaseException | None = None
        self.failed_actor = ""
        self.failed_at: float | None = None
        self.switched_off: dict[str, SwitchedOff] = {}
        # When a shutdown must be over, if it is known before `running` ends.
        self.end_by: float | None = None
        self._budget = budget or RestartBudget()
        self._actors: dict[str, Actor] = {}
        self._root: Group | None = None
        self.stopping = False
        # The actor that is the reason for cancelling others.
        self._failing: tuple[str, BaseException] | None = None
        self._failures = self._restarts = 0
        self._last_failure = ""

    def make_ref(self, kind: type[Actor], bound: int, *, name: str | None = None) -> ActorRef:
        """A ref with its channel. `name` defaults to the role."""
        name = name or kind.ROLE
        channel: Channel[Envelope[Any]] = Channel(name, bound)
        return ActorRef(name, kind.ROLE, channel, self.in_flight, self.instruments)

    def actor(self, name: str) -> Actor:
        """The present incarnation of an actor, for inspection. KeyError if it is not running."""
        return self._actors[name]

    def actors(self) -> list[Actor]:
        return list(self._actors.values())

    @asynccontextmanager
    async def running(
        self,
        *members: ActorSpec | Group,
        drain: float = 10.0,
        outside: tuple[type[Actor], ...] = (),
    ) -> AsyncIterator[Supervisor]:
        """Run the members until the block ends, then drain for at most `drain` seconds and stop in
        reverse.

        outside: classes that the graph may name and that are not wired here. Raises WiringError
        before any actor starts, and the exception that kept an actor from its first start. An
        exception out of the block passes unchanged.
        """
        self._root = root = Group("system", members)
        check_graph([*{spec.kind: None for spec in root.specs()}, *outside])
        running = asyncio.get_running_loop().create_task(
            self._run_root(root), name="kvactors supervisor"
        )
        try:
            await self._all_started(root)
            yield self
        finally:
            await uncancelled(self._shut_down(root, running, drain))

    async def _shut_down(self, root: Group, running: asyncio.Task[None], limit: float) -> None:
        end = now() + limit if self.end_by is None else self.end_by
        self.stopping = True
        try:
            if self.failed is None and not running.done():
                await self.drain(0.5 * max(LEAST_STEP, end - now()))
                await self._stop_in_reverse(root, max(LEAST_STEP, end - now()))
        finally:
            running.cancel()
            with anyio.move_on_after(max(LEAST_STEP, end - now())):
                await asyncio.wait([running])
            if not running.done():
                names = [
                    actor.ref.name for actor in self.actors() if actor.state is not State.STOPPED
                ]
                log.error("actors did not end before the shutdown's deadline", actors=names)
            self._close_channels(root)

    async def _all_started(self, root: Group) -> None:
        names = [spec.ref.name for spec in root.specs()]
        while not all(
            name in self._actors and self._actors[name].state is not State.STARTING
            for name in names
        ):
            if self.failed is not None:
                raise self.failed
            await asyncio.sleep(0)

    def failure(self) -> CacheFailed | None:
        """A new exception for a call after the system has failed, None if it has not."""
        return None if self.failed is None else CacheFailed(self.failed_actor, self.failed)

    async def drain(self, limit: float) -> bool:
        """Wait at most `limit` seconds until nothing is in flight. Returns whether that is so."""
        with anyio.move_on_after(limit) as scope:
            await self.in_flight.wait_idle()
        return not scope.cancelled_caught

    def statistics(self) -> SupervisorStatistics:
        return SupervisorStatistics(self._failures, self._restarts, self._last_failure)

    # -- running

    async def _run_root(self, root: Group) -> None:
        try:
            await self._run_group(root, RestartBudget(0, 1.0))
        except Exception as error:
            self.failed, self.failed_at = _jobs_run_on(error) or _root_cause(error), now()
            self.failed_actor = self._failing[0] if self._failing is not None else "an actor"
            log.error("system failed", actor=self.failed_actor, error=described(self.failed))
        finally:
            self._close_channels(root)

    async def _run_group(self, group: Group, budget: RestartBudget) -> None:
        failures: deque[float] = deque()
        switch = Switch(group, self)
        while True:
            try:
                async with anyio.create_task_group() as tasks:
                    for member in group.members:
                        if isinstance(member, Group):
                            tasks.start_soon(self._run_group, member, self._budget)
                        else:
                            member.ref.begin_restart()
                            self._place(self._make(member, switch))
                            tasks.start_soon(self._run_actor, member)
                cause: BaseException = RuntimeError("switched on again")
                if not switch.on():
                    return
            except Exception as error:
                if (stuck := _jobs_run_on(error)) is not None:
                    self._fail_queues(group, stuck)
                    raise
                cause = _root_cause(error)
                failures.append(now())
                while failures and failures[0] < now() - budget.within:
                    failures.popleft()
                if switch.relapse(budget) or len(failures) > budget.failures:
                    if not switch.off(cause):
                        self._fail_queues(group, cause)
                        raise
                    failures.clear()
            finally:
                switch.stop_timer()
            self._fail_queues(group, cause)
            self._failing = None
            self._restarts += 1
            self._notify_survivors(group)

    def _make(self, spec: ActorSpec, switch: Switch) -> Actor:
        """Make a new incarnation, with the incarnations of the other actors. For an actor whose
        failure is not announced yet, that is the incarnation that has ended."""
        assert self._root is not None
        try:
            actor = switch.factory(spec)(spec.ref)
        except Exception as error:
            self._failing = (spec.ref.name, error)
            raise
        actor.mailbox.failed_peer = lambda: self._failing
        actor.context.peer_incarnations = {
            other.ref.name: other.ref.incarnation - other.ref.failure_pending
            for other in self._root.specs()
        }
        return actor

    def _place(self, actor: Actor) -> None:
        name = actor.ref.name
        before, self._actors[name] = self._actors.get(name), actor
        if before is None:
            return
        log.warning("actor restarted", actor=name, incarnation=actor.incarnation)
        if self.on_replaced is not None:
            self.on_replaced(before)

    async def _run_actor(self, spec: ActorSpec) -> None:
        actor = self._actors[spec.ref.name]
        try:
            await actor.mailbox.run()
        except Exception as error:
            if self.stopping and isinstance(error, JobsRunOn):
                return  # no memory is reused after a stop
            self._failures += 1
            self._failing = (spec.ref.name, error)
            self._last_failure = f"{spec.ref.name}: {described(error)}"
            log.error(
                "actor failed", actor=spec.ref.name, error=described(error), where=frames(error)
            )
            spec.ref.failure_pending = True  # first: other threads read both
            spec.ref.incarnation += 1  # messages to the failed incarnation are stale from here on
            raise

    def _fail_queues(self, group: Group, cause: BaseException) -> None:
        """Drop the messages of the failed actors: asks fail, tells concern state that is gone."""
        for spec in group.specs():
            actor = self._actors.get(spec.ref.name)
            if actor is not None and actor.incarnation == spec.ref.incarnation:
                spec.ref.incarnation += 1
            spec.ref.purge(partial(ActorFailed, spec.ref.name, cause))

    def _notify_survivors(self, group: Group) -> None:
        assert self._root is not None
        failed = {spec.ref.name: spec.ref for spec in group.specs()}
        for ref in failed.values():
            ref.failure_pending = False
        for spec in self._root.specs():
            actor = self._actors.get(spec.ref.name)  # None before its first start
            if spec.ref.name not in failed and actor is not None and actor.state <= State.RUNNING:
                for name in sorted(failed):
                    spec.ref.try_tell(PeerRestarted(name, failed[name].incarnation))

    # -- stopping

    async def _stop_in_reverse(self, root: Group, limit: float) -> None:
        with anyio.move_on_after(limit):
            for spec in reversed(list(root.specs())):
                actor = self._actors.get(spec.ref.name)
                if actor is not None and actor.state <= State.RUNNING and not self.failed:
                    spec.ref.try_tell(Stop())
                    await actor.mailbox.ended

    def _close_channels(self, root: Group) -> None:
        for spec in root.specs():
            spec.ref.purge(self._refused)
            spec.ref.channel.close(self._refused)
            spec.ref.end_restart()

    def _refused(self) -> Exception:
        """A new exception for a message to a system that has failed or ended."""
        return self.failure() or (
            ChannelClosed("the system has stopped") if self._closed is None else self._closed()
        )


def _jobs_run_on(error: BaseException) -> JobsRunOn | None:
    """The reason why a group cannot restart, if that is among nested errors."""
    if isinstance(error, BaseExceptionGroup):
        return next(
            (found for one in error.exceptions if (found := _jobs_run_on(one)) is not None), None
        )
    return error if isinstance(error, JobsRunOn) else None


def _root_cause(error: BaseException) -> BaseException:
    """The first real exception inside nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
