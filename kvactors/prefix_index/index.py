"""The pure state of PrefixIndex: the block tree and the device block pool, and what follows from
both. No awaits, no messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from kvactors.native import DEVICE, HOST, LOADING, BlockTree, Path, TreeCheck
from kvactors.prefix_index.pool import BlockPool
from kvactors.prefix_index.records import EvictOp, LoadOp, Segment
from kvactors.types import KEY_BYTES

Media = tuple[tuple[int, int], ...]
"""(offset, length) in tokens of media items, in ascending order."""

NODES = 256
"""Nodes of the tree that a step of a check looks at: hashing the tokens of one takes a microsecond
or more."""


RETURNED = 2048
"""Device blocks of cleared trees that a turn brings back: each takes a fraction of a
microsecond."""


class Match(NamedTuple):
    """What a pinned path found. run: leading blocks on the device. segments: what may still be
    loaded, contiguous after it. own: device blocks the request must be given."""

    run: int
    segments: list[Segment]
    own: int


class BlockIndex:
    """Blocks known to this node and the device blocks they live in.

    block_size: tokens. num_blocks: device blocks. capacity: nodes to size the tree for.
    recompute_last_token: never hit a whole prompt.

    A cleared tree keeps its unused blocks until `sweep` has returned them to the pool, some at a
    time. They count as free from the clear on: `take` brings back at once as many as it lacks.
    """

    def __init__(
        self, block_size: int, num_blocks: int, capacity: int, *, recompute_last_token: bool
    ) -> None:
        self.block_size = block_size
        self.capacity = capacity
        self.pool = BlockPool(num_blocks)
        self.tree = BlockTree(block_size, capacity)
        self.retired: deque[BlockTree] = deque()  # with blocks or memory that has not come back
        self.returning = 0  # unused device blocks of those, all together
        self.reserved = 0  # free device blocks that long requests take in later turns
        self.loading: dict[int, LoadOp] = {}  # target block -> the load that fills it
        self._recompute = recompute_last_token

    @property
    def free(self) -> int:
        """Device blocks that can be taken now."""
        return self.pool.free + self.returning - self.reserved

    def take(self, count: int) -> list[int]:
        """`count` free blocks; the caller has made sure that there are as many."""
        if self.returning and count > self.pool.free:
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
        """Blocks of a prompt that may be hit: all full ones, or one less to leave a token to
        compute."""
        full = path.num_full_blocks
        return (
            full - 1
            if self._recompute and full and full * self.block_size == path.num_tokens
            else full
        )

    def could_fit(self, path: Path, needed: int, coming: int) -> bool:
        """Whether there may be room, before anything is touched. `coming`: blocks on their way to
        being free."""
        run, states = self.tree.peek(path, self.match_limit(path))
        shared = sum(
            1 for state in states if state & LOADING
        )  # others load these: they come with their blocks
        return self.free + self.evictable() + coming >= needed - run - shared

    def before_media(self, blocks: int, media: Media) -> int:
        """As many leading blocks, or fewer: those that end within no media item."""
        for offset, length in reversed(media):
            if offset < blocks * self.block_size < offset + length:
                blocks = offset // self.block_size
        return blocks

    def match(self, path: Path, *, fetch: int, media: Media = ()) -> Match:
        """Pin what is known of the path, and say what may be loaded. fetch: leading blocks that
        storage may be asked for; no segment crosses this boundary.

        media: items that are matched whole or not at all: what follows is the request's own to
        compute.
        """
        limit = self.match_limit(path)
        if not media:
            return self._match(path, limit, fetch=fetch)
        limit = self.before_media(self._reach(path, limit, fetch=fetch), media)
        while True:
            match = self._match(path, limit, fetch=fetch)
            reached = match.segments[-1].stop if match.segments else match.run
            limit = self.before_media(reached, media)
            if limit == reached:
                return match
            self.pool.give(self.tree.release(path))

    def _reach(self, path: Path, limit: int, *, fetch: int) -> int:
        """Leading blocks that a match would find at most; nothing is changed."""
        run, states = self.tree.peek(path, limit)
        for position, state in enumerate(states, run):
            if state & DEVICE or not (state & (LOADING | HOST) or position < fetch):
                return position
        return max(run + len(states), min(limit, fetch))

    def _match(self, path: Path, limit: int, *, fetch: int) -> Match:
        run, states = self.tree.pin(path, limit)
        if not states and run >= min(limit, fetch):
            return Match(run, [], self.blocks_for(path.num_tokens) - run)
        known = run + len(states)
        segments: list[Segment] = []
        joined_blocks = 0
        position = run
        while position < known:
            state = states[position - run]
            if state & DEVICE or not (state & (LOADING | HOST) or position < fetch):
                # on the device still, but leaving after the block above it: nobody may load it
                # meanwhile
                break
            stop = position + 1
            if state & LOADING:
                load = self.loading.get(path.blocks(position, stop)[0])
                if load is None or load.lost:
                    # a load without an answer past its deadline: its copies may never complete
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
        """Put the request's own blocks wherever no shared one stands."""
        used, position = 0, match.run
        total = self.blocks_for(path.num_tokens)
        if not match.segments and len(blocks) == total - position:
            if blocks:
                path.assign(position, blocks)
            return
        for start, stop, joined in [*match.segments, Segment(total, total, None)]:
            gap = start - position
            if joined is None:
                gap = stop - position
            if gap:
                path.assign(position, blocks[used : used + gap])
                used += gap
            position = stop
        if used != len(blocks):
            raise RuntimeError(f"{len(blocks)} device blocks for a table that takes {used}")

    def evictable(self) -> int:
        """Device blocks that could be evicted now."""
        return self.tree.statistics()["evictable"]

    def evict(self, count: int, op: int) -> EvictOp:
        """Mark up to `count` of the least recently used device blocks as leaving."""
        nodes, keys, parents, blocks, states = self.tree.evict(count)
        return EvictOp(op, self.tree, nodes, keys, parents, tuple(blocks), states)

    def finish_evict(self, op: EvictOp, on_host: bytes) -> tuple[list[int], list[int]]:
        """The blocks of `op` are copied or dropped: free them, but for those matched again or still
        read by an earlier eviction. Returns (indices that went, indices that stayed)."""
        freed, stayed = op.tree.finish_offload(op.nodes, on_host)
        self.pool.give(freed)
        kept = set(stayed)
        return [j for j in range(op.total) if j not in kept], stayed

    def retire(self) -> int:
        """Start over with an empty tree; what nobody uses is free from now on. Returns how many
        blocks that are. Takes no longer for many."""
        unused = self.tree.retire()
        self.returning += unused
        self.retired.append(self.tree)
        self.tree = BlockTree(self.block_size, self.capacity, touch=False)  # within a turn
        return unused

    def bring_back(self, count: int) -> None:
        """Return up to `count` unused blocks of cleared trees to the pool, those of the eldest
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
        """Whether `sweep` has something to do now: not while leases and copies use all that is
        left."""
        return self.returning > 0 or any(tree.idle for tree in self.retired)

    def sweep(self, count: int = RETURNED) -> None:
        """A step of what follows a clear: `count` blocks come back, or after the last of them a
        part of a tree's memory goes."""
        if self.returning:
            self.bring_back(count)
            return
        tree = next((tree for tree in self.retired if tree.idle), None)
        if tree is not None and tree.dismantle():
            self.retired.remove(tree)

    def check(self) -> None:
        """RuntimeError or AssertionError if tree and pool disagree with themselves."""
        self.tree.check()
        self._check_returning()
        self.pool.check()

    def _check_returning(self) -> None:
        assert self.returning == sum(tree.returning for tree in self.retired), (
            "blocks of cleared trees that are to come back"
        )

    def check_steps(self) -> Iterator[None]:
        """`check` in steps of about a millisecond, between which anything may happen. What concerns
        a block alone is always looked at; sums and orders only if nothing has changed since the
        check began."""
        check = TreeCheck(self.tree)
        while not check.step(NODES):
            yield
        self._check_returning()
        yield from self.pool.check_steps()


def pick_keys(keys: bytes, positions: list[int]) -> bytes:
    """The names at some positions of a buffer of names."""
    return b"".join(keys[p * KEY_BYTES : (p + 1) * KEY_BYTES] for p in positions)
