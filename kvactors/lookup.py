"""Look-ups for schedulers: which tiers hold a prompt's blocks, and how many device blocks there
are. They take nothing and change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, Self

from kvactors.actor.sliced import Sliced
from kvactors.cpu_evictor.slots import HostBlock
from kvactors.identity import RequestScope
from kvactors.lease import Hits
from kvactors.native import DEVICE, HOST, LOADING, Path
from kvactors.observe.invariants import in_slices
from kvactors.prefix_index.messages import Stored
from kvactors.prefix_index.settings import IndexSettings
from kvactors.prefix_index.tree import BlockIndex
from kvactors.quotas import salt_id
from kvactors.storage.guarded import GuardedBackend
from kvactors.system import System
from kvactors.types import split_hashes

FIRST_STEP_BLOCKS = 4
"""Blocks that the first step of a count hashes at most: most prompts miss at once or not at all.
Each later step may hash four times as many."""

TURN_STEPS = 4
"""Steps that hash together as many blocks as a turn of PrefixIndex handles at most."""

STORAGE = -1
"""Tier of a block that is counted in the store."""


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
    def cached_tokens(self) -> int:
        """Leading tokens that need not be computed."""
        return self.total * self.block_size

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


async def count_stored(
    system: System, path: Path, scope: RequestScope, media: tuple[tuple[int, int], ...]
) -> Stored | None:
    """Count the leading blocks of a request's path that are in some tier. None if the store cannot
    tell: then every block that it may have is hashed. Other tasks run between the steps of a long
    count."""
    core, store = system.index_actor, system.store
    if store is not None and store.is_complete:
        root = path.root
        hits: PromptHits = await in_slices(hits_of(system, path, scope.salt, media, whole=True))
        return Stored(root, hits.total)
    await in_slices(_hash(path, core.settings.fetchable(path), _step(core.index)))
    return None


def _hash(path: Path, blocks: int, step: int) -> Iterator[None]:
    """Hash the leading blocks of a path in steps."""
    for done in range(path.num_hashed, blocks, step):
        path.hashes(done, min(done + step, blocks))
        yield


def _step(index: BlockIndex) -> int:
    """Blocks that a step hashes at most."""
    return max(1, index.turn_blocks // TURN_STEPS)


def hits_of(
    system: System,
    path: Path,
    salt: str | None,
    media: tuple[tuple[int, int], ...],
    *,
    whole: bool = False,
) -> Sliced[PromptHits]:
    """Count the hits of a path that holds nothing, in steps. whole: also stored blocks that a
    request would not fetch."""
    core, hosted = system.index_actor, hosted_blocks(system, salt)
    fetched = None if whole else partial(_fetched, system)
    return count_hits(core.index, core.settings, system.store, fetched, path, media, hosted)


def _fetched(system: System, stored: int) -> int:
    """How many of so many stored blocks a request would fetch."""
    core, memory = system.index_actor, system.evictor_actor.memory
    blocks = min(stored, memory.storage.max_fetch_blocks or stored)
    seconds = core.prefill.seconds(blocks * core.index.block_size)
    refused = memory.requests.cost.refusal(blocks, seconds, memory.unread, asked=True)
    return 0 if refused else blocks


def hosted_blocks(system: System, salt: str | None) -> Mapping[bytes, HostBlock]:
    """The blocks in the host tier that a request may find, by their hashes."""
    core, evictor = system.index_actor, system.evictor_actor
    # A clear that the host tier has not handled yet comes before the loads of a later request.
    handled = evictor.memory.clears
    cleared = handled != core.clears.sent and core.clears.reaches(salt_id(salt), handled)
    return {} if cleared else evictor.host.blocks


def count_hits(
    index: BlockIndex,
    settings: IndexSettings,
    store: GuardedBackend | None,
    fetched: Callable[[int], int] | None,
    path: Path,
    media: tuple[tuple[int, int], ...],
    hosted: Mapping[bytes, HostBlock] = MappingProxyType({}),
) -> Sliced[PromptHits]:
    """Count the hits of a path that holds nothing, in steps of a fraction of a millisecond. Changes
    nothing. Blocks are hashed up to the first miss.

    `hosted` are the blocks in the slots of the host tier. Blocks fetched by a prefetch are not in
    the index yet. fetched: how many of so many stored blocks a request would fetch, None for all.
    """
    limit = index.limit_of(path.num_tokens)
    run, states = index.tree.peek(path, limit)
    fetch = 0 if store is None else min(limit, settings.fetchable(path))
    stop = max(run + len(states), fetch)
    size, below = min(FIRST_STEP_BLOCKS, _step(index)), list[int]()
    while run + len(below) < stop:
        start = run + len(below)
        end = min(start + size, stop)
        known = states[start - run : end - run].ljust(end - start, b"\0")
        unknown = start < fetch and 0 in known
        keys = split_hashes(path.hashes(start, min(end, fetch))) if unknown else []
        found = _tiers(known, keys, store, hosted)
        below += found
        if len(found) < end - start:
            break
        yield
        size = min(4 * size, _step(index))
    if fetched is not None and STORAGE in below:
        stored = [at for at, tier in enumerate(below) if tier == STORAGE]
        del below[[*stored, len(below)][fetched(len(stored))] :]
    kept = index.before_media(run + len(below), media)
    device, below = min(run, kept), below[: max(0, kept - run)]
    joined = sum(bool(state & LOADING) for state in states[: len(below)])
    return PromptHits(
        device,
        below.count(HOST),
        len(below) - below.count(HOST),
        num_tokens=path.num_tokens,
        block_size=index.block_size,
        new_blocks=index.blocks_for(path.num_tokens) - device - joined,
    )


def _tiers(
    states: bytes,
    keys: Sequence[bytes],
    store: GuardedBackend | None,
    hosted: Mapping[bytes, HostBlock],
) -> list[int]:
    """The tier of each of the leading blocks that can be loaded: HOST, STORAGE, or 0 for a load of
    another request from the store.

    `states` are the state bits of the blocks, 0 for one that the index lacks. `keys` are the
    hashes of the leading blocks that may be looked for in the store, empty if the index has all.
    """
    tiers = list[int]()
    for position, state in enumerate(states):
        if state & DEVICE:
            break  # on its way off the device: it cannot be loaded until then
        if state & (HOST | LOADING):
            tiers.append(state & HOST)
        elif position >= len(keys):
            break
        else:
            block = hosted.get(keys[position])
            tiers.append(STORAGE if block is None or block.arriving else HOST)
    asked = [position for position, tier in enumerate(tiers) if tier == STORAGE]
    held = store.held_run([keys[position] for position in asked]) if store and asked else 0
    return tiers[: asked[held]] if held < len(asked) else tiers
