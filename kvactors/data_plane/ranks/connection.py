"""One connection between a leader and a rank: whole messages, in order, over a socket or, in
simulations, in memory. Both ends prove first that they have the same secret."""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import socket
import stat
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import anyio
import msgspec

from kvactors.data_plane.ranks.protocol import (
    MOST_BYTES,
    NONCE_BYTES,
    UNPROVEN_BYTES,
    VERSION,
    Challenge,
    Frame,
    Hello,
    Proof,
    Refused,
)
from kvactors.errors import RankError
from kvactors.native import fcntl
from kvactors.settings.ranks import Secret, split_endpoint

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(
    reduce(or_, Frame.__subclasses__())
)


KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""A host that vanished without closing its connections is noticed after 25 seconds."""


class Connection(ABC):
    """One end of a connection. source: where the other end is, for logs. limit: bytes of a message
    at most. violation: the invalid data of the other end, if that ended the connection."""

    source = ""
    limit = MOST_BYTES
    violation = ""

    @abstractmethod
    def send(self, message: Frame) -> None:
        """Send without waiting. The message is lost if the connection is."""

    @abstractmethod
    async def receive(self) -> Frame | None:
        """The next message; None when the connection is lost, or when something arrives that is not
        a message."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection at once, in both directions."""

    def _accepts(self, size: int) -> bool:
        if size > self.limit:
            self.violation = f"a message of {size} bytes, at most {self.limit} are accepted here"
        return size <= self.limit

    def _decode(self, body: bytes) -> Frame | None:
        try:
            return _decoder.decode(body)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            self.violation = f"not a message of this protocol: {type(error).__name__}"
            return None


class StreamConnection(Connection):
    """Over a socket."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, source: str = ""
    ) -> None:
        self.source = source
        self._reader = reader
        self._writer = writer
        found = writer.get_extra_info("socket")
        if found is not None and found.family != socket.AF_UNIX:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE:
                found.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, message: Frame) -> None:
        body = _encoder.encode(message)
        if not self._writer.is_closing():
            self._writer.write(len(body).to_bytes(4, "little") + body)

    async def receive(self) -> Frame | None:
        try:
            size = int.from_bytes(await self._reader.readexactly(4), "little")
            if not self._accepts(size):
                return None
            return self._decode(await self._reader.readexactly(size))
        except (OSError, asyncio.IncompleteReadError):
            return None

    def close(self) -> None:
        with suppress(RuntimeError):  # the loop is closed already
            self._writer.transport.abort()


class MemoryConnection(Connection):
    """One end of a pair in memory."""

    def __init__(self) -> None:
        self.other: MemoryConnection | None = None
        self._inbox: asyncio.Queue[bytes | None] = asyncio.Queue()

    @classmethod
    def pair(cls) -> tuple[MemoryConnection, MemoryConnection]:
        one, two = cls(), cls()
        one.other, two.other = two, one
        return one, two

    def send(self, message: Frame) -> None:
        if self.other is not None:
            loop = asyncio.get_running_loop()
            loop.call_soon(self.other._inbox.put_nowait, _encoder.encode(message))

    async def receive(self) -> Frame | None:
        body = await self._inbox.get()
        if body is None:
            self._inbox.put_nowait(None)  # for later calls
        return self._decode(body) if body is not None and self._accepts(len(body)) else None

    def close(self) -> None:
        other, self.other = self.other, None
        self._inbox.put_nowait(None)
        if other is not None:
            other.other = None
            other._inbox.put_nowait(None)


# -- Sockets of leaders and ranks: where a leader listens, who may connect, and how a rank connects.
#
# A unix socket is created with mode 0600, and both ends check the other's user id (the same user,
# or root). A stale socket is replaced under a lock on its folder, so that of two leaders that start
# at once one gets an error.


Met = Callable[[Connection], Coroutine[Any, Any, None]]
"""Handles one connection, which is closed when this returns."""

BUFFER = 16 << 10
"""Bytes that a socket's reader holds before it stops reading (it may hold one more read of up to
256 KiB)."""

LOCK_TRIES, LOCK_PAUSE = 100, 0.05

SETTLE = 5
"""Steps of the loop in which asyncio finishes connections that it was accepting, and closes the
sockets of those that were aborted."""

_in_memory: dict[str, Listener] = {}
"""Listeners at memory:// endpoints of this process."""


