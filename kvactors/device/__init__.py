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
        from kvactors.device.paddle import PaddleDevice

        return PaddleDevice.allocate(layout, config.num_blocks, config.place)
    return HostDevice(layout, config.num_blocks)
