"""The course of a run: what is sampled, how it is thinned out, and the page drawn from it."""

from __future__ import annotations

import asyncio
import re
import sys
from functools import partial

import pytest

from kvactors.histogram import Histogram
from kvactors.scenario import pages
from kvactors.scenario.pages import (
    LAG,
    LOOKED_UP,
    OWN_LAG,
    POINTS,
    WINDOWS,
    Panel,
    Recorder,
    Watching,
    distributions,
    increase,
    run_page,
    shares_below,
)
from kvactors.scenario.report import TIERS, Event, Expectation, Report
from kvactors.scenario.runner import run_scenario
from kvactors.testing.loop import simulate
from tests.scenario.test_runner import CHAT
from tests.support.cache import opened, prompt, serve

LOOKED = (LOOKED_UP,)
HOST = {"slots": 8, "transit_slots": 16}


def report(**changes):
    rates = {"device": 0.5, "host": 0.25, "storage": 0.0, "total": 0.75}
    fields = {
        "name": "<run>",
        "requests": 1234,
        "rejected": 0,
        "no_room": 0,
        "blocks_looked_up": 8,
        "hit_rate": rates,
        "verified_blocks": 6,
        "corrupt_blocks_served": 0,
        "flush": {"pending": 0},
        "loop_lag_ms": {"p50": 0.1},
        "messages": 3,
        "wall_s": 1.5,
        "errors": [],
    }
    return Report(**(fields | changes))


def recorded(requests, interval=0.05, pause=0.02):
    """The recorder of requests on virtual time, and the cache's statistics at its end."""

    async def run():
        recorder = Recorder(interval)
        async with opened(host=HOST, inline=True) as cache:
            async with recorder.observing(cache):
                for number in range(requests):
                    await serve(cache, f"r{number}", prompt(number % 4, 5))
                    await asyncio.sleep(pause)
            return recorder, cache.statistics()

    return simulate(run, 1)


def test_samples_are_the_metrics():
    recorder, statistics = recorded(20)
    assert recorder.seconds == sorted(recorder.seconds)
    assert len(recorder.seconds) == pytest.approx(20 * 0.02 / 0.05, abs=3)
    last = recorder.samples[-1]
    assert last["kv_block_queries",] == statistics.blocks_looked_up == 100
    assert last["kv_block_hits", "host"] == statistics.host_hits > 0
    assert last["kv_offload_total_bytes", "host_to_device"] == statistics.swapper.bytes_to_device
    assert last["kv_cache_usage_perc", "host"] == statistics.host.resident / 8
    histograms = recorder.last.watch.histograms
    assert sum(one.count for one in histograms.ready.values()) == 20
    charts = {chart.title: chart for chart in recorder.course()}
    assert set(charts["Hit rate by tier"].lines) == {"host"}, "no line of zeros"
    assert max(charts["Hit rate by tier"].lines["host"][1]) <= 1
    assert set(charts["Occupancy"].lines) == {"device", "host"}
    assert "Blocks not fetched" not in charts
    assert {"acquire_seconds", "load_seconds", "kv_offload_size"} <= {
        chart.title for chart in distributions(recorder.last)
    }


def test_a_long_run_keeps_a_bounded_number_of_samples():
    recorder, statistics = recorded(40, interval=0.0005, pause=0.02)
    assert POINTS // 2 <= len(recorder.seconds) == len(recorder.samples) <= POINTS
    assert recorder.seconds[0] == 0.0
    assert recorder.seconds[-1] == pytest.approx(40 * 0.02, abs=0.2)
    assert recorder.samples[-1]["kv_block_queries",] == statistics.blocks_looked_up


def test_thinning_out_keeps_the_worst_lag():
    recorder = Recorder()
    recorder.seconds = [0.0, 1.0, 2.0]
    recorder.samples = [{LAG: lag, OWN_LAG: lag / 2, ("a",): lag} for lag in (1.0, 5.0, 2.0)]
    recorder._thin_out()
    assert recorder.seconds == [0.0, 2.0]
    assert recorder.samples == [
        {LAG: 5.0, OWN_LAG: 2.5, ("a",): 1.0},
        {LAG: 2.0, OWN_LAG: 1.0, ("a",): 2.0},
    ]


def test_an_increase_is_that_of_each_window():
    count = 10 * WINDOWS
    ends, shares = increase([3.0 * i for i in range(count)], [12.0 * i for i in range(count)])
    assert len(ends) == len(shares) == WINDOWS
    assert shares == pytest.approx([0.25] * WINDOWS)
    assert ends[-1] == count - 1
    assert increase([0.0] * 3, [0.0] * 3) == ([], [])  # nothing was looked up


def test_a_gauge_is_shown_by_its_means():
    recorder = Recorder()
    recorder.seconds = [0.0, 1.0, 2.0, 3.0]
    recorder.samples = [{("a",): value, LOOKED: 0.0} for value in (0.0, 4.0, 2.0, 0.0)]
    panel = Panel("gauge", "requests", ("a",), "mean")
    assert recorder._line(("a",), panel) == ([1.0, 2.0, 3.0], [4.0, 2.0, 0.0])


