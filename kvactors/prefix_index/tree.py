"""Blocks on this node: the block tree, and the device blocks that requests may count on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvactors.actor.clock import now
from kvactors.errors import ensure
from kvactors.hints import BlockHints
from kvactors.histogram import Histogram
from kvactors.native import DEVICE, HOST, LOADING, BlockPool, BlockTree, Path, TreeCheck
from kvactors.prefix_index.settings import TierPolicies
from kvactors.prefix_index.work import turn_blocks_of
from kvactors.types import HASH_BYTES

if TYPE_CHECKING:
    from kvactors.prefix_index.leases import LoadState


class BlockAges:
    """Times at which device blocks were taken and last used, in seconds of the loop's clock.
    `lifetime` and `idle` are of evicted blocks, `gap` is between uses."""

    def __init__(self, lifetime: Histogram, idle: Histogram, gap: Histogram) -> None:
        self._lifetime, self._idle, self._gap = lifetime, idle, gap
        self._taken, self._used = np.empty(0), np.empty(0)

    def took(self, blocks: Sequence[int]) -> None:
        lacking = max(blocks) + 1 - len(self._taken)
        if lacking > 0:
            more = np.full(max(lacking, len(self._taken)), -1.0)
            self._taken = np.concatenate((self._taken, more))
            self._used = np.concatenate((self._used, more))
        self._taken[blocks] = self._used[blocks] = now()

    def matched(self, blocks: Sequence[int]) -> None:
        at, known = now(), self._known(blocks)
        self._gap.observe_all(at - self._used[known])
        self._used[known] = at

    def released(self, blocks: Sequence[int]) -> None:
        """A request has ended that used these blocks. Those below 0 are none."""
        self._used[self._known(blocks)] = now()

    def evicted(self, blocks: Sequence[int]) -> None:
        at, known = now(), self._known(blocks)
        self._lifetime.observe_all(at - self._taken[known])
        self._idle.observe_all(at - self._used[known])

    def _known(self, blocks: Sequence[int]) -> list[int]:
        """Without blocks that were taken before the ages were asked for."""
        size, taken = len(self._taken), self._taken
        return [block for block in blocks if 0 <= block < size and taken[block] >= 0.0]


Media = tuple[tuple[int, int], ...]
"""(offset, length) in tokens of media items, in ascending order."""

CHECKED_NODES = 128
"""Nodes of the tree that a step of a check covers: hashing one takes a microsecond or more."""

RECLAIMED_BLOCKS = 2048
"""Device blocks of cleared trees that a turn returns: each takes a fraction of a microsecond."""


class Segment(NamedTuple):
    """Blocks [start, stop) of a path that are cached without being computed: to be loaded, or being
    loaded by `joined`."""

    start: int
    stop: int
    joined: LoadState | None


class Match(msgspec.Struct, frozen=True):
    """The cached part of a pinned path."""

    num_device_blocks: int  # leading ones on the device
    segments: list[Segment]  # what may be loaded, contiguous after those
    new_blocks: int  # device blocks that the request needs

    @property
    def expected_blocks(self) -> int:
        """Leading blocks that are cached if every segment is loaded."""
        return self.segments[-1].stop if self.segments else self.num_device_blocks


class Eviction(NamedTuple):
    """Device blocks that are leaving the device."""

    op: int
    tree: BlockTree
    nodes: NDArray[np.uint32]
    hashes: bytes  # empty in an index without hashes, as `parents`
    parents: bytes
    blocks: tuple[int, ...]
    states: bytes  # the state bits of each node when it was chosen
    traits: BlockHints | None
    freed: int  # blocks of a cleared salt that were freed at once, beside those

    @property
    def total(self) -> int:
        return len(self.blocks)


class BlockIndex:
    """Blocks known to this node and the device blocks they are in.

    A cleared tree keeps its unused blocks until `sweep` has returned them to the pool. They count
    as free from the clear on: `take` returns those it lacks.

    Args:
        hashes: whether blocks are hashed when they enter the tree, since a sink or another tier
            needs the hash of each. Otherwise evictions come without hashes, and the others are
            made when they are asked for.
    """

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        capacity: int,
        *,
        recompute_last_token: bool,
        memory_generation: int = 0,
        policy: TierPolicies | None = None,
        hashes: bool = True,
    ) -> None:
        self.block_size, self.turn_blocks = block_size, turn_blocks_of(block_size)
        self.memory_generation = memory_generation
        self.capacity = capacity
        self.hashes = hashes
        self.pool = BlockPool(num_blocks)
        self.ages: BlockAges | None = None  # while a metric asks for them
        self.policy = TierPolicies() if policy is None else policy
        self.tree = self.policy.tree(block_size, capacity, hashes=hashes)
        self.retired: deque[BlockTree] = deque()  # cleared trees that still have blocks or memory
        self.reclaimable = 0  # unused device blocks of those
        self.loading: dict[int, LoadState] = {}  # by target block
        self.recompute_tokens = int(recompute_last_token)
        self.reserved = 0  # free blocks of requests that wait for more, or take theirs later
        self.coming = 0  # blocks that copies in flight will free at most, without stalled copies
        self.promised = 0  # blocks that waiting requests lack
        self.closing = 0  # ends of leases and clears in slices, and copies within the device

    # -- device blocks that requests may count on

    @property
    def free(self) -> int:
        """Device blocks that can be taken now. Blocks with another owner are not counted."""
        free = self.pool.free - self.reserved
        if not self.reclaimable:
            return free
        return free + max(0, self.reclaimable - self.pool.num_shared)

    @property
    def unpromised(self) -> int:
        """Blocks that evictions in flight will free, less those that requests wait for."""
        return self.coming - self.promised

    @property
    def available(self) -> int:
        return self.free + self.evictable() + max(0, self.unpromised)

    def take(self, count: int) -> list[int]:
        """`count` free blocks. The caller has made sure that there are as many."""
        while self.reclaimable and count > self.pool.free:
            self.reclaim(count - self.pool.free)
        taken = self.pool.take(count)
        if self.ages is not None and taken:
            self.ages.took(taken)
        return taken

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def limit_of(self, tokens: int, most: int | None = None) -> int:
        """Blocks of a prompt that may be hit: all full ones, or one less to leave a token to
        compute. most: see `Acquire`."""
        limit = max(tokens - self.recompute_tokens, 0) // self.block_size
        return limit if most is None else min(limit, most)

    def can_fit(self, path: Path, needed: int, most: int | None) -> bool:
        run, states = self.tree.peek(path, self.limit_of(path.num_tokens, most))
        # Blocks that other requests are loading come with their device blocks.
        shared = sum(1 for state in states if state & LOADING)
        return self.free + self.unpromised + self.evictable() >= needed - run - shared

    def fits(self, path: Path, needed: int, media: Media, most: int | None) -> bool:
        """Whether a request that holds nothing can have its blocks now. It shares the blocks of its
        path that others use. Unused ones can be evicted."""
        available = self.free + self.unpromised + self.evictable()
        if available >= needed:
            return True
        limit = self.limit_of(path.num_tokens, most)
        return available >= needed - self.before_media(self.tree.referenced_run(path, limit), media)

    def before_media(self, blocks: int, media: Media) -> int:
        """As many leading blocks, or fewer: those that end within no media item."""
        for offset, length in reversed(media):
            if offset < blocks * self.block_size < offset + length:
                blocks = offset // self.block_size
        return blocks

    def needed_blocks(
        self, path: Path, chunk: int, *, fetch: int, media: Media, most: int | None
    ) -> int:
        """Table entries that a request gets at most: all, or those of its cached blocks and of a
        chunk of tokens after them."""
        if not chunk:
            return self.blocks_for(path.num_tokens)
        limit = self.limit_of(path.num_tokens, most)
        cached = self.before_media(self.reach(path, limit, fetch=fetch), media)
        # A known block has a place in the table even if it cannot be hit.
        run, states = self.tree.peek(path, cached if media else limit)
        return max(run + len(states), self.chunk_blocks(path, cached, chunk))

    def chunk_blocks(self, path: Path, cached: int, chunk: int) -> int:
        """Table entries of `cached` blocks and a chunk of tokens after them, 0 for all tokens."""
        tokens = cached * self.block_size + chunk
        return self.blocks_for(min(path.num_tokens, tokens) if chunk else path.num_tokens)

    def match(
        self,
        path: Path,
        *,
        fetch: int,
        media: Media = (),
        chunk: int = 0,
        used: bool = True,
        most: int | None = None,
    ) -> Match:
        """Pin the known blocks of the path, and find the blocks that may be loaded.

        Args:
            fetch: leading blocks that the store may have. No segment crosses this boundary.
            media: items that are matched whole or not at all. The request computes what follows the
                last whole one.
            chunk: tokens after the cached ones that the request needs blocks for, 0 for all.
            used: whether the request gets its blocks for certain. Otherwise blocks that are being
                evicted leave, unless `tree.keep` follows in this turn.
            most: leading blocks that may be hit.
        """
        limit = self.limit_of(path.num_tokens, most)
        if media:
            limit = self.before_media(self.reach(path, limit, fetch=fetch), media)
        match = self._match(path, limit, fetch=fetch, used=used)
        while media and match.expected_blocks > (
            limit := self.before_media(match.expected_blocks, media)
        ):
            self.pool.give(self.tree.release(path))
            match = self._match(path, limit, fetch=fetch, used=used)
        if not chunk:
            return match
        # Positions of known blocks that cannot be hit are in the table already.
        chunked = max(path.num_blocks, self.chunk_blocks(path, match.expected_blocks, chunk))
        later = self.blocks_for(path.num_tokens) - chunked
        return msgspec.structs.replace(match, new_blocks=match.new_blocks - later)

    def reach(self, path: Path, limit: int, *, fetch: int) -> int:
        """Leading blocks that a match would find at most."""
        run, states = self.tree.peek(path, limit)
        for position, state in enumerate(states, run):
            if not is_loadable(state, stored=position < fetch):
                return position
        known = run + len(states)
        return max(known, self._unknown(path, known, min(limit, fetch)))

    def _unknown(self, path: Path, start: int, stop: int) -> int:
        """Where the unknown blocks end that the store is asked for. A block of a flat path may be
        on the device, or on its way there, behind one that is unknown."""
        if path.flat and start < stop:
            states = self.tree.probe(path, start, stop)
            return next(
                (i for i, state in enumerate(states, start) if state & (DEVICE | LOADING)), stop
            )
        return stop

    def _match(self, path: Path, limit: int, *, fetch: int, used: bool) -> Match:
        run, states = self.tree.pin(path, limit, used)
        known = stop = run + len(states)
        fetched = self._unknown(path, known, min(limit, fetch))
        if not states and run >= fetched:
            return Match(run, [], self.blocks_for(path.num_tokens) - run)
        starts: list[tuple[int, LoadState | None]] = []  # of segments
        joined_blocks = 0
        for position, state in enumerate(states, run):
            load = None
            if not is_loadable(state, stored=position < fetch):
                stop = position
                break
            if state & LOADING:
                (block,) = path.blocks(position, position + 1)
                load = self.loading.get(block)
                if load is None or load.lost or not load.has(position, block):
                    # This load is past its deadline: its copies may never complete. Or it has the
                    # block of a flat path at another position than the path that would share it.
                    stop = position
                    break
                joined_blocks += 1
            if not starts or starts[-1][1] is not load or (load is None and position == fetch):
                starts.append((position, load))
        if stop < known:
            self.tree.trim(path, stop)
        elif stop < fetched:
            if not starts or starts[-1][1] is not None:
                starts.append((stop, None))
            stop = fetched
        stops = [*(start for start, _ in starts[1:]), stop]
        segments = [Segment(one[0], end, one[1]) for one, end in zip(starts, stops, strict=False)]
        return Match(run, segments, self.blocks_for(path.num_tokens) - run - joined_blocks)

    def fill_table(self, path: Path, match: Match, blocks: list[int]) -> None:
        """Enter the request's new blocks wherever there is no shared block."""
        used, position = 0, match.num_device_blocks
        joined_blocks = sum(stop - start for start, stop, joined in match.segments if joined)
        total = position + joined_blocks + match.new_blocks
        for start, stop, joined in [*match.segments, Segment(total, total, None)]:
            gap = (stop if joined is None else start) - position
            if gap:
                path.assign(position, blocks[used : used + gap])
                used += gap
            position = stop
        if used != len(blocks):
            raise RuntimeError(f"{len(blocks)} device blocks for a table that takes {used}")

    def release(self, tree: BlockTree, path: Path) -> None:
        """Drop all references of a path, and return its blocks."""
        if self.ages is not None:
            self.ages.released(path.blocks())
        self.pool.give(tree.release(path))

    def evictable(self) -> int:
        return self.tree.statistics()["evictable"]

    def evict(self, count: int, op: int, salt: int = 0, incoming: int = 0) -> Eviction:
        """Choose up to `count` blocks to leave the device, for a request of a salt that takes
        `incoming` blocks in all."""
        tree = self.tree
        now = self.policy.now() if tree.sharing else 0.0
        chosen = tree.evict(count, self.hashes, salt, incoming, now)
        nodes, hashes, parents, blocks, states, traits, freed = chosen
        self.pool.give(freed)
        hints = BlockHints(*traits) if tree.sharing else None
        return Eviction(op, tree, nodes, hashes, parents, tuple(blocks), states, hints, len(freed))

    def drop(self, count: int, salt: int, incoming: int) -> tuple[int, int, bytes, bytes]:
        """Free up to `count` blocks at once. As `BlockTree.drop`, with the number of blocks."""
        now = self.policy.now() if self.tree.sharing else 0.0
        freed, evicted, hosted, lost = self.tree.drop(count, self.hashes, salt, incoming, now)
        self.pool.give(freed)
        if self.ages is not None and freed:
            self.ages.evicted(freed)
        return len(freed), evicted, hosted, lost

    def finish_evict(self, op: Eviction, on_host: bytes) -> tuple[list[int], list[int]]:
        """Free the blocks of a completed eviction, except those that were matched again or that
        another eviction still reads. Returns the indices of those that left, and that stayed."""
        freed, stayed = op.tree.finish_offload(op.nodes, on_host)
        self.pool.give(freed)
        if self.ages is not None and freed:
            self.ages.evicted(freed)
        kept = set(stayed)
        return [j for j in range(op.total) if j not in kept], stayed

    # -- clears

    def retire(self) -> int:
        """Continue with an empty tree, in the same time for a large one. Returns the number of
        unused device blocks: they count as free from now on."""
        self.policy.retire(self.tree)
        unused = self.tree.retire()
        self.reclaimable += unused
        self.retired.append(self.tree)
        self._renew_tree()
        return unused

    def _renew_tree(self) -> None:
        """The memory of the empty tree is brought in later: this is within a turn."""
        make = self.policy.tree
        self.tree = make(self.block_size, self.capacity, hashes=self.hashes, touch=False)

    def set_num_blocks(self, num_blocks: int) -> None:
        if self.pool.total or self.tree.statistics()["nodes"]:
            raise RuntimeError("the number of device blocks is set once, in an empty index")
        self.capacity += num_blocks
        self.pool = BlockPool(num_blocks)
        self._renew_tree()

    def reclaim(self, count: int) -> None:
        """Return up to `count` unused blocks of cleared trees to the pool, of the oldest first."""
        for tree in self.retired:
            freed = tree.sweep(count) if tree.returning else []
            self.pool.give(freed)
            self.reclaimable -= len(freed)
            count -= len(freed)
            if not count:
                return

    @property
    def sweeping(self) -> bool:
        """Whether `sweep` has something to do: not while leases and copies use all that is left."""
        return self.reclaimable > 0 or any(tree.idle for tree in self.retired)

    def sweep(self, count: int = RECLAIMED_BLOCKS) -> None:
        """A step after a clear: return `count` blocks, or later a part of a tree's memory."""
        if self.reclaimable:
            self.reclaim(count)
            return
        tree = next((tree for tree in self.retired if tree.idle), None)
        if tree is not None and tree.dismantle():
            self.retired.remove(tree)

    def check_steps(self) -> Iterator[None]:
        """RuntimeError or AssertionError if the tree or the pool is inconsistent. In steps of about
        a millisecond, between which other calls may come. Each node is checked by itself in any
        case, sums and orders only if nothing has changed since the check began."""
        check = TreeCheck(self.tree)
        while not check.step(CHECKED_NODES):
            yield
        unused = sum(tree.returning for tree in self.retired)
        ensure(self.reclaimable == unused, "blocks of cleared trees to be returned")
        self.pool.check()


def is_loadable(state: int, *, stored: bool) -> bool:
    """Whether a block beyond those on the device may be hit. One that is still there leaves after
    the block above it, and cannot be loaded until then."""
    return not state & DEVICE and (stored or bool(state & (LOADING | HOST)))


def was_cleared(tree: BlockTree, path: Path) -> bool:
    """Whether the blocks of a path were cleared since it was matched: nothing more of it may be
    cached or reported."""
    return tree.retired or (tree.sharing and tree.is_forgotten(path))


def pick_hashes(hashes: bytes, positions: list[int]) -> bytes:
    """The hashes at some positions of a buffer of hashes, none of an empty one."""
    return b"".join(hashes[p * HASH_BYTES : (p + 1) * HASH_BYTES] for p in positions)
