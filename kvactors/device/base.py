"""Where device blocks live, and how they are copied to and from the host arena."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvactors.device.arena import Arena
from kvactors.layout.base import Layout


class Device(ABC):
    """One region per piece of the layout, each [num_blocks][piece bytes].

    regions: addresses, int64, in the layout's contract order. piece_bytes: int64, likewise. Both
    copies block until the bytes are there, let the GIL go, and are called from copy threads, on
    disjoint blocks and slots.
    """

    kind: ClassVar[str] = "host"
    """Where its memory is: host (this process can address it), cuda or ranks."""

    layout: Layout
    num_blocks: int
    regions: NDArray[np.int64]
    piece_bytes: NDArray[np.int64]

    @abstractmethod
    def copy_to_host(self, blocks: Sequence[int], arena: Arena, slots: Sequence[int]) -> None:
        """blocks[j] to slots[j]. ValueError for ids out of range or unequal lengths."""

    @abstractmethod
    def copy_to_device(
        self, blocks: Sequence[int], arena: Arena, slots: Sequence[int], layers: range | None = None
    ) -> None:
        """slots[j] to blocks[j]. layers: only these, counted from the layout's first; all if None.
        ValueError for ids out of range or unequal lengths."""

    def share(self, layers: range | None) -> tuple[slice, int]:
        """The regions of some layers, and where in a slot their bytes begin."""
        if layers is None:
            return slice(None), 0
        roles = len(self.layout.roles)
        pieces = slice(layers.start * roles, layers.stop * roles)
        return pieces, int(self.piece_bytes[: pieces.start].sum())

    def close(self) -> None:
        """Give memory of its own back; every copy has ended."""
