"""The frame of `kvactors top`: tables for a terminal, or plain text."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvactors.sizes import human
from kvactors.top.view import Latency, View

WIDE = 150
"""Columns from which on tables are beside each other."""

STATUS_STYLES = {"ok": "bold green", "degraded": "bold yellow"}
BAD = "bold red"
NONE = "-"

Row = tuple[Sequence[str], str]
"""Cells and style."""


def frame(view: View, console: Console) -> RenderableType:
    """A frame for a console's present width."""
    head = [_head(view), *_health(view)]
    if view.status == "unreachable":
        return Group(*head)
    left = [_tiers(view), _transfers(view), _latencies(view)]
    right = [_requests(view), _sinks(view), _actors(view)]
    if console.width >= WIDE:
        beside = Table.grid(padding=(0, 4))
        beside.add_row(_stack(left), _stack(right))
        return Group(*head, "", beside)
    return Group(*head, "", _stack([left[0], right[0], *left[1:], *right[1:]]))


def _stack(tables: Iterable[Table | None]) -> Group:
    parts = list[RenderableType]()
    for table in tables:
        if table is not None:
            parts += [table, ""]
    return Group(*parts[:-1])


def shown(text: str) -> str:
    """A text of another process without control characters."""
    return "".join(one if one.isprintable() else "?" for one in text)


# -- the head


def _head(view: View) -> Text:
    clock = time.strftime("%H:%M:%S", time.localtime(view.time))
    parts = [f"kvactors top  {clock}  {shown(view.url)}"]
    if model := view.settings.get("model"):
        parts.append(f"model {shown(model)}")
    if view.uptime_s is not None:
        parts.append(f"up {_uptime(view.uptime_s)}")
    if view.restarts_seen:
        parts.append(f"restarts seen {view.restarts_seen}")
    return Text("  ".join(parts), style="bold")


def _uptime(seconds: float) -> str:
    minutes, second = divmod(min(round(seconds), 10**9), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour:02d}:{minute:02d}:{second:02d}"
    return f"{days} d {clock}" if days else clock


def _health(view: View) -> Iterator[Text]:
    text = Text("health: ")
    text.append(shown(view.status), style=STATUS_STYLES.get(view.status, BAD))
    if view.breaker_open is not None:
        text.append("  circuit breaker: ")
        text.append(*(("open", BAD) if view.breaker_open else ("closed", "green")))
    if (lag := view.loop_lag) is not None:
        now = _latest(lag)
        text.append(f"  loop lag p50 {_time(now[0])} p99 {_time(now[1])}")
    yield text
    if view.error:
        yield Text(f"  {shown(view.error)}", style=BAD)
    for reason in view.reasons:
        since = ""
        if reason.since is not None:
            since = f" for {_time(max(0.0, view.time - reason.since))}"
        why = f": {shown(reason.why)}" if reason.why else ""
        yield Text(f"  {shown(reason.component)}{why}{since}", style="yellow")


# -- tables


def _table(name: str, columns: Sequence[str], rows: Iterable[Row]) -> Table | None:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(name, no_wrap=True, overflow="crop")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True, overflow="crop")
    for cells, style in rows:
        first, *others = cells
        table.add_row(Text(shown(first), style=style), *(Text(one, style=style) for one in others))
    return table if table.row_count else None


def _tiers(view: View) -> Table | None:
    columns = ("blocks", "of", "used", "bytes", "hits now", "since start", "evicted/s")
    rows = [
        (
            (
                one.name,
                _count(one.blocks),
                _count(one.capacity_blocks),
                _percent(one.blocks / one.capacity_blocks if one.capacity_blocks else None),
                human(one.bytes),
                _percent(one.hit_rate),
                _percent(one.hit_rate_since_start),
                _rate(one.evicted_per_s),
            ),
            "",
        )
        for one in view.tiers
    ]
    whole = _sum(one.hit_rate_since_start for one in view.tiers)
    if whole is not None:
        now = _sum(one.hit_rate for one in view.tiers)
        rows.append((("all", "", "", "", "", _percent(now), _percent(whole), ""), "bold"))
    return _table("tier", columns, rows)


def _sum(rates: Iterable[float | None]) -> float | None:
    found = [rate for rate in rates if rate is not None]
    return sum(found) if found else None


def _transfers(view: View) -> Table | None:
    rows = [
        (
            (
                one.route.replace("_to_", " to "),
                NONE if one.bytes_per_s is None else f"{human(one.bytes_per_s)}/s",
                human(one.bytes_since_start),
                _time(one.p50_s),
                _time(one.p99_s),
            ),
            "",
        )
        for one in view.transfers
    ]
    return _table("transfers", ("now", "since start", "p50", "p99"), rows)


def _latencies(view: View) -> Table | None:
    rows = [
        (
            (
                one.operation,
                _rate(one.per_s),
                _time(one.p50_s),
                _time(one.p99_s),
                _time(one.p50_since_start_s),
                _time(one.p99_since_start_s),
            ),
            "",
        )
        for one in view.latencies
    ]
    return _table("latency", ("/s", "p50 now", "p99 now", "p50 start", "p99 start"), rows)


def _requests(view: View) -> Table | None:
    one = view.requests
    if one is None:
        return None
    cells = (
        "",
        _rate(one.per_s),
        *map(_count, (one.leases_open, one.leases_waiting, one.no_room, one.preempted, one.leaked)),
    )
    style = "yellow" if one.leases_waiting else ""
    columns = ("/s", "open", "waiting", "no room", "preempted", "leaked")
    return _table("requests", columns, [(cells, style)])


def _sinks(view: View) -> Table | None:
    rows = [
        (
            (
                one.name,
                "up" if one.up else "down",
                _count(one.pending_blocks),
                _time(one.lag_s),
                _rate(one.blocks_per_s),
                _count(one.retries),
                _count(one.resyncs),
            ),
            "" if one.up else BAD,
        )
        for one in view.sinks
    ]
    columns = ("state", "pending", "lag", "blocks/s", "retries", "resyncs")
    return _table("sink", columns, rows)


def _actors(view: View) -> Table | None:
    rows = [
        (
            (
                one.name,
                "up" if one.up else "down",
                _rate(one.messages_per_s),
                _count(one.queued),
                _count(one.restarts),
            ),
            BAD if not one.up else "yellow" if one.restarts else "",
        )
        for one in view.actors
    ]
    return _table("actor", ("state", "messages/s", "queued", "restarts"), rows)


def _latest(one: Latency) -> tuple[float | None, float | None]:
    """The percentiles of the last interval, or else those since the start."""
    if one.p50_s is not None:
        return one.p50_s, one.p99_s
    return one.p50_since_start_s, one.p99_since_start_s


# -- values


def _count(value: float | None) -> str:
    if value is None:
        return NONE
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= factor:
            return f"{value / factor:,.4g} {unit}"
    return f"{value:,.0f}"


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.1f} %"


def _rate(value: float | None) -> str:
    if value is None:
        return NONE
    return _count(value) if value >= 100 or value == 0 else f"{value:.1f}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return NONE
    if seconds == 0:
        return "0 s"
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"
