"""A data plane without memory, for tests of refusals."""

from __future__ import annotations

from kvactors.data_plane.base import DataPlane
from kvactors.device.arena import HostSlots


class StubPlane(DataPlane):
    """A plane over the given stores, of a memory generation that the test sets."""

    generation = 0

    def __init__(self, backend=None, device_store=None) -> None:
        super().__init__(None, HostSlots(4, 64), backend, device_store, store_timeout=1.0)
        self.copied = 0

    async def copy_pairs(self, direction, blocks, slots, progress=None):
        self.copied += 1
        return ()

    async def _open(self, stack, opening):
        pass
