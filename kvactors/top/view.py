"""Values that `kvactors top` shows, computed from two readings of a process."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kvactors.top.exposition import Buckets, Metrics, grown, quantile

TIERS = ("device", "host", "storage")

OPERATIONS = ("acquire", "ready", "load", "offload", "save", "request")
"""Histograms `kvactors:NAME_seconds`."""

MANY = 64
"""Sinks, actors and reasons that are read at most, each."""


class Reason(msgspec.Struct, frozen=True):
    """A part that does not work. since: Unix time, None if the process does not report it."""

    component: str
    why: str = ""
    since: float | None = None


class Health(msgspec.Struct, frozen=True):
    """The health of a process."""

    status: str
    reasons: tuple[Reason, ...] = ()


class Reading(NamedTuple):
    """The answers of a process.

    Attributes:
        at: seconds of the reader's clock.
        metrics: of the process.
        health: None if it has no path for it.
    """

    at: float
    metrics: Metrics
    health: Health | None


class Tier(msgspec.Struct, frozen=True):
    """A tier. Rates are None without requests in their time, and capacity without a limit.

    Attributes:
        blocks: in the tier.
        capacity_blocks: at most.
        bytes: of these blocks, on one rank.
        hit_rate: blocks that the tier had, of those looked up in the last interval.
        hit_rate_since_start: the same since the cache was opened.
        evicted_per_s: blocks that left it for others.
    """

    name: str
    blocks: float
    capacity_blocks: float | None
    bytes: float
    hit_rate: float | None
    hit_rate_since_start: float | None
    evicted_per_s: float | None


class Transfer(msgspec.Struct, frozen=True):
    """Transfers between two tiers. The percentiles are those of one transfer."""

    route: str
    bytes_per_s: float | None
    bytes_since_start: float
    p50_s: float | None
    p99_s: float | None


class Latency(msgspec.Struct, frozen=True):
    """An operation. p50_s and p99_s are None if none has ended in the last interval."""

    operation: str
    per_s: float | None
    p50_s: float | None
    p99_s: float | None
    p50_since_start_s: float | None
    p99_since_start_s: float | None


class Sink(msgspec.Struct, frozen=True):
    """A flush sink."""

    name: str
    up: bool
    pending_blocks: float
    lag_s: float
    blocks_per_s: float | None
    retries: float
    resyncs: float


class ActorRow(msgspec.Struct, frozen=True):
    """An actor."""

    name: str
    up: bool
    messages_per_s: float | None
    queued: float
    restarts: float


class Requests(msgspec.Struct, frozen=True):
    """Requests and their leases. Counts are those since the start."""

    per_s: float | None
    leases_open: float
    leases_waiting: float
    no_room: float
    preempted: float
    leaked: float


class View(msgspec.Struct, frozen=True):
    """A process as of one reading.

    Attributes:
        time: Unix time of the reading.
        url: of its metrics.
        status: ok, degraded, failed or closed, or unreachable.
        error: why it is unreachable.
        restarts_seen: restarts of the process since `top` began.
        interval_s: seconds between the two readings, None with one.
        uptime_s: seconds since the cache was opened, None if the process does not report it.
        settings: sizes and parts of the cache.
        breaker_open: whether the circuit breaker of the store is not closed, None without a store.
    """

    time: float
    url: str
    status: str
    error: str = ""
    restarts_seen: int = 0
    interval_s: float | None = None
    uptime_s: float | None = None
    reasons: tuple[Reason, ...] = ()
    settings: dict[str, str] = {}
    requests: Requests | None = None
    tiers: tuple[Tier, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    latencies: tuple[Latency, ...] = ()
    sinks: tuple[Sink, ...] = ()
    breaker_open: bool | None = None
    actors: tuple[ActorRow, ...] = ()
    loop_lag: Latency | None = None


class Readings:
    """The last readings of a process. A restart of the process begins anew.

    Attributes:
        restarts: seen so far.
    """

    def __init__(self) -> None:
        self.restarts = 0
        self._last: Reading | None = None
        self._before: Reading | None = None
        self._open: Metrics | None = None  # the last metrics of an open cache

    def add(self, reading: Reading) -> None:
        """Add a reading, taken after the last one."""
        self._before, self._last = self._last, reading
        if not reading.metrics.counters():
            return
        if self._open is not None and restarted(self._open, reading.metrics):
            self.restarts += 1
            self._before = None
        self._open = reading.metrics

    def lost(self) -> None:
        """The process did not answer: the next interval begins with the next reading."""
        self._last = self._before = None

    def view(self, url: str, time: float) -> View:
        """The values of the last reading, with the rates since the one before."""
        if self._last is None:
            raise RuntimeError("there is no reading")
        return _View(self._last, self._before).view(url, time, self.restarts)

    def unreachable(self, url: str, time: float, error: str) -> View:
        """A process that does not answer."""
        return View(time, url, "unreachable", error, self.restarts)


def restarted(before: Metrics, now: Metrics) -> bool:
    """Whether another cache answers than before: opened at another time, or with a counter that
    has fallen."""
    start, earlier = now.value("start_time_seconds"), before.value("start_time_seconds")
    if start is not None and earlier is not None and start != earlier:
        return True
    counters = now.counters()
    return any(counters.get(key, value) < value for key, value in before.counters().items())


class _View:
    """Computes the values of one reading."""

    def __init__(self, now: Reading, before: Reading | None) -> None:
        self.now, self.health = now.metrics, now.health
        self.before = before.metrics if before is not None else None
        self.seconds = now.at - before.at if before is not None else None

    def view(self, url: str, time: float, restarts: int) -> View:
        """All values."""
        now = self.now
        start = now.value("start_time_seconds")
        health = self.health if self.health is not None else self._health()
        settings = dict(now.labels("cache_config_info"))
        store = settings.get("store", "none") != "none"
        return View(
            time=time,
            url=url,
            status=health.status,
            restarts_seen=restarts,
            interval_s=self.seconds,
            uptime_s=max(0.0, time - start) if start else None,
            reasons=health.reasons[:MANY],
            settings=settings,
            requests=self._requests(),
            tiers=tuple(self._tier(name) for name in TIERS if self._has_tier(name)),
            transfers=tuple(map(self._transfer, now.by("kv_offload_total_bytes_total", ROUTE))),
            latencies=tuple(
                self._latency(name, f"{name}_seconds")
                for name in OPERATIONS
                if f"{name}_seconds_count" in now
            ),
            sinks=tuple(map(self._sink, list(now.by("flush_pending", "sink"))[:MANY])),
            breaker_open=bool(now.value("store_breaker_open")) if store else None,
            actors=tuple(map(self._actor, list(now.by("actor_turns_total", "actor"))[:MANY])),
            loop_lag=(
                self._latency("loop lag", "loop_lag_seconds")
                if "loop_lag_seconds_count" in now
                else None
            ),
        )

    # -- changes since the reading before

    def _delta(self, name: str, **labels: str) -> float | None:
        value = self.now.value(name, **labels)
        earlier = self.before.value(name, **labels) if self.before is not None else None
        return None if value is None or earlier is None else max(0.0, value - earlier)

    def _per_s(self, name: str, **labels: str) -> float | None:
        grown_by = self._delta(name, **labels)
        if grown_by is None or not self.seconds:
            return None
        return grown_by / self.seconds

    def _new_buckets(self, name: str, **labels: str) -> Buckets:
        if self.before is None:
            return ()
        return grown(self.now.buckets(name, **labels), self.before.buckets(name, **labels))

    # -- parts

    def _health(self) -> Health:
        statuses = self.now.by("health", "status")
        status = next((name for name, value in statuses.items() if value), None)
        if status is None:
            status = "ok" if self.now.value("up") else "closed"
        parts = self.now.by("degraded", "component")
        return Health(status, tuple(Reason(name) for name, value in parts.items() if value))

    def _requests(self) -> Requests | None:
        value = self.now.value
        if value("requests_total") is None:
            return None
        return Requests(
            self._per_s("requests_total"),
            value("num_requests_running") or 0.0,
            value("num_requests_waiting") or 0.0,
            value("requests_no_room_total") or 0.0,
            value("num_preemptions_total") or 0.0,
            value("leases_leaked_total") or 0.0,
        )

    def _has_tier(self, name: str) -> bool:
        """Whether the cache has a tier. One without a store exposes an empty storage tier."""
        if self.now.value("tier_blocks", tier=name) is None:
            return False
        if name == "storage":
            return self.now.labels("cache_config_info").get("store", "") != "none"
        return name == "device" or bool(self.now.value("tier_capacity_blocks", tier=name))

    def _tier(self, name: str) -> Tier:
        now = self.now
        looked_up = self._delta("kv_block_queries_total")
        return Tier(
            name,
            now.value("tier_blocks", tier=name) or 0.0,
            now.value("tier_capacity_blocks", tier=name) or None,
            now.value("tier_bytes", tier=name) or 0.0,
            _share(self._delta("kv_block_hits_total", tier=name), looked_up),
            _share(
                now.value("kv_block_hits_total", tier=name), now.value("kv_block_queries_total")
            ),
            self._per_s("blocks_evicted_total", tier=name),
        )

    def _transfer(self, route: str) -> Transfer:
        recent = self._new_buckets("kv_offload_seconds", **{ROUTE: route})
        return Transfer(
            route,
            self._per_s("kv_offload_total_bytes_total", **{ROUTE: route}),
            self.now.value("kv_offload_total_bytes_total", **{ROUTE: route}) or 0.0,
            quantile(recent, 0.5),
            quantile(recent, 0.99),
        )

    def _latency(self, operation: str, name: str) -> Latency:
        recent, whole = self._new_buckets(name), self.now.buckets(name)
        return Latency(
            operation,
            self._per_s(f"{name}_count"),
            quantile(recent, 0.5),
            quantile(recent, 0.99),
            quantile(whole, 0.5),
            quantile(whole, 0.99),
        )

    def _sink(self, name: str) -> Sink:
        value = self.now.value
        return Sink(
            name,
            bool(value("sink_up", sink=name)),
            value("flush_pending", sink=name) or 0.0,
            value("flush_lag_seconds", sink=name) or 0.0,
            self._per_s("flush_blocks_total", sink=name),
            value("flush_retries_total", sink=name) or 0.0,
            value("flush_resyncs_total", sink=name) or 0.0,
        )

    def _actor(self, name: str) -> ActorRow:
        value = self.now.value
        return ActorRow(
            name,
            bool(value("actor_up", actor=name)),
            self._per_s("actor_turns_total", actor=name),
            value("actor_queued", actor=name) or 0.0,
            value("actor_restarts_total", actor=name) or 0.0,
        )


ROUTE = "transfer_type"


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
