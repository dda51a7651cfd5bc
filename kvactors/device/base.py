"""Where device blocks live, and how they are copied to and from the host arena."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvactors.device.arena import Arena
from kvactors.layout.base import Layout


class Device(ABC):
    """One region per piece of the layout, each [num_blocks][piece bytes].

    regions: addresses, int64, in the layout's contract order. piece_bytes: int64, likewise. Both copies block until the bytes are
    there, let the GIL go, and are called from copy threads, on disjoint blocks and slots.
    """

    layout: Layout
    num_blocks: int
    regions: NDArray[np.int64]
    piece_bytes: NDArray[np.int64]

    @abstractmethod
    def copy_to_host(self, blocks: Sequence[int], arena: Arena, slots: Sequence[int]) -> None:
        """blocks[j] to slots[j]. ValueError for ids out of range or unequal lengths."""

    @abstractmethod
    def copy_to_device(self, blocks: Sequence[int], arena: Arena, slots: Sequence[int]) -> None:
        """slots[j] to blocks[j]. ValueError for ids out of range or unequal lengths."""
