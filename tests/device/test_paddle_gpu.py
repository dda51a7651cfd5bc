"""Paddle devices on a GPU, with the stand-in driver and stand-ins for Paddle's tensors."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvactors.data_plane.cuda import device as cuda_device
from kvactors.data_plane.cuda.device import CudaDevice
from kvactors.data_plane.cuda.driver import CudaDriver
from kvactors.data_plane.local import make_device
from kvactors.device import paddle as paddle_device
from kvactors.device.tensors import TensorDevice
from kvactors.errors import DeviceError
from kvactors.layout import GQALayout
from kvactors.layout.base import ITEM_BYTES
from kvactors.settings import DeviceConfig
from tests.support.cuda import GpuTensor, stand_in


class Place:
    """Paddle's."""

    def __init__(self, gpu: int | None = None) -> None:
        self.gpu = gpu

    def __str__(self) -> str:
        return "Place(cpu)" if self.gpu is None else f"Place(gpu:{self.gpu})"

    def is_gpu_place(self) -> bool:
        return self.gpu is not None

    def is_cpu_place(self) -> bool:
        return self.gpu is None

    def is_cuda_pinned_place(self) -> bool:
        return False

    def gpu_device_id(self) -> int:
        assert self.gpu is not None
        return self.gpu


class Tensor26:
    """A tensor of Paddle 2.6: no DLPack, strides as a list."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: str, place: Place) -> None:
        self.address, self.place = address, place
        self.shape, self.dtype = list(shape), f"paddle.{dtype}"
        self.stop_gradient = False
        sizes = np.cumprod([1, *shape[:0:-1]])[::-1]
        self.strides = [int(size) for size in sizes]

    def data_ptr(self) -> int:
        return self.address

    def element_size(self) -> int:
        return ITEM_BYTES[self.dtype.partition(".")[2]]


class Tensor3(Tensor26):
    """A tensor of Paddle 3: DLPack."""

    def __dlpack__(self) -> Any:
        self.kept = GpuTensor(self.address, tuple(self.shape), self.dtype.partition(".")[2])
        return self.kept.__dlpack__()


class Paddle(ModuleType):
    """The module, with one GPU that is the stand-in."""

    def __init__(self, driver: CudaDriver | None, version: str) -> None:
        super().__init__("paddle")
        self.__version__ = version
        self._driver = driver
        self.made: list[int] = []
        self.version = SimpleNamespace(cuda=lambda: "11.7")
        self.device = SimpleNamespace(cuda=SimpleNamespace(device_count=lambda: int(bool(driver))))
        self.kind = Tensor26 if version.startswith("2") else Tensor3
        self.with_cuda = True
        self.CPUPlace, self.CUDAPlace = Place, Place

    def is_compiled_with_cuda(self) -> bool:
        return self.with_cuda

    def disable_signal_handler(self) -> None:
        pass

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        assert self._driver is not None
        size = int(np.prod(shape)) * ITEM_BYTES[dtype]
        context = self._driver.read("cuDevicePrimaryCtxRetain", 0)
        with self._driver.current(context):
            self.made.append(self._driver.read("cuMemAlloc", size))
        self._driver.call("cuDevicePrimaryCtxRelease", 0)
        ctypes.memset(self.made[-1], 0, size)
        return self.kind(self.made[-1], shape, dtype, Place(0))

    def free(self) -> None:
        assert self._driver is not None
        context = self._driver.read("cuDevicePrimaryCtxRetain", 0)
        with self._driver.current(context):
            for address in self.made:
                self._driver.call("cuMemFree", address)
        self._driver.call("cuDevicePrimaryCtxRelease", 0)


@pytest.fixture
def installed(monkeypatch):
    """Puts a Paddle in place of the installed one."""

    def put(module: Any) -> None:
        monkeypatch.setitem(sys.modules, "paddle", module)
        paddle_device.import_paddle.cache_clear()

    yield put
    paddle_device.import_paddle.cache_clear()


@pytest.fixture(params=["2.6.2", "3.3.1"])
def paddle(request, monkeypatch, installed):
    fake = stand_in()
    fake.reset()
    driver = CudaDriver(fake.path)
    module = Paddle(driver, request.param)
    monkeypatch.setattr(cuda_device, "load_driver", lambda: driver)
    installed(module)
    yield module
    module.free()
    left = {what: fake.live(what) for what in ("device", "pinned", "streams", "contexts")}
    assert left == dict.fromkeys(left, 0), "leaked"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "uint8"])
def test_tensors_on_a_gpu_become_a_device(paddle, dtype):
    layout, ids = GQALayout(2, 2, 32, 16, dtype), list(range(6))
    device = make_device(DeviceConfig(kind="paddle", place="gpu:0", num_blocks=6), layout)
    assert isinstance(device, CudaDevice)
    assert device.regions.tolist() == paddle.made
    assert all(tensor.stop_gradient for tensor in device.tensors)
    device.fill(ids, bytes(range(32 * 6)))
    assert device.check(ids, bytes(range(32 * 6))) == []
    device.close()


def test_tensors_of_a_gpu_are_no_host_device(paddle):
    layout = GQALayout(1, 1, 8, 4, "uint8")
    with pytest.raises(DeviceError, match="not in host memory"):
        TensorDevice(layout, layout.allocate(paddle_device.allocator("gpu:0"), 2))


@pytest.mark.parametrize("version", ["2.5.1", "2.4", "1.8.5"])
def test_a_version_that_is_too_old_is_named(installed, version):
    installed(Paddle(None, version))
    with pytest.raises(DeviceError, match=rf"Paddle {version} is too old: .* needs 2\.6"):
        paddle_device.import_paddle()


@pytest.mark.parametrize("version", ["2.6.2", "3.0.0", "3.0.0-rc1", "0.0.0", "10.1"])
def test_a_version_that_fits_is_taken(installed, version):
    module = Paddle(None, version)
    installed(module)
    assert paddle_device.import_paddle() is module


def test_a_cpu_build_and_a_build_without_a_gpu_have_different_errors(installed):
    module = Paddle(None, "3.3.1")
    module.with_cuda = False
    installed(module)
    with pytest.raises(DeviceError, match=r"Paddle 3\.3\.1 here is a CPU build.*2\.6\.2"):
        paddle_device.allocator("gpu:0")
    module.with_cuda = True
    with pytest.raises(
        DeviceError, match=r"Paddle 3\.3\.1 is a build for CUDA 11\.7, and finds no"
    ):
        paddle_device.allocator("gpu:0")


def test_a_paddle_that_cannot_be_imported_is_named_with_its_version(monkeypatch, installed):
    monkeypatch.setattr(paddle_device, "installed", lambda: "paddlepaddle-gpu 2.6.2")
    installed(None)
    with pytest.raises(DeviceError, match=r"paddlepaddle-gpu 2\.6\.2 cannot be imported: .*cuDNN"):
        paddle_device.import_paddle()


def test_a_missing_paddle_names_the_packages(monkeypatch, installed):
    monkeypatch.setattr(paddle_device.metadata, "version", missing)
    installed(None)
    with pytest.raises(DeviceError, match=r"kvactors\[paddle-gpu\].*2\.6\.2"):
        paddle_device.import_paddle()


def missing(name: str) -> str:
    raise paddle_device.metadata.PackageNotFoundError(name)
