"""The supervisor: starts actors in flow order, restarts groups of them, drains and stops them in reverse.

Actors that cannot outlive each other's state stand in one group and restart together; a group may stand in a group. Whoever
is left alive hears `PeerRestarted` and writes off what it had in flight with the dead.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import anyio
import structlog

from kvactors.actor.activity import Activity
from kvactors.actor.actor import Actor, State
from kvactors.actor.channel import Channel, Overflow
from kvactors.actor.clock import now
from kvactors.actor.graph import check_graph
from kvactors.actor.message import Envelope, PeerRestarted, Stop, bury
from kvactors.actor.ref import ActorRef
from kvactors.errors import ActorFailed, ChannelClosed

log = structlog.get_logger()


class ActorSpec(NamedTuple):
    """One actor to be: `factory(ref)` makes it, at the start and after every death."""

    kind: type[Actor]
    factory: Callable[[ActorRef], Actor]
    ref: ActorRef


class Group(NamedTuple):
    """Actors (or groups) that restart together, in flow order."""

    name: str
    members: tuple[ActorSpec | Group, ...]

    def specs(self) -> Iterator[ActorSpec]:
        """Every actor below, in flow order."""
        for member in self.members:
            if isinstance(member, Group):
                yield from member.specs()
            else:
                yield member


class RestartBudget(NamedTuple):
    """A group may die `deaths` times in `within` seconds; once more and the failure passes to the group around it."""

    deaths: int = 5
    within: float = 60.0


class SupervisorStatistics(NamedTuple):
    """What the supervisor has seen."""

    deaths: int
    restarts: int
    last_death: str  # name and cause, or empty


class Supervisor:
    """Runs one system. Use `running()`; nothing starts before the channel graph is found sound."""

    def __init__(self, activity: Activity, budget: RestartBudget | None = None) -> None:
        self.activity = activity
        self.failed: BaseException | None = None
        self._budget = budget or RestartBudget()
        self._actors: dict[str, Actor] = {}
        self._root: Group | None = None
        self._deaths = self._restarts = 0
        self._last_death = ""

    def make_ref(
        self, kind: type[Actor], bound: int, *, name: str | None = None, overflow: Overflow = Overflow.WAIT
    ) -> ActorRef:
        """A ref with a channel of its own; `name` defaults to the role."""
        name = name or kind.ROLE
        channel: Channel[Envelope[Any]] = Channel(name, bound, overflow)
        return ActorRef(name, kind.ROLE, channel, self.activity)

    def actor(self, name: str) -> Actor:
        """The present life of an actor, for inspection. KeyError if it is not running."""
        return self._actors[name]

    def actors(self) -> list[Actor]:
        """All present lives, in flow order."""
        return list(self._actors.values())

    @asynccontextmanager
    async def running(
        self, *members: ActorSpec | Group, drain: float = 10.0, outside: tuple[type[Actor], ...] = ()
    ) -> AsyncIterator[Supervisor]:
        """Run the members until the block ends; then drain for at most `drain` seconds and stop in reverse.

        outside: classes that the graph may name and that are not wired here. Raises WiringError before anything starts, and whatever
        kept an actor from its first start. An exception out of the block passes as it is.
        """
        self._root = root = Group("system", members)
        check_graph([*{spec.kind: None for spec in root.specs()}, *outside])
        life = asyncio.get_running_loop().create_task(self._run_root(root), name="kvactors supervisor")
        try:
            await self._all_started(root)
            yield self
        finally:
            with anyio.CancelScope(shield=True):
                if self.failed is None:
                    await self.drain(drain)
                    await self._stop_in_reverse(root, drain)
                life.cancel()
                await asyncio.gather(life, return_exceptions=True)
            self._close_channels(root)

    async def _all_started(self, root: Group) -> None:
        names = [spec.ref.name for spec in root.specs()]
        while not all(name in self._actors and self._actors[name].state is not State.STARTING for name in names):
            if self.failed is not None:
                raise self.failed
            await asyncio.sleep(0)

    async def drain(self, limit: float) -> bool:
        """Wait until nothing is under way, for at most `limit` seconds; whether that was reached."""
        with anyio.move_on_after(limit) as scope:
            await self.activity.quiet()
        return not scope.cancelled_caught

    def statistics(self) -> SupervisorStatistics:
        """Deaths and restarts so far."""
        return SupervisorStatistics(self._deaths, self._restarts, self._last_death)

    # -- running

    async def _run_root(self, root: Group) -> None:
        try:
            await self._run_group(root, RestartBudget(0, 1.0))
        except Exception as error:
            self.failed = root_cause(error)
            log.error("system failed", cause=self._last_death)
            self._close_channels(root)

    async def _run_group(self, group: Group, budget: RestartBudget) -> None:
        deaths: deque[float] = deque()
        while True:
            try:
                async with anyio.create_task_group() as tasks:
                    for member in group.members:
                        if isinstance(member, Group):
                            tasks.start_soon(self._run_group, member, self._budget)
                        else:
                            member.ref.reviving()
                            self._actors[member.ref.name] = self._make(member)
                            tasks.start_soon(self._run_actor, member)
                return
            except Exception as error:
                cause = root_cause(error)
                self._bury_queues(group, cause)
                deaths.append(now())
                while deaths and deaths[0] < now() - budget.within:
                    deaths.popleft()
                if len(deaths) > budget.deaths:
                    raise
                self._restarts += 1
                self._notify_survivors(group)

    def _make(self, spec: ActorSpec) -> Actor:
        """A new life, which knows the others' lives; of one whose death is not made known yet, the one that has ended."""
        assert self._root is not None
        actor = spec.factory(spec.ref)
        actor.lives = {other.ref.name: other.ref.life - other.ref.dead for other in self._root.specs()}
        return actor

    async def _run_actor(self, spec: ActorSpec) -> None:
        actor = self._actors[spec.ref.name]
        try:
            await actor.run()
        except Exception as error:
            self._deaths += 1
            self._last_death = f"{spec.ref.name}: {error!r}"
            log.error("actor died", actor=spec.ref.name, error=repr(error), exc_info=error)
            spec.ref.life += 1  # from here on, what was meant for the dead is stale
            spec.ref.dead = True
            raise

    def _bury_queues(self, group: Group, cause: BaseException) -> None:
        """Everything queued for the dead goes with them: asks fail at once, tells are about state that is gone."""
        for spec in group.specs():
            actor = self._actors.get(spec.ref.name)
            if actor is not None and actor.life == spec.ref.life:
                spec.ref.life += 1
            for envelope in spec.ref.channel.purge():
                bury(envelope, spec.ref.name, cause)
                self.activity.end()

    def _notify_survivors(self, group: Group) -> None:
        assert self._root is not None
        dead = {spec.ref.name: spec.ref for spec in group.specs()}
        for ref in dead.values():
            ref.dead = False
        for spec in self._root.specs():
            if spec.ref.name not in dead and self._actors[spec.ref.name].state <= State.RUNNING:
                for name in sorted(dead):
                    spec.ref.try_tell(PeerRestarted(name, dead[name].life))

    # -- stopping

    async def _stop_in_reverse(self, root: Group, limit: float) -> None:
        with anyio.move_on_after(limit):
            for spec in reversed(list(root.specs())):
                actor = self._actors.get(spec.ref.name)
                if actor is not None and actor.state <= State.RUNNING and not self.failed:
                    spec.ref.try_tell(Stop())
                    await actor.ended

    def _close_channels(self, root: Group) -> None:
        for spec in root.specs():
            cause = self.failed or ChannelClosed(f"{spec.ref.name} has stopped")
            for envelope in spec.ref.channel.purge():
                envelope.fail(ActorFailed(spec.ref.name, cause))
                self.activity.end()
            spec.ref.channel.close()
            spec.ref.revived()


def root_cause(error: BaseException) -> BaseException:
    """The first real exception inside nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
