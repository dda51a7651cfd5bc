"""Tasks made of runs."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvactors.actor.sliced import finish
from kvactors.flush_notifier.blocks import LedgerBlock
from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.view import BlockRun, as_task
from kvactors.identity import RequestScope
from kvactors.types import Reason, Residency, Tier

pytestmark = pytest.mark.full

ROOT = bytes([9]) * 32


def chain(count: int) -> list[LedgerBlock]:
    made: list[LedgerBlock] = []
    for i in range(count):
        parent = made[-1] if made else None
        key, above = bytes([i]) * 32, parent.hash if parent else ROOT
        scope = RequestScope("adapter", "salt")
        extra_key = b"media%d" % i if i % 2 else b""
        made.append(LedgerBlock(key, parent, (above, bytes([i]) * 8, extra_key, scope), 1))
    return made


def task(blocks, resident, tier, *, by_name, step=256) -> FlushTask:
    run = BlockRun(blocks, int(tier), resident, Reason.LOAD)
    return finish(as_task(run, 7, by_name=by_name, step=step))


@pytest.mark.parametrize("tier", list(Tier))
@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("step", [1, 2, 256])
def test_a_block_is_sent_alike_alone_and_with_others(resident, tier, step):
    """The tasks of single blocks add up to the task of their run."""
    blocks = chain(5)
    whole = task(blocks[1:], resident, tier, by_name=True, step=step)
    alone = [task([one], resident, tier, by_name=True, step=step) for one in blocks[1:]]
    assert b"".join(one.hashes for one in alone) == whole.hashes
    assert b"".join(one.tokens for one in alone) == whole.tokens
    assert sum((one.extra_keys for one in alone), ()) == whole.extra_keys
    assert len(whole.extra_keys) == (2 if resident else 0)
    assert len(whole.tokens) == (32 if resident else 0)
    residency = Residency.RESIDENT if resident else Residency.GONE
    for one in (whole, *alone):
        assert (one.residency, one.tier, type(one.tier)) == (residency, tier, Tier)
        assert (one.reason, one.epoch, one.scope) == (Reason.LOAD, 7, blocks[0].scope)
    assert [(one.start_block_idx, one.count) for one in alone] == [(i, 1) for i in range(1, 5)]
    assert (whole.start_block_idx, whole.count, whole.parent) == (1, 4, blocks[0].hash)
    assert all(below.parent == above.hashes for above, below in pairwise(alone))


@pytest.mark.parametrize("resident", [True, False])
def test_a_task_with_its_path_has_all_tokens_above(resident):
    blocks = chain(3)
    one = task(blocks[2:], resident, Tier.DEVICE, by_name=False)
    assert one.tokens == b"".join(block.tokens for block in blocks)
    assert one.extra_keys == ((1, b"media1"),)
