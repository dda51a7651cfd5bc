"""Device blocks, their index, and the tiers and indexes that follow its changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvactors.actor.log import get_logger
from kvactors.errors import CacheClosed, ConfigError, KVActorsError, NoRoom, StoreError
from kvactors.flush_notifier.messages import PathCached
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.identity import PLAIN, CacheScope
from kvactors.integrations.fastdeploy.lower_tiers import EngineTiers, LowerTiers
from kvactors.integrations.fastdeploy.requests import EngineBlocks, RequestRecord, block_ids
from kvactors.native import BlockTree, Path
from kvactors.storage.device_store import DeviceStore
from kvactors.tier_cache.sinks import SinkFeed, SinkService
from kvactors.tier_cache.storage_loop import LoopThread
from kvactors.types import Reason, Tier, split_hashes

log = get_logger()


class IndexReports:
    """Keeps sinks informed of blocks, on an event loop in a separate thread. No call waits for a
    sink. `num_blocks`: that device and host hold at most."""

    def __init__(
        self,
        sinks: Sequence[Sink],
        scope: CacheScope,
        fingerprint: bytes,
        block_size: int,
        num_blocks: int,
    ) -> None:
        tiers = (Tier.DEVICE, Tier.HOST, Tier.STORAGE)
        feed = self.feed = SinkFeed(tiers, block_size, scope, fingerprint, num_blocks)
        feed.token_root = scope.root(fingerprint)
        service = self.service = SinkService(feed, sinks)
        thread = self.thread = LoopThread([service])
        feed.wake = lambda: thread.call(service.take)

    def added(self, record: RequestRecord, count: int) -> None:
        """The last `count` blocks of a request are on the device."""
        path, start, stop = record.path, record.num_cached - count, record.num_cached
        self._announce(record, start, Reason.COMMIT)  # before they are described: not finished yet
        self.feed.record(Tier.DEVICE, True, self.describe(path, start, stop), Reason.COMMIT)

    def describe(self, path: Path, start: int, stop: int) -> list[bytes]:
        """Blocks of a path come to a tier. Returns their hashes."""
        keys = split_hashes(path.hashes(start, stop))
        parent = path.hashes(start - 1, start) if start else None
        extra_keys = {i - start: extra for i, extra in path.extra_keys(start, stop)}
        self.feed.describe(keys, path.tokens(start, stop), parent, PLAIN, extra_keys)
        return keys

    def finished(self, record: RequestRecord) -> None:
        if record.num_cached:
            self._announce(record, 0, Reason.REQUEST_FINISH)

    def _announce(self, record: RequestRecord, start: int, reason: Reason) -> None:
        path, stop = record.path, record.num_cached
        self.feed.put(
            PathCached(
                root=path.root,
                tokens=path.tokens(start, stop),
                hashes=path.hashes(start, stop),
                start=start,
                count=stop - start,
                tier=Tier.DEVICE,
                reason=reason,
                parent=path.hashes(start - 1, start) if start else path.root,
                scope=PLAIN,
                extra_keys=path.extra_keys(start, stop),
            )
        )

    def removed(self, hashes: bytes, reason: Reason) -> None:
        self.feed.record(Tier.DEVICE, False, split_hashes(hashes), reason)


MARGIN = 5.0  # of a call beyond its limit: it ends itself before
SLICE_S = 0.01  # seconds between two looks at whether a wait is to end

Move = Callable[[DeviceStore], Coroutine[Any, Any, int]]
"""A call of the store of one rank. Returns the blocks that it has moved."""


class CallInFlight(TimeoutError):
    """A call has not returned in time. It may access the device blocks until `answer` is done."""

    def __init__(self, answer: Future[int]) -> None:
        super().__init__("a call of AttentionStore does not return")
        self.answer = answer


class DirectStorage:
    """Reads and writes device blocks through the `DeviceStore` of each rank, from any thread. A
    block counts as moved when every rank has moved its part of it. While a call that raised
    CallInFlight has not returned, the next ones move nothing.

    The stores work on the event loop of `thread`, whose `Service` this is.
    """

    def __init__(self, stores: Sequence[DeviceStore], timeout_s: float) -> None:
        self.thread = LoopThread([self])
        self._stores = stores
        self._timeout_s = timeout_s
        self._calls: set[asyncio.Task[int]] = set()
        self._late: list[Future[int]] = []

    # -- on the event loop

    async def open(self) -> None:
        try:
            for store in self._stores:
                await store.open()
        except BaseException:
            await self.close(0.0)
            raise

    def _begin(self, move: Move, answer: Future[int]) -> None:
        task = asyncio.ensure_future(self._move(move))
        self._calls.add(task)
        task.add_done_callback(partial(self._ended, answer))

    async def _move(self, move: Move) -> int:
        moved = await asyncio.gather(*map(move, self._stores), return_exceptions=True)
        for one in moved:
            if isinstance(one, BaseException):
                raise one
        return min(one for one in moved if isinstance(one, int))

    def _ended(self, answer: Future[int], task: asyncio.Task[int]) -> None:
        self._calls.discard(task)
        if task.cancelled():  # before its first step too
            answer.set_exception(CacheClosed("AttentionStore is closed"))
        elif error := task.exception():
            known = isinstance(error, KVActorsError)
            answer.set_exception(error if known else StoreError(f"AttentionStore: {error!r}"))
        else:
            answer.set_result(task.result())

    async def close(self, limit: float) -> None:
        if self._calls:
            await asyncio.wait(self._calls, timeout=limit)
        for task in list(self._calls):
            task.cancel()
        for store in self._stores:
            await store.close()

    # -- any thread

    @property
    def troubles(self) -> tuple[str, ...]:
        stuck = any(not answer.done() for answer in self._late)
        return ("a call of AttentionStore does not return",) if stuck else ()

    def fetch(
        self, tokens: bytes, start: int, blocks: list[int], interrupted: Callable[[], bool]
    ) -> int:
        """Read blocks of a path into device blocks. See `DeviceStore.fetch`."""
        return self._run(
            lambda store: store.fetch(tokens, start, tuple(blocks), self._timeout_s), interrupted
        )

    def save(self, tokens: bytes, start: int, blocks: list[int]) -> int:
        return self._run(
            lambda store: store.save(tokens, start, tuple(blocks), self._timeout_s), lambda: False
        )

    def _run(self, move: Move, interrupted: Callable[[], bool]) -> int:
        if self.troubles:  # the next calls would wait for this one
            return 0
        answer: Future[int] = Future()
        if not self.thread.call(self._begin, move, answer):
            raise CacheClosed("AttentionStore is closed")
        until = time.monotonic() + self._timeout_s + MARGIN
        while not wait([answer], SLICE_S).done:
            if time.monotonic() < until and not interrupted():
                continue
            self._late = [*(one for one in self._late if not one.done()), answer]
            raise CallInFlight(answer)
        return answer.result()


@dataclass
class PrefixMatch:
    """The blocks of a request that need not be computed, in the order of its path: device blocks,
    by the tier that had their bytes, and the seconds for which the call waited."""

    gpu: list[int] = field(default_factory=list)
    cpu: list[int] = field(default_factory=list)
    storage: list[int] = field(default_factory=list)
    cpu_seconds: float = 0.0
    storage_seconds: float = 0.0

    def metrics(self, block_size: int) -> dict[str, Any]:
        """The dictionary that FastDeploy's scheduler reads, and changes."""
        return {
            "gpu_match_token_num": len(self.gpu) * block_size,
            "cpu_match_token_num": len(self.cpu) * block_size,
            "storage_match_token_num": len(self.storage) * block_size,
            "match_gpu_block_ids": self.gpu,
            "gpu_recv_block_ids": self.cpu,
            "match_storage_block_ids": self.storage,
            "cpu_cache_prepare_time": self.cpu_seconds,
            "storage_cache_prepare_time": self.storage_seconds,
        }


