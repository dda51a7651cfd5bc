"""LedgerTree: blocks by hash, and which idle blocks it keeps."""

from __future__ import annotations

from kvactors.actor.sliced import finish
from kvactors.flush_notifier.blocks import LedgerBlock, LedgerTree
from kvactors.identity import PLAIN


def chain(tree: LedgerTree, *keys: bytes) -> list[LedgerBlock]:
    """Idle blocks, each the parent of the next."""
    blocks: list[LedgerBlock] = []
    for key in keys:
        above = blocks[-1] if blocks else None
        blocks.append(LedgerBlock(key, above, (above.hash if above else b"", b"", b"", PLAIN), 1))
        tree.add(blocks[-1])
    return blocks


def test_blocks_are_found_by_hash_in_the_order_they_were_added():
    tree = LedgerTree(10, 256)
    top, below = chain(tree, b"a", b"b")
    assert tree.blocks == {b"a": top, b"b": below}
    assert list(tree.scan()) == [top, below]
    assert (top.child, below.depth) == (below, 2)


def test_the_longest_idle_block_is_removed_first():
    tree = LedgerTree(2, 256)
    blocks = [chain(tree, key)[0] for key in (b"a", b"b", b"c")]
    for block in (*blocks, blocks[0]):  # the first one becomes idle again
        tree.note_idle(block)
    finish(tree.trim())
    assert set(tree.blocks) == {b"a", b"c"}


def test_a_removed_block_takes_idle_ancestors_along():
    tree = LedgerTree(1, 256)
    top, middle, leaf = chain(tree, b"a", b"b", b"c")
    (other,) = chain(tree, b"d")
    for block in (leaf, other):
        tree.note_idle(block)
    finish(tree.trim())
    assert set(tree.blocks) == {b"d"}
    assert (top.number, middle.number) == (0, 0)


def test_a_block_with_children_a_tier_or_a_pin_stays():
    tree = LedgerTree(1, 256)
    top, below = chain(tree, b"a", b"b")
    below.tiers = 1
    (pinned,) = chain(tree, b"c")
    pinned.pins = 1
    (last,) = chain(tree, b"d")
    for block in (top, pinned, last):
        tree.note_idle(block)
    finish(tree.trim())
    assert set(tree.blocks) == {b"a", b"b", b"c", b"d"}
    tree.unpin(pinned)
    assert list(tree.idle) == [last, pinned]
    finish(tree.trim())
    assert set(tree.blocks) == {b"a", b"b", b"c"}


def test_trimming_yields_after_each_step():
    tree = LedgerTree(1, 10)
    blocks = chain(tree, *(bytes([i]) for i in range(100)))
    (other,) = chain(tree, b"other")
    tree.note_idle(blocks[-1])
    tree.note_idle(other)
    assert sum(1 for _ in tree.trim()) == 9
    assert set(tree.blocks) == {b"other"}
