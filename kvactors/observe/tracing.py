"""OpenTelemetry spans of a cache, which need the extra `otel`: acquire, load, offload, save,
copies, reads and writes of the store, and flush."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

try:
    from opentelemetry import context, trace
    from opentelemetry.trace import Span, Status, StatusCode, Tracer, set_span_in_context
except ImportError as error:
    raise ImportError("spans need: pip install '/path/to/kvactors[otel]'") from error

from kvactors.actor.clock import now
from kvactors.observe import OpenCache
from kvactors.observe.operations import Operation, OperationWatch

MAX_REQUESTS = 100_000  # whose spans are open: further ones have none, and their acquires no parent
ROOT = context.Context()  # the context of a span without a parent


class SpanWatch:
    """Makes a span of every operation that has ended, with its real times.

    The span of a request (from its acquire to the end of its lease) is the parent of its acquire
    and its load. Other operations serve several requests, and have no parent.
    """

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = trace.get_tracer("kvactors") if tracer is None else tracer
        self._requests: dict[int, Span] = {}  # by lease
        self._watch = OperationWatch(self._operation)
        self._offset = 0.0

    @asynccontextmanager
    async def observing(self, cache: OpenCache) -> AsyncIterator[SpanWatch]:
        self._offset = time.time() - now()
        self._watch.attach(cache.system)
        try:
            yield self
        finally:
            self._watch.detach(cache.system)
            for span in self._requests.values():
                span.end()
            self._requests.clear()

    def _operation(self, done: Operation) -> None:
        began, ended = self._nanoseconds(done.began), self._nanoseconds(done.ended)
        if done.kind == "acquire":
            self._acquired(done, began, ended)
        elif done.kind == "request":
            if (span := self._requests.pop(done.number, None)) is not None:
                span.end(ended)
        elif done.kind == "ready":
            parent = self._requests.get(done.number)
            if done.granted is not None and parent is not None:
                granted = self._nanoseconds(done.granted)
                self._span("kvactors.load_wait", done, granted, ended, parent)
        else:
            self._span(f"kvactors.{done.kind}", done, began, ended)

    def _acquired(self, done: Operation, began: int, ended: int) -> None:
        parent = None
        if done.ok and len(self._requests) < MAX_REQUESTS:
            parent = self._tracer.start_span(
                "kvactors.request",
                context=ROOT,
                start_time=began,
                attributes={"kvactors.request_id": done.request},
            )
            self._requests[done.number] = parent
        self._span("kvactors.acquire", done, began, ended, parent)

    def _span(
        self, name: str, done: Operation, began: int, ended: int, parent: Span | None = None
    ) -> None:
        span = self._tracer.start_span(
            name,
            context=ROOT if parent is None else set_span_in_context(parent, ROOT),
            start_time=began,
            attributes={"kvactors.blocks": done.blocks, "kvactors.where": done.where},
        )
        if done.tier:
            span.set_attribute("kvactors.tier", done.tier)
        if not done.ok:
            span.set_status(Status(StatusCode.ERROR))
        span.end(ended)

    def _nanoseconds(self, at: float) -> int:
        return round((at + self._offset) * 1e9)
