"""SinkFilter: the one place that answers which changes a sink is sent."""

from __future__ import annotations

from kvactors.flush_notifier.sinks import Sink
from kvactors.flush_notifier.view import ABOVE_ALL, SHIFT, SinkFilter
from kvactors.settings.sinks import SinkConfig
from kvactors.types import ALL_TIERS, Tier

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


def test_a_table_keeps_the_tiers_of_the_filter():
    assert PER_TIER.table() == tuple(tiers & (DEVICE | HOST) for tiers in range(ALL_TIERS + 1))


def test_a_node_table_has_one_fact():
    table = PER_TIER._replace(node=True).table()
    assert table[DEVICE] == table[HOST] == table[DEVICE | HOST | STORAGE] == DEVICE
    assert table[STORAGE] == table[0] == 0


def test_nothing_is_due_below_a_block_of_which_nothing_is_due():
    closed = PER_TIER.closed()
    assert {closed[0 << SHIFT | tiers] for tiers in range(ALL_TIERS + 1)} == {0}


def test_device_is_due_only_below_device():
    closed = PER_TIER.closed()
    assert closed[HOST << SHIFT | DEVICE | HOST] == HOST
    assert closed[DEVICE << SHIFT | DEVICE | HOST] == DEVICE | HOST
    assert closed[ABOVE_ALL << SHIFT | DEVICE] == DEVICE
