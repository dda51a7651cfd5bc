"""`kvactors top`: the state of a running process, read from its metrics over HTTP.

Texts and numbers come from another process: any of them may be wrong.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from http.client import HTTPException
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

import msgspec
from cyclopts import Parameter
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvactors.errors import ConfigError, KVActorsError
from kvactors.observe.metrics import PREFIX
from kvactors.scenario.output import Output, to_stdout, write_output
from kvactors.settings.check import human

MIN_INTERVAL_S, MAX_INTERVAL_S = 0.25, 3600.0
"""Limits of the interval. The endpoint renders metrics at most four times a second."""

MAX_ROWS = 64
"""Rows of a table, and reasons, at most."""

PIPE_COLUMNS = 200
"""Width of a frame that goes to a file or a pipe, where a cut number would be taken for another."""


class Unreachable(KVActorsError):
    """A process does not answer a request, or with something else than the metrics of a cache."""


def parse_url(text: str) -> str:
    """The URL of the metrics that a user gives as a port of this machine, host:port, or a URL."""
    given = f"127.0.0.1:{text}" if text.isdigit() else text
    given = given if "://" in given else f"http://{given}"
    fault = f"{given!r} is no address: give a port, host:port or http://host:port/metrics"
    try:
        parts = urlsplit(given)
        bad = parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
    except ValueError as error:
        raise ConfigError(f"{fault} ({error})") from error
    if bad:
        raise ConfigError(fault)
    return given if parts.path.strip("/") else given.rstrip("/") + "/metrics"


def fetch(url: str, seconds: float) -> tuple[int, bytes]:
    """One GET. Returns the status and the body. seconds: for the connection and for each read."""
    try:
        try:
            answer = build_opener(ProxyHandler({})).open(url, timeout=seconds)
        except HTTPError as error:
            answer = error
        with answer:
            return answer.status, answer.read()
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise Unreachable(f"{url} cannot be read: {reason!s:.200}") from error


# -- metrics

Labels: TypeAlias = dict[str, str]
Metrics: TypeAlias = dict[str, list[tuple[Labels, float]]]
"""The samples of kvactors by name, without those that are not finite."""


def parse_metrics(url: str, status: int, body: bytes) -> Metrics:
    """The metrics in the answer of a process."""
    from prometheus_client.parser import text_string_to_metric_families

    if status != 200:
        raise Unreachable(f"{url} answers with status {status}")
    found: Metrics = {}
    try:
        for family in text_string_to_metric_families(body.decode()):
            for sample in family.samples:
                if sample.name.startswith(PREFIX) and math.isfinite(sample.value):
                    one = (sample.labels, sample.value)
                    found.setdefault(sample.name.removeprefix(PREFIX), []).append(one)
    except (ValueError, IndexError) as error:
        raise Unreachable(f"{url} has no metrics of a kvactors cache: {error!s:.80}") from error
    if not found:
        raise Unreachable(f"{url} has no metrics of a kvactors cache: none begins with {PREFIX}")
    return found


class Interval(NamedTuple):
    """The metrics at the end and at the beginning of an interval. Its methods are values of a
    metric with some labels, None if they are not known."""

    last: Metrics
    before: Metrics
    seconds: float

    def value(self, name: str, labels: Labels) -> float | None:
        return total(self.last, name, labels)

    def growth(self, name: str, labels: Labels) -> float | None:
        value = total(self.last, name, labels)
        if value is None:
            return None
        return max(0.0, value - (total(self.before, name, labels) or 0.0))

    def per_s(self, name: str, labels: Labels) -> float | None:
        return quotient(self.growth(name, labels), self.seconds)

    def mean(self, name: str, labels: Labels) -> float | None:
        return quotient(self.growth(f"{name}_sum", labels), self.growth(f"{name}_count", labels))

    def used(self, name: str, labels: Labels) -> float | None:
        return quotient(self.value(name, labels), self.value("tier_capacity_blocks", labels))

    def hit_rate(self, name: str, labels: Labels) -> float | None:
        return quotient(self.growth(name, labels), self.growth("kv_block_queries_total", {}))


def total(metrics: Metrics, name: str, labels: Labels) -> float | None:
    """The sum of the samples that have these labels, None if there are none."""
    found = [value for has, value in metrics.get(name, ()) if labels.items() <= has.items()]
    return sum(found) if found else None


def quotient(part: float | None, of: float | None) -> float | None:
    """None without a divisor."""
    return part / of if part is not None and of else None


# -- tables


KINDS: dict[str, tuple[Callable[[Any], str], Callable[[Interval, str, Labels], float | None]]] = {
    "count": ("{:,.0f}".format, Interval.value),
    "bytes": (human, Interval.value),
    "age": ("{:.3g} s".format, Interval.value),
    "up": (lambda is_up: "up" if is_up else "down", Interval.value),
    "rate": ("{:,.1f}".format, Interval.per_s),
    "bandwidth": (lambda value: f"{human(value)}/s", Interval.per_s),
    "mean": (lambda seconds: f"{1e3 * seconds:,.3g} ms", Interval.mean),
    "used": ("{:.1%}".format, Interval.used),
    "hits": ("{:.1%}".format, Interval.hit_rate),
}
"""The text and the value of each kind of column."""


class MetricTable(NamedTuple):
    """A table. label: whose values are the rows, of this metric. Without one there is a single row.
    columns: key and heading, kind, and metric."""

    label: str
    metric: str
    columns: tuple[tuple[str, str, str], ...]

    def rows(self, both: Interval) -> list[Row]:
        samples = both.last.get(self.metric, ())
        names = {has[self.label]: None for has, _ in samples if self.label in has}
        return [self._row(both, name) for name in (islice(names, MAX_ROWS) if self.label else [""])]

    def _row(self, both: Interval, name: str) -> Row:
        labels = {self.label: name} if self.label else {}
        values = {key: KINDS[kind][1](both, of, labels) for key, kind, of in self.columns}
        return {"name": name, **values}


Row: TypeAlias = dict[str, Any]

TABLES = {
    "requests": MetricTable("", "requests_total", (
        ("requests_per_s", "rate", "requests_total"), ("open", "count", "num_requests_running"),
        ("waiting", "count", "num_requests_waiting"),
        ("no_room", "count", "requests_no_room_total"),
        ("preempted", "count", "num_preemptions_total"), ("acquire", "mean", "acquire_seconds"),
        ("ready", "mean", "ready_seconds"), ("request", "mean", "request_seconds"),
        ("loop_lag", "mean", "loop_lag_seconds"))),
    "tiers": MetricTable("tier", "tier_blocks", (
        ("blocks", "count", "tier_blocks"), ("capacity_blocks", "count", "tier_capacity_blocks"),
        ("used", "used", "tier_blocks"), ("bytes", "bytes", "tier_bytes"),
        ("hit_rate", "hits", "kv_block_hits_total"), ("load", "mean", "load_seconds"),
        ("evicted_per_s", "rate", "blocks_evicted_total"))),
    "transfers": MetricTable("transfer_type", "kv_offload_total_bytes_total", (
        ("bytes_per_s", "bandwidth", "kv_offload_total_bytes_total"),
        ("transfer", "mean", "kv_offload_seconds"))),
    "sinks": MetricTable("sink", "flush_pending", (
        ("up", "up", "sink_up"), ("pending_blocks", "count", "flush_pending"),
        ("lag", "age", "flush_lag_seconds"), ("blocks_per_s", "rate", "flush_blocks_total"),
        ("retries", "count", "flush_retries_total"))),
    "actors": MetricTable("actor", "actor_turns_total", (
        ("up", "up", "actor_up"), ("messages_per_s", "rate", "actor_turns_total"),
        ("queued", "count", "actor_queued"), ("restarts", "count", "actor_restarts_total"))),
}  # fmt: skip
"""By their keys in JSON."""


# -- a process


class ShownReason(msgspec.Struct, frozen=True):
    """A part that does not work. since: Unix time."""

    component: str
    why: str
    since: float


class ShownHealth(msgspec.Struct, frozen=True):
    """The health of a process."""

    status: str
    reasons: tuple[ShownReason, ...] = ()


class Process:
    """A process that is read again and again."""

    def __init__(self, url: str, timeout: float) -> None:
        self.url = url
        self._timeout = timeout
        self._last: tuple[float, Metrics] | None = None
        self._opened: float | None = None  # when the last open cache was opened, Unix time

    def read(self) -> Row:
        """The values of a frame. Raises Unreachable."""
        metrics = parse_metrics(self.url, *fetch(self.url, self._timeout))
        health = ShownHealth("ok" if total(metrics, "up", {}) else "closed")
        if "health" in metrics:  # else the process has no such path
            with suppress(Unreachable, msgspec.DecodeError, UnicodeDecodeError):
                _, body = fetch(self.url.rpartition("/")[0] + "/health", self._timeout)
                health = msgspec.json.decode(body, type=ShownHealth)
        return self.view(time.monotonic(), metrics, health)

    def view(self, at: float, metrics: Metrics, health: ShownHealth) -> Row:
        """The values of a frame, as `--json` writes them: of the time since the last frame, in the
        first one since the cache was opened. at: seconds of the reader's clock. A cache that was
        opened at another time than the last one is another process's."""
        opened = total(metrics, "start_time_seconds", {})
        if opened != self._opened:
            self._last, self._opened = None, opened
        uptime = 0.0 if opened is None else max(0.0, time.time() - opened)
        both = Interval(metrics, {}, uptime)
        if self._last is not None:
            both = Interval(metrics, self._last[1], at - self._last[0])
        self._last = at, metrics
        return {
            **self._frame(health.status),
            "interval_s": both.seconds,
            "uptime_s": uptime,
            "reasons": [msgspec.structs.asdict(one) for one in health.reasons[:MAX_ROWS]],
            **{key: table.rows(both) for key, table in TABLES.items()},
        }

    def unreachable(self, error: str) -> Row:
        """A process that does not answer. The next interval is since its last answer."""
        return self._frame("unreachable", error)

    def _frame(self, status: str, error: str = "") -> Row:
        return {"time": time.time(), "url": self.url, "status": status, "error": error}


