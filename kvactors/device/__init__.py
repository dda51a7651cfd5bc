"""Where device blocks live."""

from kvactors.config import DeviceConfig
from kvactors.device.base import Device
from kvactors.device.host import HostDevice
from kvactors.layout.base import Layout

__all__ = ["Device", "HostDevice", "make_device"]


def make_device(config: DeviceConfig, layout: Layout) -> Device:
    """The device a config describes. Raises LayoutError."""
    return HostDevice(layout, config.num_blocks)
