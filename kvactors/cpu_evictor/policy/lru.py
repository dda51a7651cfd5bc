"""Least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvactors.cpu_evictor.slots import HostBlock


class Lru:
    """Resident blocks in the order of their last use."""

    def __init__(self) -> None:
        self._order: OrderedDict[bytes, HostBlock] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, block: HostBlock) -> bool:
        return self._order.get(block.hash) is block

    def add(self, block: HostBlock) -> None:
        """See `EvictionPolicy.add`: the block is the most recently used one."""
        self._order[block.hash] = block

    def remove(self, block: HostBlock) -> None:
        """See `EvictionPolicy.remove`. KeyError for a block that was not added."""
        del self._order[block.hash]

    def touch(self, hashes: Iterable[bytes]) -> None:
        """See `EvictionPolicy.touch`."""
        order = self._order
        for block_hash in hashes:
            if block_hash in order:
                order.move_to_end(block_hash)

    def evict_first(self, hashes: Iterable[bytes]) -> None:
        """See `EvictionPolicy.evict_first`: the order of last use is kept."""

    def candidates(self) -> Iterable[HostBlock]:
        """See `EvictionPolicy.candidates`."""
        return self._order.values()
