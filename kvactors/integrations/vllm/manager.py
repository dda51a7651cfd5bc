"""The scheduler's side: vLLM's calls, answered by a `TierCache`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingManager,
    OffloadingMetricMetadata,
    PrepareStoreOutput,
    RequestOffloadingContext,
    TierFilter,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPUOffloadingMetrics as Cpu
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvactors.integrations.vllm.region import TierRegion
from kvactors.observe.metrics import OFFLOAD_FAMILIES, TierSnapshot
from kvactors.tier_cache import CopiesInFlight, Lookup, TierCache
from kvactors.types import Tier

RESULTS = {
    Lookup.MISS: LookupResult.MISS,
    Lookup.PENDING: LookupResult.HIT_PENDING,
    Lookup.HIT: LookupResult.HIT,
}
MEDIA = {Tier.HOST: Medium.CPU, Tier.STORAGE: Medium.STORAGE}
SOURCES = {Tier.HOST: CacheHitSource.HOST, Tier.STORAGE: CacheHitSource.DISK}
TELLS_FLUSH = hasattr(OffloadingManager, "on_reset_flushed")  # from 0.33 on


# -- metrics under the names that vLLM's own tiers have

PREFIX = "vllm:"  # `LLM.get_metrics` lists names that begin with it only
HEALTHY = f"{PREFIX}kv_offload_healthy"
COUNTERS = tuple(family for family in OFFLOAD_FAMILIES if family.kind == "counter")

PIECES = {
    Cpu.CPU_CACHE_USAGE_PERC: "copies, reads and writes",
    Cpu.CPU_CACHE_WRITE_USAGE_PERC: "copies from the device",
    Cpu.CPU_CACHE_READ_USAGE_PERC: "copies to the device, reads and writes",
}

DEFINITIONS: dict[str, OffloadingMetricMetadata] = {
    **{
        name: OffloadingGaugeMetadata(f"Part of the host tier's slots in {use}, 0 to 1.")
        for name, use in PIECES.items()
    },
    Cpu.CPU_ALLOCATION_SIZE: OffloadingHistogramMetadata(
        "Slots that each store of a request took.", buckets=tuple(4**i for i in range(10))
    ),
    HEALTHY: OffloadingGaugeMetadata("1 while every tier and sink works."),
    **{
        PREFIX + family.name: OffloadingCounterMetadata(family.text, family.labels)
        for family in COUNTERS
    },
}


class PathEnd(NamedTuple):
    """The last chunk of a request's path in a group that was seen. `tokens`: of the path up to the
    chunk's end, None if vLLM does not give it."""

    key: bytes
    tokens: int | None


class PathEnds(dict[int, PathEnd]):
    """By group of layers, kept with the request."""


class Begun(int):
    """The number of resets before a request, kept with it."""


