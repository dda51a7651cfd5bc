"""What `run` and `replay` observe and write, and pages of reports: HTML files that need no network.
Tables are as on the terminal, charts are SVG. Charts need matplotlib, extra `[report]`."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from rich.console import Console

from kvactors.cache import KVCache
from kvactors.cpu_evictor.memory import NOT_FETCHED, NOT_STORED
from kvactors.errors import ConfigError
from kvactors.histogram import Histogram
from kvactors.observe.chrome_trace import ChromeTrace
from kvactors.observe.lag import LagMonitor, Tick
from kvactors.observe.metrics import Histograms, MetricsWatch
from kvactors.observe.statistics import CacheStatistics
from kvactors.scenario.engine import Observe, beside
from kvactors.scenario.output import need, print_details, to_stdout, write_json, write_output
from kvactors.scenario.report import Report, print_report
from kvactors.scenario.sweep import SweepReport, print_sweep
from kvactors.settings import Config
from kvactors.settings.check import human, in_bytes

# -- time series of a run


POINTS = 400
"""Samples kept at most: when there are as many, every second one is dropped and the interval
doubles."""

WINDOWS = 60
"""Windows of time for which rates are computed, at most. Shorter ones show mostly noise."""

INTERVAL = 0.05
"""Seconds between samples at the start."""

WORST = ("lag_ms", "own_lag_ms")
"""Series of the worst value since the sample before: the loop's lag, and the lag without waits for
a core."""


class Recording(msgspec.Struct):
    """Samples of a run. series: a value of each name at each of `seconds`."""

    seconds: list[float]
    series: dict[str, list[float]]
    histograms: Histograms | None = None

    def rates(self, name: str, scale: float = 1.0) -> tuple[list[float], list[float]]:
        """Increase of a counter a second, divided by `scale`, in windows of about equal length."""
        count = len(self.seconds)
        ends = np.unique(np.linspace(0, count - 1, min(count, WINDOWS + 1)).astype(np.int64))
        seconds = np.asarray(self.seconds)[ends]
        rates = np.diff(np.asarray(self.series[name])[ends]) / np.diff(seconds)
        return seconds[1:].tolist(), (rates / scale).tolist()

    def shares(self, name: str, of: str) -> tuple[list[float], list[float]]:
        """Increase of a counter divided by that of another, in windows of about equal increase of
        the other.
        """
        whole = np.asarray(self.series[of])
        steps = np.linspace(whole[0], whole[-1], min(len(whole), WINDOWS // 2 + 1))
        ends = np.unique(np.searchsorted(whole, steps))
        below = np.diff(whole[ends])
        shares = np.diff(np.asarray(self.series[name])[ends]) / np.maximum(below, 1)
        return np.asarray(self.seconds)[ends[1:]].tolist(), shares.tolist()


class Recorder:
    """Samples a cache while `observing`. interval: seconds between samples at the start."""

    def __init__(self, interval: float = INTERVAL) -> None:
        self.recording = Recording([], {})
        self._interval = interval
        self._lag = LagMonitor()
        self._begin = 0.0

    @asynccontextmanager
    async def observing(self, cache: KVCache) -> AsyncIterator[Recorder]:
        """Sample a cache until the block ends, and once more then."""
        self._begin = asyncio.get_running_loop().time()
        self._sample(cache)
        watch = MetricsWatch(cache.system)
        self.recording.histograms = watch.histograms
        watch.attach()
        async with self._lag.running():
            try:
                async with beside(self._run(cache)):
                    yield self
            finally:
                watch.detach()
                self._lag.take()  # what came last is the lag of making the report
                self._sample(cache)

    async def _run(self, cache: KVCache) -> None:
        while True:
            await asyncio.sleep(self._interval)
            self._sample(cache)

    def _sample(self, cache: KVCache) -> None:
        statistics, recording = cache.statistics(), self.recording
        recording.seconds.append(asyncio.get_running_loop().time() - self._begin)
        for name, value in values_of(statistics, self._lag.take()).items():
            recording.series.setdefault(name, []).append(value)
        if len(recording.seconds) >= POINTS:
            self._thin_out()

    def _thin_out(self) -> None:
        recording = self.recording
        recording.seconds = recording.seconds[::2]
        for name, values in recording.series.items():
            pairs = (values[i : i + 2] for i in range(0, len(values), 2))
            recording.series[name] = list(map(max, pairs)) if name in WORST else values[::2]
        self._interval *= 2


def values_of(statistics: CacheStatistics, ticks: list[Tick]) -> dict[str, float]:
    """The values of a sample: counters, which only rise, and the present state. ticks: since the
    sample before."""
    prefix, host = statistics.prefix, statistics.host
    swapper, store = statistics.swapper, statistics.store
    return {
        "looked_up": statistics.blocks_looked_up,
        "device_hits": statistics.device_hits,
        "host_hits": statistics.host_hits,
        "storage_hits": statistics.storage_hits,
        "bytes_to_host": swapper.bytes_to_host,
        "bytes_to_device": swapper.bytes_to_device,
        "bytes_written": store.writes * store.object_bytes if store is not None else 0,
        "bytes_read": store.reads * store.object_bytes if store is not None else 0,
        "messages": statistics.messages,
        "tasks": sum(sink.delivered for sink in statistics.flush),
        **{name: getattr(host, name) for name in (*NOT_FETCHED, *NOT_STORED)},
        "device_full": (prefix.blocks_total - prefix.blocks_free) / prefix.blocks_total,
        "host_full": host.resident / max(1, host.capacity),  # without slots for blocks in transit
        "stored": store.objects if store is not None else 0,
        "leases": prefix.leases,
        "waiting": prefix.waiting,
        "pending": sum(sink.pending for sink in statistics.flush),
        "pending_age_s": max((sink.oldest_pending_age for sink in statistics.flush), default=0.0),
        "lag_ms": max((tick.lag for tick in ticks), default=0.0) * 1e3,
        "own_lag_ms": max((tick.own for tick in ticks), default=0.0) * 1e3,
    }


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
    """Lines over one axis. stacked: whether the lines are drawn as areas on top of each other. All
    lines then have the same x values."""

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


def run_page(report: Report, recording: Recording, settings: Mapping[str, Any]) -> str:
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

    def at(names: Mapping[str, str]) -> Lines:
        return {label: (time, series[name]) for label, name in names.items()}

    def rate(names: Mapping[str, str], scale: float = 1.0) -> Lines:
        return {label: recording.rates(name, scale) for label, name in names.items()}

    hits = {
        tier: recording.shares(f"{tier}_hits", "looked_up")
        for tier in ("device", "host", "storage")
    }
    occupied = at({"device": "device_full", "host": "host_full"})
    reasons = (name for name in (*NOT_FETCHED, *NOT_STORED) if series[name][-1])
    missed = at({name.replace("_", " "): name for name in reasons})
    moved = {
        "device to host": "bytes_to_host",
        "host to device": "bytes_to_device",
        "written": "bytes_written",
        "read": "bytes_read",
    }
    requests = at({"running": "leases", "waiting": "waiting"})
    lags = at({"lag": "lag_ms", "without waits for a core": "own_lag_ms"})
    x = "seconds"
    charts = [
        Chart("Hit rate by tier", x, "share of blocks", hits, stacked=True, top=1.0),
        Chart("Occupancy", x, "share of the tier", occupied, top=1.05),
        Chart("Objects in the store", x, "blocks", at({"store": "stored"})),
        Chart("Blocks not fetched and not stored", x, "blocks", missed),
        Chart("Requests", x, "requests", requests, steps=True),
        Chart("Bandwidth", x, "MB/s", rate(moved, 1e6)),
        Chart("Changes not yet taken by sinks", x, "blocks", at({"pending": "pending"})),
        Chart("Age of the oldest such change", x, "seconds", at({"age": "pending_age_s"})),
        Chart("Flush tasks delivered", x, "tasks/s", rate({"delivered": "tasks"})),
        Chart("Messages between actors", x, "messages/s", rate({"messages": "messages"})),
        Chart("Worst lag of the event loop", x, "ms", lags),
    ]
    return [chart for chart in charts if chart.lines]


def durations(recording: Recording) -> list[Chart]:
    """The charts of durations of operations and ages of blocks, without those that have no
    values."""
    found = recording.histograms
    if found is None:
        return []
    ages = {"lifetime": found.lifetime, "idle before eviction": found.idle, "reuse gap": found.gap}
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
        print_sweep(report, console, len(report.points))

    return _page(f"Sweep of {report.trace}", printed, charts, "")


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
        if html is not None:
            check_charts()
            self._recorder = Recorder()
            self._observers.append(self._recorder.observing)
        if trace is not None:
            self._trace = ChromeTrace()
            self._observers.append(self._trace.observing)
        if port is not None:
            if virtual:
                raise ConfigError(
                    "--metrics-port needs a run on the real clock: leave out --virtual"
                )
            need("prometheus_client", "--metrics-port needs prometheus_client", "metrics")
            from kvactors.observe.http_endpoint import HttpEndpoint

            self._observers.append(partial(HttpEndpoint().attached, host, port))

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
            page = run_page(report, self._recorder.recording, msgspec.to_builtins(settings))
            write_page(page, self._html)
        files = (self._json, self._html, self._trace_file)
        print_report(report, Console(stderr=any(map(to_stdout, files))))
        if self._json is not None:
            write_json(report, self._json)
        for what in failed:
            print(f"not as expected: {what}", file=sys.stderr)
        return 1 if failed else 0
