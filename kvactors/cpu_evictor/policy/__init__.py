"""The order in which resident blocks leave the host tier."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from kvactors.cpu_evictor.policy.lru import Lru

if TYPE_CHECKING:
    from kvactors.cpu_evictor.slots import HostBlock


class EvictionPolicy(Protocol):
    """Ranks resident blocks. `HostTier` skips candidates that are pinned or have resident
    children."""

    def __len__(self) -> int:
        """How many blocks it ranks."""

    def __contains__(self, block: HostBlock) -> bool:
        """Whether it ranks this block."""

    def add(self, block: HostBlock) -> None:
        """A block has become resident."""

    def remove(self, block: HostBlock) -> None:
        """A block is not resident any longer."""

    def touch(self, hashes: Iterable[bytes]) -> None:
        """Blocks were used, in this order. Hashes of other blocks are ignored."""

    def candidates(self) -> Iterable[HostBlock]:
        """Resident blocks, the first to evict first. The policy may not change until the iteration
        ends."""


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": Lru}
"""How an eviction policy is made, by the name it has in `host.policy`."""
