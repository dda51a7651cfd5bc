"""A device and an exclusive host tier whose requests run one after another: the native tree without
actors and bytes."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvactors.native import BlockTree, LifeTables, Path
from kvactors.types import split_hashes

ROOT = bytes(32)


class TwoTiers:
    """Both tiers, of `device` and `host` blocks, and a list of the blocks that left the host.

    Args:
        tables: the statistics of RETAIN.
        retain: which tiers evict by RETAIN: device, host. The others are LRU.
    """

    def __init__(
        self, device: int, host: int, tables: LifeTables, retain: tuple[bool, bool] = (True, True)
    ) -> None:
        self.tree = BlockTree(
            1,
            0,
            False,
            tables if retain[0] else None,
            eager_hashes=True,
            retain_host=tables if retain[1] else None,
        )
        self.device, self.host, self.by_policy = device, host, retain[1]
        self.resident: OrderedDict[bytes, bytes] = OrderedDict()  # on the host: parent by hash
        self.left: list[bytes] = []
        self.offloaded = 0
        self._free = list(range(device))
        self._followers: Counter[bytes] = Counter()

    def request(
        self, ids: NDArray[np.uint32], now: float, output: int = -1
    ) -> tuple[int, int, Sequence[bytes]]:
        """Serve one request. Returns its hits on device and host, and its hashes. A request larger
        than the device is refused."""
        if len(ids) > self.device:
            return 0, 0, []
        tree, path = self.tree, Path(1, ROOT)
        path.extend(ids)
        tree.advance(now)
        run, _ = tree.pin(path)
        hashes = split_hashes(path.hashes(0, len(ids)))
        found = run
        while found < len(ids) and hashes[found] in self.resident:
            found += 1
        tree.trim(path, min(path.num_held, found))
        for one in hashes[run:found]:
            self._leave(one)
        missing = len(ids) - run
        if missing > len(self._free):
            self.evict(missing - len(self._free))
        if missing:
            path.assign(run, self._free[-missing:])
            del self._free[-missing:]
        tree.commit(path, len(ids))
        tree.host_blocks_removed(b"".join(hashes[run:found]))
        tree.touch(path, output)
        tree.release(path)
        return run, found - run, hashes

    def _leave(self, one: bytes) -> None:
        self._followers[self.resident.pop(one)] -= 1

    def evict(self, count: int) -> None:
        """Move blocks from the device to the host."""
        nodes, hashes, parents, blocks, *_ = self.tree.evict(count)
        over = self.tree.host_kept(exclusive=True) + len(blocks) - self.host
        gone = split_hashes(self.tree.host_victims(max(0, over))) if self.by_policy else []
        for one in gone:
            if self._followers[one]:
                raise AssertionError("a block leaves the host before those that follow it")
            self._leave(one)
        for one, parent in zip(split_hashes(hashes), split_hashes(parents), strict=True):
            self.resident[one] = parent
            self._followers[parent] += 1
        self.offloaded += len(blocks)
        while len(self.resident) > self.host:
            gone.append(next(iter(self.resident)))
            self._leave(gone[-1])
        freed, _ = self.tree.finish_offload(nodes, bytes([1]) * len(blocks))
        self._free += freed
        self.tree.host_blocks_removed(b"".join(gone))
        self.left += gone
