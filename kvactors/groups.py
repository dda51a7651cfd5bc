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

from bisect import bisect_left
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from kvactors.actor.log import get_logger
from kvactors.actor.sliced import finish
from kvactors.cache import Cleared, KVCache
from kvactors.decode_batch import AnyLease, Step, Stepped
from kvactors.device.base import Device
from kvactors.device.events import Completion, Pass, Stream
from kvactors.errors import KVActorsError, NoRoom, SleepUnsupported
from kvactors.flush_notifier.messages import GroupLabel, ResyncDue
from kvactors.flush_notifier.sinks.group import GroupSink
from kvactors.lease import Lease
from kvactors.lookup import PromptHits, hits_of
from kvactors.native import DEVICE, HOST, LOADING, Path
from kvactors.prefix_index.messages import Ack, Acquire, Finish, Preempt
from kvactors.settings import Config
from kvactors.settings.tables import GroupConfig, QuotaConfig, StorageConfig
from kvactors.system import System
from kvactors.types import HASH_BYTES, Tokens, hash_at

HASH_WORDS = HASH_BYTES // 4

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
        """The words of the items of full blocks of a prompt, given in ascending order."""
        if not blocks:
            return np.empty(0, np.uint32)
        first, end, size = blocks[0], blocks[-1] + 1, self.block_size
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
            held = self._held(path, start, stop, scope)
            for block in range(stop - 1, start - 1, -1):
                if held[block - start]:
                    run += 1
                else:
                    found, run = block, 0
                if run >= min(self.span, found):
                    return found
            stop = start
        return 0

    def _held(self, path: Path, start: int, stop: int, scope: Any) -> list[bool]:
        """Whether a tier has the item of each block."""
        system = self.cache.system
        items = self.item_path(path, range(start, stop), scope)
        states = system.index_actor.index.tree.probe(items, 0, stop - start)
        held = [bool(state & (DEVICE | HOST | LOADING)) for state in states]
        store, hosted = system.store, system.evictor_actor.host.blocks
        if not all(held) and (store is not None or hosted):
            hashes = items.hashes(0, stop - start)
            for at, known in enumerate(held):
                if not known:
                    key = hash_at(hashes, at)
                    block = hosted.get(key)
                    held[at] = (block is not None and not block.arriving) or bool(
                        store is not None and store.held_run([key])
                    )
        return held


