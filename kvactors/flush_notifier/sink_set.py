"""All sinks of a notifier: their deliveries, and the asks that wait for them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from kvactors.actor import Envelope
from kvactors.config import FlushConfig
from kvactors.flush_notifier.barrier import FlushWaiters
from kvactors.flush_notifier.checks import Tiers
from kvactors.flush_notifier.deliveries import SinkDelivery, SinkHealth, SinkStatistics
from kvactors.flush_notifier.inspection import count_divergent_blocks
from kvactors.flush_notifier.ledger import Ledger
from kvactors.flush_notifier.messages import WaitFlushed
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.flush_notifier.steps import Steps, finish


class SinkSet:
    """The deliveries of all sinks, in the ledger's order, by position or by name."""

    def __init__(self, sinks: Sequence[Sink], ledger: Ledger, config: FlushConfig) -> None:
        self.ledger = ledger
        self.deliveries = [
            SinkDelivery(sink, view, config) for sink, view in zip(sinks, ledger.sinks, strict=True)
        ]
        self.waiters = FlushWaiters()
        self._by_name = {one.sink.name: one for one in self.deliveries}

    def __iter__(self) -> Iterator[SinkDelivery]:
        return iter(self.deliveries)

    def __len__(self) -> int:
        return len(self.deliveries)

    def __getitem__(self, name: str) -> SinkDelivery:
        return self._by_name[name]

    def begin_calls(self) -> list[SinkDelivery]:
        """The sinks that can be called and have something to be sent. They are in flight now."""
        ready = [one for one in self.deliveries if one.ready()]
        for one in ready:
            one.in_flight = True
        return ready

    def settle_call(self, one: SinkDelivery) -> Iterator[None]:
        """Apply the end of a call to the ledger, then the work that waited for it. Steps."""
        yield from one.settle()
        if one.resync_due:
            yield from self.resync(one)
        one.repeat_step()
        self.waiters.call_ended(one, cleared=one.call_ended())

    def resync(self, one: SinkDelivery) -> Iterator[None]:
        """Mark everything to be sent again to a sink that is not called now. Steps."""
        for envelope in (yield from one.resync()):
            self.waiters.add(envelope, (one,))

    def wait(self, message: WaitFlushed, envelope: Envelope[bool]) -> None:
        """Keep an ask until its sinks have acknowledged the changes due now."""
        asked = [
            one
            for one in self.deliveries
            if (message.sinks is None or one.sink.name in message.sinks)
            and not (message.healthy and one.failures)
        ]
        self.waiters.add(envelope, asked)

    # -- inspection

    def divergence_steps(self, tiers: Tiers, names: Collection[str] | None = None) -> Steps[int]:
        """See `count_divergent_blocks`."""
        return count_divergent_blocks(self.ledger, self.deliveries, tiers, names)

    def divergence(self, tiers: Tiers, names: Collection[str] | None = None) -> int:
        """All steps of `divergence_steps`."""
        return finish(self.divergence_steps(tiers, names))

    def statistics(self) -> tuple[SinkStatistics, ...]:
        """Counters of every sink as of now."""
        return tuple(one.statistics() for one in self.deliveries)

    def health(self) -> tuple[SinkHealth, ...]:
        """Whether the last call of each sink succeeded, and if not, why and since when."""
        return tuple(one.health() for one in self.deliveries)
