"""OpenTelemetry spans: names, times, parents, failures, and no prompts."""

from __future__ import annotations

from collections import Counter

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import kvactors
from kvactors.observe.tracing import SpanWatch
from kvactors.testing.loop import simulate
from tests.cache.test_degraded import HOST, STORE, requests
from tests.support.cache import opened, prompt


def spans_of(work, **options):
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    watch = SpanWatch(provider.get_tracer("test"))

    async def run():
        async with opened(inline=True, **options) as cache, watch.observing(cache):
            await work(cache)
            await cache.wait_idle()

    simulate(run, 1)
    return exporter.get_finished_spans()


def test_requests_are_the_parents_of_their_acquires_and_loads():
    async def work(cache):
        await requests(cache, 1, 2, 1)

    spans = spans_of(work, host=HOST, storage=STORE)
    names = Counter(span.name for span in spans)
    assert names["kvactors.request"] == names["kvactors.acquire"] == 3
    assert names["kvactors.load_wait"] > 0
    for kind in ("load", "offload", "save", "copy", "write", "flush"):
        assert names[f"kvactors.{kind}"] > 0, kind
    by_id = {span.context.span_id: span for span in spans}
    for span in spans:
        assert span.end_time >= span.start_time
        if span.name in ("kvactors.acquire", "kvactors.load_wait"):
            parent = by_id[span.parent.span_id]
            assert parent.name == "kvactors.request"
            assert parent.start_time <= span.start_time
            assert span.end_time <= parent.end_time
        else:
            assert span.parent is None


def test_a_refused_request_is_an_error_and_has_no_parent():
    async def work(cache):
        with pytest.raises(kvactors.NoRoom):
            await cache.acquire("large", prompt(1, 100))

    (span,) = [one for one in spans_of(work) if one.name == "kvactors.acquire"]
    assert not span.status.is_ok
    assert span.parent is None


def test_spans_hold_no_tokens_and_no_salts():
    async def work(cache):
        async with await cache.acquire("r", [987_654_321] * 20, salt="tenant-secret") as lease:
            await lease.wait_ready()
            await lease.commit(20)

    text = "".join(span.to_json() for span in spans_of(work, host=HOST, storage=STORE))
    assert "987654321" not in text
    assert "tenant-secret" not in text
