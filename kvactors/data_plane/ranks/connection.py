"""One connection between a leader and a rank: whole messages, in order, over a socket or, in
simulations, in memory."""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import msgspec

from kvactors.data_plane.ranks.protocol import MOST_BYTES, AnyFrame, Frame

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyFrame] = msgspec.msgpack.Decoder(AnyFrame)


KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""A host that vanished without closing its connections is noticed after 25 seconds."""


class Connection(ABC):
    """One end of a connection.

    Attributes:
        source: where the other end is, for logs.
        limit: bytes of a message at most. A longer one ends the connection.
        violation: the invalid data of the other end, if that ended the connection.
    """

    source = ""
    limit = MOST_BYTES
    violation = ""

    @abstractmethod
    def send(self, message: Frame) -> None:
        """Send without waiting. The message is lost if the connection is."""

    @abstractmethod
    async def receive(self) -> AnyFrame | None:
        """The next message; None when the connection is lost, or when something arrives that is not
        a message."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection at once, in both directions."""

    def _decode(self, body: bytes) -> AnyFrame | None:
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
        """See `Connection`."""
        body = _encoder.encode(message)
        if not self._writer.is_closing():
            self._writer.write(len(body).to_bytes(4, "little") + body)

    async def receive(self) -> AnyFrame | None:
        """See `Connection`."""
        try:
            size = int.from_bytes(await self._reader.readexactly(4), "little")
            if size > self.limit:
                self.violation = (
                    f"a message of {size} bytes, at most {self.limit} are accepted here"
                )
                return None
            return self._decode(await self._reader.readexactly(size))
        except (OSError, asyncio.IncompleteReadError):
            return None

    def close(self) -> None:
        """See `Connection`."""
        with suppress(RuntimeError):  # the loop is closed already
            self._writer.transport.abort()


class MemoryConnection(Connection):
    """One end of a pair in memory.

    Args:
        lag: seconds a message sent from here takes (called for each).
    """

    def __init__(self, lag: Callable[[], float] = lambda: 0.0) -> None:
        self.other: MemoryConnection | None = None
        self._lag = lag
        self._inbox: deque[bytes | None] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._last = 0.0
        self._sent: deque[bytes] = deque()

    @classmethod
    def pair(
        cls, lag: Callable[[], float] = lambda: 0.0
    ) -> tuple[MemoryConnection, MemoryConnection]:
        """Two ends."""
        one, two = cls(lag), cls(lag)
        one.other, two.other = two, one
        return one, two

    def send(self, message: Frame) -> None:
        """See `Connection`. Messages arrive in the order of sending, at any lag."""
        if self.other is not None:
            loop = asyncio.get_running_loop()
            self._last = max(self._last, loop.time() + self._lag())
            self._sent.append(_encoder.encode(message))
            loop.call_at(
                self._last, self._deliver, self.other
            )  # timers of one instant run in any order

    def _deliver(self, other: MemoryConnection) -> None:
        other._put(self._sent.popleft())

    def _put(self, item: bytes | None) -> None:
        self._inbox.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def receive(self) -> AnyFrame | None:
        """See `Connection`."""
        while not self._inbox:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        item = self._inbox.popleft()
        if item is None:
            self._inbox.append(None)
            return None
        if len(item) > self.limit:
            self.violation = (
                f"a message of {len(item)} bytes, at most {self.limit} are accepted here"
            )
            return None
        return self._decode(item)

    def close(self) -> None:
        """See `Connection`."""
        other, self.other = self.other, None
        self._put(None)
        if other is not None:
            other.other = None
            other._put(None)
