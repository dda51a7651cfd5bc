"""SinkFilter: the one place that answers which changes a sink is sent."""

from __future__ import annotations

from kvactors.flush_notifier.sinks import Sink
from kvactors.flush_notifier.view import SinkFilter
from kvactors.settings.sinks import SinkConfig
from kvactors.types import Tier

DEVICE, HOST, STORAGE = int(Tier.DEVICE), int(Tier.HOST), int(Tier.STORAGE)
PER_TIER = SinkFilter(DEVICE | HOST, node=False, at_finish=False)


class Declared(Sink):
    by_tokens = takes_clear = by_name = announces_full = True

    async def begin_epoch(self, epoch): ...

    async def deliver(self, tasks): ...


def test_settings_and_declarations_become_one_filter():
    config = SinkConfig(tiers=("host",), granularity="node", report_gains_at="request_finish")
    assert SinkFilter.of(Declared(config)) == SinkFilter(
        HOST,
        node=True,
        at_finish=True,
        by_tokens=True,
        by_name=True,
        takes_clear=True,
        announces_full=True,
    )


def test_a_declaration_made_after_construction_counts():
    sink = Declared("late")
    sink.takes_clear = False
    assert SinkFilter.of(sink).takes_clear is False
