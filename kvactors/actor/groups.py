"""The plan of a system: its actors, and the groups of them that restart together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvactors.actor.actor import Actor
from kvactors.actor.ref import ActorRef


class ActorSpec(NamedTuple):
    """One actor to be: `factory(ref)` makes it, at the start and after every failure.

    Attributes:
        substitute: for an actor that the system can do without, alone in its group: makes the one
            that runs in its place while it is switched off, and answers every message at once.
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
        """Every actor below, in flow order."""
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
