"""Copies between the regions of a device in host memory and host slots, and within the regions."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from kvactors.device.arena import Arena
from kvactors.device.base import Device
from kvactors.native import gather, scatter


def regions_to_host(
    device: Device, blocks: Sequence[int], arena: Arena, slots: Sequence[int]
) -> None:
    """See `Device.copy_to_host`."""
    ids, to = np.asarray(blocks, np.int64), np.asarray(slots, np.int64)
    gather(
        device.regions,
        device.piece_bytes,
        device.num_blocks,
        ids,
        arena.address,
        arena.stride,
        arena.num_slots,
        to,
    )


def regions_to_device(
    device: Device,
    blocks: Sequence[int],
    arena: Arena,
    slots: Sequence[int],
    layers: range | None = None,
) -> None:
    """See `Device.copy_to_device`."""
    ids, source = np.asarray(blocks, np.int64), np.asarray(slots, np.int64)
    pieces, offset = device.share(layers)
    scatter(
        device.regions[pieces],
        device.piece_bytes[pieces],
        device.num_blocks,
        ids,
        arena.address + offset,
        arena.stride,
        arena.num_slots,
        source,
    )


def check_pairs(device: Device, sources: Sequence[int], targets: Sequence[int]) -> None:
    """ValueError unless there is a target for every source and all are blocks of the device."""
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} sources and {len(targets)} targets")
    for block in (*sources, *targets):
        if not 0 <= block < device.num_blocks:
            raise ValueError(f"block {block} is out of range: there are {device.num_blocks}")


def copy_regions(device: Device, sources: Sequence[int], targets: Sequence[int]) -> None:
    """See `Device.copy_blocks`."""
    check_pairs(device, sources, targets)
    pieces = list(zip(device.regions.tolist(), device.piece_bytes.tolist(), strict=True))
    for source, target in zip(sources, targets, strict=True):
        for address, size in pieces:
            ctypes.memmove(address + target * size, address + source * size, size)
