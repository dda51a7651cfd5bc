"""A device whose regions are tensors of a framework in host memory, by DLPack or by address.

The device accesses the memory by address and copies nothing through the framework. It keeps
references to the tensors. Before every batch of copies it checks that their addresses are
unchanged."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvactors.device.base import Device
from kvactors.errors import DeviceError, LayoutError
from kvactors.layout.base import Layout

# -- Address, shape and type of a framework's tensor, by DLPack, the CUDA array interface or the
# tensor's own methods.
#
# No framework is imported. Paddle before 3.0 has no `__dlpack__`, and frameworks refuse DLPack for
# some tensors (eight-bit floats, tensors with autograd): such tensors are described by
# `data_ptr()`, `shape`, `element_size()` and their place, which torch and Paddle both have.


HOST_DEVICES = {1, 3, 11}
"""DLPack's device types that the host can address: CPU, pinned for CUDA, pinned for ROCm."""

CUDA_DEVICES = {2, 13}  # DLPack's device types of CUDA: a GPU's memory, and managed memory

DTYPES = {
    (2, 32): "float32",
    (2, 16): "float16",
    (4, 16): "bfloat16",
    (1, 8): "uint8",
    (0, 8): "int8",
}
"""Dtypes by DLPack's type code and bits. Eight-bit floats count as bytes."""
FIRST_FLOAT8, LAST_FLOAT8 = 7, 14

TYPESTRS = {
    "<f4": "float32",
    "<f2": "float16",
    "<V2": "bfloat16",
    "|u1": "uint8",
    "|i1": "int8",
    "<u1": "uint8",
    "<i1": "int8",
    "|V1": "uint8",
}
"""The CUDA array interface's types. Bfloat16 and eight-bit floats come as opaque bytes."""


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


_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


class Region(NamedTuple):
    """The memory of a tensor.

    Attributes:
        strides: elements from one index to the next, by axis. None: contiguous.
        dtype: its name in layouts, empty if no layout has it.
        ordinal: the GPU's number, None if the memory is not a GPU's or the number is unknown.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    item_bytes: int
    dtype: str
    type_text: str
    host: bool
    ordinal: int | None = None
    gpu: bool = False


def describe(tensor: Any) -> Region:
    """The memory of a tensor, by the first interface that it has."""
    refused: Exception | None = None
    if hasattr(tensor, "__dlpack__"):
        try:
            capsule = tensor.__dlpack__()
        except Exception as error:
            refused = error
        else:
            return _by_dlpack(capsule)
    interface = getattr(tensor, "__cuda_array_interface__", None)
    if interface is not None:
        return _by_cuda_array(interface)
    if hasattr(tensor, "data_ptr"):
        return _by_methods(tensor)
    name = type(tensor).__name__
    if refused is not None:
        raise DeviceError(f"{name} cannot be taken by DLPack: {refused}") from refused
    raise DeviceError(
        f"{name} is no tensor: it has neither DLPack nor the CUDA array interface nor data_ptr()"
    )


def address_of(tensor: Any) -> int:
    """A tensor's current address, fast enough for a check before every batch of copies."""
    if hasattr(tensor, "data_ptr"):
        return int(tensor.data_ptr())
    if isinstance(tensor, np.ndarray):
        return int(tensor.ctypes.data)
    return describe(tensor).address


