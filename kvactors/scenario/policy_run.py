"""Hits of one device tier under an eviction policy: the native tree without actors and bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvactors.native import BlockTree, LifeTables, Path
from kvactors.prefix_index.policy import FIRST
from kvactors.scenario.sweep import Paths
from kvactors.scenario.trace import TraceRequest

ROOT = bytes(32)

REPORTED = 256
"""Requests between two calls of `progress`."""

RequestsDone = Callable[[int], None]


class Arrivals(NamedTuple):
    """The data of requests that a policy learns from besides their blocks.

    Attributes:
        times: seconds, float64 [requests].
        outputs: tokens that the model produced, int64 [requests].
    """

    times: NDArray[np.float64]
    outputs: NDArray[np.int64]


def arrivals_of(requests: Sequence[TraceRequest]) -> Arrivals:
    """The times and output lengths of a trace."""
    return Arrivals(
        np.array([one.timestamp for one in requests], np.float64),
        np.array([one.output_length for one in requests], np.int64),
    )


class DeviceTier:
    """A device of one size whose requests run one after another.

    Args:
        size: blocks.
        tables: the statistics of RETAIN. None: the policy is LRU.
    """

    def __init__(self, size: int, tables: LifeTables | None = None) -> None:
        self.tree = BlockTree(1, 0, False, tables)
        self.size = size
        self.refused = 0
        self._free = list(range(size))

    def request(
        self,
        ids: NDArray[np.uint32],
        now: float,
        output: int = -1,
        *,
        ends: bool = False,
        returns_in: float = -1.0,
    ) -> int:
        """Serve one request from its beginning to its end.

        Args:
            ids: its blocks. In the tree each is one token.
            now: seconds.
            output: tokens that the model produced, -1 if that is not known.
            ends: a hint, see `BlockTree.touch`.
            returns_in: a hint in seconds, -1 without.

        Returns:
            The blocks that it hits. A request larger than the device is refused: it hits none and
            changes nothing.
        """
        if len(ids) > self.size:
            self.refused += 1
            return 0
        tree, path = self.tree, Path(1, ROOT)
        path.extend(ids)
        tree.advance(now)
        hits, _ = tree.pin(path)
        missing = len(ids) - hits
        if missing > len(self._free):
            self.evict(missing - len(self._free))
        if missing:
            path.assign(hits, self._free[-missing:])
            del self._free[-missing:]
        tree.commit(path, len(ids))
        tree.touch(path, output, ends, returns_in)
        tree.release(path)
        return hits

    def evict(self, count: int) -> list[int]:
        """Free some blocks, and return them in the order in which the policy chose them."""
        nodes, _, _, blocks, _ = self.tree.evict(count)
        freed, _ = self.tree.finish_offload(nodes, bytes(len(nodes)))
        self._free += freed
        return blocks


def retain_hits(
    paths: Paths,
    arrivals: Arrivals,
    size: int,
    *,
    whole: bool = True,
    progress: RequestsDone = lambda _: None,
) -> int:
    """The blocks that a device hits under RETAIN.

    Args:
        paths: the blocks of the trace.
        arrivals: its times and output lengths.
        size: of the device, in blocks.
        whole: whether a request may hit all its blocks.
        progress: called with the number of requests that are done, from time to time.
    """
    device = DeviceTier(size, LifeTables(first=FIRST))
    blocks = paths.blocks.astype(np.uint32)
    times: Sequence[float] = arrivals.times.tolist()
    outputs: Sequence[int] = arrivals.outputs.tolist()
    hits = begin = 0
    for request, end in enumerate(paths.ends.tolist()):
        ids, begin = blocks[begin:end], end
        most = len(ids) if whole else len(ids) - 1
        hits += min(most, device.request(ids, times[request], outputs[request]))
        if request % REPORTED == REPORTED - 1:
            progress(request + 1)
    return hits
