"""The prefix index: the tree of the blocks on this node and the pool of free device blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvactors.errors import ensure
from kvactors.hints import BlockHints
from kvactors.native import DEVICE, HOST, LOADING, BlockTree, Path, TreeCheck
from kvactors.prefix_index.parts import part_of
from kvactors.prefix_index.policy import TierPolicies
from kvactors.prefix_index.pool import BlockPool
from kvactors.types import HASH_BYTES

if TYPE_CHECKING:
    from kvactors.prefix_index.records import LoadState

Media = tuple[tuple[int, int], ...]
"""(offset, length) in tokens of media items, in ascending order."""

NODES = 128
"""Nodes of the tree that a step of a check covers: hashing the tokens of one takes a microsecond
or more."""

RETURNED = 2048
"""Device blocks of cleared trees that a turn returns to the pool: each takes a fraction of a
microsecond."""


class Segment(NamedTuple):
    """Blocks [start, stop) of a path that are cached without being computed: to be loaded, or being
    loaded by `joined`."""

    start: int
    stop: int
    joined: LoadState | None


class Match(msgspec.Struct, frozen=True):
    """The cached part of a pinned path.

    Attributes:
        num_device_blocks: leading blocks on the device.
        segments: what may be loaded, contiguous after those.
        new_blocks: device blocks that the request needs.
    """

    num_device_blocks: int
    segments: list[Segment]
    new_blocks: int

    @property
    def expected_blocks(self) -> int:
        """Leading blocks that are cached if every segment is loaded."""
        return self.segments[-1].stop if self.segments else self.num_device_blocks


class Eviction(NamedTuple):
    """Device blocks that are leaving the device.

    Attributes:
        nodes: of `tree`, marked with `op`.
        hashes, parents: hashes of the blocks and of those above them, empty in an index without
            hashes.
        states: the state bits of each node when it was chosen.
        traits: of the blocks, if the tree tracks them.
        freed: blocks of a cleared salt that were freed at once, beside those.
    """

    op: int
    tree: BlockTree
    nodes: NDArray[np.uint32]
    hashes: bytes
    parents: bytes
    blocks: tuple[int, ...]
    states: bytes
    traits: BlockHints | None = None
    freed: int = 0

    @property
    def total(self) -> int:
        """Blocks concerned."""
        return len(self.blocks)


class BlockIndex:
    """Blocks known to this node and the device blocks they are in.

    A cleared tree keeps its unused blocks until `sweep` has returned them to the pool, some at a
    time. They count as free from the clear on: `take` returns those it lacks.

    Args:
        block_size: tokens a block.
        num_blocks, capacity: device blocks, and nodes to size the tree for.
        recompute_last_token: whether a prompt is never hit as a whole.
        memory_generation: of the device memory.
        policy: the eviction policy, LRU if None.
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
        self.block_size, self.part = block_size, part_of(block_size)
        self.memory_generation = memory_generation
        self.capacity = capacity
        self.hashes = hashes
        self.pool = BlockPool(num_blocks)
        self.policy = TierPolicies() if policy is None else policy
        self.tree = self.policy.tree(block_size, capacity, hashes=hashes)
        self.retired: deque[BlockTree] = deque()  # cleared trees that still have blocks or memory
        self.returning = 0  # unused device blocks of those
        self.reserved = 0  # free device blocks that long requests take in later turns
        self.loading: dict[int, LoadState] = {}  # by target block
        self.kept_back = int(recompute_last_token)

    @property
    def free(self) -> int:
        """Device blocks that can be taken now. Blocks with another owner are not counted."""
        returning = max(0, self.returning - self.pool.num_shared) if self.returning else 0
        return self.pool.free + returning - self.reserved

    def take(self, count: int) -> list[int]:
        """`count` free blocks. The caller has made sure that there are as many."""
        while self.returning and count > self.pool.free:
            self.bring_back(count - self.pool.free)
        return self.pool.take(count)

    def take_reserved(self, count: int) -> list[int]:
        """`count` of the blocks that were counted in `reserved`."""
        self.reserved -= count
        return self.take(count)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    def match_limit(self, path: Path) -> int:
        """See `limit_of`."""
        return self.limit_of(path.num_tokens)

    def limit_of(self, tokens: int) -> int:
        """Blocks of a prompt that may be hit: all full ones, or one less to leave a token to
        compute."""
        return max(tokens - self.kept_back, 0) // self.block_size

    def can_fit(self, path: Path, needed: int, being_freed: int) -> bool:
        """Whether `needed` blocks of a path may fit on the device. Changes nothing.
        being_freed: blocks that will be free without a further eviction."""
        run, states = self.tree.peek(path, self.match_limit(path))
        # Blocks that other requests are loading come with their device blocks.
        shared = sum(1 for state in states if state & LOADING)
        return self.free + self.evictable() + being_freed >= needed - run - shared

    def fits(self, path: Path, needed: int, being_freed: int, media: Media) -> bool:
        """Whether a request that holds nothing can have its blocks now. Changes nothing.

        Blocks of its path that other requests use are shared, one part of the path at most. Unused
        ones are among those that can be evicted.
        """
        available = self.free + self.evictable() + being_freed
        if available >= needed:
            return True
        run = self.tree.referenced_run(path, min(self.match_limit(path), self.part))
        return available >= needed - self.before_media(run, media)

    def before_media(self, blocks: int, media: Media) -> int:
        """As many leading blocks, or fewer: those that end within no media item."""
        for offset, length in reversed(media):
            if offset < blocks * self.block_size < offset + length:
                blocks = offset // self.block_size
        return blocks

    def needed_blocks(self, path: Path, chunk: int, *, fetch: int, media: Media) -> int:
        """Table entries that a request gets at most: all, or those of its cached blocks and of a
        chunk of tokens after them. Changes nothing."""
        if not chunk:
            return self.blocks_for(path.num_tokens)
        limit = self.match_limit(path)
        cached = self.before_media(self._reach(path, limit, fetch=fetch), media)
        # A known block has a place in the table even if it cannot be hit.
        run, states = self.tree.peek(path, cached if media else limit)
        return max(run + len(states), self.chunk_blocks(path, cached, chunk))

    def chunk_blocks(self, path: Path, cached: int, chunk: int) -> int:
        """Table entries of `cached` blocks and a chunk of tokens after them, 0 for all tokens."""
        tokens = cached * self.block_size + chunk
        return self.blocks_for(min(path.num_tokens, tokens) if chunk else path.num_tokens)

    def match(
        self, path: Path, *, fetch: int, media: Media = (), chunk: int = 0, used: bool = True
    ) -> Match:
        """Pin the known blocks of the path, and find the blocks that may be loaded.

        Args:
            path: tokens of the request. It holds no nodes yet.
            fetch: leading blocks that the store may have. No segment crosses this boundary.
            media: items that are matched whole or not at all. The request computes what follows the
                last whole one.
            chunk: tokens after the cached ones that the request needs blocks for, 0 for all.
            used: whether the request gets its blocks for certain. Otherwise blocks that are being
                evicted leave, unless `tree.keep` follows in this turn.
        """
        limit = self.match_limit(path)
        if media:
            limit = self.before_media(self._reach(path, limit, fetch=fetch), media)
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

    def _reach(self, path: Path, limit: int, *, fetch: int) -> int:
        """Leading blocks that a match would find at most. Changes nothing."""
        run, states = self.tree.peek(path, limit)
        for position, state in enumerate(states, run):
            if state & DEVICE or not (state & (LOADING | HOST) or position < fetch):
                return position
        return max(run + len(states), min(limit, fetch))

    def _match(self, path: Path, limit: int, *, fetch: int, used: bool) -> Match:
        run, states = self.tree.pin(path, limit, used)
        if not states and run >= min(limit, fetch):
            return Match(run, [], self.blocks_for(path.num_tokens) - run)
        known = run + len(states)
        segments: list[Segment] = []
        joined_blocks = 0
        position = run
        while position < known:
            state = states[position - run]
            if state & DEVICE or not (state & (LOADING | HOST) or position < fetch):
                # Still on the device, but leaving after the block above it: it cannot be loaded
                # until then.
                break
            stop = position + 1
            if state & LOADING:
                load = self.loading.get(path.blocks(position, stop)[0])
                if load is None or load.lost:
                    # This load is past its deadline: its copies may never complete.
                    break
                while (
                    stop < known
                    and states[stop - run] & LOADING
                    and self.loading.get(path.blocks(stop, stop + 1)[0]) is load
                ):
                    stop += 1
                segments.append(Segment(position, stop, load))
                joined_blocks += stop - position
            else:
                end = min(known, fetch) if position < fetch else known
                while (
                    stop < end
                    and not states[stop - run] & (DEVICE | LOADING)
                    and (states[stop - run] & HOST or stop < fetch)
                ):
                    stop += 1
                segments.append(Segment(position, stop, None))
            position = stop
        if position < known:
            self.tree.trim(path, position)
        elif position < (limit := min(limit, fetch)):
            if segments and segments[-1].joined is None:
                segments[-1] = Segment(segments[-1].start, limit, None)
            else:
                segments.append(Segment(position, limit, None))
        return Match(run, segments, self.blocks_for(path.num_tokens) - run - joined_blocks)

    def fill_table(self, path: Path, match: Match, blocks: list[int]) -> None:
        """Enter the request's new blocks wherever there is no shared block."""
        used, position = 0, match.num_device_blocks
        if not match.segments and len(blocks) == match.new_blocks:
            if blocks:
                path.assign(position, blocks)
            return
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

    def release_parts(self, tree: BlockTree, path: Path) -> Iterator[None]:
        """Drop all references of a path, the deepest blocks first, a part at a time. Blocks that no
        other path uses are free after the step that drops them."""
        self.pool.note_release(path)
        blocks = max(path.num_blocks, path.num_held)
        for keep in range(blocks - self.part, 0, -self.part):
            self.pool.give(tree.release(path, keep))
            yield
        self.pool.give(tree.release(path))

    def evictable(self) -> int:
        """Device blocks that could be evicted now."""
        return self.tree.statistics()["evictable"]

    def evict(self, count: int, op: int, salt: int = 0, incoming: int = 0) -> Eviction:
        """See `choose_victims`."""
        return choose_victims(self, count, op, salt, incoming)

    def finish_evict(self, op: Eviction, on_host: bytes) -> tuple[list[int], list[int]]:
        """Free the blocks of a completed eviction, except those that were matched again or that
        another eviction still reads.

        Returns:
            Indices of the blocks that left the device, and of those that stayed.
        """
        freed, stayed = op.tree.finish_offload(op.nodes, on_host)
        self.pool.give(freed)
        self.pool.note_eviction(freed)
        kept = set(stayed)
        return [j for j in range(op.total) if j not in kept], stayed

    def retire(self) -> int:
        """Continue with an empty tree. Takes the same time for a large one.

        Returns:
            The device blocks that no lease and no copy uses: they count as free from now on.
        """
        self.policy.retire(self.tree)
        unused = self.tree.retire()
        self.returning += unused
        self.retired.append(self.tree)
        renew_tree(self)
        return unused

    def bring_back(self, count: int) -> None:
        """Return up to `count` unused blocks of cleared trees to the pool, those of the oldest tree
        first."""
        for tree in self.retired:
            freed = tree.sweep(count) if tree.returning else []
            self.pool.give(freed)
            self.returning -= len(freed)
            count -= len(freed)
            if not count:
                return

    @property
    def sweeping(self) -> bool:
        """Whether `sweep` has something to do now. It has not while leases and copies use all
        blocks that are left."""
        return self.returning > 0 or any(tree.idle for tree in self.retired)

    def sweep(self, count: int = RETURNED) -> None:
        """A step of the work after a clear: return `count` blocks, or after the last of them a part
        of a tree's memory."""
        if self.returning:
            self.bring_back(count)
            return
        tree = next((tree for tree in self.retired if tree.idle), None)
        if tree is not None and tree.dismantle():
            self.retired.remove(tree)

    def check(self) -> None:
        """RuntimeError or AssertionError if the tree or the pool is inconsistent."""
        self.tree.check()
        check_returning(self)
        self.pool.check()

    def check_steps(self) -> Iterator[None]:
        """`check` in steps of about a millisecond, between which other calls may come. Each block
        is checked by itself in any case, sums and orders only if nothing has changed since the
        check began."""
        check = TreeCheck(self.tree)
        while not check.step(NODES):
            yield
        check_returning(self)
        yield from self.pool.check_steps()


