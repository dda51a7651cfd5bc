"""Time series of a run: what is sampled, how it is thinned out, and the page drawn from it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvactors.histogram import Histogram
from kvactors.scenario.pages import (
    POINTS,
    WINDOWS,
    WORST,
    Recorder,
    Recording,
    course,
    durations,
    run_page,
    shares_below,
)
from kvactors.scenario.report import Report
from kvactors.testing.loop import simulate
from tests.support.cache import opened, prompt, serve

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
    """A recording of requests on virtual time, and the cache's statistics at its end."""

    async def run():
        recorder = Recorder(interval)
        async with opened(host=HOST, inline=True) as cache:
            async with recorder.observing(cache):
                for number in range(requests):
                    await serve(cache, f"r{number}", prompt(number % 4, 5))
                    await asyncio.sleep(pause)
            return recorder.recording, cache.statistics()

    return simulate(run, 1)


def test_samples_are_the_statistics():
    recording, statistics = recorded(20)
    series = recording.series
    assert {len(values) for values in series.values()} == {len(recording.seconds)}
    assert recording.seconds == sorted(recording.seconds)
    assert len(recording.seconds) == pytest.approx(20 * 0.02 / 0.05, abs=3)
    for name in ("looked_up", "host_hits", "bytes_to_host", "messages", "tasks"):
        assert series[name] == sorted(series[name])
    last = {name: values[-1] for name, values in series.items()}
    assert last["looked_up"] == statistics.blocks_looked_up == 100
    assert last["device_hits"] == statistics.device_hits
    assert last["host_hits"] == statistics.host_hits > 0
    assert last["bytes_to_device"] == statistics.swapper.bytes_to_device > 0
    assert last["host_full"] == statistics.host.resident / 8
    assert last["leases"] == last["pending"] == 0
    assert sum(one.count for one in recording.histograms.ready.values()) == 20
    assert recording.histograms.load["host"].count > 0


def test_a_long_run_keeps_a_bounded_number_of_samples():
    recording, statistics = recorded(40, interval=0.0005, pause=0.02)
    assert POINTS // 2 <= len(recording.seconds) <= POINTS
    assert {len(values) for values in recording.series.values()} == {len(recording.seconds)}
    assert recording.seconds[0] == 0.0
    assert recording.seconds[-1] == pytest.approx(40 * 0.02, abs=0.2)
    assert recording.series["looked_up"][-1] == statistics.blocks_looked_up


def test_thinning_out_keeps_the_worst_lag():
    recorder = Recorder()
    values = np.random.default_rng(0).random(POINTS).tolist()
    recorder.recording.seconds = list(range(POINTS))
    recorder.recording.series = {name: list(values) for name in ("stored", *WORST)}
    recorder._thin_out()
    for name in WORST:
        assert max(recorder.recording.series[name]) == max(values)
    assert recorder.recording.series["stored"] == values[::2]


def test_rates_and_shares_are_those_of_each_window():
    count = 10 * WINDOWS
    recording = Recording(
        [float(i) for i in range(count)],
        {"a": [3.0 * i for i in range(count)], "b": [12.0 * i for i in range(count)]},
    )
    ends, rates = recording.rates("a")
    assert len(ends) == len(rates) == WINDOWS
    assert rates == pytest.approx([3.0] * WINDOWS)
    ends, shares = recording.shares("a", "b")
    assert len(ends) == len(shares) == WINDOWS // 2
    assert shares == pytest.approx([0.25] * len(shares))
    assert ends[-1] == count - 1


def test_nothing_looked_up_has_no_shares():
    recording = Recording([0.0, 1.0, 2.0], {"a": [0.0] * 3, "b": [0.0] * 3})
    assert recording.shares("a", "b") == ([], [])


def test_blocks_that_were_not_fetched_and_not_stored_have_a_chart():
    recording, _ = recorded(20)
    recording.series["not_fetched_late"][-1] = 3.0
    [chart] = [one for one in course(recording) if one.title.startswith("Blocks not fetched")]
    assert chart.lines == {
        "not fetched late": (recording.seconds, recording.series["not_fetched_late"])
    }


def test_a_page_has_the_figures_the_charts_and_the_settings():
    recording, _ = recorded(20)
    page = run_page(report(), recording, {"device": {"num_blocks": 77}})
    assert len(course(recording)) == 10
    assert page.count("<svg") == 10 + len(durations(recording))
    assert {chart.title.split(",")[0] for chart in durations(recording)} >= {"Acquire", "Loads"}
    assert "&lt;run&gt;" in page
    assert "<run>" not in page
    assert "1234" in page
    assert "num_blocks" in page
    assert "wrong blocks" not in page


def test_durations_are_shares_of_the_operations():
    histogram = Histogram((0.001, 0.01, 0.1))
    for seconds in (0.0005, 0.001, 0.05, 3.0):
        histogram.observe(seconds)
    assert shares_below(histogram, 1e3) == ([1.0, 10.0, 100.0], [0.5, 0.5, 0.75])


def test_wrong_blocks_and_errors_are_marked():
    recording, _ = recorded(2)
    for bad in ({"corrupt_blocks_served": 1}, {"errors": ["a"]}):
        assert "wrong blocks" in run_page(report(**bad), recording, {})
