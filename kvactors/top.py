"""`kvactors top`: the state of a running process, read from its metrics over HTTP.

Texts and numbers come from another process: any of them may be wrong.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from http.client import HTTPException
from itertools import islice, pairwise
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
from kvactors.scenario.output import Output, need, to_stdout, write_output
from kvactors.settings.check import human

MIN_INTERVAL_S, MAX_INTERVAL_S = 0.25, 3600.0
"""Limits of the interval. The endpoint renders metrics at most four times a second."""

MAX_ROWS = 64
"""Sinks, actors and reasons that are shown at most, each."""


class Unreachable(KVActorsError):
    """A process does not answer a request, or with something else than HTTP."""


class BadMetrics(KVActorsError):
    """The metrics of a process cannot be read."""


# -- requests to the process


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
        if isinstance(reason, TimeoutError):
            raise Unreachable(f"{url} did not answer within {seconds:g} s") from error
        text = (getattr(reason, "strerror", None) or "").lower() or str(reason)
        brief = " ".join(text.split())[:200] or type(reason).__name__
        raise Unreachable(f"{url} cannot be read: {brief}") from error


# -- metrics

Labels: TypeAlias = dict[str, str]
Buckets: TypeAlias = list[tuple[float, float]]
"""Upper bounds and cumulative counts of a histogram, ascending."""


class Metrics(dict[str, list[tuple[Labels, float]]]):
    """The samples of kvactors by name, without those that are not finite. Empty for a process that
    has done nothing yet."""

    @classmethod
    def of(cls, text: str) -> Metrics:
        """Parse an exposition."""
        from prometheus_client.parser import text_string_to_metric_families

        found = cls()
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name.startswith(PREFIX) and math.isfinite(sample.value):
                        one = (sample.labels, sample.value)
                        found.setdefault(sample.name.removeprefix(PREFIX), []).append(one)
        except (ValueError, IndexError) as error:
            raise BadMetrics(str(error)[:80]) from error
        if not found:
            raise BadMetrics(f"no metric begins with {PREFIX}")
        return found

    def value(self, name: str, labels: Labels | None = None) -> float | None:
        """The sum of the samples that have these labels, None if there are none."""
        found = [
            value for has, value in self.get(name, ()) if (labels or {}).items() <= has.items()
        ]
        return sum(found) if found else None

    def by(self, name: str, label: str) -> dict[str, float]:
        """The samples of a metric by a label, in the order of the text."""
        return {has[label]: value for has, value in self.get(name, ()) if label in has}

    def buckets(self, name: str, labels: Labels) -> Buckets:
        """The buckets of a histogram, those of all samples with these labels added up."""
        found = dict[float, float]()
        for has, count in self.get(f"{name}_bucket", ()):
            with suppress(KeyError, ValueError):
                if labels.items() <= has.items():
                    bound = float(has["le"])
                    found[bound] = found.get(bound, 0.0) + count
        return sorted(found.items())


def quantile(buckets: Buckets, share: float) -> float | None:
    """A quantile by linear interpolation within its bucket, as Prometheus computes it. One above
    the highest finite bound is that bound. None if there are no values."""
    if not buckets or buckets[-1][1] <= 0:
        return None
    rank = share * buckets[-1][1]
    for (low, below), (high, count) in pairwise(((0.0, 0.0), *buckets)):
        if count >= rank:
            if math.isinf(high):
                return low
            part = (rank - below) / (count - below) if count > below else 1.0
            return low + (high - low) * min(1.0, max(0.0, part))
    return buckets[-1][0]


class Interval(NamedTuple):
    """The metrics at the end of an interval, and at its beginning if that is known. Its methods are
    the values of the tables: of a metric with some labels, None if they are not known."""

    last: Metrics
    before: Metrics | None
    seconds: float | None = None

    def total(self, name: str, labels: Labels) -> float:
        return self.last.value(name, labels) or 0.0

    def limit(self, name: str, labels: Labels) -> float | None:
        return self.last.value(name, labels) or None

    def flag(self, name: str, labels: Labels) -> bool:
        return bool(self.last.value(name, labels))

    def growth(self, name: str, labels: Labels) -> float | None:
        value = self.last.value(name, labels)
        if value is None or self.before is None:
            return None
        return max(0.0, value - (self.before.value(name, labels) or 0.0))

    def per_s(self, name: str, labels: Labels) -> float | None:
        return _quotient(self.growth(name, labels), self.seconds)

    def events_per_s(self, name: str, labels: Labels) -> float | None:
        return self.per_s(f"{name}_count", labels)

    def used(self, name: str, labels: Labels) -> float | None:
        return _quotient(self.last.value(name, labels), self.limit("tier_capacity_blocks", labels))

    def hit_rate(self, name: str, labels: Labels) -> float | None:
        return _quotient(self.growth(name, labels), self.growth("kv_block_queries_total", {}))

    def quantile(self, name: str, labels: Labels, share: float) -> float | None:
        if self.before is None:
            return None
        earlier = dict(self.before.buckets(name, labels))
        found = self.last.buckets(name, labels)
        return quantile(
            [(bound, max(0.0, n - earlier.get(bound, 0.0))) for bound, n in found], share
        )


def _quotient(part: float | None, of: float | None) -> float | None:
    return part / of if part is not None and of else None


# -- tables: key in JSON, heading, text, value, metric


def _count(value: float | None) -> str:
    if value is None:
        return "-"
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= factor:
            return f"{value / factor:,.4g} {unit}"
    return f"{value:,.0f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _rate(value: float | None) -> str:
    return _count(value) if value is None or value >= 100 or value == 0 else f"{value:.1f}"


def _bandwidth(value: float | None) -> str:
    return "-" if value is None else f"{human(value)}/s"


def _state(is_up: bool) -> str:
    return "up" if is_up else "down"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if 0 < seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


Row: TypeAlias = dict[str, Any]
Field: TypeAlias = tuple[
    str, str, Callable[[Any], str], Callable[[Interval, str, Labels], Any], str
]

HITS, MOVED, MOVES = "kv_block_hits_total", "kv_offload_total_bytes_total", "kv_offload_seconds"
P50, P99 = (partial(Interval.quantile, share=share) for share in (0.5, 0.99))
EVER = "_since_start"
"""In the keys of values of the whole time since the cache was opened."""

TIER: tuple[Field, ...] = (
    ("blocks", "blocks", _count, Interval.total, "tier_blocks"),
    ("capacity_blocks", "of", _count, Interval.limit, "tier_capacity_blocks"),
    ("used", "used", _percent, Interval.used, "tier_blocks"),
    ("bytes", "bytes", human, Interval.total, "tier_bytes"),
    ("hit_rate", "hits now", _percent, Interval.hit_rate, HITS),
    ("hit_rate_since_start", "since start", _percent, Interval.hit_rate, HITS),
    ("evicted_per_s", "evicted/s", _rate, Interval.per_s, "blocks_evicted_total"),
)
REQUESTS: tuple[Field, ...] = (
    ("per_s", "/s", _rate, Interval.per_s, "requests_total"),
    ("leases_open", "open", _count, Interval.total, "num_requests_running"),
    ("leases_waiting", "waiting", _count, Interval.total, "num_requests_waiting"),
    ("no_room", "no room", _count, Interval.total, "requests_no_room_total"),
    ("preempted", "preempted", _count, Interval.total, "num_preemptions_total"),
    ("leaked", "leaked", _count, Interval.total, "leases_leaked_total"),
)
TRANSFER: tuple[Field, ...] = (
    ("bytes_per_s", "now", _bandwidth, Interval.per_s, MOVED),
    ("bytes_since_start", "since start", human, Interval.total, MOVED),
    ("p50_s", "p50", _time, P50, MOVES),
    ("p99_s", "p99", _time, P99, MOVES),
)
LATENCY: tuple[Field, ...] = (
    ("per_s", "/s", _rate, Interval.events_per_s, ""),
    ("p50_s", "p50 now", _time, P50, ""),
    ("p99_s", "p99 now", _time, P99, ""),
    ("p50_since_start_s", "p50 start", _time, P50, ""),
    ("p99_since_start_s", "p99 start", _time, P99, ""),
)
SINK: tuple[Field, ...] = (
    ("up", "state", _state, Interval.flag, "sink_up"),
    ("pending_blocks", "pending", _count, Interval.total, "flush_pending"),
    ("lag_s", "lag", _time, Interval.total, "flush_lag_seconds"),
    ("blocks_per_s", "blocks/s", _rate, Interval.per_s, "flush_blocks_total"),
    ("retries", "retries", _count, Interval.total, "flush_retries_total"),
    ("resyncs", "resyncs", _count, Interval.total, "flush_resyncs_total"),
)
ACTOR: tuple[Field, ...] = (
    ("up", "state", _state, Interval.flag, "actor_up"),
    ("messages_per_s", "messages/s", _rate, Interval.per_s, "actor_turns_total"),
    ("queued", "queued", _count, Interval.total, "actor_queued"),
    ("restarts", "restarts", _count, Interval.total, "actor_restarts_total"),
)

OPERATIONS = ("acquire", "ready", "load", "offload", "save", "request")
"""Histograms `kvactors:NAME_seconds`."""


def _row(
    both: Interval, fields: Iterable[Field], first: Row, metric: str = "", **labels: str
) -> Row:
    """A row whose first column is given. metric: of the fields that name none."""
    ever = both._replace(before=Metrics())
    return first | {
        key: value(ever if EVER in key else both, of or metric, labels)
        for key, _, _, value, of in fields
    }


# -- a process


class ShownReason(msgspec.Struct, frozen=True):
    """A part that does not work. since: Unix time, None if the process does not report it."""

    component: str
    why: str = ""
    since: float | None = None


class ShownHealth(msgspec.Struct, frozen=True):
    """The health of a process."""

    status: str
    reasons: tuple[ShownReason, ...] = ()

    @classmethod
    def of(cls, metrics: Metrics) -> ShownHealth:
        """The health as far as the metrics have it."""
        up = "ok" if metrics.value("up") else "closed"
        status = next((name for name, is_so in metrics.by("health", "status").items() if is_so), up)
        parts = metrics.by("degraded", "component").items()
        return cls(status, tuple(ShownReason(name) for name, is_so in parts if is_so))


class Process:
    """A process that is read again and again."""

    def __init__(self, url: str, timeout: float) -> None:
        self.url = url
        self._timeout = timeout
        self._restarts = 0
        self._last: tuple[float, Metrics] | None = None
        self._opened: float | None = None  # when the last open cache was opened, Unix time

    def read(self) -> Row:
        """The values of a frame. Raises Unreachable, BadMetrics."""
        status, body = fetch(self.url, self._timeout)
        if status != 200:
            raise Unreachable(f"{self.url} answers with status {status}")
        try:
            metrics = Metrics.of(body.decode())
        except (BadMetrics, UnicodeDecodeError) as error:
            raise BadMetrics(f"{self.url} has no metrics of a kvactors cache: {error}") from error
        health = ShownHealth.of(metrics)
        if "health" in metrics:  # else the process has no such path
            with suppress(Unreachable, msgspec.DecodeError, UnicodeDecodeError):
                _, body = fetch(self.url.rpartition("/")[0] + "/health", self._timeout)
                health = msgspec.json.decode(body, type=ShownHealth)
        return self.view(time.monotonic(), metrics, health)

    def view(self, at: float, metrics: Metrics, health: ShownHealth) -> Row:
        """The values of a frame, as `--json` writes them. at: seconds of the reader's clock. A
        cache that was opened at another time than the last one is another process's."""
        opened = metrics.value("start_time_seconds")
        if opened is not None:  # a cache is open
            if self._opened not in (None, opened):
                self._restarts += 1
                self._last = None
            self._opened = opened
        both = Interval(metrics, None)
        if self._last is not None:
            both = Interval(metrics, self._last[1], at - self._last[0])
        self._last = at, metrics
        by = metrics.by
        settings = next((labels for labels, _ in metrics.get("cache_config_info", ())), {})
        has_store = settings.get("store", "none") != "none"
        has = {"device": True, "storage": has_store}
        has["host"] = bool(metrics.value("tier_capacity_blocks", {"tier": "host"}))
        lag = _row(both, LATENCY, {"operation": "loop lag"}, "loop_lag_seconds")

        def rows(
            first: str, fields: Iterable[Field], label: str, names: Iterable[str]
        ) -> list[Row]:
            shown = islice(names, MAX_ROWS)
            return [_row(both, fields, {first: name}, **{label: name}) for name in shown]

        return {
            **self._frame(health.status),
            "interval_s": both.seconds,
            "uptime_s": max(0.0, time.time() - opened) if opened else None,
            "reasons": [msgspec.structs.asdict(one) for one in health.reasons[:MAX_ROWS]],
            "settings": settings,
            "requests": _row(both, REQUESTS, {}) if "requests_total" in metrics else None,
            "tiers": rows("name", TIER, "tier", filter(has.get, by("tier_blocks", "tier"))),
            "transfers": rows("route", TRANSFER, "transfer_type", by(MOVED, "transfer_type")),
            "latencies": [
                _row(both, LATENCY, {"operation": name}, f"{name}_seconds")
                for name in OPERATIONS
                if f"{name}_seconds_count" in metrics
            ],
            "sinks": rows("name", SINK, "sink", by("flush_pending", "sink")),
            "breaker_open": both.flag("store_breaker_open", {}) if has_store else None,
            "actors": rows("name", ACTOR, "actor", by("actor_turns_total", "actor")),
            "loop_lag": lag if "loop_lag_seconds_count" in metrics else None,
        }

    def unreachable(self, error: str) -> Row:
        """A process that does not answer: the next interval begins with the next reading."""
        self._last = None
        return self._frame("unreachable", error)

    def _frame(self, status: str, error: str = "") -> Row:
        first = {"time": time.time(), "url": self.url, "status": status, "error": error}
        return {**first, "restarts_seen": self._restarts}


