"""No turn is long: work on very many blocks at once is done in steps, each bounded by the size of a
step.

Work is measured in lines of Python executed, not in time, so that the tests do not depend on the
machine.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from itertools import pairwise

import pytest

from kvactors.actor.sliced import finish
from kvactors.flush_notifier import ledger as ledger_module
from kvactors.flush_notifier.ledger import Ledger
from kvactors.flush_notifier.messages import BlocksRemoved, CallLate, Delivered, PathCached
from kvactors.flush_notifier.view import MAX_RUN_BLOCKS
from kvactors.types import Reason, Residency, Tier, join_hashes
from tests.flush_notifier.helpers import (
    AT_FINISH,
    NODE,
    PER_TIER,
    ROOT,
    Wired,
    announced,
    delivered,
    finished,
    known,
    memory,
    names,
    path,
    take,
)
from tests.flush_notifier.helpers import ledger as tiny

MANY = 2_000
LINES = 1_900
"""Lines between two yields at most: a loop over all blocks has at least MANY."""

KEYS = [i.to_bytes(32, "big") for i in range(1, MANY + 1)]
CHAIN = PathCached(
    ROOT, b"\0" * 4 * MANY, join_hashes(KEYS), 0, MANY, Tier.DEVICE, Reason.REQUEST_FINISH, ROOT
)


def book_of(*filters) -> Ledger:
    return Ledger(1, filters, 1)


def lines_of(steps) -> tuple[int, object]:
    """Lines executed in the longest step, and the result."""
    count, longest, result = 0, 0, None

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    old = sys.gettrace()
    while True:
        count = 0
        sys.settrace(trace)
        try:
            next(steps)
        except StopIteration as end:
            result = end.value
            break
        finally:
            sys.settrace(old)
            longest = max(longest, count)
    return longest, result


def bounded(steps):
    """Run all steps and check that each is bounded."""
    longest, result = lines_of(steps)
    assert longest <= LINES
    return result


def test_the_measure_sees_a_loop_over_all_blocks():
    def unbounded():
        for _ in KEYS:
            pass
        yield

    assert lines_of(unbounded())[0] > LINES


def sent(book, sink=0):
    """Everything that is pending, delivered in bounded steps."""
    tasks = []
    while book.sinks[sink].pending:
        batch = bounded(book.sinks[sink].take(64, 1))
        bounded(book.sinks[sink].delivered(batch))
        tasks += batch.tasks
    book.check()
    return tasks


@pytest.mark.parametrize(
    ("first", "both"),
    [(PER_TIER, {}), (NODE, {"by_name": True}), (AT_FINISH, {"takes_clear": True})],
    ids=["1", "2", "3"],
)
def test_a_path_of_very_many_blocks(first, both):
    book = book_of(first._replace(**both), PER_TIER._replace(**both))
    bounded(book.announce(CHAIN))
    for sink in (0, 1):
        assert sum(task.count for task in sent(book, sink)) == MANY
    bounded(book.check_steps())
    for order in (KEYS, KEYS[::-1]):
        bounded(book.gain(join_hashes(order), Tier.HOST, Reason.OFFLOAD))
        sent(book, 0)
        bounded(book.lose(join_hashes(order), Tier.HOST, Reason.CPU_EVICTION))
        sent(book, 0)
    batch = bounded(book.sinks[1].take(64, 1))
    bounded(book.sinks[1].refused(batch))
    sent(book, 1)
    bounded(book.clear(Tier.DEVICE, Reason.CLEAR))
    refused = bounded(book.sinks[0].take(64, 1))
    bounded(book.sinks[0].refused(refused))
    for sink in (0, 1):
        sent(book, sink)
    assert len(book.tree) <= MANY
    bounded(book.check_steps())


def test_forgetting_a_long_path():
    """All of it hangs on its last block, which is forgotten last."""
    book = book_of(PER_TIER)
    bounded(book.announce(CHAIN))
    sent(book)
    bounded(book.lose(join_hashes(KEYS[::-1]), Tier.DEVICE, Reason.CPU_EVICTION))
    sent(book)
    assert len(book.tree) <= MANY
    other = PathCached(
        ROOT, b"\1\0\0\0", bytes(31) + b"\xff" + b"", 0, 1, Tier.DEVICE, Reason.COMMIT, ROOT
    )
    bounded(book.announce(other))
    sent(book)
    bounded(book.lose(other.hashes, Tier.DEVICE, Reason.CPU_EVICTION))
    sent(book)
    assert len(book.tree) <= 2
    book.check()


def test_names_without_a_path():
    book = book_of(PER_TIER)
    bounded(book.gain(join_hashes(KEYS), Tier.HOST, Reason.LOAD))
    bounded(book.check_steps())
    bounded(book.clear(Tier.DEVICE, Reason.CLEAR))
    assert len(book.orphans.tiers) == MANY
    bounded(book.clear(Tier.HOST, Reason.CLEAR))
    assert not book.orphans.tiers


def test_divergence_is_counted_in_steps():
    book = book_of(PER_TIER)
    bounded(book.announce(CHAIN))
    sent(book)
    tiers = {Tier.DEVICE: set(KEYS[:-3]), Tier.HOST: set(KEYS[:5])}
    assert len(bounded(book.divergence_steps(book.sinks[0], None, tiers))) == 8
    mirror = {Tier.DEVICE: set(KEYS), Tier.HOST: set()}
    assert len(bounded(book.divergence_steps(book.sinks[0], mirror, tiers))) == 8


def test_a_view_is_that_of_its_first_block_while_entries_are_added_and_removed():
    book = tiny(idle_limit=1)
    for i in range(40):
        finish(book.announce(announced(i)))
    delivered(book, 0, take(book, 0, 100, 1))
    holdings = book.sinks[0].held_blocks()
    seen = [next(holdings) for _ in range(10)]
    for i in (9, 10, 11, 38):
        finish(book.lose(names(i)[0], Tier.DEVICE, Reason.DEVICE_DROP))
    delivered(book, 0, take(book, 0, 100, 1))
    finish(book.announce(announced(50)))
    assert {names(i)[0] for i in (9, 10, 11)}.isdisjoint(known(book)), "their rows are free"
    seen += holdings
    expected = [(names(i)[0], Tier.DEVICE) for i in range(40) if i not in (10, 11)]
    assert [(block.hash, block.tiers) for block in seen] == expected


def test_a_check_reports_errors_and_not_concurrent_changes(monkeypatch):
    monkeypatch.setattr(ledger_module, "CHECK_BLOCKS", 1)
    book = tiny(idle_limit=4)
    for i in range(20):
        finish(book.announce(announced(i, i)))
    checking = book.check_steps()
    for i in range(20):
        next(checking)
        finish(book.announce(announced(i + 100)))
        delivered(book, 0, take(book, 0, 3, 1))
        finish(book.lose(path(i, i)[1], Tier.DEVICE, Reason.DEVICE_DROP))
    finish(checking)
    book.check()
    children = book.tree.child
    some = next(block for block in book.tree.scan() if children[block])
    child, children[some] = children[some], 0
    with pytest.raises(AssertionError, match="not among the children"):
        book.check()
    children[some] = child
    book.orphans.tiers[names(107)[0]] = 1
    with pytest.raises(AssertionError, match="orphan in the tree"):
        book.check()
    del book.orphans.tiers[names(107)[0]]
    book.check()
    book.tree.rows.erase(book.tree.find(names(119)[0]))
    with pytest.raises(AssertionError):
        book.check()


def test_a_run_longer_than_a_task_is_sent_in_parts_in_order():
    count = 2 * MAX_RUN_BLOCKS + 5
    keys = [hashlib.sha256(b"%d" % i).digest() for i in range(count)]
    book = Ledger(1, [PER_TIER._replace(by_name=True)])
    finish(
        book.announce(
            PathCached(
                ROOT,
                b"\0" * 4 * count,
                join_hashes(keys),
                0,
                count,
                Tier.DEVICE,
                Reason.COMMIT,
                ROOT,
            )
        )
    )
    batch = take(book, 0, 10, 1)
    assert [(t.start_block_idx, t.count) for t in batch.tasks] == [
        (0, MAX_RUN_BLOCKS),
        (MAX_RUN_BLOCKS, MAX_RUN_BLOCKS),
        (2 * MAX_RUN_BLOCKS, 5),
    ]
    for above, below in pairwise(batch.tasks):
        assert below.parent == above.hashes[-32:]
    delivered(book, 0, batch)
    finish(book.clear(Tier.DEVICE, Reason.CLEAR))
    batch = take(book, 0, 10, 1)
    assert [t.start_block_idx for t in batch.tasks] == [2 * MAX_RUN_BLOCKS, MAX_RUN_BLOCKS, 0], (
        "children before parents"
    )
    assert {t.residency for t in batch.tasks} == {Residency.GONE}
    delivered(book, 0, batch)
    book.check()


async def test_facts_that_come_while_a_batch_is_being_made_wait_for_it():
    one, other = memory("one"), memory("other", granularity="node")
    wired = Wired(one, other, batch=1)
    async with wired.running():
        wired.actor.step = 2
        for i in range(30):
            await wired.tell(
                finished(*range(i % 7, i % 7 + 9)),
                BlocksRemoved(names(*range(i % 7, i % 7 + 9))[-1], Tier.DEVICE, Reason.DEVICE_DROP),
            )
        await wired.settle(20.0)
        assert one.view()[Tier.DEVICE] == other.view()[Tier.DEVICE]
        held = {Tier.DEVICE: {key for i in range(7) for key in names(*range(i, i + 9))[:-1]}}
        assert wired.actor.sinks.divergence(held) == 0
        assert one.view()[Tier.DEVICE] == held[Tier.DEVICE]


async def test_an_answer_while_the_end_of_its_call_is_settled_is_late():
    """The end of a call takes several steps. Further messages about that call between them change
    nothing."""
    one = memory("one")
    wired = Wired(one, timeout_s=30.0)
    async with wired.running():
        await wired.settle()
        actor = wired.actor
        actor.step = 1
        ended = []
        end = actor._end
        actor._end = lambda one, error: (ended.append(one.number), end(one, error))[1]
        await wired.tell(announced(*range(50)))
        while not actor.sinks.deliveries[0].in_flight:
            await asyncio.sleep(0)
        number = actor.sinks.deliveries[0].number + 1
        while not ended:
            actor.to_self(CallLate("one", number))
            actor.to_self(Delivered("one", number, "an error"))
            await asyncio.sleep(0)
        actor.to_self(CallLate("one", number))
        actor.to_self(Delivered("one", number, "an error"))
        await wired.settle()
        assert len(set(ended)) == len(ended), "each call has ended once"
        assert number in ended
        assert one.view()[Tier.DEVICE] == set(names(*range(50)))