def ensure_in_place(layout: Layout, tensors: Sequence[Any], addresses: Iterable[int]) -> None:
    """Check that no tensor of a device has moved since it was registered."""
    for piece, tensor, address in zip(layout.pieces, tensors, addresses, strict=True):
        if address_of(tensor) != address:
            raise DeviceError(
                f"the tensor of layer {piece.layer}, {piece.role}, has moved since it was "
                "registered"
            )


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> bool:
    """Whether elements follow one another without gaps. Strides are counted in elements."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides or ()), strict=False):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _by_dlpack(capsule: Any) -> Region:
    """The capsule keeps the record alive."""
    found = _DLTensor.from_address(_get_pointer(capsule, b"dltensor"))
    float8 = found.bits == 8 and FIRST_FLOAT8 <= found.code <= LAST_FLOAT8
    name = "uint8" if float8 else DTYPES.get((found.code, found.bits), "")
    gpu = found.device_type in CUDA_DEVICES
    return Region(
        (found.data or 0) + found.byte_offset,
        tuple(found.shape[i] for i in range(found.ndim)),
        tuple(found.strides[i] for i in range(found.ndim)) if found.strides else None,
        found.bits * found.lanes // 8,
        name if found.lanes == 1 else "",
        f"DLPack type {found.code}, {found.bits} bits, {found.lanes} lanes",
        found.device_type in HOST_DEVICES,
        found.device_id if gpu else None,
        gpu,
    )


def _by_cuda_array(interface: Mapping[str, Any]) -> Region:
    shape, typestr = tuple(interface["shape"]), interface["typestr"]
    address, read_only = interface["data"]
    if interface.get("version", 0) < 2:
        raise DeviceError(
            f"version {interface.get('version')} of the CUDA array interface is too old"
        )
    if read_only:
        raise DeviceError(f"a tensor of shape {list(shape)} is read-only")
    if interface.get("mask") is not None:
        raise DeviceError(f"a tensor of shape {list(shape)} is masked")
    item = int(typestr[2:])
    steps = interface.get("strides")
    if steps is not None and any(
        step % item for size, step in zip(shape, steps, strict=True) if size != 1
    ):
        raise DeviceError(f"a tensor of shape {list(shape)} has strides of parts of an element")
    return Region(
        int(address or 0),
        shape,
        None if steps is None else tuple(step // item for step in steps),
        item,
        TYPESTRS.get(typestr, ""),
        f"type {typestr!r}",
        host=False,
        gpu=True,
    )


def _by_methods(tensor: Any) -> Region:
    try:
        shape = tuple(int(size) for size in tensor.shape)
        item = int(tensor.element_size())
        host, gpu, ordinal = _place(tensor)
        strides = _strides(tensor)
    except (AttributeError, TypeError, ValueError) as error:
        raise DeviceError(
            f"{type(tensor).__name__} has data_ptr(), but cannot be described: {error}"
        ) from error
    name = str(tensor.dtype).rpartition(".")[2]
    known = "uint8" if name.startswith("float8") else name
    dtype = known if known in DTYPES.values() else ""
    return Region(
        int(tensor.data_ptr()), shape, strides, item, dtype, f"type {name}", host, ordinal, gpu
    )


def _strides(tensor: Any) -> tuple[int, ...] | None:
    """Torch has `stride()`, Paddle `strides`. A tensor without either must be contiguous."""
    found = tensor.stride() if hasattr(tensor, "stride") else getattr(tensor, "strides", None)
    if found is not None:
        return tuple(int(step) for step in found)
    if not tensor.is_contiguous():
        raise ValueError("it is not contiguous, and its strides are unknown")
    return None


def _place(tensor: Any) -> tuple[bool, bool, int | None]:
    """Whether the memory is the host's, whether it is a CUDA device's, and which one's."""
    place = getattr(tensor, "place", None)
    if place is not None:  # Paddle
        if place.is_gpu_place():
            return False, True, int(place.gpu_device_id())
        return bool(place.is_cpu_place() or place.is_cuda_pinned_place()), False, None
    device = tensor.device
    gpu = device.type == "cuda"
    return device.type == "cpu", gpu, device.index if gpu else None


class Rows(NamedTuple):
    """A tensor as rows of bytes, one for each index of its first axis.

    Attributes:
        nbytes: bytes of a row, without gaps.
        stride: bytes from one row to the next.
    """

    address: int
    rows: int
    nbytes: int
    stride: int
    host: bool
    gpu: bool = False
    ordinal: int | None = None


def rows_of(tensor: Any) -> Rows:
    """A tensor of any dtype as rows. Rows may have gaps between them, but none inside."""
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
    """A tensor that blocks can be in: contiguous, of a dtype of layouts."""
    found = describe(tensor)
    if not is_contiguous(found.shape, found.strides):
        raise DeviceError(f"a tensor of shape {list(found.shape)} is not contiguous")
    if not found.dtype:
        raise DeviceError(f"tensors of {found.type_text} cannot hold blocks")
    return found


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
        if not all(region.host for region in regions):
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
        ensure_in_place(self.layout, self.tensors, self.regions)
