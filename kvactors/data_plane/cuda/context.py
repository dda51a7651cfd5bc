"""The context of a GPU, and the resources that end with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from kvactors.actor.log import get_logger
from kvactors.data_plane.cuda.driver import NON_BLOCKING, CudaDriver, CudaError
from kvactors.errors import DeviceError

MEMORY_TYPE, DEVICE_ORDINAL = 2, 9
"""Attributes of a pointer, by the driver's numbers."""
ON_DEVICE = 2
"""The memory type of cuMemAlloc's allocations."""

log = get_logger()


class CudaContext:
    """The primary context of a GPU, which the frameworks use too, with a stream.

    Args:
        ordinal: the GPU's number.
        driver: of the system, or a stand-in.

    Attributes:
        name: the GPU's name.
        context: the driver's handle.

    Raises:
        DeviceError: there is no such GPU.
        CudaError: a call of the driver failed.
    """

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
    """Check that memory belongs to a GPU. The context of a GPU must be current.

    Raises:
        DeviceError: the first or the last byte is not memory of this GPU.
    """
    for place in (address, address + max(nbytes, 1) - 1):
        try:
            kind = driver.read_int("cuPointerGetAttribute", MEMORY_TYPE, place)
            found = driver.read_int("cuPointerGetAttribute", DEVICE_ORDINAL, place)
        except CudaError as error:
            raise DeviceError(f"{what} is not in CUDA's memory: {error}") from error
        if kind != ON_DEVICE or found != ordinal:
            raise DeviceError(f"{what} is not in the memory of GPU {ordinal}")
