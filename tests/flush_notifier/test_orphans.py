"""Orphans: resident blocks without a known path, and those that wait for a parent."""

from __future__ import annotations

import pytest

from kvactors.flush_notifier import ledger
from kvactors.flush_notifier.blocks import HashInputs, LedgerTree
from kvactors.flush_notifier.ledger import Orphans
from kvactors.identity import PLAIN

P, X = b"p" * 32, b"x" * 32


def below(parent: bytes) -> HashInputs:
    return parent, b"tokens", b"", PLAIN


def test_blocks_become_attachable_when_their_parent_is_added():
    blocks, tree = Orphans(), LedgerTree(0, 10)
    for key in (b"a", b"b", b"other"):
        blocks.gain(key, 4)
        blocks.wait(key, below(X if key == b"other" else P))
    assert blocks.next_attachable(tree) is None
    assert blocks.take_tiers(P) == 0
    parent = tree.add(P, 0, (b"", b"", b"", PLAIN))
    assert [blocks.next_attachable(tree) for _ in range(3)] == [
        (b"a", parent, below(P)),
        (b"b", parent, below(P)),
        None,
    ]
    assert list(blocks.waiting) == [b"other"]


def test_the_oldest_block_is_forgotten_beyond_the_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ledger, "MAX_WAITING_ORPHANS", 2)
    blocks = Orphans()
    for key in (b"a", b"b", b"c"):
        blocks.gain(key, 1)
        blocks.wait(key, below(b"p"))
    assert list(blocks.waiting) == [b"b", b"c"]
    assert len(blocks.tiers) == 3, "it is resident all the same"
