"""A TCP proxy that cuts connections and partitions networks on command."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio

from kvactors.testing.faults import Fault
from tests.chaos.record import reached


class Proxy:
    """target: a port of this machine. port: where the proxy listens. parted: nothing flows and no
    side is notified, and connections are still taken."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        self.parted = False
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def endpoint(self) -> str:
        """As ZMQ names it."""
        return f"tcp://127.0.0.1:{self.port}"

    def cut(self) -> int:
        """Drop every connection at once, on both sides. Returns how many ends there were."""
        ends = len(self._writers)
        for writer in self._writers:
            writer.transport.abort()
        return ends

    async def inject(self, fault: Fault) -> None:
        """See `Injectable`: link_cut, link_silent."""
        if fault.kind == "link_cut":
            self.cut()
        elif fault.kind == "link_silent":
            self.parted = True
        else:
            raise ValueError(f"{fault.kind} is no fault of a connection")

    async def recover(self, fault: Fault) -> None:
        """See `Injectable`."""
        self.parted = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Proxy]:
        """It listens while the block runs."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = int(server.sockets[0].getsockname()[1])
        try:
            yield self
        finally:
            server.close()
            self.parted = False
            self.cut()
            with anyio.CancelScope(shield=True):
                await reached(lambda: not self._writers, 1.0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            self._drop(writer)
            return
        self._writers.add(far_writer)
        try:
            await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        finally:
            self._drop(writer)
            self._drop(far_writer)

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(1 << 16):
                await reached(lambda: not self.parted, float("inf"))
                target.write(data)
                await target.drain()
        target.transport.abort()

    def _drop(self, writer: asyncio.StreamWriter) -> None:
        self._writers.discard(writer)
        writer.transport.abort()


@asynccontextmanager
async def proxied(endpoint: str) -> AsyncIterator[Proxy]:
    """A running proxy before a tcp endpoint of this machine."""
    async with Proxy(int(endpoint.rpartition(":")[2])).running() as proxy:
        yield proxy
