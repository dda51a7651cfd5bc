"""A device of host memory: numpy regions in place of device memory, with real copies.

It runs on any machine.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvactors.device.arena import FreshMemory
from kvactors.device.base import Device
from kvactors.errors import DeviceError, LayoutError
from kvactors.layout.base import Layout
from kvactors.native import touch


class HostDevice(Device):
    """Device blocks in numpy regions.

    Args:
        layout: of the blocks.
        num_blocks: number of blocks, at least 1.

    Raises:
        LayoutError: `num_blocks` is below 1.
        DeviceError: the system does not give so much memory.
    """

    fresh: FreshMemory

    def __init__(self, layout: Layout, num_blocks: int) -> None:
        if num_blocks < 1:
            raise LayoutError(f"a device needs at least 1 block, not {num_blocks}")
        self.layout = layout
        self.num_blocks = num_blocks
        try:
            self._memory = [
                np.empty((layout.region_blocks(piece, num_blocks), piece.nbytes), np.uint8)
                for piece in layout.pieces
            ]
        except (MemoryError, ValueError) as error:  # ValueError: more than addresses reach
            raise DeviceError(f"memory for {num_blocks} device blocks: {error}") from error
        ranges = [(region.ctypes.data, region.nbytes) for region in self._memory]
        self.fresh = FreshMemory(ranges, touch)
        self.regions = np.array([address for address, _ in ranges], np.int64)
        self.piece_bytes = np.array([piece.nbytes for piece in layout.pieces], np.int64)

    def region(self, layer: int, role: str) -> NDArray[np.uint8]:
        """The memory of one `layer` and `role`, uint8 [num_blocks, piece bytes].

        Raises:
            KeyError: the layout has no such piece.
        """
        for piece, memory in zip(self.layout.pieces, self._memory, strict=True):
            if (piece.layer, piece.role) == (layer, role):
                return memory
        raise KeyError((layer, role))
