"""The report of a run or a replay, with one set of terms."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from typing import Any, TypeVar

import msgspec
from rich.console import Console

from kvactors.cache import KVCache
from kvactors.cpu_evictor.memory import NOT_FETCHED
from kvactors.lease import Hits
from kvactors.observe.lag import Lags
from kvactors.scenario.output import Cells, print_fields, print_rows
from kvactors.settings.check import human
from kvactors.types import Residency

MAX_ERRORS = 50


class Totals(msgspec.Struct):
    """The counts that the driver of a run keeps itself. Hits in blocks."""

    requests: int = 0
    finished: int = 0  # requests served to their end
    rejected: int = 0
    no_room: int = 0
    blocks_looked_up: int = 0
    device: int = 0
    host: int = 0
    storage: int = 0
    verified_blocks: int = 0
    corrupt_blocks_served: int = 0
    rotten: int = 0  # slots in which a bit was flipped
    errors: list[str] = msgspec.field(default_factory=list)

    def hit_rates(self) -> dict[str, float]:
        hits = {"device": self.device, "host": self.host, "storage": self.storage}
        hits["total"] = sum(hits.values())
        return {
            tier: round(blocks / max(1, self.blocks_looked_up), 6) for tier, blocks in hits.items()
        }

    def count_request(self, blocks: int, hits: Hits) -> None:
        self.requests += 1
        self.blocks_looked_up += blocks
        self.device += hits.device
        self.host += hits.host
        self.storage += hits.storage

    def complain(self, what: str) -> None:
        """Record an error. The texts of the first MAX_ERRORS are kept."""
        if len(self.errors) < MAX_ERRORS:
            self.errors.append(what)
        elif len(self.errors) == MAX_ERRORS:
            self.errors.append("and more")


Progress = Callable[[Totals], object]
"""Called with the totals a few times a second."""


class Expectation(msgspec.Struct, frozen=True):
    """An expectation of a scenario and what the run had.

    Attributes:
        name: dotted name of the report's field.
        wanted: such as "at least 3".
    """

    name: str
    value: float
    wanted: str
    holds: bool

    def __str__(self) -> str:
        return f"{self.name} is {count_text(self.value)}, and {self.wanted} was expected"


class Event(msgspec.Struct, frozen=True):
    """What happened in a run. at: seconds since its beginning."""

    at: float
    what: str

    def __str__(self) -> str:
        return f"{self.at:.1f} s: {self.what}"


class Report(msgspec.Struct):
    """The result of a run or a replay. corrupt_blocks_served and flush["divergence"] must be 0.

    Attributes:
        wall_s: real seconds, those of earlier runs included.
        events: faults, restarts and further caches, in the order of their times.
        caches: of a run with several caches, at once or one after another, the figures of each.
        sinks: for each sink the reports it took, those pending, and the number of blocks on which
            it differs from the tiers.
        loop_own_lag_ms: the same without the time in which its thread waited for a core, empty
            where the system does not count that time.
        loop_cpu_ms: processor time of its thread within the lag.
        hit_rate_lru: of a sequential replay with another policy than LRU, the share that LRU tiers
            of the same sizes hit.
    """

    name: str
    requests: int
    rejected: int
    no_room: int
    blocks_looked_up: int
    hit_rate: dict[str, float]
    verified_blocks: int
    corrupt_blocks_served: int
    flush: dict[str, int]
    loop_lag_ms: dict[str, float]
    messages: int
    wall_s: float
    errors: list[str]
    sinks: dict[str, dict[str, float]] = msgspec.field(default_factory=dict)
    storage: dict[str, float] = msgspec.field(default_factory=dict)
    serving: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    hit_rate_lru: dict[str, float] = msgspec.field(default_factory=dict)
    blocks_moved: int = 0
    loop_own_lag_ms: dict[str, float] = msgspec.field(default_factory=dict)
    loop_cpu_ms: dict[str, float] = msgspec.field(default_factory=dict)
    description: str = ""
    expectations: list[Expectation] = msgspec.field(default_factory=list)
    events: list[Event] = msgspec.field(default_factory=list)
    caches: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)

    def failures(self) -> list[str]:
        """The expectations that do not hold, and the errors."""
        return [str(one) for one in self.expectations if not one.holds] + self.errors


TOTALS = (
    *("requests", "rejected", "no_room"),
    *("blocks_looked_up", "verified_blocks", "corrupt_blocks_served"),
)
SINK_COUNTS = ("delivered", "pending", "retried", "coalesced", "resyncs")


R = TypeVar("R", bound="Report")


def report_of(kind: type[R], name: str, totals: Totals, wall: float, **figures: Any) -> R:
    """A report with the driver's counts. wall: seconds."""
    counts = {one: getattr(totals, one) for one in TOTALS}
    return kind(name=name, hit_rate=totals.hit_rates(), wall_s=round(wall, 3), **counts, **figures)


