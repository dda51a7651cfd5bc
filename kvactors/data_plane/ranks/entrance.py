"""Connections to a leader that are not a rank's yet: each must prove the secret and identify
itself."""

from __future__ import annotations

import hmac
import secrets
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import anyio

from kvactors.actor.log import get_logger
from kvactors.data_plane.ranks.connection import Connection
from kvactors.data_plane.ranks.protocol import (
    MOST_BYTES,
    MOST_NAMES,
    NONCE_BYTES,
    UNPROVEN_BYTES,
    VERSION,
    Challenge,
    Frame,
    Hello,
    Identity,
    Proof,
    Refused,
)
from kvactors.data_plane.ranks.state import Rank, RankState
from kvactors.errors import RankError
from kvactors.settings.ranks import RanksConfig, Secret

if TYPE_CHECKING:
    from kvactors.data_plane.ranks.leader import RankGroup

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
    with anyio.move_on_after(LIMIT):
        return await _check_rank(connection, secret)
    return f"no proof in {LIMIT:.0f} s", False


async def _check_rank(connection: Connection, secret: Secret) -> tuple[str, bool]:
    hello = await connection.receive()
    if not isinstance(hello, Hello):
        return _unexpected(connection, hello, "hello"), False
    if hello.version != VERSION:
        return f"protocol version {hello.version} of the rank, {VERSION} of the leader", True
    if len(hello.nonce) != NONCE_BYTES:
        return f"a nonce of {len(hello.nonce)} bytes, not {NONCE_BYTES}", False
    nonce = secrets.token_bytes(NONCE_BYTES)
    connection.send(Challenge(VERSION, nonce))
    proof = await connection.receive()
    if not isinstance(proof, Proof):
        return _unexpected(connection, proof, "proof"), False
    if not hmac.compare_digest(proof.mac, mac(secret, b"rank", hello.nonce, nonce)):
        return "the rank's secret is not the leader's (ranks.secret or KVACTORS_RANKS_SECRET)", True
    connection.send(Proof(mac(secret, b"leader", hello.nonce, nonce)))
    return "", False


def _unexpected(connection: Connection, message: Frame | None, wanted: str) -> str:
    found = f"{type(message).__name__} in place of a {wanted}"
    return connection.violation or (f"closed before a {wanted}" if message is None else found)


async def refuse(connection: Connection, reason: str) -> None:
    """Send the reason, and wait for at most LIMIT seconds until the other end, which has read it
    then, closes the connection."""
    connection.send(Refused(reason))
    with anyio.move_on_after(LIMIT):
        await connection.receive()


async def check_leader(connection: Connection, secret: Secret) -> bool:
    """The rank's side: whether the other end has the secret; False if the connection was lost
    before that is known. RankError if the leader refuses this rank, or does not have its secret."""
    connection.limit = UNPROVEN_BYTES
    with anyio.move_on_after(LIMIT):
        if await _check_leader(connection, secret):
            connection.limit = MOST_BYTES
            return True
    return False


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


def misfit(identity: Identity, wanted: RankGroup) -> str:
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
