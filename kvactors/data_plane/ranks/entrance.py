"""Connections to a leader that are not a rank's yet: each must prove the secret and identify
itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

import anyio

from kvactors.data_plane.ranks.connection import Connection
from kvactors.data_plane.ranks.handshake import LIMIT, check_rank, refuse
from kvactors.data_plane.ranks.protocol import FROM_RANK_BYTES, Identity
from kvactors.data_plane.ranks.refusals import Wanted, misfit
from kvactors.data_plane.ranks.strangers import Strangers
from kvactors.ranks_config import Secret
from kvactors.unclaimed import Unclaimed

UNCLAIMED = 32
"""Connections without a rank's place at most, and two more for each rank. The oldest is closed for
a new one."""


class Leader(Wanted, Protocol):
    """The attributes of a leader that every rank must have, and the refused connections."""

    strangers: Strangers


class Entrance:
    """Admits connections of ranks, refuses and counts others.

    Args:
        leader: the requirements on every rank.
        secret: the secret that every rank must prove to have.
    """

    def __init__(self, leader: Leader, secret: Secret) -> None:
        self._leader = leader
        self._secret = secret
        self._unclaimed = Unclaimed(UNCLAIMED + 2 * leader.config.count, self._displace)

    async def admit(
        self, connection: Connection, claim: Callable[[Identity], Awaitable[str]]
    ) -> Identity | None:
        """Check the secret and the identity of a connection.

        Args:
            connection: the connection. The caller closes it.
            claim: waits until the rank's number is free, and returns why it is not.

        Returns:
            The identity of a rank that fits; None if the connection was refused or lost.
        """
        strangers = self._leader.strangers
        self._unclaimed.add(connection)
        reason, answer = await check_rank(connection, self._secret)
        if connection not in self._unclaimed:
            return None  # closed for a newer connection
        if reason:
            strangers.refused(connection.source, "not authenticated", reason)
            if answer:
                await refuse(connection, reason)
            return None
        connection.limit = FROM_RANK_BYTES
        identity = None
        with anyio.move_on_after(LIMIT):
            identity = await connection.receive()
        if not isinstance(identity, Identity):
            strangers.refused(
                connection.source, "no identity", connection.violation or type(identity).__name__
            )
            return None
        reason = misfit(identity, self._leader) or await claim(identity)
        if reason:
            strangers.refused(connection.source, "does not fit", reason, show=True)
            await refuse(connection, reason)
            return None
        self.leave(connection)
        return identity

    def leave(self, connection: Connection) -> None:
        """A connection has a rank's place now, or is lost."""
        self._unclaimed.discard(connection)

    def _displace(self, oldest: Connection) -> None:
        oldest.close()
        self._leader.strangers.refused(
            oldest.source, "too many connections", "closed for a newer one"
        )
