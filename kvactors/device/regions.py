"""Copies between the regions of a device in host memory and host slots."""

from __future__ import annotations

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
