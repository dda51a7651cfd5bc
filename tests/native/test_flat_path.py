"""Flat paths: every block is a child of the root, and stays or leaves without those before it."""

from __future__ import annotations

import pytest

from kvactors.native import DEVICE, HOST, BlockTree, LifeTables, Path


def flat_path(*items: int) -> Path:
    path = Path(1, bytes(32), flat=True)
    path.extend(items)
    return path


def tree_of(*items: int) -> BlockTree:
    """A tree with each item in the device block of its number, the first one unused for longest."""
    tree = BlockTree(1)
    for item in items:
        path = flat_path(item)
        path.assign(0, [item])
        tree.commit(path, 1)
        tree.release(path)
    return tree


def test_a_block_that_leaves_before_others_is_kept() -> None:
    tree, path = tree_of(1, 2, 3), flat_path(1, 2, 3)
    leaving, *_ = tree.evict(1)
    assert tree.pin(path, -1, False) == (3, b"")
    tree.keep(path)
    assert tree.finish_offload(leaving, b"\1") == ([], [0])
    assert path.blocks() == [1, 2, 3]
    assert tree.probe(path, 0, 3) == bytes([DEVICE | HOST, DEVICE, DEVICE])


def test_a_path_drops_its_own_block_while_another_path_loads_the_item() -> None:
    tree, loading, computing = tree_of(1), flat_path(1), flat_path(1, 2)
    tree.finish_offload(tree.evict(1)[0], b"\1")
    for path, blocks in ((loading, [4]), (computing, [5, 6])):
        assert tree.pin(path) == (0, bytes([HOST]))
        path.assign(0, blocks)
    load = tree.begin_load(loading, 0, 1)
    assert tree.drop_leading(computing, 1) == [5]
    assert computing.blocks() == [6]
    with pytest.raises(ValueError, match="being loaded"):
        tree.drop_leading(loading, 1)
    assert tree.finish_load(load, 1) == []
    tree.check()


def test_retain_evicts_each_block_of_a_flat_path_for_itself() -> None:
    tree = BlockTree(1, retain=LifeTables(first=4))
    for moment in (1.0, 2.0, 3.0):
        path = flat_path(1, 2, 3)
        run = len(tree.pin(path)[1]) + path.num_committed
        path.assign(run, range(run, 3))
        tree.commit(path, 3)
        tree.advance(moment)
        assert tree.end(path, -1, moment) == []
        tree.check()
    tree.drop(2)
    tree.check()
    assert tree.statistics()["device"] == 1
