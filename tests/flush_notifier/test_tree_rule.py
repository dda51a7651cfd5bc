"""A sink's view is a tree after every single event: histories in which it was not, or could easily
not be."""

from __future__ import annotations

import pytest

from kvactors.actor.sliced import finish
from kvactors.flush_notifier.view import SinkFilter
from kvactors.types import Reason, Residency, Tier, join_hashes, split_hashes
from tests.flush_notifier.helpers import (
    AT_FINISH,
    EVERYTHING,
    NODE,
    PER_TIER,
    announced,
    delivered,
    do,
    finished,
    ledger,
    names,
    refused,
    settle,
    take,
)

DEVICE, HOST, STORAGE = Tier.DEVICE, Tier.HOST, Tier.STORAGE
RESIDENT, GONE = Residency.RESIDENT, Residency.GONE


class Reader:
    """An index that finds a block's place by its parent, and refuses a block without one."""

    def __init__(self, *branches: tuple[int, ...]) -> None:
        self.parents = {}
        for branch in branches:
            keys = names(*branch)
            self.parents.update(zip(keys, [None, *keys], strict=False))
        self.held: dict[bytes, int] = {}

    def take(self, tasks) -> None:
        for task in tasks:
            keys = split_hashes(task.hashes)
            for key in keys if task.residency is RESIDENT else reversed(keys):
                before = self.held.get(key, 0)
                self.held[key] = (
                    before | task.tier if task.residency is RESIDENT else before & ~task.tier
                )
                self.check()

    def check(self) -> None:
        for key, tiers in self.held.items():
            above = self.parents[key]
            if above is not None:
                assert not tiers or self.held.get(above, 0), "a block without the block above it"
                assert not tiers & DEVICE or self.held[above] & DEVICE, (
                    "on the device, and the block above it is not"
                )

    def of(self, *branch: int) -> list[int]:
        return [self.held.get(key, 0) for key in names(*branch)]


def deliver(book, reader, limit=100, sink=0):
    """Everything that is pending, in batches of `limit`."""
    while book.sinks[sink].pending:
        batch = take(book, sink, limit, 1)
        reader.take(batch.tasks)
        delivered(book, sink, batch)
        book.check()


def shape(tasks):
    return [(task.residency, task.tier, task.start_block_idx, task.count) for task in tasks]


# -- due tiers


@pytest.mark.parametrize("limit", [1, 2, 100])
def test_a_block_on_the_device_waits_for_the_block_above_it_on_the_device(limit):
    book, reader = ledger(EVERYTHING), Reader((1, 2, 3, 4))
    do(book.announce(announced(1, 2, 3, 4)))
    deliver(book, reader, limit)
    do(book.gain(names(1, 2)[1], HOST, Reason.OFFLOAD))
    do(book.lose(names(1, 2)[1], DEVICE, Reason.DEVICE_EVICTION))
    deliver(book, reader, limit)
    assert reader.of(1, 2, 3, 4) == [DEVICE, HOST, 0, 0], (
        "on the host alone, so nothing below it is a hit on the device"
    )
    do(book.gain(names(1, 2)[1], DEVICE, Reason.LOAD))
    deliver(book, reader, limit)
    assert reader.of(1, 2, 3, 4) == [DEVICE, DEVICE | HOST, DEVICE, DEVICE]


@pytest.mark.parametrize("limit", [1, 2, 100])
def test_blocks_below_a_block_that_is_nowhere_are_not_announced(limit):
    book, reader = ledger(EVERYTHING), Reader((1, 2, 3), (1, 2, 4))
    do(book.gain(join_hashes(names(1, 2, 3)), STORAGE, Reason.STORED))
    do(book.announce(announced(1, 2, 4)))
    do(book.announce(announced(1, 2, 3, start=2, count=0)))
    deliver(book, reader, limit)
    assert reader.of(1, 2, 3) == [DEVICE | STORAGE, DEVICE | STORAGE, STORAGE]
    do(book.lose(names(1)[0], DEVICE, Reason.DEVICE_DROP))
    do(book.lose(names(1)[0], STORAGE, Reason.STORAGE_EVICTION))
    assert book.sinks[0].pending == 4
    deliver(book, reader, limit)
    assert not any(reader.held.values())
    assert not any(view.dirty for view in book.sinks), (
        "nothing is pending that waits for a block above it"
    )
    do(book.gain(names(1)[0], HOST, Reason.LOAD))
    deliver(book, reader, limit)
    assert reader.of(1, 2, 3) == [HOST, STORAGE, STORAGE]
    assert reader.of(1, 2, 4)[2] == 0


def test_lower_tiers_may_have_gaps():
    book, reader = ledger(EVERYTHING), Reader((1, 2, 3))
    do(book.announce(announced(1, 2, 3)))
    do(book.gain(names(1, 2, 3)[2], HOST, Reason.OFFLOAD))
    do(book.gain(names(1, 2, 3)[1], STORAGE, Reason.STORED))
    do(book.lose(join_hashes(names(1, 2, 3)[1:]), DEVICE, Reason.DEVICE_EVICTION))
    deliver(book, reader)
    assert reader.of(1, 2, 3) == [DEVICE, STORAGE, HOST]