def make_report(
    name: str,
    totals: Totals,
    cache: KVCache,
    lags: Lags,
    sinks: Collection[str] | None = None,
    wall: float = 0.0,
) -> Report:
    """The report as of now. The cache should be idle. sinks: the names of the sinks that count, all
    if None."""
    statistics = cache.statistics()
    flushed, store, host = statistics.flush, statistics.store, statistics.host
    counted = [sink for sink in flushed if sinks is None or sink.name in sinks]
    each = {
        sink.name: {
            **{name: getattr(sink, name) for name in SINK_COUNTS},
            "oldest_pending_s": round(sink.oldest_pending_age, 3),
            "divergence": cache.count_divergent_blocks([sink.name]),
        }
        for sink in flushed
    }
    stored: dict[str, float] = {}
    if store is not None:
        stored = {name: value for name, value in store._asdict().items() if isinstance(value, int)}
        stored |= {"shed": host.shed, "rotten": totals.rotten}
        stored |= {name: getattr(host, name) for name in NOT_FETCHED}
    return report_of(
        Report,
        name,
        totals,
        wall,
        flush={
            Residency.RESIDENT.value: sum(sink.resident for sink in flushed),
            Residency.GONE.value: sum(sink.gone for sink in flushed),
            "delivered": sum(sink.delivered for sink in flushed),
            "pending": sum(sink.pending for sink in counted),
            "divergence": cache.count_divergent_blocks(sinks),
        },
        messages=statistics.messages,
        errors=totals.errors + cache.check(),
        sinks=each,
        storage=stored,
        blocks_moved=host.offloaded + host.written,
        loop_lag_ms=lags["wall"],
        loop_own_lag_ms=lags["own"],
        loop_cpu_ms=lags["cpu"],
    )


def totals_line(totals: Totals) -> str:
    """Progress of a run in one line."""
    share = (totals.device + totals.host + totals.storage) / max(1, totals.blocks_looked_up)
    return (
        f"{totals.requests} requests, {totals.blocks_looked_up} blocks, hit rate {share:.3f}, "
        f"{totals.verified_blocks} verified"
    )


def counts_text(counts: Mapping[str, float], labels: Mapping[str, str]) -> str:
    """Counts in one line: always those with a label, and any other that is not 0."""
    shown = [f"{label} {count_text(counts.get(name, 0))}" for name, label in labels.items()]
    shown += [
        f"{name.replace('_', ' ')} {count_text(value)}"
        for name, value in counts.items()
        if name not in labels and value
    ]
    return "  ".join(shown)


def count_text(value: float) -> str:
    """A count in full, and any other number with six digits."""
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def in_line(values: Mapping[str, Any], form: str = "") -> str:
    """Names and values in one line. form: of the values, as in a format string."""
    return "  ".join(f"{name} {value:{form}}" for name, value in values.items())


def rates_text(rates: Mapping[str, float]) -> str:
    """Hit rates, the total first."""
    if not rates:
        return ""
    tiers = {tier: rate for tier, rate in rates.items() if tier != "total"}
    return f"{rates['total']:.4f}  {in_line(tiers, '.4f')}"


STORED = {"writes": "written", "existing": "had already", "reads": "read"}
STORED |= {"late": "late", "shed": "shed"}


def report_rows(report: Report) -> list[tuple[str, str]]:
    """Names and values of the summary, short enough for 80 columns. A value that the run does not
    have is empty."""
    several = len(report.sinks) > 1 or any(sink["retried"] for sink in report.sinks.values())
    sinks = [
        f"{name}: {counts_text(counts, {'delivered': 'delivered'})}"
        for name, counts in report.sinks.items()
    ]
    flush = {
        name: report.flush.get(name, 0) for name in ("resident", "gone", "pending", "divergence")
    }
    stored = {name: one for name, one in report.storage.items() if name != "object_bytes"}
    refused = {"no room": report.no_room, "rejected": report.rejected}
    rows = [
        ("requests", f"{report.requests:,}  {in_line(refused, ',')}"),
        ("hit rate", rates_text(report.hit_rate)),
        ("hit rate of LRU", rates_text(report.hit_rate_lru)),
        ("blocks looked up", f"{report.blocks_looked_up:,}"),
        (
            "verified blocks",
            f"{report.verified_blocks:,}  corrupt {report.corrupt_blocks_served:,}",
        ),
        ("blocks moved down", f"{report.blocks_moved:,}"),
        ("sent to indexes", in_line(flush, ",")),
        ("by sink", "\n".join(sinks) if several else ""),
        ("storage, blocks", counts_text(stored, STORED) if stored else ""),
        ("messages of actors", f"{report.messages:,}"),
        ("loop lag, ms", in_line(report.loop_lag_ms, ".2f")),
        ("lag on the core, ms", in_line(report.loop_own_lag_ms, ".2f")),
        ("processor time, ms", in_line(report.loop_cpu_ms, ".2f")),
        ("real time, s", f"{report.wall_s:.2f}"),
        ("events", "\n".join(map(str, report.events))),
        ("errors", "; ".join(report.errors) or "none"),
    ]
    return [(name, value) for name, value in rows if value]


