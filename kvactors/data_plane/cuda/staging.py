"""Blocks of a GPU by way of host memory that is allocated for the purpose, for tests and
benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class StagedBlocks:
    """Host memory for some blocks, one region for each piece.

    Args:
        piece_bytes: sizes of the pieces.
        count: number of blocks.

    Attributes:
        regions: addresses of the pieces' memory.
        numbers: of the blocks in it.
    """

    def __init__(self, piece_bytes: NDArray[np.int64], count: int) -> None:
        self._memory = [np.zeros(max(1, count * int(size)), np.uint8) for size in piece_bytes]
        self._piece_bytes = piece_bytes
        self.regions = np.array([region.ctypes.data for region in self._memory], np.int64)
        self.numbers = np.arange(count)

    def copies(
        self, regions: NDArray[np.int64], blocks: Sequence[int], num_blocks: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Addresses on the device, addresses here, and bytes of the copies of some blocks.

        Args:
            regions: of the device.
            blocks: of the device.
            num_blocks: how many it has.

        Raises:
            ValueError: a block is out of range.
        """
        ids = np.asarray(blocks, np.int64)
        if ids.size and not (ids.min() >= 0 and ids.max() < num_blocks):
            raise ValueError(f"a block is out of range: there are {num_blocks}")
        sizes = np.broadcast_to(self._piece_bytes, (len(ids), len(regions)))
        on_device = regions + ids[:, None] * sizes
        on_host = self.regions + self.numbers[:, None] * sizes
        return on_device.ravel(), on_host.ravel(), sizes.ravel()
