"""Tasks made of runs."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvactors.actor.sliced import finish
from kvactors.flush_notifier.blocks import LedgerTree
from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.view import BlockRun, as_task
from kvactors.identity import RequestScope
from kvactors.types import Reason, Residency, Tier

pytestmark = pytest.mark.full

ROOT = bytes([9]) * 32


def chain(count: int) -> tuple[LedgerTree, list[int]]:
    tree, made, scope = LedgerTree(8, 100), [0], RequestScope("adapter", "salt")
    for i in range(count):
        extra_key = b"media%d" % i if i % 2 else b""
        inputs = ROOT, bytes([i]) * 8, extra_key, scope
        made.append(tree.add(bytes([i]) * 32, made[-1], inputs))
    return tree, made[1:]


def task(tree, blocks, resident, tier, *, by_name) -> FlushTask:
    run = BlockRun(blocks, int(tier), resident, Reason.LOAD)
    return finish(as_task(tree, run, 7, by_name=by_name))


@pytest.mark.parametrize("tier", list(Tier))
@pytest.mark.parametrize("resident", [True, False])
def test_a_block_is_sent_alike_alone_and_with_others(resident, tier):
    """The tasks of single blocks add up to the task of their run."""
    tree, blocks = chain(5)
    whole = task(tree, blocks[1:], resident, tier, by_name=True)
    alone = [task(tree, [one], resident, tier, by_name=True) for one in blocks[1:]]
    assert b"".join(one.hashes for one in alone) == whole.hashes
    assert b"".join(one.tokens for one in alone) == whole.tokens
    assert sum((one.extra_keys for one in alone), ()) == whole.extra_keys
    assert len(whole.extra_keys) == (2 if resident else 0)
    assert len(whole.tokens) == (32 if resident else 0)
    residency = Residency.RESIDENT if resident else Residency.GONE
    for one in (whole, *alone):
        assert (one.residency, one.tier, type(one.tier)) == (residency, tier, Tier)
        assert (one.reason, one.epoch, one.scope) == (Reason.LOAD, 7, tree.scope(blocks[0]))
    assert [(one.start_block_idx, one.count) for one in alone] == [(i, 1) for i in range(1, 5)]
    assert (whole.start_block_idx, whole.count, whole.parent) == (1, 4, tree.rows.hash(blocks[0]))
    assert all(below.parent == above.hashes for above, below in pairwise(alone))


@pytest.mark.parametrize("resident", [True, False])
def test_a_task_with_its_path_has_all_tokens_above(resident):
    tree, blocks = chain(3)
    one = task(tree, blocks[2:], resident, Tier.DEVICE, by_name=False)
    assert one.tokens == tree.rows.tokens_of(blocks)
    assert one.extra_keys == ((1, b"media1"),)