# -- frames


def printable(text: object) -> str:
    """A text of another process without control characters."""
    return "".join(one if one.isprintable() else "?" for one in str(text))


def _table(table: MetricTable, rows: list[Row]) -> Table:
    found = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    found.add_column(table.label, no_wrap=True)
    for key, _, _ in table.columns:
        heading = key.replace("_per_s", "/s").replace("_", " ")
        found.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        style = "bold red" if row.get("up") == 0 else "yellow" if row.get("restarts") else ""
        cells = [printable(row["name"])]
        for key, kind, _ in table.columns:
            cells.append("-" if row[key] is None else KINDS[kind][0](row[key]))
        found.add_row(*(Text(one, style=style) for one in cells))
    return found


def _head(view: Row) -> Iterator[Text]:
    clock = time.strftime("%H:%M:%S", time.localtime(view["time"]))
    up = timedelta(seconds=min(round(view.get("uptime_s", 0)), 10**9))
    yield Text(f"kvactors top  {clock}  {printable(view['url'])}  up {up}", style="bold")
    style = {"ok": "bold green", "degraded": "bold yellow"}.get(view["status"], "bold red")
    yield Text(f"health: {printable(view['status'])}", style)
    if view["error"]:
        yield Text(f"  {printable(view['error'])}", style="bold red")
    for reason in view.get("reasons", ()):
        text = printable(f"{reason['component']}: {reason['why']}")
        ago = max(0.0, view["time"] - reason["since"])
        yield Text(f"  {text} for {ago:,.0f} s", style="yellow")


