"""How requests of a fleet choose their node."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvactors.errors import KVActorsError
from kvactors.scenario.fleet.member import Member

HOST_CREDIT = 0.8
"""Share of a device block's worth that a host block has, as in vLLM's router."""


def choose(
    members: Sequence[Member],
    hashes: Sequence[bytes],
    block_size: int,
    draw: random.Random,
    *,
    aware: bool,
) -> tuple[Member, int]:
    """The node for a prompt.

    Args:
        members: the fleet.
        hashes: of the prompt's blocks.
        block_size: tokens of a block.
        draw: decides where nothing else does.
        aware: whether the nodes' events and the requests in flight decide.

    Returns:
        The node, and the tokens that it must compute or fetch, as far as that is known.

    Raises:
        KVActorsError: no node runs.
    """
    up = [member for member in members if member.up]
    if not up:
        raise KVActorsError("no node of the fleet runs")
    if not aware:
        return draw.choice(up), block_size * len(hashes)
    names = [int.from_bytes(each[-8:], "big") for each in hashes]
    draw.shuffle(up)
    tokens = [int(block_size * (1 + len(names) - credit(member, names))) for member in up]
    best = min(range(len(up)), key=lambda at: tokens[at] + up[at].in_flight)
    return up[best], tokens[best]


def credit(member: Member, names: Sequence[int]) -> float:
    """Blocks at the start of a prompt that a node has, those on its device counting most."""
    view = member.watch()
    device, host = view.get("GPU", set()), view.get("CPU", set())
    found = 0.0
    for name in names:
        if name in device:
            found += 1
        elif name in host:
            found += HOST_CREDIT
        else:
            break
    return found
