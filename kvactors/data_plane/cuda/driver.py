"""Bindings of CUDA's driver API, loaded on first use. Needs neither the CUDA toolkit nor another
package.

ctypes lets the GIL go during every call."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvactors.actor.log import get_logger
from kvactors.data_plane.cuda.copy_plan import Rectangle
from kvactors.errors import DeviceError

LIBRARY = "libcuda.so.1"
OUT_OF_MEMORY = 2
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
HIGH_PRIORITY = -100
"""Priority of a stream. The driver takes the highest that it has."""
MAX_PITCH = 11
"""CU_DEVICE_ATTRIBUTE_MAX_PITCH, the driver's number."""
ON_HOST, ON_DEVICE = 1, 2
"""CUmemorytype of the sides of a rectangle."""
TIMED, UNTIMED = 0, 2
"""Flags of events. Events without a time are cheaper."""
PORTABLE, DEVICE_MAP = 1, 2
"""Flags of pinned memory, alike for memory allocated and memory registered."""
STREAM_ORDER = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read when the stream has come to the copy."""

V1, V2 = 12080, 13000
"""Driver versions that brought cuMemcpyBatchAsync, and its second form."""

_int, _u32, _u64, _ptr = ctypes.c_int, ctypes.c_uint, ctypes.c_uint64, ctypes.c_void_p
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
    "cuStreamCreateWithPriority": (_ptr, _u32, _int),
    "cuStreamDestroy": (_ptr,),
    "cuStreamSynchronize": (_ptr,),
    "cuStreamWaitEvent": (_ptr, _ptr, _u32),
    "cuEventCreate": (_ptr, _u32),
    "cuEventDestroy": (_ptr,),
    "cuEventRecord": (_ptr, _ptr),
    "cuEventQuery": (_ptr,),
    "cuEventSynchronize": (_ptr,),
    "cuEventElapsedTime": (_ptr, _ptr, _ptr),
    "cuMemcpyHtoDAsync": (_u64, _ptr, _u64, _ptr),
    "cuMemcpyDtoHAsync": (_ptr, _u64, _u64, _ptr),
    "cuMemcpyDtoDAsync": (_u64, _u64, _u64, _ptr),
    "cuMemcpy2DAsync": (_ptr, _ptr),
    "cuModuleLoadData": (_ptr, ctypes.c_char_p),
    "cuModuleUnload": (_ptr,),
    "cuModuleGetFunction": (_ptr, _ptr, ctypes.c_char_p),
    "cuLaunchKernel": (_ptr, *[_u32] * 7, _ptr, _ptr, _ptr),
}
"""Names without their version, and the arguments of the version that is asked for."""

SUFFIXED = {
    "cuDevicePrimaryCtxRelease",
    "cuCtxPushCurrent",
    "cuCtxPopCurrent",
    "cuMemAlloc",
    "cuMemFree",
    "cuMemHostRegister",
    "cuMemHostGetDevicePointer",
    "cuStreamDestroy",
    "cuEventDestroy",
    "cuMemcpyHtoDAsync",
    "cuMemcpyDtoHAsync",
    "cuMemcpyDtoDAsync",
    "cuMemcpy2DAsync",
    "cuMemGetAddressRange",
}
"""Those whose present version the library exports as NAME_v2, for drivers too old to be asked
(before 11.3)."""


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


class _Rectangle(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        ("source_x", ctypes.c_size_t),
        ("source_y", ctypes.c_size_t),
        ("source_type", _u32),
        ("source_host", _ptr),
        ("source_device", _u64),
        ("source_array", _ptr),
        ("source_pitch", ctypes.c_size_t),
        ("target_x", ctypes.c_size_t),
        ("target_y", ctypes.c_size_t),
        ("target_type", _u32),
        ("target_host", _ptr),
        ("target_device", _u64),
        ("target_array", _ptr),
        ("target_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class CudaDriver:
    """The driver in `library` (a path, or a name to search for). DeviceError if it is not there,
    CudaError if it does not start.

    Attributes:
        version: 1000 * major + 10 * minor.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise DeviceError(f"there is no CUDA driver ({library}): {error}") from error
        self._functions: dict[str, Any] = {}
        self._error_name = self._library.cuGetErrorName
        self.version = V1
        for name in ("cuInit", "cuDriverGetVersion"):
            self._functions[name] = self._prototype(
                name, getattr(self._library, name), FUNCTIONS[name]
            )
        self.call("cuInit", 0)
        self.version = self.read_int("cuDriverGetVersion")
        for name, arguments in FUNCTIONS.items():
            if name not in self._functions:
                self._functions[name] = self._prototype(name, self._find(name), arguments)
        self._attributes = _CopyAttributes(order=STREAM_ORDER)
        self.has_batch = self.version >= V1 and self._add_batch()

    @staticmethod
    def _prototype(name: str, function: Any, arguments: tuple[Any, ...]) -> Any:
        if function is None:
            raise DeviceError(f"the CUDA driver has no {name}")
        if isinstance(function, int):
            return ctypes.CFUNCTYPE(_int, *arguments)(function)
        function.restype, function.argtypes = _int, arguments
        return function

    def _find(self, name: str, version: int = V1) -> Any:
        """A function's address, or the function, or None. A driver older than `version` is asked
        for its own version's."""
        wanted, found, status = min(version, self.version), ctypes.c_void_p(), ctypes.c_int()
        raw, flags = name.encode(), ctypes.c_uint64(0)
        if hasattr(self._library, "cuGetProcAddress_v2"):
            self._library.cuGetProcAddress_v2(
                raw, ctypes.byref(found), wanted, flags, ctypes.byref(status)
            )
            return found.value
        if hasattr(self._library, "cuGetProcAddress"):
            self._library.cuGetProcAddress(raw, ctypes.byref(found), wanted, flags)
            return found.value
        return getattr(self._library, f"{name}_v2" if name in SUFFIXED else name, None)

    def _add_batch(self) -> bool:
        """The first form of the call also returns which copy failed. The second does not."""
        self._second_form = self.version >= V2
        found = self._find("cuMemcpyBatchAsync", V2 if self._second_form else V1)
        if found is None:
            return False
        arguments: tuple[Any, ...] = (_ptr, _ptr, _ptr, _u64, _ptr, _ptr, _u64)
        arguments += (_ptr,) if self._second_form else (_ptr, _ptr)
        self._functions["cuMemcpyBatchAsync"] = self._prototype(
            "cuMemcpyBatchAsync", found, arguments
        )
        return True

    # -- calls

    def status(self, function: str, *arguments: Any) -> int:
        """Call a function and return its code."""
        return int(self._functions[function](*arguments))

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function. CudaError unless it succeeds."""
        if code := self.status(function, *arguments):
            raise self.error(function, code)

    def error(self, function: str, code: int) -> CudaError:
        """The error for a function's code."""
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
        fixed = (
            targets,
            sources,
            sizes,
            count,
            ctypes.byref(self._attributes),
            ctypes.byref(start),
            1,
        )
        if self._second_form:
            self.call("cuMemcpyBatchAsync", *fixed, stream)
        else:
            self.call("cuMemcpyBatchAsync", *fixed, ctypes.byref(failed), stream)

    def copy_singly(
        self,
        to_device: bool,
        on_device: NDArray[np.int64],
        on_host: NDArray[np.int64],
        sizes: NDArray[np.int64],
        stream: int,
    ) -> None:
        """Put copies between host and device memory on a stream, one call each. The arrays are
        int64 with one element a copy. After a CudaError the copies before the failed one are on the
        stream."""
        function = "cuMemcpyHtoDAsync" if to_device else "cuMemcpyDtoHAsync"
        targets, sources = (on_device, on_host) if to_device else (on_host, on_device)
        for target, source, size in zip(
            targets.tolist(), sources.tolist(), sizes.tolist(), strict=True
        ):
            if size:
                self.call(function, target, source, size, stream)

    def copy_rectangle(self, to_device: bool, rectangle: Rectangle, stream: int) -> None:
        """Put a copy of rows with gaps between host and device memory on a stream. CudaError."""
        on_device, on_host, width, height, device_pitch, host_pitch = rectangle
        if to_device:
            copy = _Rectangle(
                source_type=ON_HOST,
                source_host=on_host,
                source_pitch=host_pitch,
                target_type=ON_DEVICE,
                target_device=on_device,
                target_pitch=device_pitch,
            )
        else:
            copy = _Rectangle(
                source_type=ON_DEVICE,
                source_device=on_device,
                source_pitch=device_pitch,
                target_type=ON_HOST,
                target_host=on_host,
                target_pitch=host_pitch,
            )
        copy.width, copy.height = width, height
        self.call("cuMemcpy2DAsync", ctypes.byref(copy), stream)

    def max_pitch(self, device: int) -> int:
        """Bytes at most from a row of a rectangle to the next one. CudaError."""
        return self.read_int("cuDeviceGetAttribute", MAX_PITCH, device)

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

    def elapsed(self, first: int, last: int) -> float:
        """Seconds between two timed events that have been reached. CudaError."""
        milliseconds = ctypes.c_float()
        self.call("cuEventElapsedTime", ctypes.byref(milliseconds), first, last)
        return milliseconds.value / 1000

    def device_name(self, device: int) -> str:
        """The device's name. Raises CudaError."""
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", name, len(name), device)
        return name.value.decode(errors="replace")


@cache
def load_driver(library: str = LIBRARY) -> CudaDriver:
    """The driver, loaded once. DeviceError, CudaError."""
    return CudaDriver(library)


# -- The context of a GPU, and the resources that end with it.


MEMORY_TYPE, DEVICE_ORDINAL = 2, 9
"""Attributes of a pointer, by the driver's numbers."""
ON_DEVICE = 2
"""The memory type of cuMemAlloc's allocations."""

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
        self.name = driver.device_name(number)
        self.context = driver.read("cuDevicePrimaryCtxRetain", number)
        self._release_context = number
        self._closed = False
        try:
            with self.current():
                self._stream = driver.read("cuStreamCreate", NON_BLOCKING)
                self.undo("cuStreamDestroy", self._stream)
        except BaseException:
            CudaContext.close(self)
            raise

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the GPU's context the calling thread's. CudaError."""
        with self.driver.current(self.context):
            yield

    def undo(self, function: str, handle: int) -> None:
        """Call a function of the driver when the context is closed. A failure is only logged."""
        self._undo.callback(quietly, self.driver, function, handle)

    def abandon(self) -> None:
        """Make `close` release no memory: copies that never ended may still use it."""
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
