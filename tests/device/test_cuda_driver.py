"""The driver's binding, on the stand-in."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from kvactors.data_plane.cuda.driver import CudaDriver, CudaError
from kvactors.errors import DeviceError


def test_a_missing_driver_is_reported_as_missing():
    with pytest.raises(DeviceError, match=r"there is no CUDA driver \(/nowhere/libcuda.so.1\)"):
        CudaDriver("/nowhere/libcuda.so.1")


def test_nothing_is_loaded_at_import():
    script = (
        "import kvactors.data_plane.cuda.device, kvactors.data_plane.cuda.engine as c; print('libcuda' in "
        "open('/proc/self/maps').read())"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_errors_have_the_drivers_names(fake):
    fake.fail("cuInit", 100)
    with pytest.raises(CudaError, match=r"cuInit: CUDA_ERROR_NO_DEVICE \(100\)") as caught:
        CudaDriver(fake.path)
    assert (caught.value.function, caught.value.code, caught.value.name) == (
        "cuInit",
        100,
        "CUDA_ERROR_NO_DEVICE",
    )
    assert str(CudaDriver(fake.path).error("cuX", 4711)) == "cuX: CUDA_ERROR_UNKNOWN (4711)"


@pytest.mark.parametrize(
    ("version", "has"),
    [(11040, False), (12070, False), (12080, True), (12090, True), (13000, True)],
)
def test_a_driver_has_batches_from_its_version_on(fake, version, has):
    fake.set("version", version)
    driver = CudaDriver(fake.path)
    assert (driver.version, driver.has_batch) == (version, has)


def test_a_function_the_driver_lacks_is_named(fake):
    fake.set("no cuMemcpyBatchAsync", 1)
    assert not CudaDriver(fake.path).has_batch
    fake.set("no cuMemHostRegister", 1)
    with pytest.raises(DeviceError, match="the CUDA driver has no cuMemHostRegister"):
        CudaDriver(fake.path)


def test_a_context_is_current_only_inside(fake):
    driver = CudaDriver(fake.path)
    with pytest.raises(CudaError, match="INVALID_CONTEXT"):
        driver.read("cuMemAlloc", 16)
    context = driver.read("cuDevicePrimaryCtxRetain", 0)
    with driver.current(context):
        assert fake.live("current") == 1
    assert fake.live("current") == 0
    driver.call("cuDevicePrimaryCtxRelease", 0)


def test_the_stand_in_checks_addresses(fake):
    """Freed memory is an error and not a crash: the other tests rely on it."""
    driver = CudaDriver(fake.path)
    context = driver.read("cuDevicePrimaryCtxRetain", 0)
    with driver.current(context):
        memory, stream = driver.read("cuMemAlloc", 64), driver.read("cuStreamCreate", 1)
        host = ctypes.create_string_buffer(64)
        with pytest.raises(CudaError, match="INVALID_VALUE"):
            driver.call("cuMemcpyHtoDAsync", memory + 1, ctypes.addressof(host), 64, stream)
        fake.gate(0)
        driver.call("cuMemcpyHtoDAsync", memory, ctypes.addressof(host), 64, stream)
        driver.call("cuMemFree", memory)
        fake.gate(-1)
        assert driver.status("cuStreamSynchronize", stream) == 700, "the copy ran into freed memory"
        assert driver.status("cuMemAlloc", ctypes.byref(ctypes.c_uint64()), 16) == 700, (
            "and the context is broken"
        )
        fake.sticky(0)
        driver.call("cuStreamDestroy", stream)
    driver.call("cuDevicePrimaryCtxRelease", 0)
