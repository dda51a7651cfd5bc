"""PublishedBlocks: the record of a sink whose index cannot be emptied."""

from __future__ import annotations

from kvactors.flush_notifier.sinks.attention_store import PublishedBlocks
from tests.flush_notifier.helpers import BLOCK, ROOT, names, path


def record(*branches: tuple[int, ...]) -> PublishedBlocks:
    blocks = PublishedBlocks(BLOCK)
    for branch in branches:
        blocks.add(ROOT, 0, names(*branch), path(*branch)[0])
    return blocks


def test_each_block_is_retracted_once_the_deepest_path_first():
    retractions = list(record((1, 2, 3), (1, 5)).retractions())
    assert [(start, hashes, tokens) for hashes, start, tokens in retractions] == [
        (0, names(1, 2, 3), path(1, 2, 3)[0]),
        (1, names(1, 5)[1:], path(1, 5)[0]),
    ]


def test_a_removed_block_stays_for_the_blocks_below_it():
    blocks = record((1, 2))
    blocks.remove(names(1))
    assert len(blocks.blocks) == 2
    ((hashes, start, tokens),) = blocks.retractions()
    assert (start, hashes, tokens) == (1, names(1, 2)[1:], path(1, 2)[0])
    blocks.remove(names(1, 2)[1:])
    assert len(blocks.blocks) == 0


def test_blocks_below_an_unknown_parent_keep_the_whole_path():
    blocks = PublishedBlocks(BLOCK)
    keys = names(1, 2, 3)
    blocks.add(keys[0], 1, keys[1:], path(1, 2, 3)[0])
    assert blocks.path_tokens(keys[2]) == path(1, 2, 3)[0]
    assert blocks.blocks[keys[1]].top