def test_shares_are_of_the_values_up_to_each_bound():
    histogram = Histogram((0.001, 0.01, 0.1))
    for seconds in (0.0005, 0.001, 0.05, 3.0):
        histogram.observe(seconds)
    assert shares_below(histogram) == ([0.001, 0.01, 0.1], [0.5, 0.5, 0.75])


def test_a_page_has_the_figures_the_charts_and_the_settings(monkeypatch):
    recorder, _ = recorded(20)
    seconds = dict.fromkeys(("p50", "p90", "p99"), 0.5)
    figures = dict.fromkeys(("first_token_s", "queue_s", "request_s"), seconds)
    proof = report(
        description="what it proves",
        expectations=[Expectation("requests", 1234, "at least 3", holds=True)],
        events=[Event(1.0, "sink a: down")],
        serving={"cache": figures, "none": figures},
    )
    monkeypatch.setattr(sys, "argv", ["kvactors", "run", "chat.toml"])
    draw = pages.svg_of

    def bandwidth_alone(chart):  # each takes a fraction of a second
        return draw(chart) if chart.title == "Bandwidth" else f"<svg>{chart.title}</svg>"

    monkeypatch.setattr(pages, "svg_of", bandwidth_alone)
    page = run_page(proof, [recorder], {"device": {"num_blocks": 77}})
    assert page.count("<svg") == len(recorder.course()) + len(distributions(recorder.last)) + 3
    for text in ("&lt;run&gt;", "1,234", "num_blocks", "Bandwidth"):
        assert text in page
    for text in ("what it proves", "at least 3", "1 of 1 expectations hold", "sink a: down"):
        assert text in page
    for text in ("<code>kvactors run chat.toml<", "Python 3", "With and without the cache"):
        assert text in page
    assert "<run>" not in page
    assert "wrong blocks" not in page
    monkeypatch.setattr(pages, "svg_of", lambda _: "")
    for bad in ({"corrupt_blocks_served": 1}, {"errors": ["a"]}):
        assert "wrong blocks" in run_page(report(**bad), [recorder], {})


def page_of_caches(tmp_path, monkeypatch, storage, process):
    """The report of a run on several caches, the text of its page, and its charts."""
    charts = []
    monkeypatch.setattr(pages, "svg_of", lambda chart: charts.append(chart) or "")
    # A line needs two samples between which blocks were looked up: a fast machine ends the run
    # within a few of the usual intervals.
    monkeypatch.setattr(pages, "Recorder", partial(Recorder, 0.001))
    watching = Watching(html=tmp_path / "page.html")
    storage = {**storage, "write_policy": "write_through", "timeout_s": 60.0}
    data = {**CHAT, "storage": storage, "process": process}
    data["cache"] = {**CHAT["cache"], "default_deadline_s": 60.0}
    data["workload"] = {**CHAT["workload"], "settle": True}
    spec, found = run_scenario(data, observe=watching.observing, record=watching.record)
    assert watching.conclude(found, spec, found.failures()) == 0
    return found, re.sub("<[^>]+>", " ", (tmp_path / "page.html").read_text()), charts


def test_the_page_of_a_fleet_has_the_share_of_each_cache_and_the_total(tmp_path, monkeypatch):
    storage = {"backend": "object", "url": "file:///@temp"}
    found, page, charts = page_of_caches(tmp_path, monkeypatch, storage, {"engines": 2})
    first, second = found.caches.values()
    assert first["written"] > 0 == second["written"], "the first has stored all"
    assert second["read"] > 0
    hits = [sum(one[tier] for tier in TIERS) for one in (first, second)]
    for count in hits:
        assert f"{count:,}  {count / sum(hits):.1%}" in re.sub(r"\s+", "  ", page)
    assert re.search(rf"total\s+{first['requests'] + second['requests']}\s", page)
    each = {chart.title: chart.lines for chart in charts}
    assert list(each["Hit rate: device"]) == ["engine 1", "engine 2"]
    assert "Course of engine 2" in page


def test_the_page_of_a_restart_has_its_time_and_what_came_back(tmp_path, monkeypatch):
    storage = {"backend": "file", "directory": "@temp"}
    found, page, charts = page_of_caches(tmp_path, monkeypatch, storage, {"restarts": 1})
    opened = found.events[1]
    assert re.fullmatch(r"run 2: opened, [1-9]\d* blocks in the store", opened.what)
    assert str(opened) in page
    assert found.caches["run 2"]["storage"] > found.caches["run 1"]["storage"]
    both = next(chart for chart in charts if chart.title == "Hit rate: device")
    assert both.marks == [one.at for one in found.events]
    (earlier, _), (later, _) = both.lines.values()
    assert max(earlier) <= opened.at <= max(later)
