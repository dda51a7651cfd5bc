"""A device whose regions are tensors of a framework in host memory: Paddle, torch, numpy, or any
other that supports DLPack.

The device accesses the memory by address and copies nothing through the framework. It keeps
references to the tensors. Before every batch of copies it checks that their addresses are
unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvactors.device.arena import Arena
from kvactors.device.base import Device
from kvactors.device.regions import copy_regions, regions_to_device, regions_to_host
from kvactors.device.tensor_memory import describe, ensure_in_place, is_contiguous
from kvactors.errors import DeviceError, LayoutError
from kvactors.layout.base import Layout
from kvactors.native import check_blocks, fill_blocks


class Region(NamedTuple):
    """Address, shape and dtype of a tensor.

    Attributes:
        host: whether the host can address the memory.
    """

    address: int
    shape: tuple[int, ...]
    dtype: str
    host: bool


class Rows(NamedTuple):
    """A tensor as rows of bytes, one for each index of its first axis.

    Attributes:
        address: of the first row.
        rows: number of rows.
        nbytes: bytes of a row, without gaps.
        stride: bytes from one row to the next.
        host: whether the host can address the memory.
        gpu: whether it is memory of a CUDA device.
        ordinal: the GPU's number, None if it is unknown.
    """

    address: int
    rows: int
    nbytes: int
    stride: int
    host: bool
    gpu: bool = False
    ordinal: int | None = None


def rows_of(tensor: Any) -> Rows:
    """A tensor of any dtype as rows. Rows may have gaps between them, but none inside.

    Raises:
        DeviceError: the object cannot be described, or its rows have gaps inside.
    """
    found = describe(tensor)
    shape, strides, item = found.shape, found.strides, found.item_bytes
    if not shape or item < 1:
        raise DeviceError(f"a tensor of shape {list(shape)} has no rows of whole bytes")
    elements = math.prod(shape[1:])
    if strides is not None and not is_contiguous(shape[1:], strides[1:]):
        raise DeviceError(f"a tensor of shape {list(shape)} has gaps inside its rows")
    step = elements if strides is None or shape[0] == 1 else strides[0]
    return Rows(
        found.address, shape[0], elements * item, step * item, found.host, found.gpu, found.ordinal
    )


def region_of(tensor: Any) -> Region:
    """A tensor's region.

    Raises:
        DeviceError: the object cannot be described, is not contiguous or has an unsupported dtype.
    """
    found = describe(tensor)
    if not is_contiguous(found.shape, found.strides):
        raise DeviceError(f"a tensor of shape {list(found.shape)} is not contiguous")
    if not found.dtype:
        raise DeviceError(f"tensors of {found.type_text} cannot hold blocks")
    return Region(found.address, found.shape, found.dtype, found.host)


class TensorDevice(Device):
    """Device blocks in the tensors of a framework.

    Args:
        layout: of the blocks.
        tensors: in the layout's contract order, or by (layer, role), each of shape
            [blocks, *the role's shape].

    Raises:
        LayoutError: a tensor has another shape or dtype. The text names the first one.
        DeviceError: a tensor does not support DLPack or is not in host memory.
    """

    def __init__(
        self, layout: Layout, tensors: Sequence[Any] | Mapping[tuple[int, str], Any]
    ) -> None:
        self.layout = layout
        self.tensors = self._ordered(layout, tensors)
        regions = [region_of(tensor) for tensor in self.tensors]
        elsewhere = [region for region in regions if not region.host]
        if elsewhere:
            raise DeviceError("these tensors are not in host memory: use a CUDA device")
        self.num_blocks = regions[0].shape[0] if regions and regions[0].shape else 0
        if self.num_blocks < 1:
            raise LayoutError("a device needs at least 1 block")
        layout.verify([(region.shape, region.dtype) for region in regions], self.num_blocks)
        self.regions = np.array([region.address for region in regions], np.int64)
        self.piece_bytes = np.array([piece.nbytes for piece in layout.pieces], np.int64)

    @staticmethod
    def _ordered(
        layout: Layout, tensors: Sequence[Any] | Mapping[tuple[int, str], Any]
    ) -> list[Any]:
        if not isinstance(tensors, Mapping):
            return list(tensors)
        wanted = [(piece.layer, piece.role) for piece in layout.pieces]
        lacking = [key for key in wanted if key not in tensors]
        if lacking or len(tensors) != len(wanted):
            raise LayoutError(f"tensors by (layer, role) must be {wanted}, lacking: {lacking}")
        return [tensors[key] for key in wanted]

    def ensure_in_place(self) -> None:
        """Check that no tensor has moved since it was registered.

        Raises:
            DeviceError: a tensor has moved, so its framework may have reused the memory.
        """
        ensure_in_place(self.layout, self.tensors, self.regions)

    def copy_to_host(self, blocks: Sequence[int], arena: Arena, slots: Sequence[int]) -> None:
        """See `Device`."""
        self.ensure_in_place()
        regions_to_host(self, blocks, arena, slots)

    def copy_to_device(
        self, blocks: Sequence[int], arena: Arena, slots: Sequence[int], layers: range | None = None
    ) -> None:
        """See `Device`."""
        self.ensure_in_place()
        regions_to_device(self, blocks, arena, slots, layers)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `Device`."""
        self.ensure_in_place()
        copy_regions(self, sources, targets)

    def fill(self, blocks: Sequence[int], keys: bytes) -> None:
        """See `HostDevice.fill`."""
        fill_blocks(
            self.regions, self.piece_bytes, self.num_blocks, np.asarray(blocks, np.int64), keys
        )

    def check(self, blocks: Sequence[int], keys: bytes) -> list[int]:
        """See `HostDevice.check`."""
        return check_blocks(
            self.regions, self.piece_bytes, self.num_blocks, np.asarray(blocks, np.int64), keys
        )
