"""The eviction policy RETAIN in the tree: what it keeps, its guard, and its counts."""

from __future__ import annotations

import numpy as np
import pytest

from kvactors.native import BlockTree, LifeTables, Path

ROOT = bytes(32)


class Tier:
    """A device of `size` blocks. Block ids are the tokens, one per block."""

    def __init__(self, size: int, tables: LifeTables | None) -> None:
        self.tree = BlockTree(2, size, False, tables)
        self.free = list(range(size))
        self.hits = self.looked_up = 0

    def request(self, ids: list[int], at: float, output: int = -1) -> int:
        """Serve a request. Returns its hits."""
        tree, path = self.tree, Path(2, ROOT)
        path.extend(np.repeat(np.array(ids, np.uint32), 2))
        tree.advance(at)
        run, _ = tree.pin(path)
        tree.trim(path, run)
        need = len(ids) - run
        if need > len(self.free):
            nodes, *_ = tree.evict(need - len(self.free))
            self.free += tree.finish_offload(nodes, bytes(len(nodes)))[0]
        path.assign(run, [self.free.pop() for _ in range(need)])
        tree.commit(path, len(ids))
        tree.touch(path, output)
        self.free += tree.release(path)
        self.hits += run
        self.looked_up += len(ids)
        return run


def floods(rounds: int = 60):
    """Ten chats that return every 20 s, and prompts in between that never do: (ids, time)."""
    fresh = 1_000
    for second in range(20 * rounds):
        if second % 2 == 0:
            chat = second % 20 // 2
            yield [100 * (chat + 1) + depth for depth in range(10)], float(second)
        for _ in range(3):
            fresh += 10
            yield list(range(fresh, fresh + 10)), second + 0.5


def cycle(rounds: int = 40):
    """Twelve prompts of ten blocks, asked round and round."""
    for number in range(12 * rounds):
        prompt = number % 12
        yield [100 * prompt + depth for depth in range(1, 11)], 3.0 * number


def serve(requests, size: int, tables: LifeTables | None) -> Tier:
    tier = Tier(size, tables)
    for ids, at in requests:
        tier.request(ids, at)
    tier.tree.check()
    return tier


@pytest.mark.parametrize("requests", [floods, cycle])
def test_blocks_that_return_are_kept_from_those_that_do_not(requests):
    lru, retain = serve(requests(), 110, None), serve(requests(), 110, LifeTables())
    assert retain.hits > lru.hits + 0.1 * lru.looked_up
    counts = retain.tree.retention()
    assert counts["hits"] == retain.hits
    assert counts["shadow_hits"] == lru.hits


@pytest.mark.parametrize("size", [40, 110, 300])
@pytest.mark.parametrize("requests", [floods, cycle])
def test_a_wrong_index_loses_little(requests, size):
    lru = serve(requests(), size, None)
    wrong = serve(requests(), size, LifeTables(inverted=True))
    allowed = max(0.005 * lru.looked_up, 0.02 * lru.hits) + 32 * 2
    assert wrong.hits >= lru.hits - allowed
    assert wrong.tree.retention()["shadow_hits"] == lru.hits


def test_the_shadow_has_as_many_blocks_as_the_tier():
    tier = serve(floods(10), 50, LifeTables())
    counts = tier.tree.retention()
    assert counts["resident"] == tier.tree.statistics()["device"] == 50
    assert counts["displaced"] <= counts["limit"] + 10
    assert counts["chosen"] + counts["oldest"] == counts["touched"] - counts["hits"] - 50


def test_time_that_goes_backwards_and_far_ahead_changes_nothing_but_ages():
    tier = Tier(30, LifeTables())
    for number, at in enumerate((5.0, 4.0, -1.0, 1e9, 1e9 - 1, 2e9)):
        tier.request([100 * number + depth for depth in range(10)], at, output=number)
        tier.tree.check()
    assert tier.request([500 + depth for depth in range(10)], 3e9) == 10


def test_statistics_outlast_a_clear():
    tables = LifeTables()
    first = serve(floods(20), 110, tables)
    known = tables.requests
    first.tree.retire()
    assert first.tree.retention()["requests"] == known
    again = Tier(110, tables)
    again.request([1, 2, 3], 1e4)
    assert tables.requests == known + 1
    assert again.tree.retention()["requests"] == 1


def test_a_tree_without_statistics_is_lru():
    tier = serve(floods(3), 50, None)
    assert tier.tree.retention() is None
