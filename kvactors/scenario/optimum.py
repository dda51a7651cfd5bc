"""Hits of the offline optimum: the blocks of a cache are chosen by their next use.

Belady (A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 5(2),
1966): the victim is the block whose next use is farthest. A block of a finished request may be the
victim itself. A use of a block uses those before it too, so the farthest next use is always at a
leaf, and no cache that keeps whole prefixes hits more than this one.

Blocks that were used last by the same request and are used next by the same request are
interchangeable. They form an interval between two requests, and intervals are counted in place of
blocks.
"""

from __future__ import annotations

from heapq import heappop, heappush

from kvactors.scenario.sweep import Uses


def optimal_hits(uses: Uses, requests: int, size: int) -> int:
    """Blocks that a cache hits at most.

    Args:
        uses: of the trace's blocks, after earlier ones.
        requests: of the trace.
        size: of the cache, in blocks.
    """
    begun: list[list[tuple[int, int]]] = [[] for _ in range(requests)]
    columns = (uses.before.tolist(), uses.request.tolist(), uses.blocks.tolist())
    for before, request, blocks in zip(*columns, strict=True):
        begun[before].append((request, blocks))
    kept: dict[int, int] = {}  # blocks in the cache, by the request that uses them next
    farthest: list[int] = []  # heap of those requests, negated
    hits = held = 0
    for number, intervals in enumerate(begun):
        hit = kept.pop(number, 0)
        hits += hit
        held -= hit
        for request, blocks in intervals:
            if request not in kept:
                kept[request] = 0
                heappush(farthest, -request)
            kept[request] += blocks
            held += blocks
        while held > size:
            request = -farthest[0]
            dropped = min(kept[request], held - size)
            kept[request] -= dropped
            held -= dropped
            if not kept[request]:
                del kept[request]
                heappop(farthest)
    return hits
