"""The order in which resident blocks leave the host tier."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from kvactors.cpu_evictor.policy.lru import Lru
from kvactors.cpu_evictor.policy.retain import Retain

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

    def evict_first(self, hashes: Iterable[bytes]) -> None:
        """The index has chosen the next victims. Hashes of other blocks are ignored."""

    def candidates(self) -> Iterable[HostBlock]:
        """Resident blocks, the first to evict first. Nothing else may change the policy until the
        iteration ends."""


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": Lru, "retain": Retain}
"""How an eviction policy is made, by the name it has in `host.policy`."""

ALONE = ("lru",)
"""Those that need no index."""
