"""Changes of the order of eviction, of pins and of quotas in the host tier."""

from __future__ import annotations

from kvactors.cpu_evictor.messages import EvictFirst, PinHostBlocks, ShareMessage, UnpinHostBlocks
from kvactors.cpu_evictor.slots import HostTier
from kvactors.types import split_hashes


def change_shares(tier: HostTier, message: ShareMessage) -> None:
    """Change the order of eviction, pins or the quota of a salt."""
    tier.changes += 1
    if isinstance(message, EvictFirst):
        tier.policy.evict_first(split_hashes(message.hashes))
    elif isinstance(message, PinHostBlocks):
        tier.shares.pin(message.hashes)
    elif isinstance(message, UnpinHostBlocks):
        tier.shares.unpin(message.hashes)
    else:
        residents = tier.policy.candidates()
        tier.shares.set_quota(message.salt, message.blocks, residents, named=message.named)
