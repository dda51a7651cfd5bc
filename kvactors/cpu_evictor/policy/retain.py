"""The victims that the index has chosen, then the least recently used blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from kvactors.cpu_evictor.policy.lru import Lru

if TYPE_CHECKING:
    from kvactors.cpu_evictor.slots import HostBlock


class Retain(Lru):
    """The host's part of RETAIN. The index has the statistics, and sends victims ahead of need.

    Without them, as after a restart of the index, the order is that of last use.
    """

    def __init__(self) -> None:
        super().__init__()
        self._chosen: OrderedDict[bytes, HostBlock] = OrderedDict()

    def remove(self, block: HostBlock) -> None:
        """See `EvictionPolicy.remove`."""
        super().remove(block)
        self._chosen.pop(block.hash, None)

    def touch(self, hashes: Iterable[bytes]) -> None:
        """See `EvictionPolicy.touch`: a block that is used again is not evicted first."""
        used = list(hashes)
        super().touch(used)
        if self._chosen:
            for block_hash in used:
                self._chosen.pop(block_hash, None)

    def evict_first(self, hashes: Iterable[bytes]) -> None:
        """See `EvictionPolicy.evict_first`."""
        order = self._order
        for block_hash in hashes:
            if (block := order.get(block_hash)) is not None:
                self._chosen[block_hash] = block

    def candidates(self) -> Iterator[HostBlock]:
        """See `EvictionPolicy.candidates`. A victim of the index that cannot be evicted now is not
        tried again, except in the order of last use."""
        chosen, tried = self._chosen, set[bytes]()
        while chosen:
            block_hash, block = chosen.popitem(last=False)
            tried.add(block_hash)
            yield block
        for block in self._order.values():
            if block.hash not in tried:
                yield block
