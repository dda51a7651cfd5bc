"""Proof in both directions that leader and rank have the same secret: HMAC-SHA256 over two nonces.

The rank proves first, so that a stranger that connects to the leader receives nothing that is
derived from the secret. A proof covers the sender's role and both nonces: it can be neither
replayed on another connection nor sent back. Messages after the handshake are neither encrypted nor
signed. Without a secret (unix sockets) the same messages are exchanged with an empty key.
"""

from __future__ import annotations

import hmac
import secrets

import anyio

from kvactors.data_plane.ranks.connection import Connection
from kvactors.data_plane.ranks.protocol import (
    MOST_BYTES,
    NONCE_BYTES,
    UNPROVEN_BYTES,
    VERSION,
    Challenge,
    Hello,
    Proof,
    Refused,
)
from kvactors.errors import RankError
from kvactors.ranks_config import Secret

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

    Raises:
        RankError: the leader refuses this rank, or does not have its secret.
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
