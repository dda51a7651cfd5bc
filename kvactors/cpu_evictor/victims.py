"""Blocks of the host tier by what their requests have asked for: the choice of victims, and changes
of hints and salts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvactors.cpu_evictor.slots import BlockTraits, HostBlock, HostTier


def choose_victims(
    tier: HostTier, count: int, protected: Container[bytes], incoming: Mapping[int, int]
) -> list[HostBlock]:
    """Choose up to `count` blocks to evict: not in use, not protected, not pinned, without resident
    children that stay. First those whose time is over, then those of salts above their quota, then
    by priority, and among these blocks in the policy's order. No block changes.

    Args:
        tier: the blocks.
        count: blocks.
        protected: hashes of blocks that stay.
        incoming: blocks that are about to become resident, by salt.
    """
    if count <= 0:
        return []
    shares, taken = tier.shares, Counter[int]()
    chosen: list[HostBlock] = []
    chosen_hashes: set[bytes] = set()
    gone: Counter[bytes] = Counter()
    passed: dict[bytes, float] = {}  # limits of blocks that come before their children
    for candidate, most in shares.candidates(tier.policy.candidates(), incoming, taken):
        block: HostBlock | None = candidate
        end = len(chosen) + most
        while block is not None and not (
            block.pins
            or block.hash in protected
            or block.hash in chosen_hashes
            or shares.is_pinned(block.hash)
        ):
            if tier._children[block.hash] > gone[block.hash]:
                passed.setdefault(block.hash, most)
                break
            chosen.append(block)
            chosen_hashes.add(block.hash)
            taken[block.salt] += 1
            gone[block.parent] += 1
            if len(chosen) == count:
                return chosen
            # A quota evicts no more than the blocks beyond it, and its limit is used up perhaps.
            follows = len(chosen) < end or passed.get(block.parent) == inf
            block = tier.blocks[block.parent] if follows and block.parent in passed else None
    return chosen


def set_traits(tier: HostTier, block: HostBlock, traits: BlockTraits) -> None:
    """A block was used with these hints."""
    if traits == (block.salt, block.priority, block.expiry):
        return
    tier.changes += 1
    if block.listed:
        tier.shares.remove(block)
    block.salt, block.priority, block.expiry = traits
    if block.listed:
        tier.shares.add(block)


def clear_salt(tier: HostTier, salt: int) -> list[HostBlock]:
    """Drop every block of a salt. Returns them."""
    tier.generation += 1
    found = [block for block in tier.blocks.values() if block.salt == salt]
    for block in found:
        tier.drop(block)
    return found
