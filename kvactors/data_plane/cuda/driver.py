"""Bindings of CUDA's driver API, loaded on first use. Needs neither the CUDA toolkit nor another
package.

ctypes lets the GIL go during every call."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvactors.actor.log import get_logger
from kvactors.errors import DeviceError

LIBRARY = "libcuda.so.1"
NOT_READY = 600
NOT_SUPPORTED = 801
NO_KERNEL = {209, 218, 221, 222, 223, 801}
"""Codes with which a driver reports that it cannot compile the kernel. The context remains
usable."""

FATAL = {4, 214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 999}
"""Codes after which a context runs no work any more. Every later call returns the same code."""

SETTLE_PAUSE = 0.01
"""Seconds between two questions whether a stream is done, when the first had no answer."""

NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING: no waiting for other work on the default stream."""
ON_DEVICE = 2
"""CUmemorytype of cuMemAlloc's allocations."""
UNTIMED = 2
"""Flag of events. Events without a time are cheaper."""
PORTABLE, DEVICE_MAP = 1, 2
"""Flags of pinned memory, alike for memory allocated and memory registered."""
STREAM_ORDER = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read when the stream has come to the copy."""

V1, V2 = 12080, 13000
"""Driver versions that brought cuMemcpyBatchAsync, and its second form."""

_int, _u32, _u64, _size = ctypes.c_int, ctypes.c_uint, ctypes.c_uint64, ctypes.c_size_t
_ptr = ctypes.c_void_p
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuInit": (_u32,),
    "cuDriverGetVersion": (_ptr,),
    "cuDeviceGetCount": (_ptr,),
    "cuDeviceGet": (_ptr, _int),
    "cuDeviceGetName": (ctypes.c_char_p, _int, _int),
    "cuDeviceGetAttribute": (_ptr, _int, _int),
    "cuDevicePrimaryCtxRetain": (_ptr, _int),
    "cuDevicePrimaryCtxRelease": (_int,),
    "cuCtxSetCurrent": (_ptr,),
    "cuCtxPushCurrent": (_ptr,),
    "cuCtxPopCurrent": (_ptr,),
    "cuMemAlloc": (_ptr, _u64),
    "cuMemFree": (_u64,),
    "cuMemHostAlloc": (_ptr, _u64, _u32),
    "cuMemFreeHost": (_ptr,),
    "cuMemHostRegister": (_ptr, _u64, _u32),
    "cuMemHostUnregister": (_ptr,),
    "cuMemHostGetDevicePointer": (_ptr, _ptr, _u32),
    "cuPointerGetAttribute": (_ptr, _int, _u64),
    "cuMemGetAddressRange": (_ptr, _ptr, _u64),
    "cuStreamCreate": (_ptr, _u32),
    "cuStreamDestroy": (_ptr,),
    "cuStreamSynchronize": (_ptr,),
    "cuStreamWaitEvent": (_ptr, _ptr, _u32),
    "cuEventCreate": (_ptr, _u32),
    "cuEventDestroy": (_ptr,),
    "cuEventRecord": (_ptr, _ptr),
    "cuEventQuery": (_ptr,),
    "cuEventSynchronize": (_ptr,),
    "cuMemcpyHtoDAsync": (_u64, _ptr, _u64, _ptr),
    "cuMemcpyDtoHAsync": (_ptr, _u64, _u64, _ptr),
    "cuMemcpyDtoDAsync": (_u64, _u64, _u64, _ptr),
    "cuModuleLoadData": (_ptr, ctypes.c_char_p),
    "cuModuleUnload": (_ptr,),
    "cuModuleGetFunction": (_ptr, _ptr, ctypes.c_char_p),
    "cuLaunchKernel": (_ptr, *[_u32] * 7, _ptr, _ptr, _ptr),
}
"""Names without their version, and the arguments of the version that is asked for."""

GIVEN_BACK = {
    "cuEventCreate": "cuEventDestroy",
    "cuMemAlloc": "cuMemFree",
    "cuMemHostAlloc": "cuMemFreeHost",
    "cuModuleLoadData": "cuModuleUnload",
    "cuStreamCreate": "cuStreamDestroy",
}
"""By function that makes a resource: the one that gives it back."""


class CudaError(DeviceError):
    """A call of the driver failed."""

    def __init__(self, function: str, code: int, name: str) -> None:
        super().__init__(f"{function}: {name} ({code})")
        self.function = function
        self.code = code
        self.name = name


class _Location(ctypes.Structure):
    _fields_ = (("type", _int), ("id", _int))


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (("order", _int), ("source", _Location), ("target", _Location), ("flags", _u32))


class CudaDriver:
    """The driver in `library` (a path, or a name to search for). DeviceError if it is not there,
    CudaError if it does not start. version: 1000 * major + 10 * minor."""

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise DeviceError(f"there is no CUDA driver ({library}): {error}") from error
        self._error_name = self._library.cuGetErrorName
        # with ctypes' own types, until their addresses are known
        self._functions: dict[str, Any] = {
            name: getattr(self._library, name) for name in ("cuInit", "cuDriverGetVersion")
        }
        self.call("cuInit", 0)
        self.version = self.read_int("cuDriverGetVersion")
        if not hasattr(self._library, "cuGetProcAddress_v2"):
            raise DeviceError("the CUDA driver is older than 12.0: install a newer one")
        for name, arguments in FUNCTIONS.items():
            if not self._find(name, V1, arguments):
                raise DeviceError(f"the CUDA driver has no {name}")
        self._attributes = _CopyAttributes(order=STREAM_ORDER)
        # the first form of the call also returns which copy failed, the second does not
        self._second_form = self.version >= V2
        last = (_ptr,) if self._second_form else (_ptr, _ptr)
        self.has_batch = self.version >= V1 and self._find(
            "cuMemcpyBatchAsync",
            V2 if self._second_form else V1,
            (_ptr, _ptr, _ptr, _u64, _ptr, _ptr, _u64, *last),
        )

    def _find(self, name: str, version: int, arguments: tuple[Any, ...]) -> bool:
        """Find a function's form of a version, or of the driver's own if that is older. False if
        the driver has none."""
        wanted, found, status = min(version, self.version), ctypes.c_void_p(), ctypes.c_int()
        self._library.cuGetProcAddress_v2(
            name.encode(), ctypes.byref(found), wanted, ctypes.c_uint64(0), ctypes.byref(status)
        )
        if found.value is not None:
            self._functions[name] = ctypes.CFUNCTYPE(_int, *arguments)(found.value)
        return found.value is not None

    # -- calls

    def status(self, function: str, *arguments: Any) -> int:
        return int(self._functions[function](*arguments))

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function. CudaError unless it succeeds."""
        if code := self.status(function, *arguments):
            raise self.error(function, code)

    def error(self, function: str, code: int) -> CudaError:
        name = ctypes.c_char_p()
        self._error_name(code, ctypes.byref(name))
        return CudaError(function, code, (name.value or b"CUDA_ERROR_UNKNOWN").decode())

    def read(self, function: str, *arguments: Any) -> int:
        """Call a function that writes an address or a handle through its first argument.
        CudaError."""
        value = ctypes.c_uint64()
        self.call(function, ctypes.byref(value), *arguments)
        return value.value

    def read_int(self, function: str, *arguments: Any) -> int:
        """Call a function that writes a C int through its first argument. CudaError."""
        value = ctypes.c_int()
        self.call(function, ctypes.byref(value), *arguments)
        return value.value

    def make(self, undo: ExitStack, function: str, *arguments: Any) -> int:
        """Call a function that makes a resource, which `undo` gives back. CudaError."""
        handle = self.read(function, *arguments)
        undo.callback(quietly, self, GIVEN_BACK[function], handle)
        return handle

    @contextmanager
    def current(self, context: int) -> Iterator[None]:
        """Make a context the calling thread's, and give the thread its own back after. CudaError if
        it cannot be."""
        self.call("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            popped = ctypes.c_uint64()
            self.status("cuCtxPopCurrent", ctypes.byref(popped))

    def copy_batch(self, targets: int, sources: int, sizes: int, count: int, stream: int) -> None:
        """Copy pieces between host and device memory in any order. `targets`, `sources` and `sizes`
        are addresses of `count` uint64 each. After a CudaError some of the copies may run
        nevertheless."""
        start, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        attributes = ctypes.byref(self._attributes), ctypes.byref(start), 1
        last = (stream,) if self._second_form else (ctypes.byref(failed), stream)
        self.call("cuMemcpyBatchAsync", targets, sources, sizes, count, *attributes, *last)

    def copy_singly(
        self,
        to_device: bool,
        targets: NDArray[np.int64],
        sources: NDArray[np.int64],
        sizes: NDArray[np.int64],
        stream: int,
    ) -> None:
        """Put copies between host and device memory on a stream, one call each. The arrays have one
        element a copy. After a CudaError the copies before the failed one are on the stream."""
        function = "cuMemcpyHtoDAsync" if to_device else "cuMemcpyDtoHAsync"
        for target, source, size in zip(
            targets.tolist(), sources.tolist(), sizes.tolist(), strict=True
        ):
            if size:
                self.call(function, target, source, size, stream)

    def allocation(self, address: int) -> int:
        """Start of the allocation that device memory belongs to. 0 if the driver does not tell."""
        base = ctypes.c_uint64()
        code = self.status("cuMemGetAddressRange", ctypes.byref(base), None, address)
        return 0 if code else base.value

    def settle(self, context: int, stream: int) -> bool:
        """Wait without limit until no work on a stream runs any more, also after errors of the
        driver. Returns whether the context is usable. The context becomes the thread's current
        one."""
        before = -1
        while code := self.status("cuCtxSetCurrent", context) or self.status(
            "cuStreamSynchronize", stream
        ):
            if (
                code in FATAL and code == before
            ):  # the code persists: the context and its streams are unusable
                return False
            before = code
            time.sleep(SETTLE_PAUSE)
        return True


@cache
def load_driver(library: str = LIBRARY) -> CudaDriver:
    """The driver, loaded once. DeviceError, CudaError."""
    return CudaDriver(library)


# -- The context of a GPU, and the resources that end with it.


MEMORY_TYPE, DEVICE_ORDINAL = 2, 9
"""Attributes of a pointer, by the driver's numbers."""

ABANDONED: list[Any] = []
"""Memory that copies which never ended may still use. Never freed."""

log = get_logger()


class CudaContext:
    """The primary context of a GPU, which the frameworks use too, with a stream."""

    def __init__(self, ordinal: int, driver: CudaDriver) -> None:
        self.ordinal = ordinal
        self.driver = driver
        self._undo = ExitStack()
        found = driver.read_int("cuDeviceGetCount")
        if not 0 <= ordinal < found:
            raise DeviceError(f"there is no GPU {ordinal}: the driver lists {found}")
        number = driver.read_int("cuDeviceGet", ordinal)
        name = ctypes.create_string_buffer(256)
        driver.call("cuDeviceGetName", name, len(name), number)
        self.name = name.value.decode(errors="replace")
        self.context = driver.read("cuDevicePrimaryCtxRetain", number)
        self._release_context = number
        self._closed = False
        try:
            with self.current():
                self._stream = driver.make(self._undo, "cuStreamCreate", NON_BLOCKING)
        except BaseException:
            CudaContext.close(self)
            raise

    def current(self) -> AbstractContextManager[None]:
        """Make the GPU's context the calling thread's. CudaError."""
        return self.driver.current(self.context)

    def abandon(self, *memory: Any) -> None:
        """Keep this and the memory until the process ends: copies that never ended may still use
        them."""
        log.error("copies of a GPU did not end, keeping their memory", gpu=self.name)
        ABANDONED.append((*memory, self))
        self._undo.pop_all()
        self._closed = True

    def close(self) -> None:
        """Unpin memory, free memory, release the context. Call it after the copies' end and before
        the arenas' `close`. Never raises."""
        if self._closed:
            return
        self._closed = True
        if self.driver.status("cuCtxPushCurrent", self.context):
            quietly(
                self.driver, "cuCtxPushCurrent", self.context
            )  # without a context no resource can be released: try once more
        self._undo.close()
        with suppress(CudaError):
            self.driver.read("cuCtxPopCurrent")
        quietly(self.driver, "cuDevicePrimaryCtxRelease", self._release_context)


def quietly(driver: CudaDriver, function: str, handle: int) -> None:
    """Call a function of the driver that releases a resource. A failure is only logged, because the
    caller cannot correct it."""
    if code := driver.status(function, handle):
        log.warning(
            "the CUDA driver did not take something back", error=str(driver.error(function, code))
        )


def verify_memory(driver: CudaDriver, address: int, nbytes: int, ordinal: int, what: str) -> None:
    """Check that memory belongs to a GPU. The context of a GPU must be current."""
    for place in (address, address + max(nbytes, 1) - 1):
        try:
            kind = driver.read_int("cuPointerGetAttribute", MEMORY_TYPE, place)
            found = driver.read_int("cuPointerGetAttribute", DEVICE_ORDINAL, place)
        except CudaError as error:
            raise DeviceError(f"{what} is not in CUDA's memory: {error}") from error
        if kind != ON_DEVICE or found != ordinal:
            raise DeviceError(f"{what} is not in the memory of GPU {ordinal}")