def test_a_sink_with_one_view_of_all_tiers_keeps_the_blocks_below_one_that_moves():
    book, reader = ledger(NODE), Reader((1, 2))
    do(book.announce(announced(1, 2)))
    deliver(book, reader)
    do(book.gain(names(1)[0], HOST, Reason.OFFLOAD))
    do(book.lose(names(1)[0], DEVICE, Reason.DEVICE_EVICTION))
    assert settle(book) == []


def test_a_tier_that_the_sink_is_not_sent_does_not_count():
    book, reader = ledger(PER_TIER), Reader((1, 2))
    do(book.announce(announced(1, 2, tier=HOST)))
    do(book.gain(names(1)[0], STORAGE, Reason.STORED))
    deliver(book, reader)
    do(book.lose(names(1)[0], HOST, Reason.CPU_EVICTION))
    deliver(book, reader)
    assert reader.of(1, 2) == [0, 0], "the sink is not sent that block 1 is in storage"


def test_a_gain_at_the_finish_waits_for_the_path():
    book, reader = ledger(AT_FINISH), Reader((1, 2, 3))
    do(book.announce(finished(1, 2)))
    do(book.announce(announced(1, 2, 3)))
    deliver(book, reader)
    do(book.lose(names(1)[0], DEVICE, Reason.CORRUPT))
    do(book.announce(finished(1, 2, 3)))
    do(book.lose(names(1)[0], DEVICE, Reason.CORRUPT))
    deliver(book, reader)
    assert reader.of(1, 2, 3) == [0, 0, 0]


# -- the tasks of a batch and their order


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
def test_blocks_that_come_back_while_their_removal_waits_are_not_cut_off(limit):
    """The loss of a block is sent, those of the blocks below it still wait, and then all come back:
    the index has cut them off by then."""
    book, reader = ledger(), Reader((1, 2, 3, 4, 5, 6))
    do(book.announce(announced(1, 2, 3, 4, 5, 6)))
    deliver(book, reader)
    for key in names(1, 2, 3, 4, 5, 6)[2:]:  # above first
        do(book.lose(key, DEVICE, Reason.DEVICE_DROP))
    batch = take(book, 0, limit, 1)
    reader.take(batch.tasks)
    delivered(book, 0, batch)
    do(book.announce(announced(1, 2, 3, 4, 5, 6)))
    deliver(book, reader, limit)
    assert reader.of(1, 2, 3, 4, 5, 6) == [DEVICE] * 6


@pytest.mark.parametrize("limit", [1, 2, 100])
def test_a_block_that_moves_between_tiers_is_never_nowhere(limit):
    book, reader = ledger(EVERYTHING), Reader((1, 2, 3))
    do(book.announce(announced(1, 2, 3)))
    do(book.gain(join_hashes(names(1, 2, 3)[1:]), HOST, Reason.OFFLOAD))
    do(book.lose(join_hashes(names(1, 2, 3)[1:]), DEVICE, Reason.DEVICE_EVICTION))
    deliver(book, reader, limit)
    do(book.gain(names(1)[0], STORAGE, Reason.STORED))
    do(book.lose(names(1)[0], DEVICE, Reason.DEVICE_DROP))
    deliver(book, reader, limit)
    assert reader.of(1, 2, 3) == [STORAGE, HOST, HOST]


def test_a_removal_takes_the_gain_of_the_same_block_along():
    """The removal of block 2 goes with that of block 1, the oldest difference. Block 2 must be on
    the host by then: block 3 stays."""
    book, reader = ledger(EVERYTHING), Reader((1, 2, 3), (9,))
    do(book.announce(announced(1, 2, 3)))
    do(book.announce(announced(9)))
    do(book.gain(names(1)[0], HOST, Reason.OFFLOAD))
    do(book.gain(names(1, 2, 3)[2], STORAGE, Reason.STORED))
    do(book.lose(names(1, 2, 3)[2], DEVICE, Reason.DEVICE_EVICTION))
    deliver(book, reader)
    do(book.lose(names(1)[0], HOST, Reason.CPU_EVICTION))
    do(book.lose(names(9)[0], DEVICE, Reason.DEVICE_EVICTION))
    do(book.gain(names(1, 2)[1], HOST, Reason.OFFLOAD))
    do(book.lose(names(1, 2)[1], DEVICE, Reason.DEVICE_EVICTION))
    deliver(book, reader, 1)
    assert reader.of(1, 2, 3) == [DEVICE, HOST, STORAGE]


