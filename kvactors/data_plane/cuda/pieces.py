"""Addresses of the pieces of blocks, on a GPU and in host slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from kvactors.data_plane.cuda.driver import CudaDriver


class HostRows(Protocol):
    """Host slots of the same size, one after another."""

    @property
    def address(self) -> int:
        """Of the first slot."""

    @property
    def stride(self) -> int:
        """Bytes from one slot to the next."""


class GpuPieces(Protocol):
    """Regions of a GPU, one for each piece of a block.

    Attributes:
        driver: the GPU's.
        ordinal: the GPU's number.
        regions: addresses, int64, in contract order.
        piece_bytes: bytes of a piece.
        strides: bytes from a block's piece to that of the next block.
        offsets: of the pieces within a slot, in bytes.
    """

    driver: CudaDriver
    ordinal: int
    regions: NDArray[np.int64]
    piece_bytes: NDArray[np.int64]
    strides: NDArray[np.int64]
    offsets: NDArray[np.int64]


def allocations_of(driver: CudaDriver, regions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of each region the start of its allocation, and a different number for each whose allocation
    the driver does not tell. The GPU's context must be current."""
    found = [driver.allocation(address) for address in regions.tolist()]
    return np.array([base or -1 - i for i, base in enumerate(found)], np.int64)


def addresses(
    device: GpuPieces,
    rows: HostRows,
    blocks: NDArray[np.int64],
    slots: NDArray[np.int64],
    pieces: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Of some pieces (indices in contract order) of n pairs: addresses on the device, addresses on
    the host, and bytes. Each is int64 of shape [n * len(pieces)], the pieces of a pair next to one
    another."""
    sizes = device.piece_bytes[pieces]
    on_device = device.regions[pieces] + blocks[:, None] * device.strides[pieces]
    on_host = rows.address + slots[:, None] * rows.stride + device.offsets[pieces]
    return on_device.ravel(), on_host.ravel(), np.broadcast_to(sizes, on_device.shape).ravel()
