"""ZMQ sockets of a publisher: where they listen, and what can be wrong with that, as one error."""

from __future__ import annotations

import ctypes
import errno
import os
import socket as system_socket
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import anyio

from kvactors.errors import SinkError
from kvactors.native import FrameSender
from kvactors.settings.sinks import Endpoint

try:
    import zmq
    import zmq.asyncio
    import zmq.backend
except ImportError as error:
    raise SinkError(
        "a kv_events sink needs ZMQ: pip install '/path/to/kvactors[kv-events]'"
    ) from error

__all__ = ["Sockets", "zmq"]

Send = Callable[[bytes, int, bytes], None]
"""Sends a topic, a sequence number and a payload as one message of three frames."""

MAX_TOPIC_BYTES = 4_096  # of a topic that is asked for: a larger message ends its connection
MAX_REQUEST_BYTES = 256  # of a frame to a replay socket: a larger one ends its connection unread
MAX_QUEUED_REQUESTS = 16  # of one reader, in ZMQ's queue
BIND_TIMEOUT_S = 1.0
BIND_RETRY_S = 0.02
LEFTOVER_TRIES = 3  # after which a socket file that nothing listens at counts as left over
HANDSHAKE_TIMEOUT_MS = 5_000


class Sockets:
    """The sockets of one publisher."""

    def __init__(self, name: str) -> None:
        self.name = name
        # the process's own, so that inproc readers find it
        self.context: Any = zmq.Context.instance()
        self.exposed: list[str] = []  # endpoints that every interface of this machine listens at
        self._opened: list[Any] = []
        self._senders: list[FrameSender] = []

    async def publisher(
        self, endpoint: str, high_water_mark: int, bind: Literal["auto", "bind", "connect"]
    ) -> Any:
        """A PUB socket: sending never waits. A subscriber that is `high_water_mark` messages behind
        loses some."""
        socket = self.context.socket(zmq.PUB)
        socket.setsockopt(zmq.SNDHWM, high_water_mark)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_TOPIC_BYTES)
        return await self._open(socket, endpoint, bind)

    async def router(self, endpoint: str, high_water_mark: int) -> Any:
        """A ROUTER socket of the running loop, that reports a peer that is gone or slow."""
        socket = zmq.asyncio.Socket(self.context, zmq.ROUTER)
        socket.setsockopt(zmq.SNDHWM, high_water_mark)
        socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_REQUESTS)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        return await self._open(socket, endpoint, "bind")

    async def _open(self, socket: Any, text: str, bind: Literal["auto", "bind", "connect"]) -> Any:
        self._opened.append(socket)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
        listen = bind != "connect"
        try:
            endpoint = Endpoint.of(text)
            listen = bind == "bind" or (bind == "auto" and endpoint.own)
            socket.setsockopt(zmq.IPV6, int(endpoint.ipv6))
            if listen and endpoint.any_host:
                self.exposed.append(text)
            if listen:
                await bind_when_free(socket, text, endpoint)
            else:
                socket.connect(text)
        except (zmq.ZMQError, ValueError, TypeError, OSError) as error:
            verb = "listen at" if listen else "connect to"
            raise SinkError(f"sink {self.name!r} cannot {verb} {text}: {error}") from error
        return socket

    @staticmethod
    def address(socket: Any) -> str:
        """Where a socket listens (or connects to), a port of 0 replaced by the real one."""
        return str(socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"))

    def close(self, linger: float = 0.0) -> None:
        """Close everything. ZMQ's own thread sends what was published for `linger` seconds."""
        for sender in self._senders:
            sender.close()
        for socket in self._opened:
            socket.close(linger=int(1000 * linger))
        self._senders.clear()
        self._opened.clear()

    def sender(self, socket: Any) -> Send:
        address = address_of_send()
        if not address:
            return partial(send_frames, socket)
        sender = FrameSender(address, socket.underlying, partial(raise_last, socket))
        self._senders.append(sender)
        return sender


async def bind_when_free(socket: Any, text: str, endpoint: Endpoint) -> None:
    """Listen. ZMQ's thread frees an endpoint after its socket is closed, so an endpoint in use is
    tried again."""
    last = int(BIND_TIMEOUT_S / BIND_RETRY_S)
    for number in range(last + 1):
        try:
            if endpoint.transport == "ipc":
                bind_path(socket, text, Path(endpoint.host), left=number >= LEFTOVER_TRIES)
            else:
                socket.bind(text)
            return
        except (zmq.ZMQError, OSError) as error:
            if error.errno != errno.EADDRINUSE or number == last:
                raise
        await anyio.sleep(BIND_RETRY_S)


def bind_path(socket: Any, text: str, path: Path, *, left: bool) -> None:
    """Listen at a path, for this user alone. ZMQ removes any file at the path before it listens, so
    any file but an unused socket is refused first. left: a socket that nothing listens at is left
    over. Otherwise another thread may be about to remove it."""
    if text.startswith("ipc://@"):  # a name without a file
        socket.bind(text)
        return
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise OSError("there is a file that is no socket")
        if not left or listens(path):
            raise OSError(errno.EADDRINUSE, "Address already in use")
    socket.bind(text)
    path.chmod(0o600)


def listens(path: Path) -> bool:
    """Whether something listens at the socket of a path."""
    with system_socket.socket(system_socket.AF_UNIX) as probe:
        probe.settimeout(0.5)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
    return True


def address_of_send() -> int:
    """The address of zmq_send in pyzmq's library. 0 if the library does not show it."""
    try:
        library = ctypes.CDLL(sys.modules[zmq.backend.Socket.__module__].__file__)
        return ctypes.cast(library.zmq_send, ctypes.c_void_p).value or 0
    except (AttributeError, OSError):
        return 0


def raise_last(socket: Any) -> NoReturn:
    """Raise the error of the last call for a socket."""
    error = zmq.ZMQError()  # before any other call of the library
    raise zmq.ZMQError(zmq.ENOTSOCK) if socket.closed else error


def send_frames(socket: Any, topic: bytes, number: int, payload: bytes) -> None:
    """Send a message frame by frame with pyzmq alone. `zmq.backend.Socket` leaves out a check of
    options that PUB sockets do not have."""
    send_frame: Any = zmq.backend.Socket.send
    send_frame(socket, topic, zmq.SNDMORE)
    send_frame(socket, number.to_bytes(8, "big"), zmq.SNDMORE)
    send_frame(socket, payload)
