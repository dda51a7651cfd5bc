"""LedgerTree: blocks by hash, and which idle blocks it keeps."""

from __future__ import annotations

from array import array

from kvactors.actor.sliced import finish
from kvactors.flush_notifier.blocks import LedgerTree
from kvactors.identity import PLAIN

A, B, C, D = (bytes([i]) * 32 for i in range(4))


def chain(tree: LedgerTree, *keys: bytes) -> list[int]:
    """Idle blocks, each the parent of the next."""
    blocks: list[int] = []
    for key in keys:
        blocks.append(tree.add(key, blocks[-1] if blocks else 0, (D, b"", b"", PLAIN)))
    return blocks


def known(tree: LedgerTree) -> set[bytes]:
    return {tree.rows.hash(block) for block in tree.scan()}


def test_the_longest_idle_block_is_removed_first():
    tree = LedgerTree(0, 2)
    blocks = [chain(tree, key)[0] for key in (A, B, C)]
    for block in (*blocks, blocks[0]):  # the first one becomes idle again
        tree.note_idle(block)
    finish(tree.trim())
    assert known(tree) == {A, C}


def test_rows_are_used_again_under_a_scan_that_stays_open():
    """A repetition to a sink that is down keeps its scan."""
    tree = LedgerTree(0, 1)
    chain(tree, A, B)
    scan = tree.scan()
    next(scan)
    rows = set()
    for i in range(10, 200):
        (block,) = chain(tree, bytes([i]) * 32)
        rows.add(block)
        tree.note_idle(block)
        finish(tree.trim())
    assert len(rows) <= 2
    assert list(scan) == [tree.find(B)]


def test_tokens_of_any_size_come_back():
    tree, some = LedgerTree(12, 1), [7, 2**20 - 1, 2**20, 2**32 - 1, 0, 5]
    blocks = []
    for i in range(4):
        tokens = array("I", some[i : i + 3]).tobytes()
        blocks.append(tree.add(bytes([i]) * 32, 0, (D, tokens, b"", PLAIN)))
    assert tree.rows.tokens_of(blocks) == b"".join(
        array("I", some[i : i + 3]).tobytes() for i in range(4)
    )


def test_a_long_idle_path_is_removed_block_by_block():
    tree = LedgerTree(0, 1)
    blocks = chain(tree, *(bytes([i]) * 32 for i in range(100)))
    (other,) = chain(tree, bytes([200]) * 32)
    tree.note_idle(blocks[-1])
    tree.note_idle(other)
    assert sum(1 for _ in tree.trim()) == 100
    assert known(tree) == {bytes([200]) * 32}
