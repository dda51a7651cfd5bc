"""The stand-in driver, and tensors on it."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvactors.data_plane.cuda.driver import CudaDriver
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
EVERYTHING = (
    "device",
    "pinned",
    "streams",
    "events",
    "modules",
    "contexts",
    "current",
    "running",
    "races",
)
"""Kinds of resources that a GPU may have left over, and unordered uses of the same memory."""
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def stand_in() -> FakeCuda:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to build the stand-in driver with")
    fake = FakeCuda(build(Path(__file__).parents[2] / "native" / "cuda"))
    fake.forgive()  # those of an earlier test have failed that one
    return fake


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    """The stand-in driver, on which a test leaves nothing over."""
    found = stand_in()
    found.reset()
    yield found
    found.reset()
    left = {what: found.live(what) for what in EVERYTHING}
    assert left == dict.fromkeys(EVERYTHING, 0), f"leaked: {left}"


@contextmanager
def context_again(driver: CudaDriver) -> Iterator[None]:
    """The GPU's context, retained once more: for what a device that has closed left behind."""
    context = driver.read("cuDevicePrimaryCtxRetain", 0)
    with driver.current(context):
        yield
    driver.call("cuDevicePrimaryCtxRelease", 0)


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


class Gpu:
    """An engine on the stand-in: tensors of its memory, a stream, and work on it."""

    def __init__(self) -> None:
        self.fake = stand_in()
        self.fake.reset()
        self.driver = CudaDriver(self.fake.path)
        self.context = self.driver.read("cuDevicePrimaryCtxRetain", 0)
        self._memory: list[int] = []
        self._kept: list[Any] = []
        self.forgotten = False
        with self.driver.current(self.context):
            self.stream = self.driver.read("cuStreamCreate", 1)
        self._library = ctypes.CDLL(self.fake.path)

    def allocate(self, size: int) -> int:
        with self.driver.current(self.context):
            self._memory.append(self.driver.read("cuMemAlloc", size))
        ctypes.memset(self._memory[-1], 0, size)
        return self._memory[-1]

    def tensors(self, rows: int, *widths: int, kind: Any = PointerTensor) -> list[Any]:
        noise = np.random.default_rng(0)
        found = []
        for width in widths:
            content = noise.integers(1, 255, (rows, width), np.uint8)
            found.append(kind(self.allocate(content.nbytes), (rows, width), "uint8"))
            ctypes.memmove(found[-1].address, content.ctypes.data, content.nbytes)
        return found

    def work(self, stream: int, call: Any) -> None:
        """Have a stream call a function when its turn comes, as a kernel."""
        function = HOST_FUNCTION(lambda _: call())
        self._kept.append(function)
        with self.driver.current(self.context):
            code = self._library.cuLaunchHostFunc(ctypes.c_void_p(stream), function, None)
        assert code == 0

    def record(self, stream: int) -> int:
        """An event on a stream."""
        with self.driver.current(self.context):
            event = self.driver.read("cuEventCreate", 2)
            self.driver.call("cuEventRecord", event, stream)
        self._kept.append(event)
        return event

    def forget(self) -> None:
        """The device is reset: everything in its context is freed."""
        self._library.fake_forget()
        self.forgotten = True

    def close(self) -> None:
        self.fake.reset()
        if self.forgotten:
            return
        with self.driver.current(self.context):
            for address in self._memory:
                self.driver.call("cuMemFree", address)
            for one in self._kept:
                if isinstance(one, int):
                    self.driver.call("cuEventDestroy", one)
            self.driver.call("cuStreamDestroy", self.stream)
        self.driver.call("cuDevicePrimaryCtxRelease", 0)


@contextmanager
def opened_gpu() -> Iterator[Gpu]:
    """A GPU, at the end of which nothing may be left over."""
    gpu = Gpu()
    yield gpu
    gpu.close()
    left = {what: gpu.fake.live(what) for what in EVERYTHING}
    assert left == dict.fromkeys(EVERYTHING, 0), f"leaked: {left}"
