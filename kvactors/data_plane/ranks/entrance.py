"""Connections to a leader that are not a rank's yet: each must prove the secret and identify
itself."""

from __future__ import annotations

import hmac
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

import anyio

from kvactors.actor.log import get_logger
from kvactors.data_plane.ranks.connection import Connection
from kvactors.data_plane.ranks.protocol import (
    FROM_RANK_BYTES,
    MOST_BYTES,
    MOST_NAMES,
    NONCE_BYTES,
    UNPROVEN_BYTES,
    VERSION,
    Challenge,
    Hello,
    Identity,
    Proof,
    Refused,
)
from kvactors.data_plane.ranks.state import Rank, RankState
from kvactors.errors import RankError
from kvactors.identity import StoreIdentity
from kvactors.settings.ranks import RanksConfig, Secret
from kvactors.tables import Unclaimed

# -- Proof in both directions that leader and rank have the same secret: HMAC-SHA256 over two
# nonces.
#
# The rank proves first, so that a stranger that connects to the leader receives nothing that is
# derived from the secret. A proof covers the sender's role and both nonces: it can be neither
# replayed on another connection nor sent back. Messages after the handshake are neither encrypted
# nor signed. Without a secret (unix sockets) the same messages are exchanged with an empty key.


LIMIT = 5.0
"""Seconds a connection may take until the other end has proved that it has the secret."""

DOMAIN = b"kvactors ranks 2 "


def mac(secret: Secret, role: bytes, rank_nonce: bytes, leader_nonce: bytes) -> bytes:
    """The authentication code that a role must present for two nonces."""
    return hmac.digest(
        secret.encoded(), DOMAIN + role + b"\0" + rank_nonce + leader_nonce, "sha256"
    )


async def check_rank(connection: Connection, secret: Secret) -> tuple[str, bool]:
    """The leader's side. Returns why the connection is refused, and whether the reason is sent to
    the other end (`refuse`). The reason is empty if the other end has the secret."""
    connection.limit = UNPROVEN_BYTES
    reason, answer = f"no proof in {LIMIT:.0f} s", False
    with anyio.move_on_after(LIMIT):
        reason, answer = await _check_rank(connection, secret)
    return reason, answer


async def _check_rank(connection: Connection, secret: Secret) -> tuple[str, bool]:
    """The reason for a refusal, and whether the other end is sent it."""
    hello = await connection.receive()
    if not isinstance(hello, Hello):
        return connection.violation or (
            "closed before a hello"
            if hello is None
            else f"{type(hello).__name__} in place of a hello"
        ), False
    if hello.version != VERSION:
        return f"protocol version {hello.version} of the rank, {VERSION} of the leader", True
    if len(hello.nonce) != NONCE_BYTES:
        return f"a nonce of {len(hello.nonce)} bytes, not {NONCE_BYTES}", False
    nonce = secrets.token_bytes(NONCE_BYTES)
    connection.send(Challenge(VERSION, nonce))
    proof = await connection.receive()
    if not isinstance(proof, Proof):
        return connection.violation or (
            "closed before a proof"
            if proof is None
            else f"{type(proof).__name__} in place of a proof"
        ), False
    if not hmac.compare_digest(proof.mac, mac(secret, b"rank", hello.nonce, nonce)):
        return "the rank's secret is not the leader's (ranks.secret or KVACTORS_RANKS_SECRET)", True
    connection.send(Proof(mac(secret, b"leader", hello.nonce, nonce)))
    return "", False


async def refuse(connection: Connection, reason: str) -> None:
    """Send the reason, and wait for at most LIMIT seconds until the other end, which has read it
    then, closes the connection."""
    connection.send(Refused(reason))
    with anyio.move_on_after(LIMIT):
        await connection.receive()


async def check_leader(connection: Connection, secret: Secret) -> bool:
    """The rank's side: whether the other end has the secret; False if the connection was lost
    before that is known.
    """
    connection.limit = UNPROVEN_BYTES
    proved = False
    with anyio.move_on_after(LIMIT):
        proved = await _check_leader(connection, secret)
    if proved:
        connection.limit = MOST_BYTES
    return proved


