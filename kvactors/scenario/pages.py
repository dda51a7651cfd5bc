"""What `run` and `replay` observe and write, and pages of reports: HTML files that need no network.
Tables are as on the terminal, charts are SVG. Charts need matplotlib, extra `[report]`."""

from __future__ import annotations

import asyncio
import io
import os
import platform
import shlex
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import ArrayLike
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvactors.actor.sliced import finish
from kvactors.cache import KVCache
from kvactors.errors import ConfigError
from kvactors.histogram import Histogram
from kvactors.observe.chrome_trace import ChromeTrace
from kvactors.observe.lag import LagMonitor
from kvactors.observe.metrics import FAMILIES, MetricsWatch, Snapshot, take_snapshot
from kvactors.scenario.engine import Observe, beside
from kvactors.scenario.output import need, to_stdout, unbroken, version, write_json, write_output
from kvactors.scenario.report import FIGURES, Report, print_proof, print_summary
from kvactors.scenario.sweep import SweepReport, print_sweep
from kvactors.settings import Config
from kvactors.settings.check import human, in_bytes

# -- the course of a run: metrics, sampled


POINTS = 400
"""Samples kept at most: when there are as many, every second one is dropped and the interval
doubles."""

WINDOWS = 40
"""Windows for which rates and shares are computed, at most. Shorter ones show mostly noise."""

INTERVAL = 0.05
"""Seconds between samples at the start."""

Key: TypeAlias = tuple[str, ...]
"""The name of a metric, and the values of its labels."""

LAG, OWN_LAG = ("lag",), ("lag", "without waits for a core")
"""The worst lag of the loop since the sample before."""

LOOKED_UP = "kv_block_queries"


class Panel(NamedTuple):
    """A chart of metrics over time: of their values, of their means in windows, or of their
    increase in proportion to the time or to the blocks that were looked up."""

    title: str
    unit: str
    metrics: tuple[str, ...]
    shown: Literal["value", "mean", "per second", "share"] = "value"
    scale: float = 1.0
    top: float | None = None


COURSE = (
    Panel("Hit rate by tier", "share of blocks", ("kv_block_hits",), "share", top=1.0),
    Panel("Occupancy", "share of the tier", ("kv_cache_usage_perc",), top=1.05),
    Panel("Blocks by tier", "blocks", ("tier_blocks",)),
    Panel("Blocks not fetched", "blocks", ("blocks_not_fetched",)),
    Panel("Blocks not stored", "blocks", ("blocks_not_stored",)),
    Panel("Requests", "requests", ("num_requests_running", "num_requests_waiting"), "mean"),
    Panel("Bandwidth", "MB/s", ("kv_offload_total_bytes",), "per second", 1e6),
    Panel("Changes not yet taken by sinks", "blocks", ("flush_pending",)),
    Panel("Age of the oldest change not yet taken", "seconds", ("flush_lag_seconds",)),
    Panel("Flush tasks delivered", "tasks/s", ("flush_tasks",), "per second"),
    Panel("Messages of actors", "messages/s", ("actor_turns",), "per second"),
    Panel("Worst lag of the event loop", "ms", ("lag",), scale=1e-3),
)
SAMPLED = {LOOKED_UP, *(name for panel in COURSE for name in panel.metrics)}


