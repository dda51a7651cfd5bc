"""Traces keep the rules of the Trace Event Format, as a reader of such files depends on them."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import kvactors
from kvactors.cli import main
from kvactors.observe.chrome_trace import ChromeTrace
from kvactors.observe.tracing import SpanWatch
from kvactors.testing.loop import simulate
from tests.cache.test_degraded import HOST, STORE, fail, requests
from tests.support.cache import opened, prompt

SCENARIO = """
[scenario]
name = "traced"
[cache]
block_size = 16
[device]
num_blocks = 256
[layout]
num_layers = 1
num_kv_heads = 1
head_dim = 8
[host]
slots = 16
[workload]
sessions = 4
turns = 2
"""


def check(page):
    """Raise AssertionError for the first rule that is broken. Returns events by phase."""
    found, stacks, slices, last = defaultdict(list), defaultdict(list), defaultdict(list), 0
    assert page["displayTimeUnit"] in ("ms", "ns")
    for event in page["traceEvents"]:
        found[event["ph"]].append(event)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert set(event) <= FIELDS
        assert event["name"]
        if event["ph"] == "M":
            assert event["args"]["name"]
            continue
        assert event["ts"] >= last
        last = event["ts"]
        match event["ph"]:
            case "X":
                assert event["dur"] >= 0
                slices[event["tid"]].append((last, last + event["dur"]))
            case "b":
                stacks[event["cat"], event["id"]].append(event["name"])
            case "e":
                assert stacks[event["cat"], event["id"]].pop() == event["name"]
            case phase:
                assert phase in ("s", "f", "i")
    assert not any(stacks.values())
    for track, spans in slices.items():
        for (_, end), (begin, _) in itertools.pairwise(spans):
            assert begin >= end, track  # slices of a track do not overlap
    starts = Counter(event["id"] for event in found["s"])
    assert max(starts.values()) == 1
    assert all(starts[event["id"]] == 1 for event in found["f"])  # an arrow that ends has begun
    for arrow in (*found["s"], *found["f"]):  # and both ends are in a slice
        assert any(b <= arrow["ts"] <= e for b, e in slices[arrow["tid"]]), arrow
    named = {e["tid"] for e in found["M"] if e["name"] == "thread_name"}
    assert {e["tid"] for e in page["traceEvents"]} <= named
    return found


FIELDS = {*("ph", "pid", "tid", "ts", "dur", "name", "cat", "id", "args", "bp", "s")}


def recorded(tmp_path, work, **options):
    trace = ChromeTrace(**options)

    async def run():
        async with opened(inline=True, host=HOST, storage=STORE) as cache, trace.observing(cache):
            await work(cache)
            await cache.wait_idle()

    simulate(run, 1)
    file = tmp_path / "trace.json"
    trace.write(file)
    return json.loads(file.read_text())


def test_a_trace_has_a_track_for_each_actor_arrows_and_nested_requests(tmp_path):
    async def work(cache):
        await requests(cache, 1, 2, 1)

    page = recorded(tmp_path, work)
    found = check(page)
    tracks = {e["args"]["name"] for e in found["M"] if e["name"] == "thread_name"}
    assert tracks >= {"callers", "prefix_index", "cpu_evictor", "gpu_swapper", "flush_notifier"}
    kinds = {e["cat"] for e in found["b"]}
    assert kinds >= {"request", "copy", "write", "offload", "save", "flush", "load"}
    names = Counter(e["name"] for e in found["b"] if e["cat"] == "request")
    assert names["request request 1"] == 2
    assert names["acquire"] == 3
    assert names["load"] > 0
    assert len(found["s"]) >= len(found["f"]) > 50
    assert any(e["args"].get("lease") for e in found["X"] if e["cat"] == "turn")


def test_a_failure_is_marked_and_leaves_the_trace_whole(tmp_path):
    async def work(cache):
        for victim in ("index", "evictor", "notifier"):
            await requests(cache, 1, 2)
            await fail(cache, victim, 1)
        await requests(cache, 3)

    found = check(recorded(tmp_path, work))
    assert len(found["i"]) == 3


def test_a_trace_is_bounded(tmp_path):
    async def work(cache):
        await requests(cache, 1, 2, 3)

    page = recorded(tmp_path, work, limit=100)
    assert len([e for e in page["traceEvents"] if e["ph"] != "M"]) <= 100
    assert page["otherData"]["left_out"] > 100


def test_the_command_writes_a_trace(tmp_path, capsys):
    scenario, out = tmp_path / "s.toml", tmp_path / "trace.json"
    scenario.write_text(SCENARIO)
    with pytest.raises(SystemExit) as ended:
        main(["run", str(scenario), "--trace", str(out)])
    assert ended.value.code == 0, capsys.readouterr()
    found = check(json.loads(out.read_text()))
    requests_ = [e for e in found["b"] if e["name"].startswith("request ")]
    assert len(requests_) == 8


# -- OpenTelemetry spans


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


def test_neither_traces_nor_spans_hold_tokens_or_salts(tmp_path):
    async def work(cache):
        async with await cache.acquire("r", [987_654_321] * 20, salt="tenant-secret") as lease:
            await lease.wait_ready()
            await lease.commit(20)

    text = "".join(span.to_json() for span in spans_of(work, host=HOST, storage=STORE))
    text += json.dumps(recorded(tmp_path, work))
    assert "987654321" not in text
    assert "tenant-secret" not in text
