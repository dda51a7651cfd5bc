"""Where device blocks live."""

from kvactors.config import DeviceConfig
from kvactors.device.base import Device
from kvactors.device.host import HostDevice
from kvactors.device.tensors import TensorDevice
from kvactors.layout.base import Layout

__all__ = ["Device", "HostDevice", "TensorDevice", "make_device"]


def make_device(config: DeviceConfig, layout: Layout) -> Device:
    """The device a config describes. Raises LayoutError, DeviceError."""
    if config.kind == "paddle":
        from kvactors.device.paddle import make_paddle_device

        return make_paddle_device(layout, config.num_blocks, config.place)
    if config.kind == "cuda":
        from kvactors.device.cuda import CudaDevice

        return CudaDevice.allocate(layout, config.num_blocks, ordinal=config.ordinal)
    return HostDevice(layout, config.num_blocks)
