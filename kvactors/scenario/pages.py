"""Pages of reports: HTML files that need no network. Tables are as on the terminal, charts are SVG.
Charts need matplotlib, extra `[report]`."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from rich.console import Console

from kvactors.cpu_evictor.memory import NOT_FETCHED, NOT_STORED
from kvactors.histogram import Histogram
from kvactors.scenario.output import need, print_details, write_output
from kvactors.scenario.recorder import Recording
from kvactors.scenario.report import Report, print_report
from kvactors.scenario.sweep_report import SweepReport, print_sweep, unit_of

Lines: TypeAlias = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""By name, the x and the y values of each point."""

INCHES = (7.2, 3.2)
COLORS = ("#0b6e99", "#d9730d", "#448361", "#9065b0", "#c14c8a", "#787774")
"""Of the lines in their order: distinguishable in grey and with the common colour blindnesses."""

STYLE: Any = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9.0,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: a page can be searched
    "svg.hashsalt": "kvactors",  # equal reports are equal files
}
CSS = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 74rem; padding: 0 1rem; }
pre { overflow: auto; font-size: 13px; line-height: 1.2; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(32rem, 100%), 1fr)); }
svg { width: 100%; height: auto; max-width: 46rem; }
"""


class Chart(NamedTuple):
    """Lines over one axis.

    Attributes:
        stacked: whether the lines are drawn as areas on top of each other. All lines then have the
            same x values.
    """

    title: str
    x_label: str
    y_label: str
    lines: Lines
    log_x: bool = False
    stacked: bool = False
    steps: bool = False
    top: float | None = None


def check_charts() -> None:
    """Raise ConfigError if charts cannot be drawn here."""
    need("matplotlib.figure", "a report with charts needs matplotlib", "report")


def svg_of(chart: Chart) -> str:
    """The chart as an `<svg>` element."""
    text = _drawn(chart, "svg").decode()
    return text[text.index("<svg") :]


def write_png(chart: Chart, path: str | Path) -> None:
    """Write the chart as a PNG, to standard output if the path is `-`."""
    write_output(_drawn(chart, "png"), path)


def _drawn(chart: Chart, form: str) -> bytes:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    found = io.BytesIO()
    with rc_context(STYLE):
        figure = Figure(figsize=INCHES, layout="constrained")
        axes = figure.subplots()
        if chart.stacked:
            x = next((x for x, _ in chart.lines.values()), ())
            heights = [y for _, y in chart.lines.values()]
            axes.stackplot(x, *heights, labels=list(chart.lines), colors=COLORS, alpha=0.8)
        else:
            style = "steps-post" if chart.steps else "default"
            for position, (name, (x, y)) in enumerate(chart.lines.items()):
                color = COLORS[position % len(COLORS)]
                axes.plot(x, y, label=name, color=color, linewidth=1.5, drawstyle=style)
        axes.set_title(chart.title, loc="left")
        axes.set(xlabel=chart.x_label, ylabel=chart.y_label, ylim=(0, chart.top))
        if chart.log_x:
            axes.set_xscale("log")
        if len(chart.lines) > 1:
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        figure.savefig(
            found, format=form, dpi=150, metadata={"Date": None} if form == "svg" else {}
        )
    return found.getvalue()


def write_page(page: str, path: str | Path) -> None:
    """Write a page, to standard output if the path is `-`."""
    write_output(page.encode(errors="replace"), path)


def _page(title: str, printed: Callable[[Console], object], charts: Iterable[str], end: str) -> str:
    """A page: what is printed on a console, the charts, and further HTML."""
    console = Console(file=io.StringIO(), record=True, width=140)
    printed(console)
    tables = console.export_html(code_format="<pre>{code}</pre>", inline_styles=True)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>\n<body><h1>{escape(title)}</h1>"
        f"{tables}{''.join(charts)}{end}</body></html>\n"
    )


def _charts(heading: str, charts: Sequence[Chart], remark: str = "") -> str:
    drawn = "".join(map(svg_of, charts))
    return f'<h2>{heading}</h2><p>{remark}</p><div class="charts">{drawn}</div>'


# -- runs and replays


def run_page(report: Report, recording: Recording | None, settings: Mapping[str, Any]) -> str:
    """The page of a run or a replay."""

    def printed(console: Console) -> None:
        if report.errors or report.corrupt_blocks_served:
            console.print("errors or wrong blocks: see the table", style="bold red")
        print_report(report, console)
        if report.serving:
            print_details(
                "On the cache, without a cache, and with an exact LRU of the same sizes whose "
                "loads take no time. Seconds are those of the trace's clock.",
                console,
            )

    charts = ["<h2>Course of the run</h2><p>Not recorded: the run had several processes.</p>"]
    if recording is not None and len(recording.seconds) > 1:
        shares = "Each line is the share of the operations that took at most so long."
        charts = [
            _charts("Course of the run", course(recording)),
            _charts("Durations and ages", durations(recording), shares),
        ]
    text = msgspec.json.format(msgspec.json.encode(settings), indent=2).decode()
    return _page(report.name, printed, charts, f"<h2>Settings</h2><pre>{escape(text)}</pre>")


def course(recording: Recording) -> list[Chart]:
    """The charts over time."""
    time, series = recording.seconds, recording.series

    def at(**names: str) -> Lines:
        return {label.replace("_", " "): (time, series[name]) for label, name in names.items()}

    def rate(scale: float = 1.0, **names: str) -> Lines:
        rates = {label: recording.rates(name) for label, name in names.items()}
        return {
            label.replace("_", " "): (ends, [one / scale for one in values])
            for label, (ends, values) in rates.items()
        }

    def full(name: str, size: float) -> tuple[Sequence[float], Sequence[float]]:
        return time, [value / size if size else 0.0 for value in series[name]]

    hits = {
        tier: recording.shares(f"{tier}_hits", "looked_up")
        for tier in ("device", "host", "storage")
    }
    occupied = {
        "device": full("device_used", recording.device_blocks),
        "host": full("host_used", recording.host_slots),
    }
    missed = at(**{name: name for name in (*NOT_FETCHED, *NOT_STORED) if series[name][-1]})
    bytes_moved = rate(
        1e6,
        device_to_host="bytes_to_host",
        host_to_device="bytes_to_device",
        written="bytes_written",
        read="bytes_read",
    )
    requests = at(running="leases", waiting="waiting")
    lags = at(lag="lag_ms", without_waits_for_a_core="own_lag_ms")
    x = "seconds"
    charts = [
        Chart("Hit rate by tier", x, "share of blocks", hits, stacked=True, top=1.0),
        Chart("Occupancy", x, "share of the tier", occupied, top=1.05),
        Chart("Objects in the store", x, "blocks", at(store="stored")),
        Chart("Blocks not fetched and not stored", x, "blocks", missed),
        Chart("Requests", x, "requests", requests, steps=True),
        Chart("Bandwidth", x, "MB/s", bytes_moved),
        Chart("Changes not yet taken by sinks", x, "blocks", at(pending="pending")),
        Chart("Age of the oldest such change", x, "seconds", at(age="pending_age_s")),
        Chart("Flush tasks delivered", x, "tasks/s", rate(delivered="tasks")),
        Chart("Messages between actors", x, "messages/s", rate(messages="messages")),
        Chart("Worst lag of the event loop", x, "ms", lags),
    ]
    return [chart for chart in charts if chart.lines]


def durations(recording: Recording) -> list[Chart]:
    """The charts of durations of operations and ages of blocks, without those that have no
    values."""
    found = recording.histograms
    if found is None:
        return []
    ages = {
        "lifetime": found.lifetime,
        "idle before eviction": found.idle,
        "reuse gap": found.gap,
    }
    groups: dict[str, Mapping[str, Histogram]] = {
        "Acquire, by the tier of the deepest hit": found.acquire,
        "From acquire until ready, by tier": found.ready,
        "Loads, by tier": found.load,
        "Copies": found.transfer_seconds,
        "Offloads and saves": {"offload": found.offload, "save": found.save},
        "Flush, by sink": found.flush,
        "Ages of device blocks": ages,
    }
    charts = []
    for title, histograms in groups.items():
        unit, scale, what = ("ms", 1e3, "operations")
        if histograms is ages:
            unit, scale, what = ("seconds", 1.0, "blocks")
        lines = {name: shares_below(one, scale) for name, one in histograms.items() if one.count}
        charts.append(Chart(title, unit, f"share of {what}", lines, log_x=True, top=1.02))
    return [chart for chart in charts if chart.lines]


def shares_below(histogram: Histogram, scale: float) -> tuple[list[float], list[float]]:
    """The bounds, scaled, and the share of the values up to each. Values above the last bound are
    missing from the end."""
    shares = np.cumsum(histogram.counts[:-1]) / histogram.count
    return [bound * scale for bound in histogram.bounds], [float(share) for share in shares]


# -- sweeps


def sweep_page(report: SweepReport) -> str:
    """The page of a sweep."""
    remark = (
        "Share of the looked-up blocks that one cache of this size hits. Exclusive LRU tiers hit "
        "together like one cache of the sum of their sizes, inclusive ones like one of the "
        "largest. The offline optimum evicts the block whose next use is farthest."
    )
    charts = [_charts("Hit rate by size", [sweep_chart(report)], remark)]

    def printed(console: Console) -> None:
        print_sweep(report, console, rows=len(report.points))

    return _page(f"Sweep of {report.trace}", printed, charts, "")


def sweep_chart(report: SweepReport) -> Chart:
    """Hit rate against the size of one tier."""
    unit, per_block = "blocks", 1.0
    if report.block_bytes is not None:
        unit, size = unit_of(report.block_bytes * report.distinct_blocks)
        per_block = report.block_bytes / size
    x = [point.blocks * per_block for point in report.points]
    retain = [point.retain for point in report.points if point.retain is not None]
    lines = {
        "LRU": (x, [point.hit_rate for point in report.points]),
        **({"RETAIN": (x, retain)} if retain else {}),
        "offline optimum": (x, [point.optimum for point in report.points]),
        "most possible": (x, [report.most] * len(x)),
    }
    return Chart(f"Hit rate by cache size: {report.trace}", unit, "hit rate", lines, log_x=True)
