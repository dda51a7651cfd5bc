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
        self._by_name = {delivery.sink.name: delivery for delivery in self.deliveries}

    def __iter__(self) -> Iterator[SinkDelivery]:
        return iter(self.deliveries)

    def __len__(self) -> int:
        return len(self.deliveries)

    def __getitem__(self, name: str) -> SinkDelivery:
        return self._by_name[name]

    def begin_calls(self) -> list[SinkDelivery]:
        """The sinks that can be called and have something to be sent. They are in flight now."""
        ready = [delivery for delivery in self.deliveries if delivery.ready()]
        for delivery in ready:
            delivery.in_flight = True
        return ready

    def finish_call(self, delivery: SinkDelivery) -> Iterator[None]:
        """Apply the end of a call to the ledger, then the work that waited for it. Steps."""
        yield from delivery.apply_result()
        if delivery.resync_due:
            yield from self.resync(delivery)
        delivery.repeat_step()
        self.waiters.call_ended(delivery, cleared=delivery.call_ended())

    def resync(self, delivery: SinkDelivery) -> Iterator[None]:
        """Mark everything to be sent again to a sink that is not called now. Steps."""
        for envelope in (yield from delivery.resync()):
            self.waiters.add(envelope, (delivery,))

    def wait(self, message: WaitFlushed, envelope: Envelope[bool]) -> None:
        """Keep an ask until its sinks have acknowledged the changes due now."""
        asked = [
            delivery
            for delivery in self.deliveries
            if (message.sinks is None or delivery.sink.name in message.sinks)
            and not (message.healthy and delivery.failures)
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
        return tuple(delivery.statistics() for delivery in self.deliveries)

    def health(self) -> tuple[SinkHealth, ...]:
        """Whether the last call of each sink succeeded, and if not, why and since when."""
        return tuple(delivery.health() for delivery in self.deliveries)