def frame(view: Row) -> RenderableType:
    """A frame."""
    parts: list[RenderableType] = list(_head(view))
    for key, table in TABLES.items():
        if rows := view.get(key):
            parts += ["", _table(table, rows)]
    return Group(*parts)


# -- the command

Show: TypeAlias = Callable[[Row], object]


@contextmanager
def output(json: Output | None, *, once: bool) -> Iterator[Show]:
    """The output that options and terminal ask for, while the block runs."""
    console = Console()
    if json is not None:
        with Path(os.devnull if to_stdout(json) else json).open("wb", buffering=0) as file:
            write = partial(write_output, path="-") if to_stdout(json) else file.write
            yield lambda view: write(msgspec.json.encode(view) + b"\n")
    elif once or not console.is_terminal:
        width = console.width if console.is_terminal else PIPE_COLUMNS
        plain = Console(width=width, no_color=True, highlight=False)
        yield lambda view: plain.print(frame(view), "")
    else:
        with Live(console=console, screen=True) as live:
            yield lambda view: live.update(frame(view), refresh=True)


def watch(url: str, show: Show, interval: float, timeout: float, *, once: bool) -> Row:
    """Read a process and show it, without end or once. Raises Unreachable: at the first reading."""
    process, view = Process(url, timeout), None
    while True:
        try:
            view = process.read()
        except Unreachable as error:
            if view is None:
                raise
            view = process.unreachable(str(error))
        show(view)
        if once:
            return view
        time.sleep(interval)


def top(
    url: str = "9464",
    *,
    interval: float = 2.0,
    timeout: float = 5.0,
    once: Annotated[bool, Parameter(negative="")] = False,
    json: Output | None = None,
) -> int:
    """Show the state of a running process: health, requests, occupancy and hit rates of the tiers,
    transfers, sinks and actors. It reads /metrics and /health of the process. Ctrl-C
    ends it. Without a terminal the frames are plain text, one after another. Needs the extra
    [metrics].

    Parameters
    ----------
    url
        Address of the process: a port of this machine, host:port, or the URL of its metrics.
    interval
        Seconds between two frames. Rates are those of the last interval, in the first frame those
        since the cache was opened.
    timeout
        Seconds that a request to the process may take.
    once
        Print one frame as plain text, and end. The exit status is 1 unless the
        status is ok or degraded.
    json
        Where to write the values in place of frames, one JSON object a line.
    """
    target = parse_url(url)
    bounded = (("--interval", interval, MIN_INTERVAL_S), ("--timeout", timeout, 0.0))
    for name, value, least in bounded:
        if not (math.isfinite(value) and least <= value <= MAX_INTERVAL_S and value > 0):
            raise ConfigError(
                f"{name} must be {least or 'above 0'} to {MAX_INTERVAL_S:g} s, not {value:g}"
            )
    with output(json, once=once) as show:
        view = watch(target, show, interval, timeout, once=once)
    return 0 if view["status"] in ("ok", "degraded") else 1
