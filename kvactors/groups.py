"""Models with several kinds of layers: layers with a sliding window or a state beside those with
full attention (docs/groups.md).

Each further group of layers has its own cache: index, host tier, store, device blocks. Its
blocks are *items*. The item at block i of a prompt has what the group's layers need to continue
after that block: their keys and values of the block, or a snapshot of their state. In the group's
index an item is one block below the root, whose tokens name the block of the prompt (`item_words`),
so an item is found, evicted, saved and loaded without those before it.

A hit of n blocks needs the last items before n: those of the window, or one snapshot.
`GroupedCache` finds the longest n that every group can serve, and acquires the same n everywhere.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from kvactors.actor.clock import now
from kvactors.actor.log import get_logger
from kvactors.actor.sliced import finish
from kvactors.actor.uncancelled import uncancelled
from kvactors.cache import Cleared, KVCache
from kvactors.checks import check_int
from kvactors.decode_batch import AnyLease, StepCall, Stepped
from kvactors.device.base import Device
from kvactors.device.events import Completion, Pass, Stream
from kvactors.errors import (
    KVActorsError,
    LeaseEnded,
    NoRoom,
    NotReady,
    SleepUnsupported,
    TokensCommitted,
)
from kvactors.flush_notifier.messages import GroupLabel, ResyncDue
from kvactors.flush_notifier.sinks.group import GroupSink
from kvactors.lease import Lease
from kvactors.lookup import PromptHits, hits_of, hosted_blocks
from kvactors.native import DEVICE, HOST, LOADING, Path
from kvactors.prefix_index.messages import Ack, Acquire, Extend, Finish, Preempt, Reserve
from kvactors.settings import Config
from kvactors.settings.tables import GroupConfig, QuotaConfig, StorageConfig
from kvactors.system import System
from kvactors.types import HASH_BYTES, Tokens, hash_at

HASH_WORDS = HASH_BYTES // 4

STORAGE = 1 << 8
"""Beside the state bits of the index: the index does not know the item, and the store has it."""

ORDER = (DEVICE, LOADING, HOST, STORAGE, 0)
"""Of items that are acquired together: an index loads what follows the last one on the device, and
a store reads a leading run."""

PROBED_ITEMS = 64
"""Items that a step of a look-up looks at together."""

ACQUIRE_TRIES = 3
"""Attempts to acquire the same blocks in every group. Between two of them blocks were evicted. The
last one takes no cached block."""

log = get_logger()


def item_words(block_size: int) -> int:
    """Words of an item in the index of a group: the number of the block in its prompt, its tokens,
    the hash of the block before it and its own hash."""
    return 1 + block_size + 2 * HASH_WORDS


def left(at: float) -> float:
    """Seconds until a call must have ended."""
    return max(at - now(), 1e-9)


class LayerGroup:
    """One group of layers of a cache, and the cache of its items.

    Attributes:
        span: items that a hit needs.
    """

    def __init__(self, config: GroupConfig, cache: KVCache, block_size: int) -> None:
        self.config, self.cache, self.block_size = config, cache, block_size
        self.words = item_words(block_size)
        self.is_state = config.kind == "state"
        self.span = 1 if self.is_state else -(-(config.window - 1) // block_size)

    def items(self, path: Path, blocks: Sequence[int]) -> NDArray[np.uint32]:
        """The words of the items of full blocks of a prompt."""
        if not blocks:
            return np.empty(0, np.uint32)
        first, end, size = min(blocks), max(blocks) + 1, self.block_size
        names = path.parent(first) + path.hashes(first, end)
        rows = np.asarray(blocks) - first
        hashes = np.frombuffer(names, np.uint32).reshape(-1, HASH_WORDS)
        tokens = np.frombuffer(path.tokens(first, end), np.uint32).reshape(-1, size)
        found = np.empty((len(blocks), self.words), np.uint32)
        found[:, 0] = blocks
        found[:, 1 : 1 + size] = tokens[rows]
        found[:, 1 + size : -HASH_WORDS] = hashes[rows]
        found[:, -HASH_WORDS:] = hashes[rows + 1]
        return found.ravel()

    def item_path(self, path: Path, blocks: Sequence[int], scope: Any) -> Path:
        """Items as a path of the group's index."""
        items = Path(self.words, self.cache.system.roots.root(scope), flat=True)
        items.extend(self.items(path, blocks))
        return items

    def longest(self, path: Path, blocks: int, scope: Any) -> int:
        """The most leading blocks of a prompt, at most `blocks`, after which the group can
        continue: a tier has every item that the hit needs."""
        found, run, stop = blocks, 0, blocks
        while stop:
            start = max(0, stop - PROBED_ITEMS)
            held = self.tiers(path, start, stop, scope)
            for block in range(stop - 1, start - 1, -1):
                if held[block - start]:
                    run += 1
                else:
                    found, run = block, 0
                if run >= min(self.span, found):
                    return found
            stop = start
        return 0

    def needed(self, path: Path, blocks: int, scope: Any) -> list[int]:
        """The blocks of the prompt whose items a hit of `blocks` blocks needs. Items of upper tiers
        come first."""
        needed = range(max(0, blocks - self.span), blocks)
        tiers = self.tiers(path, needed.start, blocks, scope) if needed else []
        return [at for _, at in sorted(zip(map(ORDER.index, tiers), needed, strict=True))]

    def tiers(self, path: Path, start: int, stop: int, scope: Any) -> list[int]:
        """What has the item of each block: DEVICE, LOADING, HOST, STORAGE, or 0 for none."""
        system, count = self.cache.system, stop - start
        items = self.item_path(path, range(start, stop), scope)
        states = system.index_actor.index.tree.probe(items, 0, count)
        found = [next((bit for bit in ORDER if state & bit), 0) for state in states]
        if all(found) or not system.index_actor.settings.fetch:
            return found
        hosted, store, hashes = (
            hosted_blocks(system, scope.salt),
            system.store,
            items.hashes(0, count),
        )
        for at, known in enumerate(found):
            if not known:
                key = hash_at(hashes, at)
                block = hosted.get(key)
                if (block is not None and not block.arriving) or (
                    store is not None and store.held_run([key])
                ):
                    found[at] = STORAGE
        return found