async def _check_leader(connection: Connection, secret: Secret) -> bool:
    nonce = secrets.token_bytes(NONCE_BYTES)
    connection.send(Hello(VERSION, nonce))
    challenge = await connection.receive()
    if isinstance(challenge, Refused):
        raise RankError(f"the leader refuses: {challenge.reason}")
    if not isinstance(challenge, Challenge) or len(challenge.nonce) != NONCE_BYTES:
        return False
    if challenge.version != VERSION:
        raise RankError(
            f"protocol version {VERSION} of the rank, {challenge.version} of the leader"
        )
    connection.send(Proof(mac(secret, b"rank", nonce, challenge.nonce)))
    proof = await connection.receive()
    if isinstance(proof, Refused):
        raise RankError(f"the leader refuses: {proof.reason}")
    if not isinstance(proof, Proof):
        return False
    if not hmac.compare_digest(proof.mac, mac(secret, b"leader", nonce, challenge.nonce)):
        raise RankError(
            "the leader's secret is not the rank's (ranks.secret or KVACTORS_RANKS_SECRET)"
        )
    return True


# -- Connections that a leader refused: counted by reason, logged once for each source.


log = get_logger()

SOURCES = 256
"""Sources remembered as logged. The one that was seen longest ago is dropped first."""


class Strangers:
    """counts: refused connections by kind. shown: the latest reasons of ranks that do not fit, for
    the error of `open`."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.shown: list[str] = []
        self._logged: OrderedDict[tuple[str, str], None] = OrderedDict()

    def refused(self, source: str, kind: str, reason: str, *, show: bool = False) -> None:
        """Count a refused connection. Log it unless its source was logged for this kind before."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if show and reason not in self.shown:
            self.shown = [*self.shown[-2:], reason]
        if (source, kind) in self._logged:
            self._logged.move_to_end((source, kind))
            return
        self._logged[source, kind] = None
        if len(self._logged) > SOURCES:
            self._logged.popitem(last=False)
        log.warning(
            "connection to the rank endpoint refused", source=source, kind=kind, reason=reason
        )


# -- Reasons for refusing a rank, and the ranks that a leader still waits for.


class Wanted(Protocol):
    """Requirements of a leader on every rank. See `RankGroup`."""

    config: RanksConfig
    identity: StoreIdentity
    blocks: int
    slots: int
    storage: str


def misfit(identity: Identity, wanted: Wanted) -> str:
    """Why a rank does not meet the requirements, with both values. Empty if it meets them."""
    ours, count = wanted.identity, wanted.config.count
    rows = (
        ("rank count", identity.ranks, count),
        ("model", identity.model, ours.model),
        ("storage namespace", identity.namespace, ours.namespace),
        ("storage back end", identity.storage, wanted.storage),
        ("layout", identity.fingerprint.hex()[:16], ours.fingerprint.hex()[:16]),
        ("device blocks", identity.blocks, wanted.blocks),
        ("host slots", identity.slots, wanted.slots),
    )
    for name, theirs, own in rows:
        if theirs != own:
            return f"rank {identity.rank} has {name} {theirs!r}, the leader has {own!r}"
    if not 0 <= identity.rank < count:
        return f"there is no rank {identity.rank} of {count}"
    if not 0 <= identity.objects <= MOST_NAMES:
        return (
            f"rank {identity.rank} has {identity.objects} stored objects, at most {MOST_NAMES} are "
            "possible"
        )
    return ""


def lacking(ranks: Iterable[Rank], config: RanksConfig, strangers: Strangers) -> str:
    """The ranks that did not join in time, and the refused connections."""
    missing = [rank.number for rank in ranks if rank.health is not RankState.HEALTHY]
    refused = [f"{number} connections refused: {kind}" for kind, number in strangers.counts.items()]
    details = "; ".join([*strangers.shown, *refused])
    text = f"ranks {missing} of {config.count} did not come to {config.endpoint} in time"
    return f"{text} ({details})" if details else text


UNCLAIMED = 32
"""Connections without a rank's place at most, and two more for each rank. The oldest is closed for
a new one."""


class Leader(Wanted, Protocol):
    """The attributes of a leader that every rank must have, and the refused connections."""

    strangers: Strangers


class Entrance:
    """Admits connections of ranks, refuses and counts others."""

    def __init__(self, leader: Leader, secret: Secret) -> None:
        self._leader = leader
        self._secret = secret
        self._unclaimed = Unclaimed(UNCLAIMED + 2 * leader.config.count, self._displace)

    async def admit(
        self, connection: Connection, claim: Callable[[Identity], Awaitable[str]]
    ) -> Identity | None:
        """Check the secret and the identity of a connection.

        Args:
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
