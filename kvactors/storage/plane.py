"""The interface of a data plane as the storage actors use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvactors.device.arena import HostSlots
from kvactors.lineage import Lineage
from kvactors.storage.backends.base import Expired, ReadReport, WriteReport


class StoragePlane(Protocol):
    """Moves objects between a store and host slots. See `DataPlane`."""

    slots: HostSlots

    async def read(
        self, generation: int, keys: Sequence[bytes], slots: Sequence[int], expired: Expired
    ) -> ReadReport:
        """Read objects into slots of a memory generation."""

    async def write(
        self,
        generation: int,
        keys: Sequence[bytes],
        slots: Sequence[int],
        expired: Expired,
        lineages: Sequence[Lineage | None] = (),
        salts: Sequence[int] = (),
    ) -> WriteReport:
        """Write objects from slots of a memory generation."""


class DeviceStorePlane(Protocol):
    """Moves blocks between a store and device memory. See `DataPlane`."""

    async def fetch(
        self, generation: int, tokens: bytes, start: int, blocks: tuple[int, ...], seconds: float
    ) -> int:
        """Read blocks of a path into device blocks of a memory generation."""

    async def save(
        self, generation: int, tokens: bytes, start: int, blocks: tuple[int, ...], seconds: float
    ) -> int:
        """Write blocks of a path from device blocks of a memory generation."""
