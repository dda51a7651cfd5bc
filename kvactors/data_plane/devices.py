"""The device that a config describes."""

from __future__ import annotations

from kvactors.config import DeviceConfig
from kvactors.device.base import Device
from kvactors.device.host import HostDevice
from kvactors.layout.base import Layout


def make_device(config: DeviceConfig, layout: Layout) -> Device:
    """Make the device that `[device]` describes.

    Raises:
        LayoutError: the layout's dtypes cannot be held by tensors of this kind.
        DeviceError: there is no such device, or the framework is not installed.
    """
    if config.kind == "paddle":
        return _paddle_device(layout, config.num_blocks, config.place)
    if config.kind == "cuda":
        from kvactors.data_plane.cuda.device import CudaDevice

        return CudaDevice.allocate(layout, config.num_blocks, ordinal=config.ordinal)
    return HostDevice(layout, config.num_blocks)


def _paddle_device(layout: Layout, num_blocks: int, place: str) -> Device:
    from kvactors.device.paddle import PaddleDevice, allocator

    kind, _, number = place.partition(":")
    if kind == "cpu":
        return PaddleDevice.allocate(layout, num_blocks, place)
    from kvactors.data_plane.cuda.device import CudaDevice

    return CudaDevice(
        layout, layout.allocate(allocator(place), num_blocks), ordinal=int(number or 0)
    )
