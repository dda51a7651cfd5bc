"""What holds for the blocks of a manager after every call."""

from __future__ import annotations

from kvactors.integrations.fastdeploy import PrefixCacheManager
from kvactors.integrations.fastdeploy.requests import EngineBlockIndex, EngineBlocks


def check(manager: PrefixCacheManager) -> None:
    """Blocks, index and references agree."""
    cache = manager._cache
    check_blocks(cache.blocks)
    check_index(cache.index)
    if cache.lower is not None:
        cache.lower.tiers.check()


def check_blocks(blocks: EngineBlocks) -> None:
    """Each block is in one place."""
    places = [*blocks.free_list, *blocks.held, *blocks.indexed, *blocks.lost]
    assert len(places) == blocks.total
    assert set(places) == set(range(blocks.total))


def check_index(index: EngineBlockIndex) -> None:
    """References, children and the eviction order agree."""
    blocks = index.blocks.values()
    assert index.unreferenced == sum(not block.refs for block in blocks)
    leaves = {entry[-1].hash for entry in index._order if index._is_current(entry)}
    for block in blocks:
        assert block.children == sum(other.parent is block for other in blocks)
        assert block.parent is None or index.blocks.get(block.parent.hash) is block.parent
        assert block.parent is None or block.parent.refs >= block.refs
        evictable = not block.refs and not block.children
        assert evictable == (block.hash in leaves)