class KVActorsManager(OffloadingManager):
    """Answers vLLM's scheduler from a `TierCache`. Every call is synchronous.

    vLLM forgets its jobs at `reset_cache`, while workers may still copy from and to their slots.
    Those slots stay pinned here until the workers have flushed the jobs.

    After a reset vLLM offers the chunks of running requests again: computed with the weights of
    before it and, in layers with a window, from blocks that have left the window and may be another
    request's. Requests that began before a reset store nothing after it.

    Args:
        chunk_tokens: tokens of a chunk of each group of layers.
        flush_steps: ends of scheduler steps after which the workers have flushed the jobs of before
            a reset, for a vLLM that does not report it.

    Attributes:
        waiting: the chunks of each request that wait for slots, for the connector that offers them
            again.
    """

    def __init__(
        self,
        tiers: TierCache,
        region: TierRegion | None,
        *,
        chunk_tokens: Mapping[int, int],
        flush_steps: int,
    ) -> None:
        self.tiers = tiers
        self._region = region
        self._chunk_tokens = chunk_tokens
        self._flush_steps = flush_steps
        self._forgotten: CopiesInFlight | None = None  # of before a reset
        self._steps_left = 0
        self._resets = 0
        self._allocations: list[int] = []  # slots of each store since the last metrics
        self._last: dict[tuple[str, ...], float] = {}  # name and labels of each counter
        self.waiting: dict[str, Sequence[bytes]] = {}

    # -- requests

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        req_context.set_state(Begun(self._resets))
        return RequestOffloadingContext()

    # -- look-up and load

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        """Whether a chunk can be loaded, from the tiers that the request names."""
        allowed = req_context.load_tier_filter
        if allowed is TierFilter.ALL:
            return RESULTS[self.tiers.lookup(key)]
        storage = allowed.allows(Medium.STORAGE, None)
        return RESULTS[self.tiers.lookup(key, storage=storage)]

    def get_load_source(self, key: Any, req_context: Any) -> CacheHitSource:
        return SOURCES[self.tiers.source(key)]

    def prepare_load(self, keys: Collection[Any], req_context: Any) -> CPULoadStoreSpec:
        ordered = list(keys)
        slots = self.tiers.prepare_load(ordered)
        self._parents(ordered, req_context)
        return CPULoadStoreSpec(slots)

    def complete_load(self, keys: Collection[Any], req_context: Any) -> None:
        self.tiers.complete_load(keys)

    def touch(self, keys: Collection[Any], req_context: Any) -> None:
        self.tiers.touch(list(keys))

    # -- store

    def prepare_store(self, keys: Collection[Any], req_context: Any) -> PrepareStoreOutput:
        """Take slots for the first chunks, as many as can be had, evicting others."""
        if (req_context.get_state(Begun) or 0) < self._resets:
            return PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        ordered = list(keys)
        before = PathEnds(req_context.get_state(PathEnds) or {})
        found = self.tiers.prepare_store(ordered, self._parents(ordered, req_context))
        if found.waiting:  # they are offered again
            req_context.set_state(before)
            self._parents(ordered[: ordered.index(found.waiting[0])], req_context)
            self.waiting[req_context.req_id] = found.waiting
        self._allocations.append(len(found.keys))
        return PrepareStoreOutput(
            list(found.keys),  # type: ignore[arg-type, unused-ignore]
            CPULoadStoreSpec(list(found.slots)),
            list(found.evicted),  # type: ignore[arg-type, unused-ignore]
        )

    def _parents(self, keys: list[Any], request: Any) -> list[bytes | None]:
        """The chunk before each in its group, None where unknown. The request's path goes on with
        them."""
        ends = request.get_state(PathEnds) or PathEnds()
        parents = []
        for key in keys:
            group, tokens = get_offload_group_idx(key), request.get_offload_key_position(key)
            above = ends.get(group)
            follows = (
                above is not None
                and above.tokens is not None
                and tokens == above.tokens + self._chunk_tokens[group]
            )
            parents.append(above.key if above is not None and follows else None)
            ends[group] = PathEnd(key, tokens)
        request.set_state(ends)
        return parents

    def complete_store(self, keys: Collection[Any], req_context: Any, success: bool = True) -> None:
        self.tiers.complete_store(keys, success)

    # -- steps

    def on_schedule_end(self, context: Any) -> None:
        if self._forgotten and not TELLS_FLUSH:
            self._steps_left -= 1
            if self._steps_left <= 0:
                self.on_reset_flushed()
        self.tiers.end_step()

    def has_pending_work(self) -> bool:
        return self.tiers.has_pending_work()

    def reset_cache(self) -> None:
        """Forget every chunk, in storage too: vLLM resets after an update of the weights, which is
        not part of a chunk's identity."""
        self._resets += 1
        copies = self.tiers.copies_in_flight()  # those of before an earlier reset among them
        if copies.stores or copies.loads:
            self._forgotten = copies
            self._steps_left = self._flush_steps
        self.tiers.reset(storage=True)

    def on_reset_flushed(self) -> None:
        """No worker copies for a job of before a reset: unpin the slots of those jobs."""
        copies, self._forgotten = self._forgotten, None
        if copies is not None:
            self.tiers.complete_load(copies.loads)
            self.tiers.complete_store(copies.stores, success=False)

    # -- events, metrics, end

    def take_events(self) -> Iterable[OffloadingEvent]:
        for event in self.tiers.take_events():
            yield OffloadingEvent(
                list(event.keys),  # type: ignore[arg-type, unused-ignore]
                MEDIA[event.tier],
                removed=not event.stored,
            )

    def get_stats(self) -> OffloadingConnectorStats:
        stats = OffloadingConnectorStats()
        now, health = self.tiers.statistics(), self.tiers.health()
        writing = len(self.tiers.copies_in_flight().stores)
        stats.set_gauge(Cpu.CPU_CACHE_USAGE_PERC, now.pinned / now.slots)
        stats.set_gauge(Cpu.CPU_CACHE_WRITE_USAGE_PERC, writing / now.slots)
        stats.set_gauge(Cpu.CPU_CACHE_READ_USAGE_PERC, max(0, now.pinned - writing) / now.slots)
        stats.set_gauge(HEALTHY, float(health.status == "ok"))
        for count in self._allocations:
            stats.observe_histogram(Cpu.CPU_ALLOCATION_SIZE, count)
        self._allocations.clear()
        snapshot = TierSnapshot(self.tiers.config, now, health)
        for family in COUNTERS:
            for labels, value in family.read(snapshot):
                counter = (family.name, *labels)
                grown = value - self._last.get(counter, 0)
                self._last[counter] = value
                if grown:
                    tier = tuple(f"kvactors_{label}" for label in labels)
                    stats.increase_counter(PREFIX + family.name, grown, tier)
        return stats

    def shutdown(self) -> None:
        """Save what is queued for storage, and let go of the memory."""
        self.tiers.shutdown()
        if self._region is not None:
            self._region.close()
