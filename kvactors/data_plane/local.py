"""The data plane of this process."""

from __future__ import annotations

from kvactors.config import HostConfig
from kvactors.data_plane.engine import CopyExecutor, Executor, InlineExecutor
from kvactors.device.arena import Arena
from kvactors.device.base import Device
from kvactors.errors import DeviceError


def make_executor(device: Device, arena: Arena, config: HostConfig, *, inline: bool) -> Executor:
    """Make the copy engine for a device of this process; `inline` copies in the loop's thread."""
    if inline:
        return InlineExecutor(device, arena, config.copy_threads)
    if device.kind == "cuda":
        from kvactors.data_plane.cuda.device import CudaDevice
        from kvactors.data_plane.cuda.engine import CudaExecutor

        if not isinstance(device, CudaDevice):
            raise DeviceError(
                f"a device of kind 'cuda' must be a CudaDevice, not {type(device).__name__}"
            )
        return CudaExecutor(device, arena, batch_from=config.batch_from)
    return CopyExecutor(device, arena, config.copy_threads)
