"""The benchmarks of the native core run, time only the named operations and report in the common
form."""

from __future__ import annotations

import numpy as np

from kvactors.native import BlockTree
from tests.benchmarks import index
from tests.benchmarks.index_child import prompts
from tests.benchmarks.report import rate_row, time_row


def test_a_higher_ratio_is_better_in_every_kind_of_row() -> None:
    assert rate_row("r", 20.0, 10.0, "/s", "bar").ratio == 2.0
    assert time_row("t", 5.0, 10.0, "ms", "bar").ratio == 2.0


def test_prompts_share_their_group_prefix() -> None:
    batch = prompts(np.random.default_rng(0), 16, 1024)
    shared = int(1024 * index.SHARED)
    assert all(len(tokens) == 1024 for tokens in batch)
    for i, tokens in enumerate(batch):
        again = batch[(i + 16 // index.GROUP_SIZE) % 16]
        assert np.array_equal(tokens[:shared], again[:shared])
        assert not np.array_equal(tokens[shared:], again[shared:])
        assert not np.array_equal(tokens[:shared], batch[(i + 1) % 16][:shared])


def test_the_timed_code_leaves_every_block_in_the_tree() -> None:
    tree = BlockTree(16)
    batch = prompts(np.random.default_rng(0), 16, 1024)
    index.insert(tree, batch, 16)
    groups, shared, own = 16 // index.GROUP_SIZE, 48, 16
    expected = groups * shared + 16 * own
    statistics = tree.statistics()
    assert (statistics["nodes"], statistics["device"], statistics["evictable"]) == (
        expected,
        expected,
        expected,
    )
    index.insert(tree, batch, 16)
    assert tree.statistics()["nodes"] == expected
    tree.check()
