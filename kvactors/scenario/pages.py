"""The page of a run or a replay: its figures, its course, its settings."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from kvactors.cpu_evictor.statistics import NOT_FETCHED, NOT_STORED
from kvactors.errors import ConfigError
from kvactors.histogram import Histogram
from kvactors.scenario.output import write_output
from kvactors.scenario.recorder import Recording
from kvactors.scenario.report import Report, report_rows, serving_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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


# -- pages


CSS = """
:root { color-scheme: light; --line: #d8dee4; --ink: #1f2328; --dim: #59636e; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); margin: 2rem auto;
  max-width: 74rem; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p { color: var(--dim); margin: .2rem 0 .8rem; max-width: 60rem; }
.charts { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(32rem, 100%), 1fr)); }
figure { margin: 0; max-width: 46rem; border: 1px solid var(--line); border-radius: 6px;
  padding: .5rem; }
figure svg { width: 100%; height: auto; }
.tiles { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1rem 0; }
.tile { border: 1px solid var(--line); border-radius: 6px; padding: .5rem .9rem; }
.tile b { display: block; font-size: 1.3rem; } .tile span { color: var(--dim); }
.tile.bad b { color: #b42318; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .8rem .25rem 0; text-align: right; }
th:first-child, td:first-child, .text td { text-align: left; white-space: pre-line; }
pre { background: #f6f8fa; border-radius: 6px; overflow: auto; padding: .8rem; }
@media print { figure { break-inside: avoid; } }
"""


class Tile(NamedTuple):
    """One figure at the top of a page. bad: whether it is drawn as a failure."""

    name: str
    value: str
    bad: bool = False


class Section(NamedTuple):
    """A part of a page.

    Attributes:
        heading: of the part.
        text: a remark below the heading, empty for none.
        charts: drawn beside each other.
        columns: headings of the table, empty without one.
        rows: cells of the table.
        text_cells: whether the cells are text, which is aligned to the left.
        code: shown as it is, in a fixed width, empty for none.
    """

    heading: str
    text: str = ""
    charts: Sequence[Chart] = ()
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    text_cells: bool = False
    code: str = ""


def make_page(title: str, text: str, tiles: Iterable[Tile], sections: Iterable[Section]) -> str:
    """The page as HTML.

    Args:
        title: of the page.
        text: a remark below it.
        tiles: figures at the top.
        sections: the parts in their order.
    """
    shown = "".join(
        f'<div class="tile{" bad" if tile.bad else ""}"><b>{escape(tile.value)}</b>'
        f"<span>{escape(tile.name)}</span></div>"
        for tile in tiles
    )
    parts = "".join(_section(section) for section in sections)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>\n<body><h1>{escape(title)}</h1>"
        f'<p>{escape(text)}</p><div class="tiles">{shown}</div>{parts}</body></html>\n'
    )


def write_page(page: str, path: str | Path) -> None:
    """Write a page, to standard output if the path is `-`."""
    write_output(page.encode(errors="replace"), path)


def _section(section: Section) -> str:
    parts = [f"<section><h2>{escape(section.heading)}</h2>"]
    if section.text:
        parts.append(f"<p>{escape(section.text)}</p>")
    if section.charts:
        figures = "".join(f"<figure>{svg_of(chart)}</figure>" for chart in section.charts)
        parts.append(f'<div class="charts">{figures}</div>')
    if section.rows:
        parts.append(_table(section))
    if section.code:
        parts.append(f"<pre>{escape(section.code)}</pre>")
    return "".join([*parts, "</section>"])


def _table(section: Section) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in section.columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in section.rows
    )
    kind = ' class="text"' if section.text_cells else ""
    return f"<table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


# -- charts


INCHES = (7.2, 3.2)
"""Width and height of a chart."""

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


class Chart(NamedTuple):
    """Lines over one axis.

    Attributes:
        title: of the chart.
        x_label: with its unit.
        y_label: with its unit.
        lines: by name, the x and the y values of each point.
        log_x: whether the x axis is logarithmic.
        log_y: whether the y axis is logarithmic.
        stacked: whether the lines are drawn as areas on top of each other. All lines then have the
            same x values.
        steps: whether a value holds from its point to the next.
        top: the end of the y axis, None for one that fits.
    """

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    log_x: bool = False
    log_y: bool = False
    stacked: bool = False
    steps: bool = False
    top: float | None = None


def check_charts() -> None:
    """Raise ConfigError if charts cannot be drawn here."""
    try:
        import matplotlib.figure  # noqa: F401  (whether it is there)
    except ImportError as error:
        raise ConfigError(
            "a report with charts needs matplotlib: pip install 'kvactors[report]'"
        ) from error


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

    with rc_context(STYLE):
        figure = Figure(figsize=INCHES, layout="constrained")
        _draw(chart, figure.subplots())
        return _saved(figure, form)


def _saved(figure: Figure, form: str) -> bytes:
    found = io.BytesIO()
    metadata = {"Date": None} if form == "svg" else None
    figure.savefig(found, format=form, dpi=150, metadata=metadata)
    return found.getvalue()


def _draw(chart: Chart, axes: Axes) -> None:
    if chart.stacked:
        x = next(iter(chart.lines.values()))[0] if chart.lines else ()
        heights = [y for _, y in chart.lines.values()]
        axes.stackplot(x, *heights, labels=list(chart.lines), colors=COLORS, alpha=0.8)
    else:
        style = "steps-post" if chart.steps else "default"
        for position, (name, (x, y)) in enumerate(chart.lines.items()):
            color = COLORS[position % len(COLORS)]
            axes.plot(x, y, label=name, color=color, linewidth=1.5, drawstyle=style)
    axes.set_title(chart.title, loc="left")
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    if chart.log_x:
        axes.set_xscale("log")
    if chart.log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, chart.top)
    if len(chart.lines) > 1:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