class GroupLease:
    """A lease's blocks of one group.

    Attributes:
        lease: in the group's cache. Its path has the items of `blocks`, in that order. The last may
            not be complete.
        blocks: of the prompt, ascending but for the hits.
        hits: leading items that were cached when the lease was acquired.
        kept: hits that it still has.
        passed: tokens that are computed. Of a state.
        floor: the first block of the prompt for which a device block stands.
        marks: blocks of the prompt after which a snapshot is wanted beside the regular ones.
    """

    def __init__(self, group: LayerGroup, blocks: list[int], floor: int, marks: set[int]) -> None:
        self.group, self.blocks, self.floor = group, blocks, floor
        self.passed = (max(blocks, default=floor - 1) + 1) * group.block_size
        self.hits = self.kept = len(blocks)
        self.marks = marks
        self.lease: Lease = None  # type: ignore[assignment]  # until it is acquired

    def forked(self, lease: Lease) -> GroupLease:
        """The same items, in a fork, which has no reserved blocks."""
        made = GroupLease(self.group, self.blocks[: len(lease._table)], self.floor, self.marks)
        made.hits, made.kept, made.lease = self.hits, self.kept, lease
        made.passed = self.passed
        return made

    def check_fork(self) -> None:
        """NotReady if a fork would share a state that passes still update."""
        complete = self.lease.num_tokens // self.group.words
        if self.group.is_state and complete:
            needed = (self.blocks[complete - 1] + 1) * self.group.block_size
            if self.passed < needed:
                raise NotReady(
                    f"the state after {needed} tokens is a snapshot that forks share: compute and "
                    f"commit these tokens before fork, not {self.passed}"
                )

    @property
    def is_whole(self) -> bool:
        """Whether it has all of its hits."""
        return self.lease.cached_tokens == self.hits * self.group.words

    def table(self, blocks: int) -> tuple[int, ...]:
        """The device blocks for the first blocks of the prompt, -1 where the group has none."""
        found, floor = [-1] * blocks, self.floor
        for block, at in sorted(zip(self.blocks, self.lease._table, strict=False)):
            first = floor if self.group.is_state else block
            stop = min(block + 1, blocks)
            found[first:stop] = [at] * (stop - first)
            floor = stop
        return tuple(found)

    def _before(self, block: int) -> int:
        """Leading items of blocks before `block`."""
        for at in range(self.kept):
            if self.blocks[at] >= block:
                return at
        return bisect_left(self.blocks, block, self.kept)

    # -- growth

    def plan(self, blocks: int) -> None:
        """Have items for the first `blocks` blocks of the prompt."""
        last = max(self.blocks, default=self.floor - 1)
        while last < blocks - 1:
            last = self._next_mark(last) if self.group.is_state else last + 1
            self.blocks.append(last)

    def _trim(self, blocks: int) -> None:
        """Drop later items than the hits and those of the first `blocks` blocks of the prompt."""
        while (later := len(self.blocks) - self.kept) > 0:
            before = self.blocks[-2] if later > 1 else max(self.blocks[:-1], default=self.floor - 1)
            if before < blocks - 1:
                return
            self.blocks.pop()

    def _next_mark(self, last: int) -> int:
        """The block after `last` behind which the next snapshot is wanted. Without one the state
        stays in one device block, which is that of no snapshot."""
        every = self.group.config.every
        later = [block for block in self.marks if block > last]
        if every:
            later.append((last + 1) // every * every + every - 1)
        return min(later, default=NEVER)

    def words(self, path: Path, done: int) -> NDArray[np.uint32]:
        """What the group's lease lacks of the items of a prompt, if it has `done` words. An item
        that has begun has its first word, so that a fork copies its device block."""
        complete = self._before(path.num_full_blocks)
        first, part = divmod(done, self.group.words)
        words = self.group.items(path, self.blocks[first:complete])[part:]
        if first <= complete < len(self.blocks) and not (part and first == complete):
            words = np.append(words, np.uint32(min(self.blocks[complete], NEVER)))
        return words

    async def cover(self, blocks: int, at: float) -> None:
        """Have device blocks for the first `blocks` blocks of the prompt, before the lease has. If
        it gets none there after all, a later call uses them."""
        own, words, before = self.lease, self.group.words, len(self.blocks)
        self.plan(blocks)
        try:
            while (lacking := len(self.blocks) - len(own._table)) > 0:
                most = min(lacking, own._handle.context.part_tokens // words)
                upto = (len(own._table) + most) * words
                await own._grow(Reserve(own._handle.id, own.num_tokens, upto), at, "reserve")
        except BaseException:
            del self.blocks[max(before, len(own._table)) :]
            raise

    def _wanted(self, path: Path) -> int:
        """Words of the items of a prompt. An item that has begun has its first one."""
        complete = self._before(path.num_full_blocks)
        return complete * self.group.words + (complete < len(self.blocks))

    async def follow(self, lease: Lease, at: float) -> None:
        """Have the items of the lease's tokens, for which the group has blocks."""
        own, path = self.lease, lease._path
        if self._wanted(path) > own.num_tokens:
            await own.extend(self.words(path, own.num_tokens), deadline=left(at))

    async def truncate(self, lease: Lease, at: float) -> None:
        """Have no items and blocks beyond the lease's."""
        own = self.lease
        self._trim(len(lease._table))
        wanted = self._wanted(lease._path)
        if wanted < own.num_tokens or len(self.blocks) < len(own._table):
            # Blocks of a call that was refused in the end have no words yet.
            await own.truncate(min(wanted, own.num_tokens), deadline=left(at))

    # -- commit and end

    async def commit(self, lease: Lease, computed: int, at: float) -> None:
        """The first `computed` tokens are computed. Items that no later token needs are given up:
        those that are complete stay cached."""
        size, words, own = self.group.block_size, self.group.words, self.lease
        full = min(computed // size, lease._path.num_full_blocks)
        if self.group.is_state:
            self.passed = max(self.passed, computed)
            # A block has the state of its last token only if a pass has ended there.
            passed = self._before(-(-computed // size) - 1)
            await self._give_up(passed, at)
            if self.blocks and (self.blocks[0] + 1) * size == computed <= full * size:
                await own.commit(words, deadline=left(at))
            return
        await own.commit(self._before(full) * words, deadline=left(at))
        needed = max(0, computed - self.group.config.window + 1) // size
        await self._give_up(self._before(needed), at)

    async def _give_up(self, items: int, at: float) -> None:
        if items:
            self.floor = max(self.floor, *(block + 1 for block in self.blocks[:items]))
            self.kept = max(0, self.kept - items)
            del self.blocks[:items]
            await self.lease._drop_leading(items, left(at))

    async def finish(self, lease: Lease, computed: int | None, at: float) -> None:
        if computed is not None:
            await self.commit(lease, computed, at)
        await self.lease.finish(output_tokens=0, deadline=left(at))


NEVER = (1 << 32) - 1
"""The block of an item that no snapshot is made of."""


class GroupedLease(Lease):
    """A lease with device blocks in every group of layers. `block_tables` has them.

    A pass that computes a state ends where the block table of its group has another block, and the
    tokens up to there are committed before the next pass: this makes the snapshots. A pass from
    token a to before token b reads the state in the entry of token a - 1, if a is not 0, and writes
    it to the entry of token b - 1.

    A call that grows the request takes the blocks of the groups first, so that no group lacks room
    once the request has grown. The groups follow the calls one after another. If a group fails, or
    the caller is cancelled between two of them, the lease ends in all of them.
    """

    _cache: GroupedCache
    _message: Acquire

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._parts: list[GroupLease] = []
        self._latest: asyncio.Future[None] | None = None  # end of the last call in the groups
        self._incarnations: list[int] = []  # of the groups' indexes, which have the lease
        self._block = -1  # of the last computed token that the groups know of
        self._shared = 0  # leading tokens in full blocks that forks have

    def _bind(self, part: GroupLease) -> None:
        """The lease has a part in a further group."""
        handle = self._handle
        if not handle.bound:
            handle.bound.append(handle)
        handle.bound.append(part.lease._handle)
        part.lease._handle.bound = handle.bound
        self._parts.append(part)

    @property
    def block_tables(self) -> tuple[tuple[int, ...], ...]:
        """See `Lease.block_tables`. -1: no layer of the group needs the block's tokens any more."""
        table = self.block_table
        return (table, *(part.table(len(table)) for part in self._parts))

    def pass_end(self, start: int, stop: int) -> int:
        stop, size = super().pass_end(start, stop), self._path.block_size
        for part in self._parts:
            if part.group.is_state:
                at = bisect_left(part.blocks, start // size)
                if at < len(part.blocks):
                    stop = min(stop, (part.blocks[at] + 1) * size)
        return stop

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Within the block no other call of the lease is in the groups: they come one after
        another."""
        over = asyncio.get_running_loop().create_future()
        before, self._latest = self._latest, over
        try:
            if before is not None:
                try:
                    await before
                except BaseException:
                    self._handle.give_up()  # the next call does not wait for the one before
                    raise
            yield
        finally:
            if not over.done():
                over.set_result(None)
            if self._latest is over:
                self._latest = None

    async def _in_groups(
        self, call: Callable[[GroupLease], Awaitable[None]], change: str = ""
    ) -> None:
        """Make a call in every group. change: of the lease, that it is a part of."""
        handle = self._handle
        if change:
            handle.begin_change(change)
        try:
            async with self._alone():
                for part in self._parts:
                    await call(part)
        finally:
            if change:
                handle.changing = ""

    async def _follow(
        self, call: Callable[[GroupLease], Awaitable[None]], change: str = ""
    ) -> None:
        """Make a call in every group after that of the lease: it ends if one fails."""
        try:
            await self._in_groups(call, change)
        except BaseException:
            self._handle.give_up()
            raise

    def _lacks(self, tokens: int) -> bool:
        """Whether the block tables end before this number of tokens."""
        return tokens > len(self._table) * self._path.block_size

    async def _cover(self, tokens: int, at: float, change: str = "") -> None:
        blocks = -(-tokens // self._path.block_size)
        await self._in_groups(lambda part: part.cover(blocks, at), change)

    # -- loads

    async def wait_ready(
        self, *, stream: Stream | None = None, deadline: float | None = None
    ) -> None:
        """See `Lease.wait_ready`. If a group lacks an item after all, nothing of the request is
        cached, and it gets other device blocks. LeaseEnded if `set_namespace`, or `clear` of its
        adapter, came before them."""
        handle = self._handle
        at = None if deadline is None else handle.begin_call(deadline)
        await super().wait_ready(stream=stream, deadline=deadline)
        whole, pending = await self._groups_ready(stream, at)
        if not (pending or (whole and self._is_whole())):
            async with self._alone():
                if self._handle is handle:  # no other call has done it
                    await self._acquire_again(deadline if at is None else left(at))

    async def _groups_ready(self, stream: Stream | None, at: float | None) -> tuple[bool, bool]:
        """Wait for the loads of the groups. Returns whether none of them lacks a device block, and
        whether a stream waits for one."""
        whole, pending = True, self.pending
        self.pending = True  # until all have answered
        for part in self._parts:
            try:
                deadline = None if at is None else left(at)
                await part.lease.wait_ready(stream=stream, deadline=deadline)
            except NoRoom:
                whole = False  # it stays pending: its blocks are given up
                continue
            pending |= part.lease.pending
            self._handle.unread |= part.lease._handle.unread
        self.pending = pending
        return whole, pending

    def _is_whole(self) -> bool:
        """Whether every group has what the cached tokens need."""
        return self.cached_tokens == (self._message.most or 0) * self._path.block_size and all(
            part.is_whole for part in self._parts
        )

    async def _acquire_again(self, deadline: float | None) -> None:
        cache, at = self._cache, self._handle.begin_call(deadline)
        lease, path = next(cache._leases), again(self._path)
        self._handle.give_up()
        message = replace(
            self._message,
            lease=lease,
            path=path,
            media=self._media,
            most=0,
            deadline=at,
            wait_for_room=True,
        )
        made = await cache._grant_all(message, 0)
        if made._path.root != self._path.root:
            made.abandon()
            raise LeaseEnded(
                f"the weights of {self.request_id!r} changed while it waited for other blocks: "
                "acquire it again"
            )
        made._latest = self._latest
        self.__dict__.update(made.__dict__)
        del made.__dict__["_handle"]  # its finaliser must not end the lease

    async def wait_layer(
        self, layer: int, *, stream: Stream | None = None, deadline: float | None = None
    ) -> int:
        """See `Lease.wait_layer`: a layer of `[layout]`. The other groups are waited for whole."""
        at = None if deadline is None else self._handle.begin_call(deadline)
        whole, _ = await self._groups_ready(None, at)
        rest = None if at is None else left(at)
        cached = await super().wait_layer(layer, stream=stream, deadline=rest)
        if whole and all(part.is_whole for part in self._parts):
            return cached
        await self.wait_ready(deadline=None if at is None else left(at))
        return self.cached_tokens

    # -- tokens and blocks

    async def _grow(self, message: Extend | Reserve, at: float, call: str) -> tuple[int, ...]:
        if self._lacks(message.num_tokens):
            await self._cover(message.num_tokens, at, call)
        blocks = await super()._grow(message, at, call)
        await self._follow(lambda part: part.follow(self, at), call)
        return blocks

    async def truncate(self, num_tokens: int, *, deadline: float | None = None) -> tuple[int, ...]:
        """See `Lease.truncate`. A state cannot go back: the caller has one of before, or computes
        again from `cached_tokens` of a new lease. TokensCommitted for less than the full blocks
        that forks had: after its end, what a fork has computed stays cached in some groups longer
        than in others."""
        at = self._handle.begin_call(deadline)
        if check_int("num_tokens", num_tokens, 0, self.num_tokens) < self._shared:
            raise TokensCommitted(
                f"num_tokens is {num_tokens}, but the full blocks of the first {self._shared} "
                "tokens were shared with a fork, in groups of layers too"
            )
        dropped = await super().truncate(num_tokens, deadline=deadline)
        await self._follow(lambda part: part.truncate(self, at), "truncate")
        return dropped

    async def fork_many(
        self, count: int, request_ids: Sequence[str] | None = None, **options: Any
    ) -> tuple[Self, ...]:
        """See `Lease.fork_many`."""
        at = self._handle.begin_call(options.get("deadline"))
        for part in self._parts:
            part.check_fork()
        forks = await super().fork_many(count, request_ids, **options)
        names = [fork.request_id for fork in forks]
        waits = {key: one for key, one in options.items() if key.startswith("wait")}
        size = self._path.block_size

        async def fork_part(part: GroupLease) -> None:
            made = await part.lease.fork_many(count, names, deadline=left(at), **waits)
            for fork, lease in zip(forks, made, strict=True):
                fork._bind(part.forked(lease))

        try:
            for fork in forks:
                fork._cache, fork._message = self._cache, self._message
                fork._incarnations = self._incarnations
                fork._shared = fork.num_tokens // size * size
            await self._in_groups(fork_part, "fork")
        except BaseException:
            for fork in forks:
                fork.abandon()
            raise
        self._shared = max((fork._shared for fork in forks), default=self._shared)
        return forks

    # -- commit and end

    async def commit(
        self,
        computed_tokens: int,
        *,
        event: Completion | None = None,
        stream: Stream | None = None,
        deadline: float | None = None,
    ) -> int:
        """See `Lease.commit`."""
        at = self._handle.begin_call(deadline)
        done = await super().commit(computed_tokens, event=event, stream=stream, deadline=deadline)
        await self._commit_parts_of(computed_tokens, at)
        return done

    def _has_committed(self, computed: int) -> bool:
        """Whether the last commit in the groups did the same, and they have the lease."""
        size = self._path.block_size
        same = computed % size != 0 and (computed - 1) // size <= self._block
        return same and self._incarnations == self._cache.incarnations()

    async def _commit_parts_of(self, computed: int, at: float, *, grown: bool = False) -> None:
        """Commit in the groups. grown: after their items have followed those of the lease."""

        async def commit(part: GroupLease) -> None:
            if self._incarnations != self._cache.incarnations():
                raise LeaseEnded(
                    "the index of a group of layers has failed: others may have the lease's blocks"
                )
            if grown:
                await part.follow(self, at)
            await part.commit(self, computed, at)

        if grown or not self._has_committed(computed):
            await self._follow(commit)
            self._block = max(self._block, (computed - 1) // self._path.block_size)

    async def _end(
        self,
        message: Finish | Preempt,
        event: Completion | None,
        stream: Stream | None,
        deadline: float | None,
    ) -> Ack:
        at, handle = self._handle.begin_call(deadline), self._handle
        reply: Any = None
        try:
            reply = await super()._end(message, event, stream, deadline)
            await self._in_groups(lambda part: part.finish(self, message.computed_tokens, at))
        except KVActorsError as error:
            if reply is None:
                raise
            log.warning("group of layers lost a request", error=str(error))  # its items
        finally:
            if handle.ended:
                handle.end_bound()
        return reply  # type: ignore[no-any-return]

    def abandon(self, *, event: Completion | None = None, stream: Stream | None = None) -> None:
        """See `Lease.abandon`."""
        if not self._handle.ended and (event is not None or stream is not None):
            self._handle.context.check_thread()
            self._cache.record_pass([self], event=event, stream=stream)
        super().abandon()


class GroupedStep(StepCall):
    """A step of leases of several groups of layers."""

    async def carry_out(self, at: float) -> None:
        befores = [lease.num_tokens for lease in self.leases]
        for row, lease in enumerate(self.leases):
            tokens = befores[row] + self._counts[row]
            if self._numbers[row] and lease._lacks(tokens):
                try:
                    await lease._cover(tokens, at)
                except KVActorsError as error:
                    self._refused[row] = Stepped(error=error)
                    self._numbers[row] = 0
        await super().carry_out(at)
        for row, lease in enumerate(self.leases):
            outcome, computed = self.outcomes[row], self._computed[row]
            if outcome.error is not None:
                continue
            try:
                size = lease._path.block_size
                grown = lease.num_tokens // size != befores[row] // size or outcome.blocks
                if computed is not None:
                    if grown or not lease._has_committed(computed):
                        await lease._commit_parts_of(computed, at, grown=bool(grown))
                elif grown:
                    await lease._follow(lambda part, lease=lease: part.follow(lease, at))
            except KVActorsError as error:
                self.outcomes[row] = Stepped(error=error)


class GroupedCache(KVCache):
    """A `KVCache` whose model has several groups of layers (`cache.groups` of the settings).

    `free_blocks`, quotas, pins and `check_slices` are of the layers of `[layout]`. `groups` has the
    cache of every other group by name, with its own.
    """

    _LEASE: ClassVar[type[Lease]] = GroupedLease
    _STEP: ClassVar[type[StepCall]] = GroupedStep

    def __init__(self, system: System, caches: Sequence[KVCache]) -> None:
        super().__init__(system)
        configs = system.config.cache.groups
        self.layer_groups = [
            LayerGroup(config, cache, self.block_size)
            for config, cache in zip(configs, caches, strict=True)
        ]

    @property
    def groups(self) -> dict[str, KVCache]:
        """See `KVCache.groups`."""
        return {group.config.name: group.cache for group in self.layer_groups}

    def incarnations(self) -> list[int]:
        """Of the groups' indexes."""
        return [group.cache.system.index.incarnation for group in self.layer_groups]

    # -- requests

    def _longest(self, path: Path, scope: Any, media: Any) -> tuple[PromptHits, int]:
        """What the tiers hold of a prompt, and how many leading blocks every group can serve."""
        media = () if self._split_media else media
        hits: PromptHits = finish(hits_of(self.system, path, scope.salt, media))
        blocks, index = hits.total, self.system.index_actor.index
        before = -1
        while blocks != before:
            before = blocks
            for group in self.layer_groups:
                blocks = group.longest(path, blocks, scope)
            blocks = index.before_media(blocks, media)
        return hits, blocks

    async def acquire(self, request_id: str, tokens: Tokens, **options: Any) -> Lease:
        """See `KVCache.acquire`. The request gets device blocks in every group. `cached_tokens` is
        what all groups have."""
        names = tuple(options.pop(name, None) for name in ("salt", "lora", "lora_id"))
        message = self._acquire_message(request_id, tokens, names=names, **options)
        for left in reversed(range(ACQUIRE_TRIES)):
            known, most = self._longest(message.path, message.scope, message.media)
            made = await self._grant_all(replace(message, most=most if left else 0), known.total)
            if made._is_whole() or not left:
                break
            made.abandon()
            message = replace(message, lease=next(self._leases), path=again(message.path))
        return made

    async def _grant_all(self, message: Acquire, known: int) -> GroupedLease:
        """Acquire a request in every group. known: blocks of it that the tiers of `[layout]` have:
        if they are more than it may hit, its prompt leaves another one there."""
        if self.system.index_actor.settings.fetch:
            stored = await self._count_stored(message.path, message.scope, message.media)
            message = replace(message, stored=stored)
        made = self._grant(message)
        lease: Any = made if isinstance(made, Lease) else await made
        lease._cache, lease._message = self, message
        lease._incarnations = self.incarnations()
        try:
            for group in self.layer_groups:
                lease._bind(await self._grant_part(group, lease, message, known))
        except BaseException as error:
            error.add_note(f"of the group of layers {group.config.name!r}")
            lease.abandon()
            raise
        lease.pending |= any(part.lease.pending for part in lease._parts)
        return lease  # type: ignore[no-any-return]

    async def _grant_part(
        self, group: LayerGroup, lease: Lease, message: Acquire, known: int
    ) -> GroupLease:
        path, hit = lease._path, lease.cached_tokens // self.block_size
        limit = self.system.index_actor.index.limit_of(path.num_tokens)
        marks = {block - 1 for block in (limit, path.num_full_blocks, known) if block > hit}
        cached = group.needed(path, hit, message.scope)
        part = GroupLease(group, cached, min(cached, default=hit), marks)
        part.plan(len(lease._table))
        cache, scope, hints = group.cache, message.scope, message.hints
        items = Path(group.words, cache.system.roots.root(scope), flat=True)
        items.extend(part.words(path, 0))
        number = next(cache._leases)
        own = replace(
            message,
            lease=number,
            path=items,
            media=(),
            chunk_tokens=0,
            most=part.hits,
            hints=None if hints is None else replace(hints, pin=False),
        )
        if cache.system.index_actor.settings.fetch:
            own = replace(own, stored=await cache._count_stored(items, scope, ()))
        made = cache._grant(own)
        part.lease = made if isinstance(made, Lease) else await made
        return part

    def record_pass(
        self,
        leases: Sequence[AnyLease],
        *,
        event: Completion | None = None,
        stream: Stream | None = None,
    ) -> Pass:
        """See `KVCache.record_pass`."""
        made = super().record_pass(leases, event=event, stream=stream)
        own: list[Any] = list(leases)
        for at, group in enumerate(self.layer_groups):
            group.cache.record_pass([lease._parts[at].lease for lease in own], event=made)
        return made

    def lookup(self, tokens: Tokens, **options: Any) -> PromptHits:
        """See `KVCache.lookup`: what every group can serve, by the tier that holds the blocks of
        the layers of `[layout]`."""
        return self._clipped(*self._look(tokens, **options))

    async def lookup_slices(self, tokens: Tokens, **options: Any) -> PromptHits:
        """See `lookup`."""
        return self.lookup(tokens, **options)

    def _look(self, tokens: Tokens, **options: Any) -> tuple[PromptHits, int]:
        path, scope, media = self._lookup_path(tokens, **options)
        return self._longest(path, scope, media)

    def _clipped(self, hits: PromptHits, blocks: int) -> PromptHits:
        device = min(hits.device, blocks)
        host = min(hits.host, blocks - device)
        return PromptHits(
            device,
            host,
            blocks - device - host,
            num_tokens=hits.num_tokens,
            block_size=hits.block_size,
            new_blocks=hits.new_blocks + hits.device - device,
        )

    async def prefetch(
        self, tokens: Tokens, *, deadline: float | None = None, **options: Any
    ) -> int:
        """See `KVCache.prefetch`. The items that the hit needs are fetched as well."""
        path, scope, media = self._lookup_path(tokens, **options)
        _, blocks = self._longest(path, scope, media)
        found = await super().prefetch(tokens, deadline=deadline, **options)
        for group in self.layer_groups:
            needed = group.needed(path, blocks, scope)
            if needed and group.cache.config.host.slots:
                at = self._context.begin_call(deadline)
                items = group.item_path(path, needed, scope)
                await group.cache._prefetch(items, scope, (), at)
        return found

    # -- the whole cache

    @property
    def _all(self) -> list[KVCache]:
        return list(self.groups.values())

    async def clear(self, **options: Any) -> Cleared:
        """See `KVCache.clear`. The counts are those of all groups together."""
        at = self._context.begin_call(options.get("deadline"))
        done = await super().clear(**options)
        for cache in self._all:
            more = await cache.clear(**options | {"deadline": left(at)})
            done = Cleared(*(a + b for a, b in zip(done, more, strict=True)))
        return done

    async def pause(self, *, deadline: float | None = None) -> None:
        """See `KVCache.pause`."""
        at = self._context.begin_call(deadline)
        await super().pause(deadline=deadline)
        for cache in self._all:
            await cache.wait_idle(left(at))

    async def set_namespace(self, namespace: str, *, deadline: float | None = None) -> None:
        """See `KVCache.set_namespace`."""
        at = self._context.begin_call(deadline)
        await super().set_namespace(namespace, deadline=deadline)
        for cache in self._all:
            await cache.set_namespace(namespace, deadline=left(at))

    async def wait_idle(self, deadline: float = 30.0) -> None:
        """See `KVCache.wait_idle`."""
        at = self._context.begin_call(deadline)
        for cache in self._all:
            await cache.wait_idle(left(at))
        await super().wait_idle(left(at))

    async def wait_flushed(
        self, deadline: float = 30.0, *, at_rest: bool = True, sinks: Collection[str] | None = None
    ) -> None:
        """See `KVCache.wait_flushed`."""
        at = self._context.begin_call(deadline)
        await super().wait_flushed(deadline, at_rest=at_rest, sinks=sinks)
        for cache in self._all:
            own = None if sinks is None else [name for name in sinks if name in cache.sinks]
            await cache.wait_flushed(left(at), at_rest=at_rest, sinks=own)

    def count_divergent_blocks(self, sinks: Collection[str] | None = None) -> int:
        """See `KVCache.count_divergent_blocks`."""
        found = super().count_divergent_blocks(sinks)
        for cache in self._all:
            own = None if sinks is None else [name for name in sinks if name in cache.sinks]
            found += cache.count_divergent_blocks(own)
        return found

    async def sleep(self, level: int = 1, *, deadline: float | None = None) -> None:
        """See `KVCache.sleep`."""
        at = self._context.begin_call(deadline)
        for name, cache in self.groups.items():
            if not getattr(cache.system.plane, "owns_device", False):
                raise SleepUnsupported(f"the device of the group {name!r} is the engine's")
        await super().sleep(level, deadline=deadline)
        try:
            for cache in self._all:
                await cache.sleep(level, deadline=left(at))
        except BaseException:
            await uncancelled(self.wake())
            raise

    async def wake(self, device: Device | None = None, *, deadline: float | None = None) -> None:
        """See `KVCache.wake`."""
        at = self._context.begin_call(deadline)
        for cache in self._all:
            await cache.wake(deadline=left(at))
        await super().wake(device, deadline=left(at))

    def check(self) -> list[str]:
        """See `KVCache.check`."""
        found = super().check()
        for name, cache in self.groups.items():
            found += [f"{name}: {line}" for line in cache.check()]
        return found

    def close(self) -> None:
        """See `KVCache.close`."""
        super().close()
        for cache in self._all:
            cache.close()


def group_config(config: Config, group: GroupConfig, storage: StorageConfig) -> Config:
    """The settings of the cache of a group of layers, of a cache with these settings and store."""
    if group.stored_blocks is not None:
        storage = replace(storage, capacity_blocks=group.stored_blocks, capacity_bytes=None)
    return replace(
        config,
        cache=replace(
            config.cache,
            model=f"{config.cache.model}/{group.name}" if config.cache.model else "",
            recompute_last_token=False,
            prefill_tokens_per_s=0.0,
            groups=(),
        ),
        layout=group.layout,
        device=replace(config.device, num_blocks=group.num_blocks, capacity_bytes=None),
        host=replace(
            config.host,
            slots=group.slots,
            transit_slots=group.transit_slots,
            capacity_bytes=None,
            transit_bytes=None,
        ),
        storage=replace(storage, max_fetch_blocks=None),
        flush=replace(config.flush, sinks=(), mode="normal"),
        quota=QuotaConfig(),
    )


@asynccontextmanager
async def open_group(
    system: System, number: int, device: Device | None = None, **options: Any
) -> AsyncIterator[KVCache]:
    """Open the cache of a group of layers of an open cache.

    Args:
        number: of the group, from 0.
        device: of the group, made from the settings if None.
    """
    config, group = system.config, system.config.cache.groups[number]
    label = GroupLabel(number + 1, group.name, group.kind, group.window)
    size, taking = (
        config.cache.block_size,
        [one for one in system.sinks.values() if one.takes_groups],
    )
    sinks = [GroupSink(sink, label, size) for sink in taking]
    own = group_config(config, group, system.storage)
    made = System(own, device, sinks, item_tokens=item_words(size), **options)

    def resync(name: str) -> None:
        with suppress(KVActorsError):  # the cache is closing
            made.notifier.try_tell(ResyncDue(name))

    cache = KVCache(made)
    try:
        async with made.running():
            system.layer_groups[group.name] = made
            for sink in sinks:
                sink.sink.on_reset += (partial(resync, sink.name),)
            try:
                yield cache
            finally:
                cache.close()
                for sink in sinks:
                    sink.sink.on_reset = ()
    finally:
        cache._context.stop()


def again(path: Path) -> Path:
    """A path of the same tokens and extra keys that holds nothing."""
    made = Path(path.block_size, path.root, path.flat)
    made.append(path)
    full = path.num_full_blocks
    for block, extra in (*path.extra_keys(0, full), (full, path.extra_key(full))):
        if extra:
            made.set_extra(block, extra)
    return made
