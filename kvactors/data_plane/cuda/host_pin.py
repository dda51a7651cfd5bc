"""Pins of host memory that several users in a process share."""

from __future__ import annotations

from kvactors.data_plane.cuda.context import CudaContext, quietly
from kvactors.data_plane.cuda.driver import DEVICE_MAP, PORTABLE, CudaError
from kvactors.errors import DeviceError

ALREADY_REGISTERED = 712

PINS: dict[int, list[int]] = {}
"""Bytes and users of the memory that this process has pinned, by address."""


class HostPin:
    """Host memory that the GPU may address, until `release`.

    Memory that its owner has pinned stays the owner's, who keeps it pinned as long as copies of it
    are made. Pins of the same memory are made by one thread at a time.

    Args:
        context: of a GPU, current.
        address: of the memory.
        nbytes: of the memory.

    Attributes:
        on_device: the address by which the GPU reaches the memory.

    Raises:
        DeviceError: the memory is pinned in part.
        CudaError: the driver refuses the memory.
    """

    def __init__(self, context: CudaContext, address: int, nbytes: int) -> None:
        self._driver = driver = context.driver
        self._address = address
        self._counted = False
        pinned = PINS.get(address)
        if pinned is None:
            code = driver.status("cuMemHostRegister", address, nbytes, PORTABLE | DEVICE_MAP)
            if code == 0:
                pinned = PINS[address] = [nbytes, 0]
            elif code != ALREADY_REGISTERED:
                raise driver.error("cuMemHostRegister", code)
        if pinned is not None:
            pinned[1] += 1
            self._counted = True
        try:
            if not self._reaches(pinned, nbytes):
                raise DeviceError(
                    f"{nbytes} bytes of host memory are pinned in part: pin all of it or none"
                )
            self.on_device = driver.read("cuMemHostGetDevicePointer", address, 0)
        except BaseException:
            self.release()
            raise

    def _reaches(self, pinned: list[int] | None, nbytes: int) -> bool:
        """Whether the memory is pinned up to its last byte."""
        if pinned is not None:
            return pinned[0] >= nbytes
        try:
            self._driver.read("cuMemHostGetDevicePointer", self._address + nbytes - 1, 0)
        except CudaError:
            return False
        return True

    def release(self) -> None:
        """Unpin the memory if nothing else uses it. The context must be current."""
        if not self._counted:
            return
        self._counted = False
        pinned = PINS[self._address]
        pinned[1] -= 1
        if not pinned[1]:
            del PINS[self._address]
            quietly(self._driver, "cuMemHostUnregister", self._address)