class Recorder:
    """Samples the metrics of a cache while `observing`. interval: seconds between samples at the
    start. began: the time of the loop from which seconds count. None: from the first sample."""

    def __init__(self, interval: float = INTERVAL, began: float | None = None) -> None:
        self.seconds: list[float] = []
        self.samples: list[dict[Key, float]] = []
        self.last: Snapshot
        self._interval = interval
        self._lag = LagMonitor()
        self.began = began

    @asynccontextmanager
    async def observing(self, cache: KVCache) -> AsyncIterator[Recorder]:
        """Sample a cache until the block ends, and once more then."""
        if self.began is None:
            self.began = asyncio.get_running_loop().time()
        watch = MetricsWatch(cache.system)
        self._sample(watch)
        watch.attach()
        async with self._lag.running():
            try:
                async with beside(self._run(watch)):
                    yield self
            finally:
                watch.detach()
                self._lag.take()  # what came last is the lag of making the report
                self._sample(watch)

    async def _run(self, watch: MetricsWatch) -> None:
        while True:
            await asyncio.sleep(self._interval)
            self._sample(watch)

    def _sample(self, watch: MetricsWatch) -> None:
        self.last = finish(take_snapshot(watch.system, watch))
        ticks = self._lag.take()
        sample = {
            LAG: max((tick.lag for tick in ticks), default=0.0),
            OWN_LAG: max((tick.own for tick in ticks), default=0.0),
        }
        for family in FAMILIES:
            if family.name in SAMPLED:
                for labels, value in family.read(self.last):
                    sample[family.name, *labels] = float(value)
        self.seconds.append(asyncio.get_running_loop().time() - (self.began or 0.0))
        self.samples.append(sample)
        if len(self.samples) >= POINTS:
            self._thin_out()

    def _thin_out(self) -> None:
        for kept, dropped in zip(self.samples[::2], self.samples[1::2], strict=False):
            for lag in (LAG, OWN_LAG):
                kept[lag] = max(kept[lag], dropped[lag])
        self.samples, self.seconds = self.samples[::2], self.seconds[::2]
        self._interval *= 2

    def course(self, marks: Sequence[float] = ()) -> list[Chart]:
        """The charts over time, without charts that have no lines. marks: seconds of events."""
        marks = [mark for mark in marks if mark >= self.seconds[0]]
        return [
            Chart(panel.title, "seconds", panel.unit, lines, top=panel.top, marks=marks)
            for panel in COURSE
            if (lines := self.lines(panel))
        ]

    def lines(self, panel: Panel) -> Lines:
        """The lines of a panel that are not 0 throughout, of two points or more."""
        lines = {}
        for key in sorted({key for one in self.samples for key in one}):
            if key[0] in panel.metrics and any(one.get(key) for one in self.samples):
                name = " ".join(key[1:]) or key[0].removeprefix("num_").replace("_", " ")
                lines[name] = self._line(key, panel)
        return {name: line for name, line in lines.items() if len(line[0]) > 1}

    def _line(self, key: Key, panel: Panel) -> tuple[list[float], list[float]]:
        values = [one.get(key, 0.0) / panel.scale for one in self.samples]
        if panel.shown == "value":
            return self.seconds, values
        if panel.shown == "mean":  # the increase of the integral over time
            values = np.cumsum(values * np.diff(self.seconds, prepend=0.0)).tolist()
        looked_up = [one[LOOKED_UP,] for one in self.samples]
        ends, rates = increase(values, self.seconds if panel.shown != "share" else looked_up)
        return [self.seconds[end] for end in ends], rates


def increase(values: ArrayLike, of: ArrayLike) -> tuple[list[int], list[float]]:
    """Increase of a counter divided by that of another, in windows of about equal increase of the
    other, and the index of the last value of each window."""
    counter, other = np.asarray(values), np.asarray(of)
    steps = np.linspace(other[0], other[-1], min(len(other), WINDOWS + 1))
    ends = np.unique(np.searchsorted(other, steps))
    return ends[1:].tolist(), (np.diff(counter[ends]) / np.diff(other[ends])).tolist()


# -- charts and pages


Lines: TypeAlias = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""By name, the x and the y values of each point."""

INCHES = (4.6, 2.2)
COLORS = ("#0b6e99", "#d9730d", "#448361", "#9065b0", "#c14c8a", "#787774")
"""Of the lines in their order: distinguishable in grey and with the common colour blindnesses."""

DASHES = ("solid", "dashed", "dotted")
"""Of the lines that have one colour."""

STYLE: Any = {
    "axes.autolimit_mode": "round_numbers",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.xmargin": 0.0,
    "font.size": 9.0,
    "grid.alpha": 0.3,
    "svg.fonttype": "none",  # text stays text: a page can be searched
    "svg.hashsalt": "kvactors",  # equal reports are equal files
}
CSS = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 74rem; padding: 0 1rem; }
pre { font-size: 13px; white-space: pre-wrap; overflow-wrap: anywhere; }
code { overflow-wrap: anywhere; }
table { border-collapse: collapse; display: block; margin: 0.5rem 0 1rem; overflow-x: auto; }
td, th { border-bottom: 1px solid #ddd; padding: 0.15rem 1rem 0.15rem 0; text-align: left;
  vertical-align: top; white-space: pre-wrap; }
td:first-child, td.right { white-space: nowrap; }
.right { text-align: right; } .right + .left { padding-left: 0.5rem; }
.green { color: #2c6e2f; } .red { color: #b3261e; } .bold { font-weight: bold; }
.dim { color: #666; }
.charts { display: grid; gap: 1.5rem 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(22rem, 100%), 1fr)); }
figure { margin: 0; display: flex; flex-direction: column; justify-content: space-between; }
figcaption { font-size: 13px; } figcaption b { display: block; font-size: 15px; }
figcaption span { display: inline-block; margin-right: 1rem; }
figcaption i { display: inline-block; width: 1.2rem; margin-right: 0.3rem; vertical-align: middle; }
svg { width: 100%; height: auto; }
@media (min-width: 60rem) { figure:only-child { grid-column: span 2; } }
@media (max-width: 40rem) { td, th { font-size: 12px; padding-right: 0.25rem; }
  td.left:first-child { white-space: pre-wrap; } }
"""


