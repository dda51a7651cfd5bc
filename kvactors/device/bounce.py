"""Copies from one device block to another by way of host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvactors.device.arena import Arena
from kvactors.layout.base import Layout


class Copying(Protocol):
    """The parts of a `Device` that copy."""

    layout: Layout

    def copy_to_host(self, blocks: Sequence[int], arena: Arena, slots: Sequence[int]) -> None:
        """See `Device`."""

    def copy_to_device(self, blocks: Sequence[int], arena: Arena, slots: Sequence[int]) -> None:
        """See `Device`."""


def copy_by_host(  # noqa: D417  (a method of Device)
    self: Copying, sources: Sequence[int], targets: Sequence[int]
) -> None:
    """Copy blocks to other blocks. A device that can copy within its memory overrides this.

    Args:
        sources: device blocks.
        targets: as many others, none of which is a source.

    Raises:
        ValueError: a number is out of range, or the lengths differ.
    """
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} sources and {len(targets)} targets")
    arena = Arena(1, self.layout.block_bytes)
    try:
        for source, target in zip(sources, targets, strict=True):
            self.copy_to_host((source,), arena, (0,))
            self.copy_to_device((target,), arena, (0,))
    finally:
        arena.close()