def choose_victims(index: BlockIndex, count: int, op: int, salt: int, incoming: int) -> Eviction:
    """Choose up to `count` device blocks to leave the device, by quotas, hints and the policy.

    Args:
        index: the blocks.
        count: blocks.
        op: the operation.
        salt: of the request that needs them.
        incoming: blocks that the request takes in all.
    """
    tree = index.tree
    if not tree.sharing:
        nodes, hashes, parents, blocks, states = tree.evict(count, hashes=index.hashes)
        return Eviction(op, tree, nodes, hashes, parents, tuple(blocks), states)
    now = index.policy.now()
    chosen, traits = tree.evict_for(count, index.hashes, salt, incoming, now)
    nodes, hashes, parents, blocks, states = chosen
    freed = tree.take_discarded() if tree.forgetting else []
    index.pool.give(freed)
    return Eviction(
        op, tree, nodes, hashes, parents, tuple(blocks), states, BlockHints(*traits), len(freed)
    )


def is_past(tree: BlockTree, path: Path) -> bool:
    """Whether the blocks of a path were cleared since it was matched: nothing more of it may be
    cached or reported."""
    return tree.retired or (tree.sharing and tree.is_forgotten(path))


def renew_tree(index: BlockIndex) -> None:
    """Continue with an empty tree. Its memory is brought in later: this is within a turn."""
    make = index.policy.tree
    index.tree = make(index.block_size, index.capacity, hashes=index.hashes, touch=False)


def check_returning(index: BlockIndex) -> None:
    """AssertionError if the blocks of cleared trees are not counted right."""
    ensure(
        index.returning == sum(tree.returning for tree in index.retired),
        "blocks of cleared trees to be returned",
    )


def set_num_blocks(index: BlockIndex, num_blocks: int) -> None:
    """Give device blocks to an index that was made without any, and that is empty."""
    if index.pool.total or index.tree.statistics()["nodes"]:
        raise RuntimeError("the number of device blocks is set once, in an empty index")
    index.capacity += num_blocks
    index.pool = BlockPool(num_blocks, index.pool.ages)
    renew_tree(index)


def pick_hashes(hashes: bytes, positions: list[int]) -> bytes:
    """The hashes at some positions of a buffer of hashes, none of an empty one."""
    return b"".join(hashes[p * HASH_BYTES : (p + 1) * HASH_BYTES] for p in positions)
