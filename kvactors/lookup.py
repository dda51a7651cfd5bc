"""Look-ups for schedulers: which tiers hold a prompt's blocks, and how many device blocks there
are. They take nothing and change nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

from kvactors.arguments import Media, request_path, request_scope
from kvactors.errors import CacheAsleep, NumBlocksUnset
from kvactors.lease import Hits
from kvactors.native import DEVICE, HOST, LOADING, Path
from kvactors.open_cache import OpenCache
from kvactors.prefix_index.index import BlockIndex
from kvactors.prefix_index.settings import IndexSettings
from kvactors.quotas import salt_id
from kvactors.storage.backends.checked import CheckedBackend
from kvactors.storage.checked_inventory import CheckedInventory
from kvactors.system import System
from kvactors.types import Tokens, split_hashes


class PromptHits(Hits):
    """Blocks of a prompt that need not be computed, by the tier that holds them.

    Attributes:
        device: blocks on the device.
        host: further blocks in host memory, those being loaded from it included.
        storage: further blocks in the store. 0 for a store whose contents only a query can tell
            (one that several nodes share, AttentionStore).
        num_tokens: tokens of the prompt.
        block_size: tokens a block.
        new_blocks: device blocks that the prompt needs beside those on the device.
    """

    num_tokens: int
    block_size: int
    new_blocks: int

    def __new__(
        cls,
        device: int,
        host: int,
        storage: int,
        *,
        num_tokens: int,
        block_size: int,
        new_blocks: int,
    ) -> Self:
        """Equal to the `Hits` of a lease with the same blocks."""
        made = super().__new__(cls, device, host, storage)
        made.num_tokens, made.block_size, made.new_blocks = num_tokens, block_size, new_blocks
        return made

    @property
    def blocks(self) -> int:
        """Blocks in all tiers."""
        return sum(self)

    @property
    def cached_tokens(self) -> int:
        """Leading tokens that need not be computed."""
        return self.blocks * self.block_size

    @property
    def tokens(self) -> Hits:
        """The hits in tokens, by tier."""
        return Hits(*(blocks * self.block_size for blocks in self))


class FreeBlocks(NamedTuple):
    """The device blocks that a request could have.

    Attributes:
        total: blocks of the device.
        free: blocks that can be taken now.
        evictable: cached blocks that no request uses.
        being_freed: blocks that evictions in flight will free, less those that requests wait for.
        waiting: requests that wait for blocks. Later ones get theirs after them.
    """

    total: int
    free: int
    evictable: int
    being_freed: int
    waiting: int

    @property
    def available(self) -> int:
        """Blocks that a request could have at most, if it waits for evictions."""
        return self.free + self.evictable + self.being_freed


def lookup(
    self: OpenCache,
    tokens: Tokens,
    *,
    extra_keys: Sequence[Media] = (),
    salt: str | None = None,
    lora: str | None = None,
) -> PromptHits:
    """Count the cached blocks of a prompt, as `acquire` would find them now.

    Takes nothing: no block is held, evicted or marked as used, and the next call may find another
    count. After the copy of the tokens it takes some tens of nanoseconds a cached block, and a few
    hundred a block that is looked for in a store.

    Args:
        self: the cache.
        tokens: as in `acquire`.
        extra_keys: as in `acquire`.
        salt: as in `acquire`.
        lora: as in `acquire`.

    Returns:
        The hits, by tier.

    Raises:
        NumBlocksUnset: the number of device blocks is not set yet.
    """
    self._client.check()
    if self.system.wiring.asleep:
        raise CacheAsleep
    system = self.system
    if not system.plane.device.num_blocks:
        raise NumBlocksUnset
    scope = request_scope(salt, lora)
    path, media = request_path(self.block_size, system.roots.root(scope), tokens, extra_keys)
    return hits_of(system, path, scope.salt, () if self._split_media else media)


def free_blocks(self: OpenCache) -> FreeBlocks:
    """The device blocks that a request could have now, in about a microsecond. None, before the
    number of device blocks is set."""
    self._client.check()
    if self.system.wiring.asleep:
        raise CacheAsleep
    core = self.system.index_actor.core
    index = core.index
    being_freed = max(0, core.admission.unpromised())
    waiting = len(core.admission.waiting) + len(core.admission.space)
    return FreeBlocks(index.pool.total, index.free, index.evictable(), being_freed, waiting)


def stored_blocks(
    system: System, path: Path, salt: str | None, media: tuple[tuple[int, int], ...]
) -> int | None:
    """Leading blocks of a path that are in some tier, None if the store cannot tell."""
    store = system.store
    if store is None or not store.inventory.is_complete:
        return None
    return hits_of(system, path, salt, media).blocks


def hits_of(
    system: System, path: Path, salt: str | None, media: tuple[tuple[int, int], ...]
) -> PromptHits:
    """Count the hits of a path that holds nothing."""
    core, least = system.index_actor.core, system.config.storage.min_fetch_blocks
    evictor = system.evictor_actor
    # A clear that the host tier has not handled yet comes before the loads of a later request.
    handled = evictor.memory.clears
    cleared = handled != core.clears.sent and core.clears.reaches(salt_id(salt), handled)
    on_host = _nothing if cleared else evictor.host.readable
    return count_hits(core.index, core.settings, system.store, least, path, media, on_host)


def _nothing(_hash: bytes) -> None:
    """A host tier without blocks."""


def count_hits(
    index: BlockIndex,
    settings: IndexSettings,
    store: CheckedBackend | None,
    min_fetch_blocks: int,
    path: Path,
    media: tuple[tuple[int, int], ...],
    on_host: Callable[[bytes], object] = _nothing,
) -> PromptHits:
    """Count the hits of a path that holds nothing. Changes nothing. on_host: the host tier's block
    of a hash, None if it has none: the index has none of those that a prefetch has brought."""
    limit = index.match_limit(path)
    run, states = index.tree.peek(path, limit)
    fetch = min(limit, settings.fetchable(path))
    stored = 0
    if store is not None and run < fetch:
        near = run + len(states)
        missing = [p - run for p in range(run, fetch) if p >= near or not states[p - run]]
        keys = split_hashes(path.hashes(run, fetch))
        hosted, stored = _fetchable([keys[p] for p in missing], store.inventory, on_host)
        stored = stored if stored >= min_fetch_blocks else 0
        states = _with_hosted(states, [missing[i] for i in hosted])
    below = _below_device(states, fetch - run, stored)
    kept = index.before_media(run + len(below), media)
    device, below = min(run, kept), below[: max(0, kept - run)]
    host = below.count(HOST)
    joined = sum(bool(state & LOADING) for state in states[: len(below)])
    return PromptHits(
        device,
        host,
        len(below) - host,
        num_tokens=path.num_tokens,
        block_size=index.block_size,
        new_blocks=index.blocks_for(path.num_tokens) - device - joined,
    )


def _fetchable(
    keys: Sequence[bytes], inventory: CheckedInventory, on_host: Callable[[bytes], object]
) -> tuple[list[int], int]:
    """Of blocks that the index does not have, the leading run that host memory or the store holds:
    positions of those on the host, and the number of the others."""
    hosted, stored, start = list[int](), 0, 0
    while start < len(keys):
        run = inventory.held_run(keys[start:])
        both = [i for i in range(start, start + run) if on_host(keys[i]) is not None]
        hosted += both
        stored += run - len(both)
        after = start + run
        start = after
        while start < len(keys) and on_host(keys[start]) is not None:
            hosted.append(start)
            start += 1
        if start == after:
            break
    return hosted, stored


def _with_hosted(states: bytes, hosted: Sequence[int]) -> bytes:
    """The states of the known blocks, with further ones that are on the host."""
    if not hosted:
        return states
    known = bytearray(states.ljust(hosted[-1] + 1, b"\0"))
    for position in hosted:
        known[position] = HOST
    return bytes(known)


def _below_device(states: bytes, fetch: int, stored: int) -> list[int]:
    """The tier, HOST or 0 for storage, of each block that can be loaded after the device run.

    Args:
        states: state bits of the known blocks after the run.
        fetch: blocks after the run that may be looked for in the store.
        stored: blocks of those, unknown to other tiers, that the store holds without a gap.
    """
    tiers: list[int] = []
    for position in range(max(len(states), fetch)):
        state = states[position] if position < len(states) else 0
        if state & DEVICE:
            break  # on its way off the device: it cannot be loaded until then
        if state & (HOST | LOADING):
            tiers.append(state & HOST)
        elif position < fetch and stored:
            stored -= 1
            tiers.append(0)
        else:
            break
    return tiers