def test_runs_of_several_tiers_go_from_the_deepest_block_on():
    """The runs of the tiers differ in length and reach beyond each other, and a branch hangs on the
    middle of one."""
    book, reader = ledger(EVERYTHING), Reader((1, 2, 3, 4, 5, 6), (1, 2, 7, 8))
    do(book.announce(announced(1, 2, 3, 4, 5, 6, tier=HOST)))
    do(book.announce(announced(1, 2, 7, 8, tier=STORAGE)))
    do(book.lose(join_hashes(names(1, 2)), STORAGE, Reason.STORAGE_EVICTION))
    do(book.gain(join_hashes(names(1, 2, 3, 4)[2:]), STORAGE, Reason.STORED))
    deliver(book, reader)
    for tier in (HOST, STORAGE):
        do(book.clear(tier, Reason.RESTART))
    (batch,) = [take(book, 0, 100, 1)]
    reader.take(batch.tasks)
    assert not any(reader.held.values())


def test_a_very_large_subtree_goes_in_batches():
    book, leaves = ledger(), range(10, 60)
    branches = [(1, 2, leaf, leaf) for leaf in leaves]
    reader = Reader(*branches)
    for branch in branches:
        do(book.announce(announced(*branch)))
    deliver(book, reader)
    do(book.lose(names(1)[0], DEVICE, Reason.CORRUPT))
    batch = take(book, 0, 8, 1)
    assert sum(task.count for task in batch.tasks) <= 16
    reader.take(batch.tasks)
    delivered(book, 0, batch)
    deliver(book, reader, 8)
    assert not any(reader.held.values())


def test_a_refused_gain_is_sent_before_the_blocks_below_it():
    book, reader = ledger(), Reader((1, 2, 3))
    do(book.announce(announced(1, 2)))
    refused(book, 0, take(book, 0, 100, 1))
    do(book.announce(announced(1, 2, 3)))
    deliver(book, reader, 1)
    assert reader.of(1, 2, 3) == [DEVICE] * 3


@pytest.mark.parametrize("arrived", range(4))
def test_a_refused_removal_of_a_subtree_is_sent_again_from_the_leaves_on(arrived):
    book, reader = ledger(), Reader((1, 2, 3), (1, 2, 4))
    do(book.announce(announced(1, 2, 3)))
    do(book.announce(announced(1, 2, 4)))
    deliver(book, reader)
    do(book.lose(names(1)[0], DEVICE, Reason.CORRUPT))
    batch = take(book, 0, 100, 1)
    reader.take(batch.tasks[:arrived])
    refused(book, 0, batch)
    book.check()
    do(book.gain(names(1)[0], DEVICE, Reason.LOAD))
    do(book.lose(names(1, 2)[1], DEVICE, Reason.CORRUPT))
    deliver(book, reader, 1)
    assert reader.of(1, 2, 3) == [DEVICE, 0, 0]


def test_a_reason_is_that_of_the_block_above_which_it_waited_for():
    book = ledger()
    do(book.announce(announced(1, 2, 3)))
    settle(book)
    do(book.lose(names(1)[0], DEVICE, Reason.CORRUPT))
    (task,) = settle(book)
    assert (task.start_block_idx, task.count, task.reason) == (0, 3, Reason.CORRUPT)


# -- an index that lost its state


def test_an_index_that_is_empty_is_sent_everything():
    book, reader = ledger(EVERYTHING, takes_clear=[0]), Reader((1, 2, 3), (1, 4))
    do(book.announce(announced(1, 2, 3)))
    do(book.announce(announced(1, 4, tier=HOST)))
    deliver(book, reader)
    do(book.lose(names(1, 2, 3)[2], DEVICE, Reason.DEVICE_DROP))
    reader.held.clear()
    do(book.sinks[0].reset())
    book.check()
    deliver(book, reader, 1)
    assert reader.of(1, 2, 3) == [DEVICE | HOST, DEVICE, 0]
    assert reader.of(1, 4) == [DEVICE | HOST, HOST]


def test_an_index_that_may_have_lost_blocks_is_sent_its_view_again_from_the_roots_on():
    book, reader = ledger(EVERYTHING), Reader((1, 2, 3))
    do(book.announce(announced(1, 2, 3)))
    deliver(book, reader)
    reader.held.clear()
    do(book.sinks[0].repeat())
    book.check()
    deliver(book, reader, 1)
    assert reader.of(1, 2, 3) == [DEVICE] * 3


# -- the truth to compare with


@pytest.mark.parametrize(
    ("view", "differing"),
    [(EVERYTHING, 0), (NODE, 0), (SinkFilter(int(HOST), node=False, at_finish=False), 0)],
    ids=["per tier", "node", "host"],
)
def test_blocks_that_cannot_be_announced_do_not_differ(view, differing):
    book = ledger(view)
    do(book.announce(announced(1, 2, 3)))
    do(book.gain(names(1, 2, 3)[2], HOST, Reason.OFFLOAD))
    settle(book)
    do(book.lose(names(1)[0], DEVICE, Reason.CORRUPT))
    settle(book)
    tiers = {DEVICE: set(names(1, 2, 3)[1:]), HOST: set(names(1, 2, 3)[2:])}
    assert len(finish(book.divergence_steps(book.sinks[0], None, tiers))) == differing
    for wrong in (names(1, 2)[1], bytes(32)):  # the ledger has no entry of the second
        mirror = {DEVICE: {wrong}}
        assert len(finish(book.divergence_steps(book.sinks[0], mirror, tiers))) == 1
