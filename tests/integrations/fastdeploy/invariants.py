"""What holds for the blocks of a manager after every call."""

from __future__ import annotations

from kvactors.integrations.fastdeploy import PrefixCacheManager


def check(manager: PrefixCacheManager) -> None:
    """Each block is in one place, and the tree is consistent."""
    cache = manager._cache
    cache.tree.check()
    records = [*cache.requests.values(), *cache._leaving]
    trees = {id(tree): tree for tree in (cache.tree, *(one.tree for one in records))}
    entered = sum(tree.statistics()["device"] for tree in trees.values())
    copies = [
        block
        for one in records
        for position, block in enumerate(one.blocks)
        if not one.path.is_shared(position)
    ]
    places = [*cache.blocks.free, *cache.blocks.held, *cache.blocks.lost, *copies]
    assert len(places) == len(set(places))
    assert len(places) + entered == cache.blocks.total
    if cache.lower is not None:
        cache.lower.tiers.check()
