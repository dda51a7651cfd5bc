"""The contents of block hashes, as the tree reports them for nodes that leave the device."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from kvactors.native import BlockTree, Path
from kvactors.types import split_hashes

SIZE = 2


def entered(
    tree: BlockTree, root: bytes, tokens: list[int], blocks: list[int], extra: bytes = b""
) -> Path:
    path = Path(SIZE, root)
    path.extend(np.array(tokens, np.uint32))
    if extra:
        path.set_extra(1, extra)
    run, _ = tree.pin(path, len(tokens) // SIZE)
    path.assign(run, blocks)
    tree.commit(path, len(tokens) // SIZE)
    tree.release(path)
    return path


def test_contents_give_the_keys_of_evicted_nodes():
    tree, roots = BlockTree(SIZE, 64), (b"a" * 32, b"b" * 32)
    entered(tree, roots[0], [1, 2, 3, 4, 5, 6], [0, 1, 2])
    entered(tree, roots[0], [1, 2, 9, 9], [3])  # another child of the first block
    entered(tree, roots[1], [1, 2, 3, 4, 5, 6], [4, 5, 6], b"media")
    nodes, keys, parents, _, *_ = tree.evict(64)
    found_roots, tokens, extras = tree.contents(nodes)
    extra_keys, size = dict(extras), 4 * SIZE
    assert len(nodes) == 7
    assert sorted(extra_keys.values()) == [b"media"]
    root_of = dict(zip(split_hashes(keys), split_hashes(found_roots), strict=True))
    for i, (key, parent) in enumerate(zip(split_hashes(keys), split_hashes(parents), strict=True)):
        extra = extra_keys.get(i, b"")
        own = tokens[i * size : (i + 1) * size]
        assert (
            key == hashlib.sha256(parent + len(extra).to_bytes(4, "little") + extra + own).digest()
        )
        assert root_of[key] == (parent if parent in roots else root_of[parent])


def test_contents_of_a_node_that_is_not_there():
    with pytest.raises(ValueError, match="not there"):
        BlockTree(SIZE, 64).contents(np.array([3], np.uint32))