class Listener:
    """Accepts connections at one endpoint. met: awaited for each. Stopping cancels the calls that
    have not returned. foreign: called with the source and the reason for a connection that is
    closed because of its user."""

    def __init__(
        self, met: Met, foreign: Callable[[str, str], None] = lambda _source, _reason: None
    ) -> None:
        self.met = met
        self.foreign = foreign
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._path: tuple[str, int, int] | None = None
        self._name = ""
        self._stopped = False

    async def start(self, endpoint: str) -> None:
        """Listen. ConfigError, RankError if that is impossible."""
        scheme, host, port = split_endpoint(endpoint)
        if scheme == "memory":
            _in_memory[host], self._name = self, host
            return
        try:
            if scheme == "unix":
                sock = await _bind_unix(host)
                made = os.lstat(host)
                self._path = (host, made.st_dev, made.st_ino)
                self._server = await asyncio.start_unix_server(
                    self._accept, sock=sock, limit=BUFFER
                )
            else:
                self._server = await asyncio.start_server(self._accept, host, port, limit=BUFFER)
        except OSError as error:
            raise RankError(f"cannot listen for ranks at {endpoint}: {error}") from error

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock = writer.get_extra_info("socket")
        if sock.family == socket.AF_UNIX:
            pid, uid = peer_of(sock)
            source = f"uid {uid}"
            if not is_trusted(uid):
                self.foreign(
                    source,
                    f"process {pid} of user {uid}; only user {os.geteuid()} and root may connect",
                )
                writer.transport.abort()
                return
        else:
            name = writer.get_extra_info("peername")
            source = str(name[0]) if name else "unknown"
        self.take(StreamConnection(reader, writer, source))

    def take(self, connection: Connection) -> None:
        """Handle one connection. One that was accepted while the listener stopped is closed."""
        if self._stopped:
            connection.close()
            return
        task = asyncio.get_running_loop().create_task(self.met(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # a task that is cancelled before its first step runs no `finally`
        task.add_done_callback(lambda _: connection.close())

    async def stop(self) -> None:
        """Accept nothing more, close every connection, and remove the socket's path if it is still
        this listener's."""
        self._stopped = True
        if self._name and _in_memory.get(self._name) is self:
            del _in_memory[self._name]
        if self._path is not None:
            # before the socket is closed: another leader does not take the path of one that listens
            _remove_own(*self._path)
        if self._server is not None:
            await _close_server(self._server)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for _ in range(SETTLE):
            await asyncio.sleep(0)


async def _close_server(server: asyncio.Server) -> None:
    """Close a server when no connection is being accepted: asyncio would leave the socket of such a
    connection open (seen in 3.11)."""
    loop = asyncio.get_running_loop()
    for sock in server.sockets:
        # Loops other than asyncio's watch listening sockets in another way, and raise here.
        with suppress(RuntimeError, NotImplementedError):
            loop.remove_reader(sock.fileno())
    for _ in range(SETTLE):
        await asyncio.sleep(0)
    server.close()


async def _bind_unix(path: str) -> socket.socket:
    """A socket that listens at the path, which only this user can connect to. OSError."""
    folder = os.open(Path(path).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        await _lock(folder, path)
        _remove_stale(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _listen_at(sock, path)
        except BaseException:
            sock.close()
            raise
        return sock
    finally:
        os.close(folder)


def _listen_at(sock: socket.socket, path: str) -> None:
    os.fchmod(sock.fileno(), 0o600)  # Linux takes the mode of the path from it
    sock.bind(path)
    Path(path).chmod(0o600)  # other systems. No client can connect before listen()
    sock.listen(128)
    sock.setblocking(False)


def _remove_own(path: str, device: int, inode: int) -> None:
    with suppress(OSError):
        found = os.lstat(path)
        if (found.st_dev, found.st_ino) == (device, inode):
            Path(path).unlink()


async def _lock(folder: int, path: str) -> None:
    for _ in range(LOCK_TRIES):
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            await asyncio.sleep(LOCK_PAUSE)
        else:
            return
    raise OSError(f"the folder of {path} is locked by another process")


def _remove_stale(path: str) -> None:
    """Remove a socket that no process listens at. OSError if one does, or if something else is
    there."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(f"{path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()
            return
        except BlockingIOError:
            pass  # its queue of connections is full: a process listens
    raise FileExistsError("another process listens there already")


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Process and user id at the other end of a unix socket."""
    pid, uid, _ = struct.unpack(
        "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return pid, uid


def is_trusted(uid: int) -> bool:
    """Whether a user may be at the other end: this process's own, or root."""
    return uid in (os.geteuid(), 0)


async def connect(endpoint: str) -> Connection:
    """A connection to a leader. ConfigError, OSError (PermissionError if a process of another user
    listens at a unix socket)."""
    scheme, host, port = split_endpoint(endpoint)
    if scheme == "memory":
        if host not in _in_memory:
            raise ConnectionRefusedError(f"nothing listens at {endpoint}")
        mine, theirs = MemoryConnection.pair()
        mine.source = theirs.source = endpoint
        _in_memory[host].take(theirs)
        return mine
    if scheme != "unix":
        return StreamConnection(
            *await asyncio.open_connection(host, port, limit=BUFFER), f"{host}:{port}"
        )
    reader, writer = await asyncio.open_unix_connection(host, limit=BUFFER)
    pid, uid = peer_of(writer.get_extra_info("socket"))
    if not is_trusted(uid):
        writer.transport.abort()
        raise PermissionError(
            f"process {pid} of user {uid} listens at {host}, not user {os.geteuid()} or root"
        )
    return StreamConnection(reader, writer, host)


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
