"""Which prefixes of a request can be restored from the pages of several pools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Need = Literal["all_pages", "trailing_pages"]


class PoolNeed(NamedTuple):
    """The need of a prefix in one pool.

    Attributes:
        has: whether the pool has each page.
        need: every page of the prefix, or its last ones.
        trailing: how many last ones.
    """

    has: Sequence[bool]
    need: Need
    trailing: int = 1


class Prefixes(NamedTuple):
    """Prefixes that can be restored.

    Attributes:
        longest: pages of the longest one.
        of_pools: for each pool, pages of the longest prefix that it allows.
        restorable: pages of each prefix that every pool allows, ascending.
    """

    longest: int
    of_pools: list[int]
    restorable: list[int]


def leading(has: Sequence[bool]) -> int:
    """Pages that are there before the first one that is not."""
    return next((i for i, found in enumerate(has) if not found), len(has))


def find_prefixes(kv_pages: int, pools: Sequence[PoolNeed]) -> Prefixes:
    """Find the prefixes that every pool allows.

    Args:
        kv_pages: pages of the longest prefix that the pool of keys and values allows.
        pools: the others, with as many pages.
    """
    restorable = list(range(1, kv_pages + 1))
    of_pools = []
    for pool in pools:
        if pool.need == "all_pages":
            found = set(range(1, leading(pool.has) + 1))
        else:
            found = _with_window(pool, kv_pages)
        of_pools.append(max(found, default=0))
        restorable = [length for length in restorable if length in found]
    return Prefixes(max(restorable, default=0), of_pools, restorable)


def _with_window(pool: PoolNeed, kv_pages: int) -> set[int]:
    """Prefixes whose last pages are there."""
    found, run = set(), 0
    for i in range(kv_pages):
        run = run + 1 if pool.has[i] else 0
        if run >= min(pool.trailing, i + 1):
            found.add(i + 1)
    return found