class GroupLease:
    """A lease's blocks of one group.

    Attributes:
        lease: in the group's cache. Its path has the items of `blocks`, in that order. The last may
            not be complete.
        blocks: of the prompt, ascending.
        hits: leading items that were cached when the lease was acquired.
        floor: the first block of the prompt for which the first item's device block stands.
        marks: blocks of the prompt after which a snapshot is wanted beside the regular ones.
    """

    def __init__(self, group: LayerGroup, blocks: list[int], floor: int, marks: set[int]) -> None:
        self.group, self.blocks, self.floor = group, blocks, floor
        self.hits, self.marks = len(blocks), marks
        self._last = -1  # block of the last computed token
        self.lease: Lease = None  # type: ignore[assignment]  # until it is acquired

    def forked(self, lease: Lease) -> GroupLease:
        """The same items, in a fork."""
        made = GroupLease(self.group, list(self.blocks), self.floor, self.marks)
        made.hits, made.lease = self.hits, lease
        return made

    def table(self, blocks: int) -> tuple[int, ...]:
        """The device blocks for the first blocks of the prompt, -1 where the group has none."""
        found, last = [-1] * min(self.floor, blocks), self.floor - 1
        for block, at in zip(self.blocks, self.lease._table, strict=False):
            found += [at] * (min(block, blocks - 1) - last)
            last = block
        return tuple(found[:blocks])

    # -- growth

    def plan(self, blocks: int) -> None:
        """Have items for the first `blocks` blocks of the prompt."""
        last = self.blocks[-1] if self.blocks else self.floor - 1
        while last < blocks - 1:
            last = self._next_mark(last) if self.group.is_state else last + 1
            self.blocks.append(last)

    def _trim(self, blocks: int) -> None:
        """Have no items beyond those that the first `blocks` blocks of the prompt need."""
        while len(self.blocks) > 1 and self.blocks[-2] >= blocks - 1:
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
        complete = bisect_left(self.blocks, path.num_full_blocks)
        first, part = divmod(done, self.group.words)
        words = self.group.items(path, self.blocks[first:complete])[part:]
        if first <= complete < len(self.blocks) and not (part and first == complete):
            words = np.append(words, np.uint32(min(self.blocks[complete], NEVER)))
        return words

    async def follow(self, lease: Lease) -> None:
        """Have the items that the lease's tokens and blocks need. NoRoom: nothing changed."""
        own, group, path = self.lease, self.group, lease._path
        self._trim(len(lease._table))
        before = len(self.blocks)
        self.plan(len(lease._table))
        complete = bisect_left(self.blocks, path.num_full_blocks)
        wanted = complete * group.words + (complete < len(self.blocks))
        try:
            if wanted < own.num_tokens or len(self.blocks) < len(own._table):
                await own.truncate(wanted)  # as the lease was
            if wanted > own.num_tokens:
                await own.extend(self.words(path, own.num_tokens))
            while (lacking := len(self.blocks) - len(own._table)) > 0:
                most = min(lacking, own._handle.context.part_tokens // group.words)
                upto = (len(own._table) + most) * group.words
                await own.reserve(upto - own.num_tokens)
        except NoRoom:
            del self.blocks[max(before, len(own._table)) :]
            raise

    # -- commit and end

    async def commit(self, lease: Lease, computed: int) -> None:
        """The first `computed` tokens are computed. Items that no later token needs are given up:
        those that are complete stay cached."""
        size, words, own = self.group.block_size, self.group.words, self.lease
        last, self._last = self._last, (computed - 1) // size
        if self._last <= last and computed % size:
            return
        full = min(computed // size, lease._path.num_full_blocks)
        if self.group.is_state:
            # A block has the state of its last token only if a pass has ended there.
            passed = bisect_left(self.blocks, -(-computed // size) - 1)
            await self._give_up(passed)
            if self.blocks and (self.blocks[0] + 1) * size == computed <= full * size:
                await own.commit(words)
            return
        await own.commit(bisect_left(self.blocks, full) * words)
        needed = max(0, computed - self.group.config.window + 1) // size
        await self._give_up(bisect_left(self.blocks, needed))

    async def _give_up(self, items: int) -> None:
        if items:
            self.floor = self.blocks[items - 1] + 1
            del self.blocks[:items]
            await self.lease._drop_leading(items)

    async def finish(self, lease: Lease, computed: int | None) -> None:
        if computed is not None:
            await self.commit(lease, computed)
        await self.lease.finish(output_tokens=0)


NEVER = (1 << 32) - 1
"""The block of an item that no snapshot is made of."""


class GroupedLease(Lease):
    """A lease with device blocks in every group of layers. `block_tables` has them.

    A pass that computes a state ends where the block table of its group has another block, and the
    tokens up to there are committed before the next pass: this makes the snapshots. A pass from
    token a to before token b reads the state in the entry of token a - 1, if a is not 0, and writes
    it to the entry of token b - 1.
    """

    _cache: GroupedCache
    _message: Acquire

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._parts: list[GroupLease] = []

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

    def _give_up_parts(self) -> None:
        for part in self._parts:
            part.lease.abandon()

    async def _follow(self, before: int) -> None:
        """Have the items that the lease needs now. If there is no room for them, the lease has
        `before` tokens again, and blocks for no others."""
        try:
            for part in self._parts:
                await part.follow(self)
        except NoRoom as error:
            try:
                await super().truncate(before)
                for part in self._parts:
                    await part.follow(self)
            except KVActorsError:
                self.abandon()
            raise error
        except BaseException:
            self.abandon()
            raise

    # -- loads

    async def wait_ready(
        self, *, stream: Stream | None = None, deadline: float | None = None
    ) -> None:
        """See `Lease.wait_ready`. If a group lacks an item after all, nothing of the request is
        cached, and it gets other device blocks."""
        pending = self.pending
        await super().wait_ready(stream=stream, deadline=deadline)
        for part in self._parts:
            await part.lease.wait_ready(stream=stream, deadline=deadline)
        if pending and not (self.pending or self._is_whole()):
            await self._acquire_again(deadline)

    def _is_whole(self) -> bool:
        """Whether every group has what the cached tokens need."""
        return self.cached_tokens == (self._message.most or 0) * self._path.block_size and all(
            part.lease.cached_tokens == part.hits * part.group.words for part in self._parts
        )

    async def _acquire_again(self, deadline: float | None) -> None:
        cache, at = self._cache, self._handle.context.begin_call(deadline)
        self.abandon()
        path = again(self._path)
        lease = next(cache._leases)
        message = replace(self._message, lease=lease, path=path, most=0, deadline=at)
        made = await cache._grant_all(replace(message, wait_for_room=True), 0)
        self.__dict__.update(made.__dict__)
        del made.__dict__["_handle"]  # its finaliser must not end the lease

    async def wait_layer(
        self, layer: int, *, stream: Stream | None = None, deadline: float | None = None
    ) -> int:
        """See `Lease.wait_layer`: a layer of `[layout]`. The other groups are waited for whole."""
        for part in self._parts:
            await part.lease.wait_ready(deadline=deadline)
        cached = await super().wait_layer(layer, stream=stream, deadline=deadline)
        if any(part.lease.cached_tokens < part.hits * part.group.words for part in self._parts):
            await self.wait_ready(deadline=deadline)
            return self.cached_tokens
        return cached

    # -- tokens and blocks

    async def extend(self, tokens: Tokens, **options: Any) -> tuple[int, ...]:
        """See `Lease.extend`."""
        before = self.num_tokens
        blocks = await super().extend(tokens, **options)
        await self._follow(before)
        return blocks

    async def next_chunk(
        self, num_tokens: int, *, deadline: float | None = None
    ) -> tuple[int, ...]:
        """See `Lease.next_chunk`."""
        blocks = await super().next_chunk(num_tokens, deadline=deadline)
        await self._follow(self.num_tokens)
        return blocks

    async def reserve(self, num_tokens: int, *, deadline: float | None = None) -> tuple[int, ...]:
        """See `Lease.reserve`."""
        blocks = await super().reserve(num_tokens, deadline=deadline)
        await self._follow(self.num_tokens)
        return blocks

    async def truncate(self, num_tokens: int, *, deadline: float | None = None) -> tuple[int, ...]:
        """See `Lease.truncate`. A state cannot go back: the caller has one of before, or computes
        again from `cached_tokens` of a new lease."""
        dropped = await super().truncate(num_tokens, deadline=deadline)
        await self._follow(num_tokens)
        return dropped

    async def fork_many(
        self, count: int, request_ids: Sequence[str] | None = None, **options: Any
    ) -> tuple[Self, ...]:
        """See `Lease.fork_many`."""
        forks = await super().fork_many(count, request_ids, **options)
        try:
            for fork in forks:
                fork._cache, fork._message = self._cache, self._message
            names = [fork.request_id for fork in forks]
            waits = {key: one for key, one in options.items() if key not in ("event", "stream")}
            for part in self._parts:
                made = await part.lease.fork_many(count, names, **waits)
                for fork, lease in zip(forks, made, strict=True):
                    fork._parts.append(part.forked(lease))
        except BaseException:
            for fork in forks:
                fork.abandon()
            raise
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
        done = await super().commit(computed_tokens, event=event, stream=stream, deadline=deadline)
        await self._commit_parts_of(computed_tokens)
        return done

    async def _commit_parts_of(self, computed: int) -> None:
        try:
            for part in self._parts:
                await part.commit(self, computed)
        except BaseException:
            self.abandon()
            raise

    async def _end(
        self,
        message: Finish | Preempt,
        event: Completion | None,
        stream: Stream | None,
        deadline: float | None,
    ) -> Ack:
        reply = await super()._end(message, event, stream, deadline)
        try:
            for part in self._parts:
                await part.finish(self, message.computed_tokens)
        except KVActorsError as error:  # its items are not cached
            log.warning("group of layers lost a request", error=str(error))
        finally:
            self._give_up_parts()
        return reply

    def abandon(self, *, event: Completion | None = None, stream: Stream | None = None) -> None:
        """See `Lease.abandon`."""
        if not self._handle.ended and (event is not None or stream is not None):
            self._handle.context.check_thread()
            self._cache.record_pass([self], event=event, stream=stream)
        super().abandon()
        self._give_up_parts()

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        try:
            await super().__aexit__(kind, error, trace)
        finally:
            self._give_up_parts()


class GroupedCache(KVCache):
    """A `KVCache` whose model has several groups of layers (`cache.groups` of the settings).

    `free_blocks`, quotas, pins and `check_slices` are of the layers of `[layout]`. `groups` has the
    cache of every other group by name, with its own.
    """

    _LEASE: ClassVar[type[Lease]] = GroupedLease

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

    # -- requests

    def _longest(self, path: Path, scope: Any, media: Any) -> tuple[PromptHits, int]:
        """What the tiers hold of a prompt, and how many leading blocks every group can serve."""
        media = () if self._split_media else media
        hits: PromptHits = finish(hits_of(self.system, path, scope.salt, media))
        blocks, index = hits.blocks, self.system.index_actor.index
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
            made = await self._grant_all(replace(message, most=most if left else 0), known.blocks)
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
        try:
            for group in self.layer_groups:
                lease._parts.append(await self._grant_part(group, lease, message, known))
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
        cached = list(range(max(0, hit - group.span), hit))
        part = GroupLease(group, cached, cached[0] if cached else hit, marks)
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
        if len(part.blocks) > len(part.lease._table):
            try:
                await part.follow(lease)
            except BaseException:
                part.lease.abandon()
                raise
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

    async def step(
        self,
        steps: Sequence[Step],
        *,
        event: Completion | None = None,
        stream: Stream | None = None,
        deadline: float | None = None,
    ) -> list[Stepped]:
        """See `KVCache.step`."""
        befores = [getattr(step.lease, "num_tokens", 0) for step in steps]
        done = await super().step(steps, event=event, stream=stream, deadline=deadline)
        for row, (step, before) in enumerate(zip(steps, befores, strict=True)):
            lease: Any = step.lease
            if done[row].error is not None:
                continue
            try:
                if lease.num_tokens // self.block_size != before // self.block_size or (
                    done[row].blocks
                ):
                    await lease._follow(before)
                if step.computed_tokens is not None:
                    await lease._commit_parts_of(step.computed_tokens)
            except KVActorsError as error:
                done[row] = Stepped(error=error)
        return done

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
            needed = range(max(0, blocks - group.span), blocks)
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
        done = await super().clear(**options)
        for cache in self._all:
            more = await cache.clear(**options)
            done = Cleared(*(a + b for a, b in zip(done, more, strict=True)))
        return done

    async def pause(self, *, deadline: float | None = None) -> None:
        """See `KVCache.pause`."""
        await super().pause(deadline=deadline)
        for cache in self._all:
            await cache.wait_idle(cache.config.cache.default_deadline_s)

    async def set_namespace(self, namespace: str, *, deadline: float | None = None) -> None:
        """See `KVCache.set_namespace`."""
        await super().set_namespace(namespace, deadline=deadline)
        for cache in self._all:
            await cache.set_namespace(namespace, deadline=deadline)

    async def wait_idle(self, deadline: float = 30.0) -> None:
        """See `KVCache.wait_idle`."""
        for cache in self._all:
            await cache.wait_idle(deadline)
        await super().wait_idle(deadline)

    async def wait_flushed(
        self, deadline: float = 30.0, *, at_rest: bool = True, sinks: Collection[str] | None = None
    ) -> None:
        """See `KVCache.wait_flushed`."""
        await super().wait_flushed(deadline, at_rest=at_rest, sinks=sinks)
        for cache in self._all:
            own = None if sinks is None else [name for name in sinks if name in cache.sinks]
            await cache.wait_flushed(deadline, at_rest=at_rest, sinks=own)

    def count_divergent_blocks(self, sinks: Collection[str] | None = None) -> int:
        """See `KVCache.count_divergent_blocks`."""
        found = super().count_divergent_blocks(sinks)
        for cache in self._all:
            own = None if sinks is None else [name for name in sinks if name in cache.sinks]
            found += cache.count_divergent_blocks(own)
        return found

    async def sleep(self, level: int = 1, *, deadline: float | None = None) -> None:
        """See `KVCache.sleep`."""
        self._context.begin_call(deadline)
        for name, cache in self.groups.items():
            if not getattr(cache.system.plane, "owns_device", False):
                raise SleepUnsupported(f"the device of the group {name!r} is the engine's")
        await super().sleep(level, deadline=deadline)
        for cache in self._all:
            await cache.sleep(level, deadline=deadline)

    async def wake(self, device: Device | None = None, *, deadline: float | None = None) -> None:
        """See `KVCache.wake`."""
        for cache in self._all:
            await cache.wake(deadline=deadline)
        await super().wake(device, deadline=deadline)

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
        storage=replace(storage, min_fetch_blocks=1),
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