# -- frames


def printable(text: object) -> str:
    """A text of another process without control characters."""
    return "".join(one if one.isprintable() else "?" for one in str(text))


def _table(title: str, fields: Sequence[Field], rows: Iterable[Row]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(title, no_wrap=True, overflow="crop")
    for _, heading, *_ in fields:
        table.add_column(heading, justify="right", no_wrap=True, overflow="crop")
    for row in rows:
        warned = row.get("leases_waiting") or row.get("restarts")
        style = "bold red" if not row.get("up", True) else "yellow" if warned else ""
        name = row.get("name") or row.get("route") or row.get("operation") or ""
        cells = [printable(name), *(text(row[key]) for key, _, text, *_ in fields)]
        table.add_row(*(Text(cell, style=style) for cell in cells))
    return table


def _head(view: Row) -> Iterator[Text]:
    clock = time.strftime("%H:%M:%S", time.localtime(view["time"]))
    parts = [f"kvactors top  {clock}  {printable(view['url'])}"]
    if model := view.get("settings", {}).get("model"):
        parts.append(f"model {printable(model)}")
    if view.get("uptime_s") is not None:
        parts.append(f"up {timedelta(seconds=min(round(view['uptime_s']), 10**9))}")
    if view["restarts_seen"]:
        parts.append(f"restarts seen {view['restarts_seen']}")
    yield Text("  ".join(parts), style="bold")
    styles = {"ok": "bold green", "degraded": "bold yellow"}
    health = Text("health: ")
    health.append(printable(view["status"]), style=styles.get(view["status"], "bold red"))
    if view.get("breaker_open") is not None:
        health.append("  circuit breaker: ")
        health.append(*(("open", "bold red") if view["breaker_open"] else ("closed", "green")))
    if (lag := view.get("loop_lag")) is not None:
        of = "_s" if lag["p50_s"] is not None else "_since_start_s"
        health.append(f"  loop lag p50 {_time(lag['p50' + of])} p99 {_time(lag['p99' + of])}")
    yield health
    if view["error"]:
        yield Text(f"  {printable(view['error'])}", style="bold red")
    for reason in view.get("reasons", ()):
        why = f": {printable(reason['why'])}" if reason["why"] else ""
        ago = None if reason["since"] is None else max(0.0, view["time"] - reason["since"])
        since = "" if ago is None else f" for {_time(ago)}"
        yield Text(f"  {printable(reason['component'])}{why}{since}", style="yellow")


def frame(view: Row) -> RenderableType:
    """A frame."""
    head = list(_head(view))
    if view["status"] == "unreachable":
        return Group(*head)
    tiers = _table("tier", TIER, view["tiers"])
    if found := [row for row in view["tiers"] if row["hit_rate_since_start"] is not None]:
        now = None if found[0]["hit_rate"] is None else sum(row["hit_rate"] for row in found)
        ever = sum(row["hit_rate_since_start"] for row in found)
        tiers.add_row("all", "", "", "", "", _percent(now), _percent(ever), style="bold")
    tables = (
        tiers,
        _table("requests", REQUESTS, filter(None, [view["requests"]])),
        _table("transfers", TRANSFER, view["transfers"]),
        _table("latency", LATENCY, view["latencies"]),
        _table("sink", SINK, view["sinks"]),
        _table("actor", ACTOR, view["actors"]),
    )
    return Group(*head, *[part for table in tables if table.row_count for part in ("", table)])


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
        width = console.width if console.is_terminal else None
        plain = Console(width=width, no_color=True, highlight=False)
        yield lambda view: plain.print(frame(view), "")
    else:
        with Live(console=console, screen=True) as live:
            yield lambda view: live.update(frame(view), refresh=True)


def watch(url: str, show: Show, interval: float, timeout: float, *, once: bool) -> Row:
    """Read a process and show it, without end or until the second reading. Raises Unreachable,
    BadMetrics: at the first reading, or with `once`."""
    process = Process(url, timeout)
    view = process.read()
    if not once:
        show(view)
    while True:
        time.sleep(interval)
        try:
            view = process.read()
        except (Unreachable, BadMetrics) as error:
            if once:
                raise
            view = process.unreachable(str(error))
        show(view)
        if once:
            return view


def top(
    url: str = "9464",
    *,
    interval: float = 2.0,
    timeout: float = 5.0,
    once: Annotated[bool, Parameter(negative="")] = False,
    json: Output | None = None,
) -> int:
    """Show the state of a running process: health, occupancy and hit rates of the tiers, transfers,
    latencies, leases, sinks and actors. It reads /metrics and /health of the process. Ctrl-C
    ends it. Without a terminal the frames are plain text, one after another. Needs the extra
    [metrics].

    Parameters
    ----------
    url
        Address of the process: a port of this machine, host:port, or the URL of its metrics.
    interval
        Seconds between two frames. Rates are those of the last interval.
    timeout
        Seconds that a request to the process may take.
    once
        Print one frame as plain text, after one interval, and end. The exit status is 1 unless the
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
    need("prometheus_client", "kvactors top needs prometheus_client", "metrics")
    with output(json, once=once) as show:
        view = watch(target, show, interval, timeout, once=once)
    return 0 if view["status"] in ("ok", "degraded") else 1
