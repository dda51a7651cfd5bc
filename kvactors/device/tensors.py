"""A device whose regions are tensors of a framework in host memory: Paddle, torch, numpy, or any
other that supports DLPack.

The device accesses the memory by address and copies nothing through the framework. It keeps
references to the tensors. Before every batch of copies it checks that their addresses are
unchanged.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvactors.device.arena import Arena
from kvactors.device.base import Device
from kvactors.device.regions import regions_to_device, regions_to_host
from kvactors.errors import DeviceError, LayoutError
from kvactors.layout.base import Layout
from kvactors.native import check_blocks, fill_blocks

HOST_DEVICES = {1, 3, 11}
"""DLPack's device types whose memory the host can address: CPU, pinned for CUDA, pinned for
ROCm."""

DTYPES = {
    (2, 32): "float32",
    (2, 16): "float16",
    (4, 16): "bfloat16",
    (1, 8): "uint8",
    (0, 8): "int8",
}
"""Dtypes by DLPack's type code and bits. Eight-bit floats count as bytes."""
FIRST_FLOAT8, LAST_FLOAT8 = 7, 14


class _DLTensor(ctypes.Structure):
    """`DLTensor` of dlpack.h, which is the same in v0.8 and v1."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Region(NamedTuple):
    """Address, shape and dtype of a tensor.

    Attributes:
        host: whether the host can address the memory.
    """

    address: int
    shape: tuple[int, ...]
    dtype: str
    host: bool


_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


class Rows(NamedTuple):
    """A tensor as rows of bytes, one for each index of its first axis.

    Attributes:
        address: of the first row.
        rows: number of rows.
        nbytes: bytes of a row, without gaps.
        stride: bytes from one row to the next.
        host: whether the host can address the memory.
    """

    address: int
    rows: int
    nbytes: int
    stride: int
    host: bool


def _dl_tensor(tensor: Any) -> tuple[Any, _DLTensor]:
    """A capsule that keeps the record alive, and the record. DeviceError."""
    try:
        capsule = tensor.__dlpack__()
    except Exception as error:
        raise DeviceError(f"{type(tensor).__name__} cannot be taken by DLPack: {error}") from error
    return capsule, _DLTensor.from_address(_get_pointer(capsule, b"dltensor"))


def rows_of(tensor: Any) -> Rows:
    """A tensor of any dtype as rows. Rows may have gaps between them, but none inside.

    Raises:
        DeviceError: the object does not support DLPack, or its rows have gaps inside.
    """
    _capsule, found = _dl_tensor(tensor)
    shape = tuple(found.shape[i] for i in range(found.ndim))
    item = found.bits * found.lanes // 8
    if not shape or item < 1:
        raise DeviceError(f"a tensor of shape {list(shape)} has no rows of whole bytes")
    elements = math.prod(shape[1:])
    strides = tuple(found.strides[i] for i in range(found.ndim)) if found.strides else None
    if strides is not None and not _contiguous(shape[1:], strides[1:]):
        raise DeviceError(f"a tensor of shape {list(shape)} has gaps inside its rows")
    step = elements if strides is None or shape[0] == 1 else strides[0]
    address = (found.data or 0) + found.byte_offset
    host = found.device_type in HOST_DEVICES
    return Rows(address, shape[0], elements * item, step * item, host)


def region_of(tensor: Any) -> Region:
    """A tensor's region.

    Raises:
        DeviceError: the object does not support DLPack, is not contiguous or has an unsupported
            dtype.
    """
    _capsule, found = _dl_tensor(tensor)
    shape = tuple(found.shape[i] for i in range(found.ndim))
    if found.strides and not _contiguous(shape, tuple(found.strides[i] for i in range(found.ndim))):
        raise DeviceError(f"a tensor of shape {list(shape)} is not contiguous")
    dtype = (
        "uint8"
        if found.bits == 8 and FIRST_FLOAT8 <= found.code <= LAST_FLOAT8
        else DTYPES.get((found.code, found.bits))
    )
    if dtype is None or found.lanes != 1:
        raise DeviceError(
            f"tensors of DLPack type {found.code}, {found.bits} bits, {found.lanes} lanes cannot "
            "hold blocks"
        )
    return Region(
        (found.data or 0) + found.byte_offset, shape, dtype, found.device_type in HOST_DEVICES
    )


def _contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def address_of(tensor: Any) -> int:
    """A tensor's current address, fast enough for a check before every batch of copies."""
    if hasattr(tensor, "data_ptr"):
        return int(tensor.data_ptr())
    if isinstance(tensor, np.ndarray):
        return int(tensor.ctypes.data)
    return region_of(tensor).address


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
        for i, tensor in enumerate(self.tensors):
            if address_of(tensor) != self.regions[i]:
                piece = self.layout.pieces[i]
                raise DeviceError(
                    f"the tensor of layer {piece.layer}, {piece.role}, has moved since it was "
                    "registered"
                )

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
