"""Contract of devices: device blocks, and their copies to and from the host arena."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvactors.device.arena import Arena, FreshMemory
from kvactors.layout.base import Layout
from kvactors.native import check_blocks, fill_blocks, gather, scatter


class DeviceBlocks:
    """Device blocks by number, in the memory of this process or of others.

    Attributes:
        kind: location of the memory: `host`, `cuda`, or `ranks` (in other processes).
        layout: of one process's share of a block.
        fresh: memory that was not used yet, None for memory of others.
    """

    kind: str = "host"
    fresh: FreshMemory | None = None

    def __init__(self, kind: str, layout: Layout, num_blocks: int) -> None:
        self.kind = kind
        self.layout = layout
        self.num_blocks = num_blocks

    def close(self) -> None:
        """Free memory that the device has allocated. Every copy must have ended."""


class Device(DeviceBlocks):
    """Device blocks that this process copies, in memory that it can address unless a subclass
    overrides the copies.

    Each piece of the layout has one region, `[num_blocks][piece bytes]`.

    The copy methods block until the bytes have arrived, and release the GIL. Copy threads call them
    on disjoint blocks and slots.

    Attributes:
        regions: addresses, int64, in the layout's contract order.
        piece_bytes: sizes, int64, in the same order.
    """

    regions: NDArray[np.int64]
    piece_bytes: NDArray[np.int64]

    def ensure_in_place(self) -> None:
        """Check that no region has moved since it was registered.

        Raises:
            DeviceError: a region has moved, so its owner may have reused the memory.
        """

    def copy_to_host(self, blocks: Sequence[int], arena: Arena, slots: Sequence[int]) -> None:
        """Copy blocks[j] to slots[j].

        Args:
            blocks: device blocks.
            arena: the memory of the slots.
            slots: as many host slots.

        Raises:
            ValueError: a number is out of range, or the lengths differ.
        """
        self.ensure_in_place()
        ids, to = np.asarray(blocks, np.int64), np.asarray(slots, np.int64)
        rows = (arena.address, arena.stride, arena.num_slots)
        gather(self.regions, self.piece_bytes, self.num_blocks, ids, *rows, to)

    def copy_to_device(
        self, blocks: Sequence[int], arena: Arena, slots: Sequence[int], layers: range | None = None
    ) -> None:
        """Copy slots[j] to blocks[j].

        Args:
            blocks: device blocks.
            arena: the memory of the slots.
            slots: as many host slots.
            layers: the layers to copy, counted from the layout's first. None copies all.

        Raises:
            ValueError: a number is out of range, or the lengths differ.
        """
        self.ensure_in_place()
        ids, source = np.asarray(blocks, np.int64), np.asarray(slots, np.int64)
        pieces, offset = self.share(layers)
        regions, sizes = self.regions[pieces], self.piece_bytes[pieces]
        rows = (arena.address + offset, arena.stride, arena.num_slots)
        scatter(regions, sizes, self.num_blocks, ids, *rows, source)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks to other blocks.

        Args:
            sources: device blocks.
            targets: as many others, none of which is a source.

        Raises:
            ValueError: a number is out of range, or the lengths differ.
        """
        self.ensure_in_place()
        checked_numbers(source=(sources, self.num_blocks), target=(targets, self.num_blocks))
        pieces = list(zip(self.regions.tolist(), self.piece_bytes.tolist(), strict=True))
        for source, target in zip(sources, targets, strict=True):
            for address, size in pieces:
                ctypes.memmove(address + target * size, address + source * size, size)

    def share(self, layers: range | None) -> tuple[slice, int]:
        """The regions of some layers, and the offset of their bytes in a slot."""
        if layers is None:
            return slice(None), 0
        found = self.layout.span(layers)
        pieces = slice(found.start, found.stop)
        return pieces, int(self.piece_bytes[: pieces.start].sum())

    def fill(self, blocks: Sequence[int], keys: bytes) -> None:
        """Fill blocks with test patterns that depend on their keys, in place of a model's output.

        Args:
            blocks: device blocks.
            keys: the blocks' keys, 32 bytes each.
        """
        ids = np.asarray(blocks, np.int64)
        fill_blocks(self.regions, self.piece_bytes, self.num_blocks, ids, keys)

    def check(self, blocks: Sequence[int], keys: bytes) -> list[int]:
        """Indices into `blocks` of the blocks without the pattern of their `keys` (see `fill`)."""
        ids = np.asarray(blocks, np.int64)
        return check_blocks(self.regions, self.piece_bytes, self.num_blocks, ids, keys)


def checked_numbers(
    **numbers: tuple[Sequence[int] | NDArray[np.int64], int],
) -> list[NDArray[np.int64]]:
    """Numbers as int64 arrays. ValueError for one out of range, or for kinds that differ in length.

    Args:
        numbers: by the name of their kind, with how many of the kind there are.
    """
    arrays = [np.asarray(some, np.int64) for some, _ in numbers.values()]
    if len({array.shape for array in arrays}) > 1:
        raise ValueError(f"{' and '.join(f'{name}s' for name in numbers)} differ in length")
    for (name, (_, limit)), array in zip(numbers.items(), arrays, strict=True):
        if array.size and not (array.min() >= 0 and array.max() < limit):
            raise ValueError(f"{name} id out of range: there are {limit}")
    return arrays
