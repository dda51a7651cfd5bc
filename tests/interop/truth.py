"""The blocks that an index must hold and its right answers, from the blocks that the owners of the
tiers hold at rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

TIERS = ("device", "host", "storage")

Chain = Sequence[str]
"""Hashes of a prompt's blocks from the root on, 32 bytes in hexadecimal."""


class Answer(NamedTuple):
    """Blocks of a prompt that an index finds, as Dynamo counts them: on the device from block 0 on,
    on the host from there on, in storage from there on."""

    device: int
    host: int
    storage: int

    @property
    def total(self) -> int:
        """Blocks on any tier."""
        return self.device + self.host + self.storage


def short(block_hash: str) -> int:
    """A block hash as readers of the events name it: the last 8 bytes."""
    return int(block_hash[-16:], 16)


class Truth:
    """residency: block hashes by tier, from the tiers' owners. chains: of every prompt that was
    ever requested.

    announced: 64-bit hashes by tier that an index must hold. Only a tree is announced: a block is
    not on any tier of the index while the block above it is on none, and not on the device tier
    while that one is not on the device.
    """

    def __init__(self, residency: dict[str, list[str]], chains: Iterable[Chain]) -> None:
        self.resident = {tier: set(residency[tier]) for tier in TIERS}
        self.announced: dict[str, set[int]] = {tier: set() for tier in TIERS}
        self.unknown = set().union(*self.resident.values())
        """Resident blocks that no prompt of the case has."""
        for chain in chains:
            self._walk(chain)

    def _walk(self, chain: Chain) -> None:
        above: Iterable[str] = TIERS
        self.unknown.difference_update(chain)
        for block in chain:
            tiers = [
                tier
                for tier in TIERS
                if block in self.resident[tier] and (tier != "device" or tier in above)
            ]
            if not tiers:
                return
            for tier in tiers:
                self.announced[tier].add(short(block))
            above = tiers

    def answer(self, chain: Chain) -> Answer:
        """The right answer of an index about a prompt."""
        device = self._run(chain, 0, "device")
        host = self._run(chain, device, "host")
        return Answer(device, host, self._run(chain, device + host, "storage"))

    def credit(self, chain: Chain) -> int:
        """Blocks of a prompt that vLLM's router counts as cached: on the device from block 0 on,
        and on the lower tier that has most from there."""
        device = self._run(chain, 0, "device")
        return device + max(self._run(chain, device, tier) for tier in TIERS[1:])

    def _run(self, chain: Chain, first: int, tier: str) -> int:
        """Blocks of a prompt on one tier from block `first` on."""
        at = first
        while at < len(chain) and short(chain[at]) in self.announced[tier]:
            at += 1
        return at - first

    def cached(self, chain: Chain) -> int:
        """Leading blocks of a prompt that a request finds, on any tiers."""
        for at, block in enumerate(chain):
            if not any(block in held for held in self.resident.values()):
                return at
        return len(chain)
