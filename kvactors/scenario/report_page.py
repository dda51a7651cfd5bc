"""The page of a run or a replay: its figures, its course, its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np

from kvactors.charts import Chart
from kvactors.cpu_evictor.memory import NOT_FETCHED, NOT_STORED
from kvactors.histogram import Histogram
from kvactors.page import Section, Tile, make_page
from kvactors.scenario.recorder import Recording
from kvactors.scenario.report import Report, report_rows, serving_rows

TIERS = ("device", "host", "storage")
MEGABYTE = 1e6

Lines: TypeAlias = dict[str, tuple[Sequence[float], Sequence[float]]]


def run_page(report: Report, recording: Recording | None, settings: Mapping[str, Any]) -> str:
    """The page as HTML.

    Args:
        report: of the run.
        recording: the course of the run, None if it was not recorded: a run in several processes.
        settings: of the cache and the run.
    """
    hits = report.hit_rate
    tiles = [
        Tile("requests", f"{report.requests:,}"),
        Tile("hit rate", f"{hits['total']:.1%}"),
        *[Tile(f"{tier} hits", f"{hits[tier]:.1%}") for tier in TIERS],
        Tile("blocks verified", f"{report.verified_blocks:,}"),
        Tile(
            "wrong blocks", f"{report.corrupt_blocks_served}", bad=report.corrupt_blocks_served > 0
        ),
        Tile("errors", f"{len(report.errors)}", bad=bool(report.errors)),
        Tile("seconds", f"{report.wall_s:.1f}"),
    ]
    sections = [Section("Summary", rows=report_rows(report), text_cells=True)]
    if report.serving:
        sections.append(
            Section(
                "Serving loop",
                "On the cache, without a cache, and with an exact LRU of the same sizes whose "
                "loads take no time. Seconds are those of the trace's clock.",
                columns=["", *report.serving],
                rows=serving_rows(report.serving),
            )
        )
    if recording is not None and len(recording.seconds) > 1:
        sections.append(Section("Course of the run", charts=course(recording)))
        sections.append(
            Section(
                "Durations and ages",
                "Each line is the share of the operations that took at most so long.",
                charts=durations(recording),
            )
        )
    else:
        sections.append(
            Section("Course of the run", "Not recorded: the run had several processes.")
        )
    text = msgspec.json.format(msgspec.json.encode(settings), indent=2).decode()
    sections.append(
        Section("Settings", "Settings that have their defaults are left out.", code=text)
    )
    return make_page(report.name, "A report of kvactors.", tiles, sections)


def course(recording: Recording) -> list[Chart]:
    """The charts over time."""
    time = recording.seconds
    series = recording.series

    def at(**names: str) -> Lines:
        return {label.replace("_", " "): (time, series[name]) for label, name in names.items()}

    def rate(scale: float = 1.0, **names: str) -> Lines:
        found: Lines = {}
        for label, name in names.items():
            ends, rates = recording.rates(name)
            found[label.replace("_", " ")] = (ends, [one / scale for one in rates])
        return found

    hits = {tier: recording.shares(f"{tier}_hits", "looked_up") for tier in TIERS}
    full = {
        "device": (time, shares_of(series["device_used"], recording.device_blocks)),
        "host": (time, shares_of(series["host_used"], recording.host_slots)),
    }
    missed = {name: name for name in (*NOT_FETCHED, *NOT_STORED) if series[name][-1]}
    seconds = "seconds"
    return [
        Chart("Hit rate by tier", seconds, "share of blocks", hits, stacked=True, top=1.0),
        Chart("Occupancy", seconds, "share of the tier", full, top=1.05),
        Chart("Objects in the store", seconds, "blocks", at(store="stored")),
        *(
            [Chart("Blocks not fetched and not stored", seconds, "blocks", at(**missed))]
            if missed
            else []
        ),
        Chart("Requests", seconds, "requests", at(running="leases", waiting="waiting"), steps=True),
        Chart(
            "Bandwidth",
            seconds,
            "MB/s",
            rate(
                MEGABYTE,
                device_to_host="bytes_to_host",
                host_to_device="bytes_to_device",
                written="bytes_written",
                read="bytes_read",
            ),
        ),
        Chart("Changes not yet taken by sinks", seconds, "blocks", at(pending="pending")),
        Chart("Age of the oldest such change", seconds, "seconds", at(age="pending_age_s")),
        Chart("Flush tasks delivered", seconds, "tasks/s", rate(delivered="tasks")),
        Chart("Messages between actors", seconds, "messages/s", rate(messages="messages")),
        Chart(
            "Worst lag of the event loop",
            seconds,
            "ms",
            at(lag="lag_ms", without_waits_for_a_core="own_lag_ms"),
        ),
    ]


def durations(recording: Recording) -> list[Chart]:
    """The charts of durations of operations and ages of blocks, without those that have no
    values."""
    found = recording.histograms
    if found is None:
        return []
    groups: list[tuple[str, Mapping[str, Histogram], float, str]] = [
        ("Acquire, by the tier of the deepest hit", found.acquire, 1e3, "ms"),
        ("From acquire until ready, by tier", found.ready, 1e3, "ms"),
        ("Loads, by tier", found.load, 1e3, "ms"),
        ("Copies", found.transfer_seconds, 1e3, "ms"),
        ("Offloads and saves", {"offload": found.offload, "save": found.save}, 1e3, "ms"),
        ("Flush, by sink", found.flush, 1e3, "ms"),
        (
            "Ages of device blocks",
            {
                "lifetime": found.lifetime,
                "idle before eviction": found.idle,
                "reuse gap": found.gap,
            },
            1.0,
            "seconds",
        ),
    ]
    charts = []
    for title, histograms, scale, unit in groups:
        lines = {name: shares_below(one, scale) for name, one in histograms.items() if one.count}
        if lines:
            share = "share of operations" if unit == "ms" else "share of blocks"
            charts.append(Chart(title, unit, share, lines, log_x=True, top=1.02))
    return charts


def shares_below(histogram: Histogram, scale: float) -> tuple[list[float], list[float]]:
    """The bounds, scaled, and the share of the values up to each. Values above the last bound are
    missing from the end."""
    shares = np.cumsum(histogram.counts[:-1]) / histogram.count
    return [bound * scale for bound in histogram.bounds], [float(share) for share in shares]


def shares_of(values: Sequence[float], size: float) -> list[float]:
    """The values as shares of a size. All 0 if the size is 0."""
    return [value / size if size else 0.0 for value in values]
