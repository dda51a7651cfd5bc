"""Counters of a cache over all incarnations of its actors.

An incarnation counts from zero. When the supervisor replaces an incarnation, its counters are added
to the sums of its actor, so that totals never go down.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from kvactors.actor import Actor, ActorStatistics
from kvactors.cpu_evictor.actor import CpuEvictor
from kvactors.cpu_evictor.memory import NOT_FETCHED, NOT_STORED, HostStatistics
from kvactors.flush_notifier.actor import FlushNotifier
from kvactors.flush_notifier.deliver import SinkStatistics
from kvactors.gpu_swapper.actor import GpuSwapper, SwapperStatistics
from kvactors.prefix_index.actor import PrefixIndex
from kvactors.prefix_index.records import IndexStatistics
from kvactors.quotas import SaltCounts

Record = TypeVar("Record", bound=NamedTuple)

COUNTERS: Mapping[type[Any], tuple[str, ...]] = {
    IndexStatistics: (
        "requests",
        "blocks_looked_up",
        "device_hits",
        "host_hits",
        "storage_hits",
        "no_room",
        "refused_size",
        "refused_pins",
        "preempted",
        "abandoned",
        "evicted",
        "rescued",
        "overdue_loads",
        "resumed",
        "forks",
        "tails_copied",
        "pins_refused",
        "pins_expired",
        "quota_evictions",
    ),
    HostStatistics: (
        "evicted",
        "offloaded",
        "loaded",
        "fetched",
        "written",
        "shed",
        "copy_failures",
        "write_failures",
        *NOT_STORED,
        *NOT_FETCHED,
        "quota_evictions",
        "pins_refused",
    ),
    SwapperStatistics: (
        "blocks_to_host",
        "blocks_to_device",
        "bytes_to_host",
        "bytes_to_device",
        "seconds_to_host",
        "seconds_to_device",
        "failed",
        "blocks_within_device",
    ),
    SinkStatistics: ("delivered", "resident", "gone", "blocks", "retried", "coalesced", "resyncs"),
    ActorStatistics: ("turns", "sent", "late_replies", "skipped"),
}
"""The fields of each record that count from the start of an incarnation. The others describe the
present."""


class Totals:
    """Sums of the counters of replaced incarnations.

    Args:
        salts: counters by salt, None for a system that has none.
    """

    def __init__(self, salts: SaltCounts | None = None) -> None:
        self._salts = salts
        self._sums: dict[tuple[type[Any], str], tuple[float, ...]] = {}

    def replaced(self, actor: Actor) -> None:
        """Add the counters of an incarnation that the supervisor has replaced."""
        self._add(actor.ref.name, actor.statistics())
        if isinstance(actor, PrefixIndex):
            self._add("", actor.core.statistics())
            actor.core.index.policy.keep_counts(actor.core.index.tree)
        elif isinstance(actor, CpuEvictor):
            self._add("", actor.host_statistics())
            if self._salts is not None:
                self._salts.host_ended(actor.host.shares.evicted)
        elif isinstance(actor, GpuSwapper):
            self._add("", actor.swapper_statistics())
        elif isinstance(actor, FlushNotifier):
            for sink in actor.sinks.statistics():
                self._add(sink.name, sink)

    def over_incarnations(self, present: Record, name: str = "") -> Record:
        """The statistics of a present incarnation with the counters of the earlier ones added.

        Args:
            present: the statistics.
            name: of the actor or sink, for records of which there are several.
        """
        kind = type(present)
        sums = self._sums.get((kind, name))
        if sums is None:
            return present
        fields = COUNTERS[kind]
        added = {
            field: getattr(present, field) + earlier
            for field, earlier in zip(fields, sums, strict=True)
        }
        return present._replace(**added)

    def of_sinks(
        self, present: Iterable[SinkStatistics], names: Iterable[str]
    ) -> tuple[SinkStatistics, ...]:
        """The statistics of every sink. While the notifier is switched off, they are the counters
        up to then.

        Args:
            present: the statistics of the present notifier.
            names: of all sinks.
        """
        found = {sink.name: sink for sink in present}
        return tuple(
            self.over_incarnations(found.get(name) or silent_sink(name), name) for name in names
        )

    def _add(self, name: str, record: Any) -> None:
        fields = COUNTERS[type(record)]
        key = type(record), name
        before = self._sums.get(key, (0,) * len(fields))
        self._sums[key] = tuple(
            earlier + getattr(record, field) for earlier, field in zip(before, fields, strict=True)
        )


def silent_sink(name: str) -> SinkStatistics:
    """Statistics of a sink that has not been called."""
    return SinkStatistics(name, 0, 0, 0, 0, 0, 0, 0, 0.0, False, 0, 0.0, "", 0)
