"""The stand-in driver, and tensors on it."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_cuda import FakeCuda, build

CAPSULE = ctypes.pythonapi.PyCapsule_New
CAPSULE.restype = ctypes.py_object
CAPSULE.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
CODES = {
    "float32": (2, 32),
    "float16": (2, 16),
    "bfloat16": (4, 16),
    "uint8": (1, 8),
    "int8": (0, 8),
}


def stand_in() -> FakeCuda:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to build the stand-in driver with")
    return FakeCuda(build(Path(__file__).parents[2] / "native" / "cuda"))


class Managed(ctypes.Structure):
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
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class GpuTensor:
    """A tensor with DLPack's interface, as GPU frameworks have it. pointer: whether it has
    `data_ptr`, as
    torch's and Paddle's."""

    def __init__(
        self,
        address: int,
        shape: tuple[int, ...],
        dtype: str,
        kind: int = 2,
        *,
        gpu: int = 0,
        strides: tuple[int, ...] | None = None,
    ) -> None:
        self.address, self.shape, self.dtype, self.kind = address, shape, dtype, kind
        self.gpu, self.strides = gpu, strides

    def __dlpack__(self) -> Any:
        code, bits = CODES[self.dtype]
        shape = (ctypes.c_int64 * len(self.shape))(*self.shape)
        strides = self.strides and (ctypes.c_int64 * len(self.shape))(*self.strides)
        self.kept = (
            (shape, strides),
            Managed(
                self.address,
                self.kind,
                self.gpu,
                len(self.shape),
                code,
                bits,
                1,
                shape,
                strides,
                0,
                None,
                None,
            ),
        )
        return CAPSULE(ctypes.addressof(self.kept[1]), b"dltensor", None)


class PointerTensor(GpuTensor):
    def data_ptr(self) -> int:
        return self.address