class Chart(NamedTuple):
    """Lines over one axis. marks: of events, on that axis."""

    title: str
    x_label: str
    y_label: str
    lines: Lines
    log_x: bool = False
    top: float | None = None
    marks: Sequence[float] = ()


def check_charts() -> None:
    """Raise ConfigError if charts cannot be drawn here."""
    need("matplotlib.figure", "a report with charts needs matplotlib", "report")


def svg_of(chart: Chart) -> str:
    """The chart as a `<figure>` element: its title and its legend, then an `<svg>`."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    found, legend = io.StringIO(), ""
    with rc_context(STYLE):
        figure = Figure(figsize=INCHES, layout="constrained")
        axes = figure.subplots()
        for position, (name, (x, y)) in enumerate(chart.lines.items()):
            again, at = divmod(position, len(COLORS))
            color, dash = COLORS[at], DASHES[again % len(DASHES)]
            axes.plot(x, y, color=color, linestyle=dash, linewidth=1.5)
            if name:  # a line without a name is what the title says
                legend += f'<span><i style="border-top: 2px {dash} {color}"></i>'
                legend += f"{escape(name.replace('_', ' '))}</span>"
        for mark in chart.marks:
            axes.axvline(mark, color="#b3261e", linestyle="dotted", linewidth=1.0)
        axes.set(xlabel=chart.x_label, ylabel=chart.y_label, ylim=(0, chart.top))
        axes.yaxis.set_major_formatter("{x:,.9g}")
        if chart.log_x:
            sizes = chart.x_label == "bytes"
            axes.set_xscale("log", base=4 if sizes else 10)
            axes.minorticks_off()
            axes.xaxis.set_major_formatter((lambda x, _: human(x)) if sizes else "{x:,.9g}")
        figure.savefig(found, format="svg", metadata={"Date": None})
    text = found.getvalue()
    caption = f"<b>{escape(chart.title)}</b>{legend}"
    return f"<figure><figcaption>{caption}</figcaption>{text[text.index('<svg') :]}</figure>"


class PageConsole(Console):
    """Makes HTML of what is printed: tables and paragraphs that fit any width."""

    def __init__(self, title: str, program: str) -> None:
        super().__init__(file=io.StringIO(), width=1000)  # a cell breaks where the page does
        self.html = [f"<h1>{escape(title)}</h1>{origin(program)}"]

    def print(self, *objects: Any, style: Any = None, **options: Any) -> None:
        for one in objects:
            if isinstance(one, Table):
                self.html.append(table_html(one))
            else:
                self.html.append(f'<p class="{style or ""}">{escape(str(one))}</p>')


def table_html(table: Table) -> str:
    """A table of rich as a `<table>` element."""

    def row(cells: Iterable[Any], tag: str, style: Any = None) -> str:
        texts = (escape(unbroken(Text.from_markup(str(cell)).plain)) for cell in cells)
        inner = "".join(
            f'<{tag} class="{column.justify}">{text}</{tag}>'
            for column, text in zip(table.columns, texts, strict=True)
        )
        return f'<tr class="{style or ""}">{inner}</tr>'

    columns = [column.cells for column in table.columns]
    rows = zip(table.rows, zip(*columns, strict=True), strict=True)
    head = row((column.header for column in table.columns), "th") if table.show_header else ""
    title = f"<h2>{escape(str(table.title))}</h2>" if table.title else ""
    body = "".join(row(cells, "td", one.style) for one, cells in rows)
    return f"{title}<table>{head}{body}</table>"


def origin(program: str) -> str:
    """The command line, the version, the machine and the time of the page, as HTML."""
    command = f"{program} {shlex.join(sys.argv[1:])}"
    at = f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}"
    python = platform.python_version()
    text = f"kvactors {version()}, Python {python}, {at}, {time.strftime('%Y-%m-%d %H:%M %Z')}"
    return f'<p class="dim"><code>{escape(command)}</code><br>{escape(text)}</p>'


def page_of(
    title: str,
    printed: Callable[[Console], object],
    charts: Iterable[str],
    settings: Mapping[str, Any] | None = None,
    program: str = "kvactors",
) -> str:
    """A page: what is printed on a console, the charts, and the settings."""
    end = ""
    if settings is not None:
        text = msgspec.json.format(msgspec.json.encode(settings), indent=2).decode()
        end = f"<details><summary>Settings</summary><pre>{escape(text)}</pre></details>"
    console = PageConsole(title, program)
    printed(console)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>\n"
        f"<body>{''.join(console.html)}{''.join(charts)}{end}</body></html>\n"
    )


def charts_of(heading: str, charts: Sequence[Chart], remark: str = "") -> str:
    """Charts under a heading and a remark, as HTML."""
    drawn = "".join(map(svg_of, charts))
    return f'<h2>{heading}</h2><p>{remark}</p><div class="charts">{drawn}</div>'


# -- runs and replays


EACH = [panel for panel in COURSE if panel.title in ("Hit rate by tier", "Bandwidth")]
"""Charts of all caches of a run that has several."""


def run_page(report: Report, recorders: Sequence[Recorder], settings: Mapping[str, Any]) -> str:
    """The page of a run or a replay. recorders: of its caches, that of the report is the last."""

    def printed(console: Console) -> None:
        if report.errors or report.corrupt_blocks_served:
            console.print("errors or wrong blocks: see the table", style="bold red")
        print_proof(report, console)
        print_summary(report, console, "")

    shares = "Each line is the share of the values that are at most as large."
    marks = [one.at for one in report.events]
    events = "Dotted lines are the events." if marks else ""
    *others, recorder = recorders
    of = next(reversed(report.caches), "the run")
    charts = [
        charts_of(f"Course of {of}", recorder.course(marks), "" if others else events),
        charts_of("Durations, sizes and ages", distributions(recorder.last), shares),
    ]
    if others:
        names = dict(zip(report.caches, recorders, strict=True))
        charts.insert(0, charts_of("Each cache", each_cache(names, marks), events))
    if report.serving:
        remark = (
            "On the cache, without a cache, and with an exact LRU of the same sizes whose loads "
            "take no time. Seconds are those of the trace's clock."
        )
        serving = serving_charts(report.serving)
        charts.insert(0, charts_of("With and without the cache", serving, remark))
    return page_of(report.name, printed, charts, settings)


def each_cache(recorders: Mapping[str, Recorder], marks: Sequence[float]) -> list[Chart]:
    """The charts of EACH, one for each of their lines, with a line of each cache."""
    charts = []
    for panel in EACH:
        found = {name: one.lines(panel) for name, one in recorders.items()}
        for key in sorted({key for lines in found.values() for key in lines}):
            lines = {name: lines[key] for name, lines in found.items() if key in lines}
            title = f"{panel.title.partition(' by')[0]}: {key.replace('_', ' ')}"
            charts.append(Chart(title, "seconds", panel.unit, lines, top=panel.top, marks=marks))
    return charts


def serving_charts(serving: Mapping[str, Mapping[str, Any]]) -> list[Chart]:
    """The latencies of a serving loop on each cache."""
    charts = []
    for label, field in FIGURES[:3]:
        title = label.removesuffix(", s").capitalize()
        lines = {
            name: ([float(one[1:]) for one in figures[field]], list(figures[field].values()))
            for name, figures in serving.items()
        }
        charts.append(Chart(title, "percentile of the requests", "seconds", lines))
    return charts


def distributions(snapshot: Snapshot) -> list[Chart]:
    """The charts of the histograms that have values."""
    charts = []
    for family in FAMILIES:
        if family.kind != "histogram":
            continue
        found = {" ".join(labels): one for labels, one in family.read(snapshot) if one.count}
        if lines := {name: shares_below(one) for name, one in found.items()}:
            unit = "bytes" if family.name.endswith("_size") else "seconds"
            charts.append(Chart(family.name, unit, "share", lines, log_x=True, top=1.02))
    return charts


def shares_below(histogram: Histogram) -> tuple[list[float], list[float]]:
    """The bounds, and the share of the values up to each, from the last that is 0 to the first
    that is 1. Values above the last bound are missing from the end."""
    shares = np.cumsum(histogram.counts[:-1]) / histogram.count
    low = max(0, int(np.searchsorted(shares, 0.0, "right")) - 1)
    high = int(np.searchsorted(shares, 1.0)) + 1
    return list(histogram.bounds[low:high]), shares[low:high].tolist()


# -- sweeps


def sweep_page(report: SweepReport) -> str:
    """The page of a sweep."""
    remark = (
        "Share of the looked-up blocks that one cache of this size hits. Exclusive LRU tiers hit "
        "together like one cache of the sum of their sizes, inclusive ones like one of the "
        "largest. The offline optimum evicts the block whose next use is farthest. Requests that "
        "are larger than the cache are refused: their number is in the table as too large."
    )
    charts = [charts_of("Hit rate by size", [sweep_chart(report)], remark)]

    def printed(console: Console) -> None:
        print_sweep(report, console, len(report.points))

    return page_of(f"Sweep of {report.trace}", printed, charts)


def sweep_chart(report: SweepReport) -> Chart:
    """Hit rate against the size of one tier."""
    unit, per_block = "blocks", 1.0
    if report.block_bytes is not None:
        unit = human(report.block_bytes * report.distinct_blocks).split()[1]
        per_block = report.block_bytes / in_bytes(f"1 {unit}", "a unit")
    x = [point.blocks * per_block for point in report.points]
    retain = [point.retain for point in report.points if point.retain is not None]
    lines = {
        "LRU": (x, [point.hit_rate for point in report.points]),
        **({"RETAIN": (x, retain)} if retain else {}),
        "offline optimum": (x, [point.optimum for point in report.points]),
        "most possible": (x, [report.most] * len(x)),
    }
    return Chart(f"Hit rate by cache size: {report.trace}", unit, "hit rate", lines, log_x=True)


# -- what `run` and `replay` observe and write


class Watching:
    """Observes a run, and writes what its options ask for."""

    def __init__(
        self,
        *,
        json: Path | None = None,
        html: Path | None = None,
        trace: Path | None = None,
        port: int | None = None,
        host: str = "",
        virtual: bool = False,
    ) -> None:
        self._json, self._html, self._trace_file = json, html, trace
        self._observers: list[Observe] = []
        self._recorders: list[Recorder] = []
        if html is not None:
            check_charts()
            self._observers.append(self.record)
        if trace is not None:
            self._trace = ChromeTrace()
            self._observers.append(self._trace.observing)
        if port is not None:
            if virtual:
                raise ConfigError(
                    "--metrics-port needs a run on the real clock: leave out --virtual"
                )
            from kvactors.observe.http_endpoint import serve_metrics

            self._observers.append(partial(serve_metrics, port=port, host=host))

    def record(self, cache: KVCache) -> AbstractAsyncContextManager[Any]:
        """Record the course of a cache, if that is for a page."""
        if self._html is None:
            return nullcontext()
        recorder = Recorder(began=self._recorders[0].began if self._recorders else None)
        self._recorders.append(recorder)
        return recorder.observing(cache)

    @asynccontextmanager
    async def observing(self, cache: KVCache) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for observe in self._observers:
                await stack.enter_async_context(observe(cache))
            yield

    def conclude(self, report: Report, settings: Config, failed: list[str]) -> int:
        """Print and write the report of the run that has ended. Returns the exit status: 1 if
        anything failed."""
        if self._trace_file is not None:
            write_output(self._trace.encode(), self._trace_file)
        if self._html is not None:
            page = run_page(report, self._recorders, msgspec.to_builtins(settings))
            write_output(page.encode(errors="replace"), self._html)
        files = (self._json, self._html, self._trace_file)
        console = Console(stderr=any(map(to_stdout, files)))
        print_summary(report, console, report.name)
        print_proof(report, console)
        write_json(report, self._json)
        for what in failed:
            print(f"not as expected: {what}", file=sys.stderr)
        return 1 if failed else 0
