"""HTTP endpoint of a cache: `/metrics` for Prometheus, `/health` for load balancers, and
`/statistics` as JSON.

The endpoint runs on the cache's event loop. Connections, their time and the renderings a second are
bounded. A thread makes the text of the metrics.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import msgspec

from kvactors.actor.clock import now
from kvactors.actor.log import get_logger
from kvactors.errors import ConfigError
from kvactors.observe import OpenCache
from kvactors.observe.health import health
from kvactors.observe.invariants import in_slices
from kvactors.observe.statistics import TenantStatistics, collect, named_tenants
from kvactors.tables import Unclaimed
from kvactors.threads import DaemonExecutor

if TYPE_CHECKING:
    from kvactors.observe.prometheus import CacheMetrics

log = get_logger()

LOOPBACK = "127.0.0.1"

MAX_CONNECTIONS = 32  # at once: the oldest is closed for a new one
MAX_HEAD_BYTES = 8192  # bytes of a request's head
EXCHANGE_LIMIT_S = 5.0  # seconds of a connection
FRESH_S = 0.25  # seconds for which one rendering answers every request for it


class HttpAnswer(NamedTuple):
    """An HTTP answer."""

    status: int
    body: bytes
    kind: str = "text/plain; charset=utf-8"

    def head(self) -> bytes:
        return (
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}\r\n"
            f"Content-Type: {self.kind}\r\nContent-Length: {len(self.body)}\r\n"
            "Cache-Control: no-store\r\nConnection: close\r\n\r\n"
        ).encode()


class HttpEndpoint:
    """The endpoint of a cache (see `serve_metrics`). port: that it listens on."""

    def __init__(self, metrics: CacheMetrics) -> None:
        self.port = 0
        self._metrics_of = metrics
        self._connections = Unclaimed[asyncio.Task[None]](MAX_CONNECTIONS, asyncio.Task.cancel)
        # by path: the rendering that was begun last, and when
        self._rendered: dict[bytes, tuple[asyncio.Task[HttpAnswer], float]] = {}

    # -- the server

    @asynccontextmanager
    async def serving(self, host: str, port: int) -> AsyncIterator[None]:
        try:
            server = await asyncio.start_server(
                self._connected, host, port, limit=MAX_HEAD_BYTES, backlog=MAX_CONNECTIONS
            )
        except OSError as error:
            raise ConfigError(f"the metrics endpoint cannot bind {host}:{port}: {error}") from error
        self.port = server.sockets[0].getsockname()[1]
        log.info("metrics endpoint open", host=host, port=self.port)
        try:
            yield
        finally:
            server.close()
            tasks = [*self._connections]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task: Any = asyncio.current_task()
        self._connections.add(task)
        # A cancellation closes the connection for a newer one, or with the endpoint.
        gone = (OSError, EOFError, asyncio.LimitOverrunError, asyncio.CancelledError)
        try:
            with suppress(*gone):
                with anyio.fail_after(EXCHANGE_LIMIT_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    answer = await self.answer(head)
                    body = b"" if head.startswith(b"HEAD ") else answer.body
                    writer.transport.set_write_buffer_limits(high=0)
                    writer.write(answer.head() + body)
                    await writer.drain()  # until the client has taken all
        except Exception as error:
            log.error("metrics endpoint failed", error=type(error).__name__)
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    # -- answers

    async def answer(self, head: bytes) -> HttpAnswer:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return HttpAnswer(400, b"not an HTTP/1 request\n")
        method, target = words[0], words[1].split(b"?", 1)[0]
        if method not in (b"GET", b"HEAD"):
            return HttpAnswer(405, b"only GET and HEAD\n")
        if target == b"/health":
            return self._health()
        if target == b"/metrics":
            return await self._shared(target, self._metrics)
        if target == b"/statistics":
            if not self._metrics_of.is_open():
                return HttpAnswer(503, b"no cache is open\n")
            return await self._shared(target, self._statistics)
        return HttpAnswer(404, b"/metrics, /health or /statistics\n")

    async def _shared(self, path: bytes, make: Callable[[], Awaitable[HttpAnswer]]) -> HttpAnswer:
        """The answer that is being made, or is fresh: many requests cost one rendering."""
        task, began = self._rendered.get(path, (None, 0.0))
        if task is None or (task.done() and now() >= began + FRESH_S):
            task = asyncio.ensure_future(make())
            self._rendered[path] = task, now()
        return await asyncio.shield(task)

    async def _metrics(self) -> HttpAnswer:
        from kvactors.observe.prometheus import CONTENT_TYPE

        executor = DaemonExecutor("kvactors-metrics")
        body = await asyncio.wrap_future(executor.submit(self._metrics_of.render))
        return HttpAnswer(200, body, CONTENT_TYPE)

    def _health(self) -> HttpAnswer:
        """200 while requests are served, also without some parts; 503 otherwise."""
        found: dict[str, object] = {"status": "closed", "reasons": []}
        if self._metrics_of.is_open():
            found = health(self._metrics_of.cache.system).as_dict()
        status = 503 if found["status"] in ("failed", "closed") else 200
        return HttpAnswer(status, json.dumps(found).encode() + b"\n", "application/json")

    async def _statistics(self) -> HttpAnswer:
        """`KVCache.statistics` as JSON, with `tenants` that have a named quota."""
        system = self._metrics_of.cache.system
        tenants: dict[str, TenantStatistics] = await in_slices(named_tenants(system))
        found = collect(system).as_dict() | {"tenants": tenants}
        return HttpAnswer(200, msgspec.json.encode(found) + b"\n", "application/json")


@asynccontextmanager
async def serve_metrics(
    cache: OpenCache, port: int = 9464, host: str = LOOPBACK, *, fastdeploy_names: bool = False
) -> AsyncIterator[HttpEndpoint]:
    """Serve `/metrics`, `/health` and `/statistics` of a cache while the block runs. Needs the
    extra `metrics`.

    Args:
        port: 0 for any free one (see `HttpEndpoint.port`).
        host: the address to listen on. There is no authentication: give another address than the
            loopback's only on a network that you trust.
    """
    from kvactors.observe.prometheus import CacheMetrics

    if not host:  # asyncio would listen on every interface
        raise ConfigError(f"the metrics endpoint needs a host, for instance {LOOPBACK}")
    if not 0 <= port <= 65535:
        raise ConfigError(f"the port of the metrics endpoint is 0 to 65535, not {port}")
    metrics = CacheMetrics(cache, fastdeploy_names=fastdeploy_names)
    endpoint = HttpEndpoint(metrics)
    try:
        async with endpoint.serving(host, port):
            yield endpoint
    finally:
        metrics.close()
