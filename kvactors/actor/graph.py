"""The channel graph, as the actor classes declare it, and the check that it cannot deadlock."""

from __future__ import annotations

from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from kvactors.actor.actor import Actor
from kvactors.actor.message import Control, Message
from kvactors.errors import WiringError


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