class DeviceCache:
    """The cached blocks of one engine: a block tree, and the requests that hold its blocks."""

    def __init__(self, total: int, block_size: int) -> None:
        self.blocks = EngineBlocks(total)
        self.requests: dict[str, RequestRecord] = {}
        self.lower: EngineTiers | None = None
        self.direct: DirectStorage | None = None
        self.reports: IndexReports | None = None
        self.interrupted: Callable[[], bool] = lambda: False
        self._block_size = block_size
        self._plant()
        self._leaving: list[RequestRecord] = []  # released, with writes to storage in flight
        self._forgotten: set[str] = set()  # by a reset, and not released since
        self._late: list[tuple[Future[int], list[int]]] = []  # lost blocks of calls

    def _plant(self) -> None:
        self.tree = BlockTree(self._block_size, self.blocks.total, touch=False)

    # -- writes to storage: any thread

    def begin_write(self, request: str) -> RequestRecord | None:
        """The record of a request, whose blocks stay until its entry in `writers` is removed. None
        if it holds nothing. A release that comes between the two look-ups is seen by one of them,
        or sees the writer."""
        record = self.requests.get(request)
        if record is None:
            return None
        record.writers.append(None)
        if self.holds(record):
            return record
        record.writers.pop()
        return None

    def holds(self, record: RequestRecord) -> bool:
        """Whether the request goes on, with blocks of the weights of now."""
        return self.requests.get(record.request) is record and not record.tree.retired

    # -- calls with the engine's lock: requests

    def open(self, record: RequestRecord) -> None:
        self._forgotten.discard(record.request)
        self.requests[record.request] = record

    def named(self, request: str) -> RequestRecord | None:
        """The record of a request, None if a reset has forgotten it. LookupError without one."""
        found = self.requests.get(request)
        if found is None and request not in self._forgotten:
            raise LookupError(f"request {request!r} holds nothing: call request_match_blocks first")
        return found

    def uncommitted(self, record: RequestRecord, table: Sequence[int], full: int) -> list[int]:
        """The blocks of a request's table that are not cached, of the `full` first ones."""
        start = record.num_cached
        if full <= start:
            return []
        if len(table) < full:
            raise ValueError(
                f"the block table of request {record.request!r} has {len(table)} blocks, and "
                f"{full} are full"
            )
        own = block_ids("a block id", table[start:full])
        self.blocks.check_held(own, record.request)
        return own

    def commit(self, record: RequestRecord, own: Sequence[int]) -> None:
        """Cache the next blocks of a request, which has their tokens. They stay the engine's if the
        tree was forgotten: the bytes may be of other weights."""
        if not record.tree.retired:
            self.blocks.enter(own)
            self._enter(record, own)

    def _enter(self, record: RequestRecord, blocks: Sequence[int]) -> None:
        added = record.enter(blocks)
        if added and self.reports is not None:
            self.reports.added(record, added)

    def release(self, request: str) -> None:
        """A request holds nothing any more: its blocks are free when its writes have ended."""
        self._forgotten.discard(request)
        record = self.requests.pop(request, None)
        if record is not None:
            self._leaving.append(record)
        self.settle()

    def settle(self) -> None:
        """A call of the engine begins: free what ended writes and late calls have held."""
        for record in [one for one in self._leaving if not one.writers]:
            self._leaving.remove(record)
            if self.reports is not None and record.finished and not record.tree.retired:
                self.reports.finished(record)
            self.blocks.push(record.tree.release(record.path))
        for late in [one for one in self._late if one[0].done()]:
            self._late.remove(late)
            self.blocks.lost.difference_update(late[1])
            self.blocks.push(late[1])

    # -- matches: they bring the blocks of the tiers below to the device

    def match(self, record: RequestRecord) -> PrefixMatch:
        """Let a request hold the leading blocks of its path that are cached. Loads have ended when
        this returns. After an error nothing is held: NoRoom if blocks in host memory do not fit,
        DeviceError if a copy does not end, whose blocks are lost."""
        self.tree.pin(record.path)
        found = PrefixMatch(gpu=record.blocks)
        try:
            if isinstance(self.lower, LowerTiers):
                self._load(self.lower, record, found)
            self._fetch(record, found)
        except BaseException:
            self.blocks.push(self.tree.release(record.path))
            raise
        finally:
            self.report_moves()
        return found

    def _load(self, lower: LowerTiers, record: RequestRecord, found: PrefixMatch) -> None:
        lower.enter()
        hashes = split_hashes(record.path.hashes(0, record.path.num_full_blocks))
        try:
            while left := hashes[record.num_cached :]:
                if not self._load_some(lower, record, left, found):
                    break
                lower.tiers.end_step()
        finally:
            lower.tiers.end_step()

    def _load_some(
        self, lower: LowerTiers, record: RequestRecord, hashes: Sequence[bytes], found: PrefixMatch
    ) -> bool:
        """Load as many blocks as there are host slots. Returns whether there may be more."""
        sources, seconds = lower.find(hashes, found.storage_seconds, self.interrupted)
        found.storage_seconds += seconds
        available = self.available
        if len(sources) > available and sources[available] is Tier.HOST:
            raise NoRoom(len(sources), available)
        count = min(len(sources), available)  # stored blocks that do not fit are misses
        if not count:
            return False
        keys, begun = hashes[:count], time.monotonic()
        lower.tiers.touch(keys)
        slots = lower.tiers.prepare_load(keys)
        try:
            self.make_room(count)
            blocks = self.blocks.pop(count)
        except BaseException:
            lower.tiers.complete_load(keys)
            raise
        try:
            error = lower.copies.load(blocks, slots)
            lower.tiers.complete_load(keys)
        except BaseException:
            self.blocks.lost.update(blocks)
            raise
        if error:
            log.error("blocks not loaded from host memory", blocks=count, error=error)
            self.blocks.push(blocks)
            return False
        seconds = time.monotonic() - begun
        if Tier.STORAGE in sources[:count]:
            found.storage_seconds += seconds
        else:
            found.cpu_seconds += seconds
        self._enter(record, blocks)
        for source, block in zip(sources, blocks, strict=False):
            (found.storage if source is Tier.STORAGE else found.cpu).append(block)
        return count == len(sources)

    def _fetch(self, record: RequestRecord, found: PrefixMatch) -> None:
        """Read blocks from AttentionStore, which finds them by tokens: not those with media."""
        direct, start = self.direct, record.num_cached
        count = min(record.path.num_full_blocks - start, self.available)
        if direct is None or record.has_media or count < 1 or self.interrupted():
            return
        self.make_room(count)
        blocks = self.blocks.pop(count)
        begun = time.monotonic()
        try:
            tokens = record.path.tokens(0, start + count)
            got = direct.fetch(tokens, start, blocks, self.interrupted)
        except CallInFlight as late:
            log.error("AttentionStore does not answer: blocks not used", blocks=count)
            self.blocks.lost.update(blocks)  # the SDK may write them before it returns
            self._late.append((late.answer, blocks))
            return
        except KVActorsError as error:
            log.error("AttentionStore not read", error=str(error))
            got = 0
        found.storage_seconds += time.monotonic() - begun
        self.blocks.push(blocks[got:])
        found.storage = blocks[:got]
        self._enter(record, found.storage)

    # -- room

    @property
    def evictable(self) -> int:
        return self.tree.statistics()["evictable"]

    @property
    def available(self) -> int:
        return len(self.blocks.free) + self.evictable

    def make_room(self, count: int) -> bool:
        """Evict until `count` blocks are free. Nothing is evicted if that is not possible."""
        lacking = count - len(self.blocks.free)
        if lacking <= 0:
            return True
        if lacking > self.evictable:
            return False
        self.evict(lacking)
        return True

    def evict(self, count: int) -> None:
        """Evict blocks, at most `count`. Their bytes are in host memory before another request can
        get them. They are lost if the copy does not end (DeviceError)."""
        lower, reports = self.lower, self.reports
        named = lower is not None or reports is not None
        count = min(max(0, count), self.evictable)
        nodes, hashes, parents, blocks, *_ = self.tree.evict(count, named)
        if not blocks:
            return
        none_on_host = bytes(len(blocks))  # the tree does not follow the host tier
        try:
            if lower is not None:
                lower.enter()
                lower.keep(split_hashes(hashes), split_hashes(parents), blocks)
        except BaseException:
            self.blocks.lost.update(self.tree.finish_offload(nodes, none_on_host)[0])
            raise
        self.blocks.push(self.tree.finish_offload(nodes, none_on_host)[0])
        self.report_moves()
        if reports is not None:
            kept = lower is not None and lower.slots > 0
            reports.removed(hashes, Reason.DEVICE_EVICTION if kept else Reason.DEVICE_DROP)

    def report_moves(self) -> None:
        if self.reports is not None and self.lower is not None:
            for event in self.lower.tiers.take_events():
                self.reports.feed.record(event.tier, event.stored, event.keys, event.reason)

    def reset(self) -> None:
        """Forget every block of device and host, and every request. Stored objects stay. Blocks
        that are written to storage are free when the writes have ended."""
        self._forgotten.update(self.requests)
        self._leaving += self.requests.values()
        self.requests.clear()
        self.forget()
        self.blocks.reset()

    def forget(self) -> None:
        """Forget every block of device and host. Requests keep theirs, and no further blocks of
        them are cached: the next ones may be of other weights."""
        gone = b"" if self.reports is None else self.tree.device_hashes()
        self.tree.retire()
        self.blocks.push(self.tree.sweep(self.blocks.total))
        self.settle()
        self._plant()
        if self.lower is not None:
            self.lower.enter()
            self.lower.tiers.reset()
        self.report_moves()
        if self.reports is not None:
            self.reports.removed(gone, Reason.CLEAR)
            self.reports.feed.flush()

    def resize(self, total: int) -> None:
        blocks = self.blocks
        if total == blocks.total:
            return
        if used := blocks.total - len(blocks.free):
            raise ConfigError(
                f"total_block_num is {blocks.total} and cannot become {total}: {used} blocks are "
                "in use"
            )
        blocks.resize(total)
        self._plant()
