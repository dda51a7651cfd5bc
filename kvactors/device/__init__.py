"""Device blocks: memory that holds them, and copies to and from the host arena."""

from msgspec.structs import replace

from kvactors.device.base import Device
from kvactors.device.host import HostDevice
from kvactors.device.tensors import TensorDevice
from kvactors.errors import ConfigError, LayoutError
from kvactors.layout import Layout, make_layout
from kvactors.settings import Config, DeviceConfig, LayoutConfig
from kvactors.settings.check import in_bytes

__all__ = ["Device", "HostDevice", "TensorDevice", "config_for", "layout_for"]


def layout_for(config: Config, device: Device | None) -> Layout:
    """The layout of a cache: the given device's, or the one that `[layout]` describes."""
    size = config.cache.block_size
    if device is None:
        return make_layout(config.layout, size)
    if device.layout.block_size != size:
        raise LayoutError(
            f"the device's blocks hold {device.layout.block_size} tokens, cache.block_size is "
            f"{size}"
        )
    described = (
        device.layout if config.layout == LayoutConfig() else make_layout(config.layout, size)
    )
    if described.fingerprint != device.layout.fingerprint:
        raise LayoutError(
            "[layout] describes another layout than the given device has: leave it out, or make "
            "them agree"
        )
    return device.layout


def config_for(config: Config, device: Device | None) -> Config:
    """The config with the given device's number of blocks.

    Raises:
        ConfigError: `device.num_blocks` or `device.capacity_bytes` is set to another size.
    """
    if device is None:
        return config
    if (size := config.device.capacity_bytes) is not None:
        blocks = device.layout.blocks_in(in_bytes(size, "device.capacity_bytes"))
        if blocks != device.num_blocks:
            raise ConfigError(
                f"device.capacity_bytes is {size!r}, that is {blocks} blocks, and the given device "
                f"has {device.num_blocks}: leave it out, or make them agree"
            )
    elif config.device.num_blocks not in (device.num_blocks, DeviceConfig().num_blocks):
        raise ConfigError(
            f"device.num_blocks is {config.device.num_blocks}, and the given device has "
            f"{device.num_blocks}: leave it out, or make them agree"
        )
    sized = replace(config.device, num_blocks=device.num_blocks, capacity_bytes=None)
    return replace(config, device=sized)
