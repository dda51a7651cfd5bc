"""The memory of ranks in other processes, as the leader sees it: sizes, and no bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from kvactors.device.arena import Arena
from kvactors.device.base import Device
from kvactors.errors import DeviceError
from kvactors.layout.base import Layout


class RanksDevice(Device):
    """Every rank's device. layout: one rank's. num_blocks: of each."""

    kind = "ranks"

    def __init__(self, layout: Layout, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.regions = np.empty(0, np.int64)
        self.piece_bytes = np.array([piece.nbytes for piece in layout.pieces], np.int64)

    def copy_to_host(self, blocks: Sequence[int], arena: Arena, slots: Sequence[int]) -> NoReturn:
        """There is nothing here to copy. DeviceError."""
        raise DeviceError("device memory is in the ranks' processes")

    def copy_to_device(
        self, blocks: Sequence[int], arena: Arena, slots: Sequence[int], layers: range | None = None
    ) -> NoReturn:
        """See `copy_to_host`."""
        raise DeviceError("device memory is in the ranks' processes")


class RanksArena(Arena):
    """Every rank's arena. num_slots: of each."""

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        super().__init__(0, block_bytes)
        self.num_slots = num_slots

    def touch(self) -> None:
        """There is no memory here."""

    def view(self, slot: int) -> memoryview:
        """DeviceError: the slots are in the ranks' processes."""
        raise DeviceError("host slots are in the ranks' processes")