def print_summary(report: Report, console: Console, title: str) -> None:
    """The figures of a run, of its last cache if it has several."""
    named = [name for name in (title, *list(report.caches)[-1:]) if name]
    print_fields(": ".join(named), report_rows(report), console)
    if report.caches:
        print_caches("each cache", report.caches, console)
    if report.serving:
        print_figures("serving loop", FIGURES, report.serving, console)


def print_proof(report: Report, console: Console) -> None:
    """The description of a scenario, and each expectation with its value."""
    if report.description:
        console.print(report.description, markup=False, highlight=False)
    if report.expectations:
        rows = [
            (one.name, count_text(one.value), one.wanted, "holds" if one.holds else "FAILS")
            for one in report.expectations
        ]
        failed = {at: "red" for at, one in enumerate(report.expectations) if not one.holds}
        columns = ("expectation", "value", "expected", "")
        print_rows("", columns, rows, console, numbers=range(1, 2), styles=failed)
        verdict = f"{len(rows) - len(failed)} of {len(rows)} expectations hold"
        console.print(verdict, style=f"bold {'red' if failed else 'green'}", highlight=False)


TIERS = ("device", "host", "storage")
MOVED = ("read", "written")
"""Figures of a cache that is one of several: blocks that its requests hit, and bytes of a store."""


def cache_figures(report: Report) -> dict[str, int]:
    """The figures of a cache that is one of several: requests, blocks, and bytes of the store."""
    looked_up, size = report.blocks_looked_up, report.storage.get("object_bytes", 0)
    return {
        "requests": report.requests,
        "blocks_looked_up": looked_up,
        **{tier: round(report.hit_rate[tier] * looked_up) for tier in TIERS},
        "read": int(report.storage.get("reads", 0) * size),
        "written": int(report.storage.get("writes", 0) * size),
    }


def print_caches(title: str, caches: Mapping[str, Mapping[str, int]], console: Console) -> None:
    """Print the hits of each cache and what it moved to and from the store, beside those of all."""
    fields = next(iter(caches.values()))
    total = {field: sum(one[field] for one in caches.values()) for field in fields}
    hits, moved, last = list[Cells](), list[Cells](), {len(caches): "bold"}
    for name, one in {**caches, "total": total}.items():
        rates = [f"{one[tier] / max(1, one['blocks_looked_up']):.3f}" for tier in TIERS]
        found, every = (sum(each[tier] for tier in TIERS) for each in (one, total))
        share = f"{found / max(1, every):.1%}"
        hits.append((name, f"{one['requests']:,}", *rates, f"{found:,}", share))
        cells = ((human(one[way]), f"{one[way] / max(1, total[way]):.1%}") for way in MOVED)
        moved.append((name, *chain(*cells)))
    heads = ["", "requests", *TIERS, "blocks hit", "of all hits"]
    print_rows(f"{title}: hit rates", heads, hits, console, numbers=range(1, 7), styles=last)
    if total["read"] or total["written"]:
        title, heads = f"{title}: bytes of the store", ["", "read", "of all", "written", "of all"]
        print_rows(title, heads, moved, console, numbers=range(1, 5), styles=last)


FIGURES = (
    ("first token, s", "first_token_s"),
    ("in the queue, s", "queue_s"),
    ("whole request, s", "request_s"),
    ("requests served", "requests"),
    ("requests per s", "requests_per_s"),
    ("output tokens per s", "output_tokens_per_s"),
    ("prompt tokens", "prompt_tokens"),
    ("prompt tokens saved", "saved_tokens"),
    ("tokens computed", "computed_tokens"),
    ("preemptions", "preemptions"),
    ("seconds of the trace's clock", "seconds"),
)
"""The figures of a serving loop, and how they are labelled."""


def print_figures(
    title: str,
    figures: Iterable[tuple[str, str]],
    columns: Mapping[str, Mapping[str, Any]],
    console: Console,
) -> None:
    """Print labelled figures, a row each, of each column. Percentiles have a row each too."""
    rows = list[Cells]()
    for label, field in figures:
        values = [one.get(field, 0) for one in columns.values()]
        if isinstance(values[0], dict):
            rows += [
                [f"{label}, {share}", *(count_text(one[share]) for one in values)]
                for share in values[0]
            ]
        else:
            rows.append([label, *map(count_text, values)])
    numbers = range(1, len(columns) + 1)
    print_rows(title, ["", *columns], rows, console, numbers=numbers)
