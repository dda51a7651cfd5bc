"""Devices of GPU memory, on the stand-in driver."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from kvactors.data_plane.cuda.copies import HostPin
from kvactors.data_plane.cuda.device import CudaDevice, DeviceMemory, cuda_region_of
from kvactors.data_plane.cuda.driver import CudaDriver, CudaError
from kvactors.device.arena import Arena
from kvactors.device.tensors import address_of
from kvactors.errors import DeviceError, LayoutError
from kvactors.layout import GQALayout
from tests.support.cuda import GpuTensor, PointerTensor, context_again

LAYOUT = GQALayout(2, 2, 32, 16, "float16")


@pytest.fixture
def driver(fake):
    return CudaDriver(fake.path)


@pytest.mark.parametrize("kind", [GpuTensor, PointerTensor, "interface"])
def test_an_engines_tensors_are_taken_by_address(driver, kind):
    owner = CudaDevice.allocate(LAYOUT, 4, driver=driver)
    tensors = owner.tensors
    if kind != "interface":
        tensors = [kind(memory.address, memory.shape, "float16") for memory in owner.tensors]
    device = CudaDevice(LAYOUT, tensors, driver=driver)
    assert device.regions.tolist() == owner.regions.tolist()
    assert device.num_blocks == 4
    device.fill([2], b"n" * 32)
    assert owner.check([2], b"n" * 32) == []
    by_name = {(p.layer, p.role): t for p, t in zip(LAYOUT.pieces, tensors, strict=True)}
    named = CudaDevice(LAYOUT, by_name, driver=driver)
    assert named.regions.tolist() == owner.regions.tolist()
    for one in (named, device, owner):
        one.close()
        one.close()


def interface(**changes):
    fields = {
        "shape": (4, 8),
        "typestr": "<f2",
        "data": (4096, False),
        "version": 3,
        "strides": None,
        **changes,
    }
    return SimpleNamespace(__cuda_array_interface__=fields)


@pytest.mark.parametrize(
    ("tensor", "complaint"),
    [
        (interface(data=(4096, True)), "read-only"),
        (interface(version=1), "version 1 of the CUDA array interface is too old"),
        (interface(typestr="<f8"), "type '<f8'"),
        (interface(strides=(32, 2)), "not contiguous"),
        (interface(mask=interface()), "masked"),
        (np.zeros((2, 2), np.float32), "host memory"),
        (GpuTensor(4096, (2, 2), "float32", kind=1), "host memory"),
        ("a tensor", "str is no tensor"),
    ],
)
def test_tensors_that_cannot_be_taken(tensor, complaint):
    with pytest.raises(DeviceError, match=complaint):
        cuda_region_of(tensor)


def region(tensor):
    found = cuda_region_of(tensor)
    return found.address, found.shape, found.dtype, found.host


def test_regions_by_the_interface():
    assert region(interface(strides=(16, 2))) == (4096, (4, 8), "float16", False)
    assert cuda_region_of(interface(shape=(1, 8), strides=(99, 2), version=2)).shape == (1, 8)
    assert cuda_region_of(interface(typestr="|V1")).dtype == "uint8"
    assert cuda_region_of(interface(typestr="<V2")).dtype == "bfloat16"
    assert address_of(interface()) == address_of(GpuTensor(4096, (2,), "int8")) == 4096


def test_memory_that_does_not_fit_the_layout_or_the_gpu_is_an_error(driver):
    owner = CudaDevice.allocate(LAYOUT, 4, driver=driver)
    good = [PointerTensor(memory.address, memory.shape, "float16") for memory in owner.tensors]
    host = np.zeros(good[3].shape, np.float16)
    for tensors, error, complaint in (
        (good[:3], LayoutError, "4 regions, and 3"),
        (
            [*good[:3], PointerTensor(good[3].address, good[3].shape, "float32")],
            LayoutError,
            "layer 1, value, is float32",
        ),
        (
            [*good[:3], PointerTensor(host.ctypes.data, host.shape, "float16")],
            DeviceError,
            "not in CUDA's memory",
        ),
        (
            [PointerTensor(t.address, (0, *t.shape[1:]), t.dtype) for t in good],
            LayoutError,
            "at least 1 block",
        ),
    ):
        with pytest.raises(error, match=complaint):
            CudaDevice(LAYOUT, tensors, driver=driver)
    with pytest.raises(DeviceError, match="no GPU 1: the driver lists 1"):
        CudaDevice(LAYOUT, good, ordinal=1, driver=driver)
    owner.close()


def test_tensors_of_another_gpu_are_refused(fake, driver):
    fake.set("devices", 2)
    owner = CudaDevice.allocate(LAYOUT, 4, driver=driver)
    with pytest.raises(DeviceError, match="not in the memory of GPU 1"):
        CudaDevice(LAYOUT, owner.tensors, ordinal=1, driver=driver)
    owner.close()


def test_a_tensor_that_moved_is_an_error_and_no_copy(driver):
    owner, arena = CudaDevice.allocate(LAYOUT, 4, driver=driver), Arena(2, LAYOUT.block_bytes)
    device = CudaDevice(
        LAYOUT, [PointerTensor(m.address, m.shape, "float16") for m in owner.tensors], driver=driver
    )
    device.tensors[1].address += 256
    with pytest.raises(DeviceError, match="layer 0, value, has moved"):
        device.copy_to_host([0], arena, [0])
    assert not any(arena.view(0))
    device.close()
    owner.close()
    arena.close()


def test_an_arena_is_pinned_once_and_until_the_end(fake, driver):
    device, arena = CudaDevice.allocate(LAYOUT, 4, driver=driver), Arena(2, LAYOUT.block_bytes)
    with device.current():
        pins = [pin(device, arena) for _ in range(2)]
        assert [one.on_device for one in pins] == [arena.address] * 2
        assert (fake.live("pinned"), fake.calls("cuMemHostRegister")) == (1, 1)
        for one in (pins[0], pins[0], pins[1]):
            assert fake.live("pinned") == 1
            one.release()
        assert fake.live("pinned") == 0
    device.close()
    arena.close()


def pin(device, arena):
    return HostPin(device, arena.address, arena.num_slots * arena.stride)


CALLS = [
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRetain",
    "cuCtxPushCurrent",
    "cuStreamCreate",
    "cuMemAlloc",
    "cuPointerGetAttribute",
    "cuMemcpyHtoDAsync",
    "cuMemcpyDtoHAsync",
    "cuStreamSynchronize",
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("nth", [1, 2])
def test_every_call_may_fail_and_nothing_leaks(fake, driver, call, nth):
    arena = Arena(2, LAYOUT.block_bytes)
    device = None
    fake.fail(call, 2, nth)
    failures = []
    try:
        device = CudaDevice.allocate(LAYOUT, 4, driver=driver)
        device.copy_to_host([1, 2], arena, [0, 1])
        device.copy_to_device([1, 2], arena, [0, 1])
    except (CudaError, DeviceError) as error:
        failures.append(str(error))
    if device is not None:
        device.close()
    assert len(failures) == (fake.calls(call) >= nth)
    assert all("OUT_OF_MEMORY" in failure for failure in failures)
    arena.close()


@pytest.mark.parametrize(
    "call", ["cuMemFree", "cuCtxPushCurrent", "cuMemHostUnregister", "cuStreamDestroy"]
)
def test_closing_never_raises(fake, driver, call):
    device = CudaDevice.allocate(LAYOUT, 4, driver=driver)
    arena = Arena(2, LAYOUT.block_bytes)
    with device.current():
        device._undo.callback(pin(device, arena).release)
    fake.fail(call, 700)
    device.close()
    arena.close()
    with context_again(driver):
        if call == "cuMemFree":
            driver.call("cuMemFree", device.tensors[-1].address)
        elif call in {"cuMemHostUnregister", "cuStreamDestroy"}:
            driver.status("cuMemHostUnregister", arena.address)
            driver.status("cuStreamDestroy", device._stream)


def test_device_memory_has_the_cuda_array_interface():
    assert region(DeviceMemory(512, (3, 2), "<V2")) == (512, (3, 2), "bfloat16", False)


@pytest.mark.parametrize("call", ["cuMemcpyDtoDAsync", "cuStreamSynchronize"])
def test_a_copy_that_the_driver_refuses_is_raised(fake, driver, call):
    device = CudaDevice.allocate(LAYOUT, 4, driver=driver)
    fake.fail(call, 2)
    with pytest.raises(CudaError, match=call):
        device.copy_blocks((0,), (1,))
    device.copy_blocks((0,), (1,))
    device.close()
