"""Lines of JSON between a fleet's driver and its nodes."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec


class Orders(msgspec.Struct):
    """The first line that a node reads.

    Attributes:
        data: the scenario of the node.
        seed: of the texts.
        commands: to run first, which connect the node's network.
    """

    data: dict[str, Any]
    seed: int
    commands: list[list[str]]


class Order(msgspec.Struct):
    """A command to a node.

    Attributes:
        number: of the order, repeated in the answer.
        do: serve a request, fill the pool with pinned objects, remove them, or settle: wait until
            nothing is in flight, and describe the node.
        session, turn: of the request.
    """

    number: int
    do: Literal["serve", "fill", "drain", "settle"]
    session: int = 0
    turn: int = 0


class Blocks(NamedTuple):
    """Numbers of blocks by tier."""

    device: int = 0
    host: int = 0
    storage: int = 0


class Answer(msgspec.Struct):
    """The answer of a node.

    Attributes:
        number: of the order.
        hits: blocks of the prompt by tier.
        wait_s: seconds from the grant of the lease until the loads had ended and their blocks were
            verified.
        held: at the end, hashes of resident blocks by medium.
        sequence: at the end, batches of events that were published.
        counts: at the end, counters of the node by name.
        errors: at the end, errors of the node.
    """

    number: int
    hits: Blocks = Blocks()
    wait_s: float = 0.0
    held: dict[str, list[int]] = {}
    sequence: int = 0
    counts: dict[str, float] = {}
    errors: list[str] = []
