"""One connection between a leader and a rank: whole messages, in order, over a socket or, in simulations, in memory."""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec

from kvactors.endpoint import split_endpoint
from kvactors.errors import RankError
from kvactors.ranks.protocol import MOST_BYTES, AnyFrame, Frame

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyFrame] = msgspec.msgpack.Decoder(AnyFrame)


class Wire(ABC):
    """One end of a connection."""

    @abstractmethod
    def send(self, message: Frame) -> None:
        """Send, without waiting; lost if the connection is."""

    @abstractmethod
    async def receive(self) -> AnyFrame | None:
        """The next message; None when the connection is lost, or carries something that is not one."""

    @abstractmethod
    def close(self) -> None:
        """Hang up, both ways."""


class StreamWire(Wire):
    """Over a socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        found = writer.get_extra_info("socket")
        if found is not None and found.family != socket.AF_UNIX:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # the other machine may be gone without a word

    def send(self, message: Frame) -> None:
        """See `Wire`."""
        body = _encoder.encode(message)
        if not self._writer.is_closing():
            self._writer.write(len(body).to_bytes(4, "little") + body)

    async def receive(self) -> AnyFrame | None:
        """See `Wire`."""
        try:
            size = int.from_bytes(await self._reader.readexactly(4), "little")
            return _decoder.decode(await self._reader.readexactly(size)) if size <= MOST_BYTES else None
        except (OSError, asyncio.IncompleteReadError, msgspec.MsgspecError, RecursionError):
            return None

    def close(self) -> None:
        """See `Wire`."""
        with suppress(RuntimeError):  # the loop is closed already
            self._writer.transport.abort()


class MemoryWire(Wire):
    """One end of a pair in memory. lag: seconds a message sent from here takes (called for each)."""

    def __init__(self, lag: Callable[[], float] = lambda: 0.0) -> None:
        self.other: MemoryWire | None = None
        self.keeps: asyncio.Task[None] | None = None  # who hears the other end
        self._lag = lag
        self._inbox: deque[bytes | None] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._last = 0.0
        self._sent: deque[bytes] = deque()

    @classmethod
    def pair(cls, lag: Callable[[], float] = lambda: 0.0) -> tuple[MemoryWire, MemoryWire]:
        """Two ends."""
        one, two = cls(lag), cls(lag)
        one.other, two.other = two, one
        return one, two

    def send(self, message: Frame) -> None:
        """See `Wire`. What was sent first arrives first, whatever the lag."""
        if self.other is not None:
            loop = asyncio.get_running_loop()
            self._last = max(self._last, loop.time() + self._lag())
            self._sent.append(_encoder.encode(message))
            loop.call_at(self._last, self._deliver, self.other)  # timers of one instant run in any order

    def _deliver(self, other: MemoryWire) -> None:
        other._put(self._sent.popleft())

    def _put(self, item: bytes | None) -> None:
        self._inbox.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def receive(self) -> AnyFrame | None:
        """See `Wire`."""
        while not self._inbox:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        item = self._inbox.popleft()
        if item is None:
            self._inbox.append(None)
            return None
        return _decoder.decode(item)

    def close(self) -> None:
        """See `Wire`."""
        other, self.other = self.other, None
        self._put(None)
        if other is not None:
            other.other = None
            other._put(None)


_in_memory: dict[str, Callable[[Wire], Awaitable[None]]] = {}
"""Whoever listens at memory:// endpoints of this process."""


async def connect(endpoint: str) -> Wire:
    """A connection. ConfigError, OSError."""
    scheme, host, port = split_endpoint(endpoint)
    if scheme == "memory":
        return _connect_in_memory(host)
    if scheme == "unix":
        return StreamWire(*await asyncio.open_unix_connection(host))
    return StreamWire(*await asyncio.open_connection(host, port))


def _connect_in_memory(name: str) -> Wire:
    if name not in _in_memory:
        raise ConnectionRefusedError(f"nobody listens at memory://{name}")
    mine, theirs = MemoryWire.pair()
    task = asyncio.get_running_loop().create_task(_heard(_in_memory[name], theirs))
    mine.keeps = task
    return mine


async def _heard(met: Callable[[Wire], Awaitable[None]], wire: Wire) -> None:
    await met(wire)


async def listen(endpoint: str, met: Callable[[Wire], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    """Await `met` for whoever connects; returns how to stop. ConfigError, RankError if nobody can listen there."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await met(StreamWire(reader, writer))

    scheme, host, port = split_endpoint(endpoint)
    if scheme == "memory":
        _in_memory[host] = met

        async def forget() -> None:
            _in_memory.pop(host, None)

        return forget
    if scheme == "unix":  # asyncio would take the path from whoever listens there
        with suppress(OSError):
            _, other = await asyncio.open_unix_connection(host)
            other.transport.abort()
            raise RankError(f"somebody listens for ranks at {endpoint} already")
    try:
        if scheme == "unix":
            server = await asyncio.start_unix_server(accept, host)
        else:
            server = await asyncio.start_server(accept, host, port)
    except OSError as error:
        raise RankError(f"nobody can listen for ranks at {endpoint}: {error}") from error

    async def stop() -> None:
        server.close()

    return stop
