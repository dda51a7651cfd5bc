"""Connections to a leader that are not a rank's yet: each must prove the secret and identify
itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

import anyio

from kvactors.data_plane.ranks.connection import Wire
from kvactors.data_plane.ranks.handshake import LIMIT, check_rank, refuse
from kvactors.data_plane.ranks.protocol import FROM_RANK_BYTES, Identity
from kvactors.data_plane.ranks.refusals import Wanted, misfit
from kvactors.data_plane.ranks.strangers import Strangers
from kvactors.ranks_config import Secret

UNCLAIMED = 32
"""Connections without a rank's place at most, and two more for each rank; the oldest is closed for
a new one."""


class Leader(Wanted, Protocol):
    """The attributes of a leader that every rank must have, and the refused connections."""

    strangers: Strangers


class Entrance:
    """Admits connections of ranks, refuses and counts others.

    Args:
        leader: what every rank must have in common.
        secret: what every rank must prove to have.
    """

    def __init__(self, leader: Leader, secret: Secret) -> None:
        self._leader = leader
        self._secret = secret
        self._unclaimed: dict[Wire, None] = {}

    async def admit(
        self, wire: Wire, claim: Callable[[Identity], Awaitable[str]]
    ) -> Identity | None:
        """Check the secret and the identity of a connection.

        Args:
            wire: the connection. The caller closes it.
            claim: waits until the rank's number is free, and returns why it is not.

        Returns:
            The identity of a rank that fits; None if the connection was refused or lost.
        """
        strangers = self._leader.strangers
        while len(self._unclaimed) >= UNCLAIMED + 2 * self._leader.config.count:
            oldest = next(iter(self._unclaimed))
            del self._unclaimed[oldest]
            oldest.close()
            strangers.refused(oldest.source, "too many connections", "closed for a newer one")
        self._unclaimed[wire] = None
        reason, answer = await check_rank(wire, self._secret)
        if wire not in self._unclaimed:
            return None  # closed for a newer connection
        if reason:
            strangers.refused(wire.source, "not authenticated", reason)
            if answer:
                await refuse(wire, reason)
            return None
        wire.limit = FROM_RANK_BYTES
        identity = None
        with anyio.move_on_after(LIMIT):
            identity = await wire.receive()
        if not isinstance(identity, Identity):
            strangers.refused(wire.source, "no identity", wire.violation or type(identity).__name__)
            return None
        reason = misfit(identity, self._leader) or await claim(identity)
        if reason:
            strangers.refused(wire.source, "does not fit", reason, show=True)
            await refuse(wire, reason)
            return None
        self.leave(wire)
        return identity

    def leave(self, wire: Wire) -> None:
        """A connection has a rank's place now, or is lost."""
        self._unclaimed.pop(wire, None)
