"""Chains of nodes in ascending ids, which a match compares together, also over the chunks of the
tree's memory, and chains that are not in ascending ids."""

from __future__ import annotations

import pytest

from kvactors.native import BlockTree, Path

ROOT = bytes(32)
BLOCKS = 600
CHUNK = 256
"""Nodes in a chunk of a tree without a capacity."""
EDGES = {0, 1, CHUNK - 2, CHUNK - 1, CHUNK, 2 * CHUNK - 1, 2 * CHUNK, BLOCKS - 1}


def path_of(size: int, tokens: list[int]) -> Path:
    path = Path(size, ROOT)
    path.extend(tokens)
    return path


def store(tree: BlockTree, tokens: list[int], pool: list[int]) -> None:
    path = path_of(tree.block_size, tokens)
    run, _ = tree.pin(path)
    missing = path.num_full_blocks - run
    path.assign(run, [pool.pop() for _ in range(missing)])
    tree.commit(path, path.num_full_blocks)
    tree.release(path)


@pytest.mark.parametrize("size", [1, 16, 64, 300])
def test_a_match_ends_where_the_tokens_differ(size: int) -> None:
    tree, tokens = BlockTree(size), list(range(BLOCKS * size))
    store(tree, tokens, list(range(BLOCKS)))
    assert tree.peek(path_of(size, tokens))[0] == BLOCKS
    for block in sorted(EDGES | set(range(3, BLOCKS, 61))):
        for token in {block * size, block * size + size - 1}:
            other = [*tokens[:token], 1 << 31, *tokens[token + 1 :]]
            assert tree.peek(path_of(size, other)) == (block, b"")
        extra = path_of(size, tokens)
        extra.set_extra(block, b"image")
        assert tree.peek(extra) == (block, b"")
        assert tree.peek(path_of(size, tokens), block)[0] == block
    tree.check()


def test_a_node_with_an_extra_key_is_no_part_of_a_plain_chain() -> None:
    tree, tokens = BlockTree(2), list(range(12))
    path = path_of(2, tokens)
    path.set_extra(3, b"image")
    tree.pin(path)
    path.assign(0, range(6))
    tree.commit(path, 6)
    assert tree.peek(path_of(2, tokens))[0] == 3
    assert tree.peek(path)[0] == 6
    tree.release(path)
