"""FastDeploy's v1 `CacheManager`, in the scheduler's process (ENABLE_V1_KVCACHE_MANAGER=1).

The workers copy: this side only decides. A worker makes the copies of a step before it computes,
evictions first, and begins a step when the copies of the one before have ended. So a block or a
slot may change hands between two steps of the scheduler, and never within one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from kvactors.errors import CacheClosed
from kvactors.integrations.fastdeploy.lower_tiers import MARGIN, EngineTiers
from kvactors.integrations.fastdeploy.manager import BlockManager, log
from kvactors.integrations.fastdeploy.requests import (
    RequestRecord,
    block_ids,
    computed_tokens,
    name_of,
    rounded_up,
    sequence_of,
    whole,
)
from kvactors.integrations.fastdeploy.settings import FastDeployOptions, read_settings
from kvactors.integrations.fastdeploy.v1_storage import (
    PendingPrefetch,
    StorageMetadata,
    open_rank_storage,
)
from kvactors.layout import make_layout
from kvactors.tier_cache import SlotMemory, StorageTier, TierCache, TierConfig
from kvactors.tier_cache.cache import leading_keys
from kvactors.types import split_hashes


@dataclass
class SwapMetadata:
    """Copies that a request or a batch carries to the workers, with the attributes of FastDeploy's
    `CacheSwapMetadata`: pairs of blocks on the device and on the host, and their hashes in hex."""

    src_type: str
    dst_type: str
    src_block_ids: list[int] = field(default_factory=list)
    dst_block_ids: list[int] = field(default_factory=list)
    hash_values: list[str] = field(default_factory=list)
    success: bool = False
    error_message: str | None = None

    def add(self, sources: Sequence[int], targets: Sequence[int], keys: Sequence[bytes]) -> None:
        self.src_block_ids += sources
        self.dst_block_ids += targets
        self.hash_values += [key.hex() for key in keys]


class MatchResult(NamedTuple):
    """What a match has found: device blocks, and blocks of the host, which come to the device with
    the request's next blocks. Those of storage are on the host after a prefetch."""

    device_block_ids: list[int]
    matched_device_nums: int = 0
    matched_host_nums: int = 0
    matched_storage_nums: int = 0
    total_matched_blocks: int = 0


class WorkerSlots(EngineTiers):
    """The table of the workers' host blocks. Slots of a step's copies stay until the step ends."""

    def __init__(self, num_slots: int, *, model: str, events: bool, keeps: bool) -> None:
        table = TierConfig(
            model=model, block_bytes=1, num_slots=num_slots, events=("host",) if events else ()
        )
        # the bytes are in the workers: the memory of this cache is never accessed
        super().__init__(TierCache(table, SlotMemory(num_slots, 1, stride=1)), num_slots)
        self.keeps = keeps  # whether evicted blocks are kept
        self.loads: list[bytes] = []
        self.copies: Counter[int] = Counter()  # to and from each slot
        self.arrived: set[bytes] = set()  # from storage, and not matched since
        self._reads: dict[int, bytes] = {}  # by slot
        self._stores: list[bytes] = []
        self._begun = SwapMetadata("device", "host")

    def keep(self, keys: Sequence[bytes], parents: Sequence[bytes], blocks: Sequence[int]) -> None:
        if self.keeps:
            self.store(keys[::-1], parents[::-1], blocks[::-1])

    def store(self, keys: Sequence[bytes], parents: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Begin copies of blocks to host slots, of as many as there are slots for."""
        of_key = dict(zip(keys, blocks, strict=True))
        found = self.tiers.prepare_store(keys, parents)
        self.copies.update(found.slots)
        self._begun.add([of_key[key] for key in found.keys], found.slots, found.keys)
        self._stores += found.keys

    def take_stores(self) -> list[SwapMetadata]:
        """The copies begun since the last call, if there are any."""
        begun, self._begun = self._begun, SwapMetadata("device", "host")
        return [begun] if begun.src_block_ids else []

    def begin_reads(self, keys: Sequence[bytes], parents: Sequence[bytes]) -> StorageMetadata:
        """Take slots for blocks from storage, as many as there are."""
        found = self.tiers.prepare_store(keys, parents)
        self._reads.update(zip(found.slots, found.keys, strict=True))
        return StorageMetadata(
            [key.hex() for key in found.keys],
            list(found.slots),
            extra_params={"copies": [self.copies[slot] for slot in found.slots]},
        )

    def end_reads(self, slots: Sequence[int], *, success: bool) -> None:
        keys = [self._reads.pop(slot) for slot in slots if slot in self._reads]
        if len(keys) < len(slots):
            log.warning("host blocks without a prefetch", blocks=len(slots) - len(keys))
        self.enter()
        self.tiers.complete_store(keys, success=success)
        if success and len(self.arrived) < self.slots:  # else most of them have left
            self.arrived.update(keys)

    def end_step(self) -> None:
        """Later steps come after the copies that this step has begun."""
        self.enter()
        self.tiers.complete_store(self._stores)
        self.tiers.complete_load(self.loads)
        self._stores, self.loads = [], []
        self.tiers.end_step()


class CacheManager(BlockManager):
    """Device blocks, prefix index and host blocks of one FastDeploy engine, for schedulers in v1
    mode. Copies are metadata on the requests, which `CacheController` makes in each worker.

    Args:
        config: FastDeploy's `FDConfig`, or an object with the same attributes.
        gauges: FastDeploy's `main_process_metrics`.
        environ: variables, the process's environment if None.

    Raises:
        ConfigError: a role other than mixed, AttentionStore as storage, or another setting that
            cannot be honoured.
        StoreError: storage cannot be used.
    """

    def __init__(
        self,
        config: Any,
        *,
        options: FastDeployOptions | Mapping[str, Any] | None = None,
        gauges: Any = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        settings = read_settings(config, None, None, None, options, environ, v1=True)
        super().__init__(settings, gauges)
        self.block_size, sinks = settings.block_size, settings.config.flush.sinks
        self.enable_prefix_caching = settings.cache.enable_prefix_caching
        self.enable_host_cache = self.num_cpu_blocks > 0
        self._backs_up = settings.cache.write_policy != "write_back"
        self._scheduled: dict[str, tuple[RequestRecord, Any]] = {}  # may have blocks to commit
        self._held: list[RequestRecord] = []  # scheduled in this step
        self._finished: list[RequestRecord] = []  # to be backed up
        self._uses: Counter[bytes] = Counter()  # matches of each block
        self._slots: WorkerSlots | None = None
        if self.enable_host_cache:
            model, keeps = settings.config.cache.model, not self._backs_up
            slots = WorkerSlots(self.num_cpu_blocks, model=model, events=bool(sinks), keeps=keeps)
            self._slots = self._cache.lower = slots
        self._storage: StorageTier | None = None
        self._lookups = count()
        self._prefetches: list[PendingPrefetch] = []
        if settings.options.layout:
            self._layout = make_layout(settings.config.layout, self.block_size)
            try:
                if settings.storage.backend != "none":
                    self._storage = open_rank_storage(settings, self._layout, 0, gives=False)
                self._open_services()
            except BaseException:
                self._close_tiers()
                raise

    def _open_services(self) -> None:
        if self._layout is not None:
            self._open_reports(self._layout, None)

    # -- numbers

    @property
    def num_free_device_blocks(self) -> int:
        return len(self._cache.blocks.free)

    @property
    def num_free_host_blocks(self) -> int:
        if self._slots is None:
            return 0
        found = self._slots.tiers.statistics()
        return found.slots - found.resident

    def can_allocate_device_blocks(self, num: float) -> bool:
        """Whether so many device blocks, rounded up, are free or can be evicted."""
        count = rounded_up("num", num)
        with self._turn():
            self._cache.settle()
            return count <= self._cache.available

    can_allocate_gpu_blocks = can_allocate_device_blocks

    def get_stats(self) -> dict[str, Any]:
        """Sizes of now, under FastDeploy's names."""
        names = {"total_blocks": "num_blocks", "used_blocks": "used", "free_blocks": "available"}
        tree = self._cache.tree.statistics()
        sizes: dict[str, Any] = {
            f"{level}_pool": {name: sizes[one] for one, name in names.items()}
            for level, sizes in self.get_memory_usage().items()
        }
        counts = ("num_gpu_blocks", "num_cpu_blocks", "block_size")
        for name in (*counts, "num_free_device_blocks", "num_free_host_blocks"):
            sizes[name] = getattr(self, name)
        sizes["radix_tree"] = {
            "node_count": tree["nodes"],
            "evictable_device_count": tree["evictable"],
        }
        storage = self._storage is not None
        return sizes | {"initialized": not self._closed, "storage_enabled": storage}

    def get_memory_usage(self) -> dict[str, dict[str, float]]:
        """Blocks of each level, under FastDeploy's names."""
        device = (self.num_gpu_blocks, self.num_free_device_blocks)
        host = (self.num_cpu_blocks, self.num_free_host_blocks)
        return {
            level: {
                "total_blocks": total,
                "used_blocks": total - free,
                "free_blocks": free,
                "usage_percent": 100 * (total - free) / total if total else 0,
            }
            for level, (total, free) in (("device", device), ("host", host))
        }

    # -- requests

    def match_prefix(self, request: Any, skip_storage: bool = True) -> None:
        """Match a request's tokens with the cache, and set `request._match_result`. The request
        holds what was found until `request_finish`. Blocks of an earlier match are released first.

        Args:
            skip_storage: has no effect: `prefetch_storage` looks blocks up.

        Raises:
            TypeError, ValueError: tokens or media are malformed. Nothing changed.
            ConfigError: the version of the weights cannot be read.
        """
        request._match_result = MatchResult([])
        if not self.enable_prefix_caching:
            return
        with self._turn():
            name, cache, slots = name_of(request), self._cache, self._slots
            self._commit_scheduled()
            root = self._root()  # may forget the tree
            record = RequestRecord(name, request, cache.tree, root)
            self._drop(name)
            cache.tree.pin(record.path)
            cache.open(record)
            blocks, size = record.blocks, self.block_size
            keys = split_hashes(record.path.hashes(0, record.path.num_full_blocks))
            if slots is not None:
                slots.enter()
                found, _ = leading_keys(slots.tiers, keys[len(blocks) :])
                record.host = keys[len(blocks) :][:found]
                slots.tiers.touch(record.host)
                record.host_slots = slots.tiers.prepare_load(record.host)
            device, host = len(blocks), len(record.host)
            self._uses.update(keys[: device + host])
            stored = 0
            if slots is not None:
                stored = len(slots.arrived.intersection(record.host))
                slots.arrived.difference_update(record.host)
            tokens = (device * size, (host - stored) * size, stored * size)
            self.metrics.matched(*tokens, record.path.num_tokens)
            request._match_result = MatchResult(blocks, device, host, 0, device + host)

    def allocate_device_blocks(self, request: Any, num_blocks: int) -> list[int]:
        """Take device blocks for a request, after an eviction if need be. The first ones get the
        blocks that its match has found on the host (`request.cache_swap_metadata`). Copies of
        evicted blocks are in `request.cache_evict_metadata`.

        Returns:
            As many blocks, or none if fewer are free and evictable: nothing changed.
        """
        count = max(0, whole("num_blocks", num_blocks))
        with self._turn():
            name, cache = name_of(request), self._cache
            cache.settle()
            if not cache.make_room(count):
                return []
            if self._slots is not None:
                request.cache_evict_metadata += self._slots.take_stores()
            blocks = cache.blocks.take(count, name)
            record = cache.requests.get(name)
            if record is not None:
                self._commit(record, request)  # what earlier steps have computed
                if loads := self._load(record, blocks):
                    request.cache_swap_metadata.append(loads)
                record.writers.append(None)  # this step's work on its blocks comes later
                self._held.append(record)
                self._scheduled[name] = (record, request)
            return blocks

    allocate_gpu_blocks = allocate_device_blocks

    def _load(self, record: RequestRecord, blocks: list[int]) -> SwapMetadata | None:
        """Load a match's blocks of the host into the first device blocks. Those without one, since
        the scheduler has taken fewer, are computed."""
        slots, keys, places = self._slots, record.host, record.host_slots
        record.host, record.host_slots = [], []
        count = min(len(keys), len(blocks))
        if slots is not None:
            slots.copies.update(places[:count])
            slots.loads += keys[:count]
            slots.tiers.complete_load(keys[count:])
        if not count:
            return None
        self._cache.commit(record, blocks[:count])
        loads = SwapMetadata("host", "device")
        loads.add(places[:count], blocks[:count], keys[:count])
        return loads

    def _commit_scheduled(self) -> None:
        """Index what requests compute in this step: work that is scheduled later comes after it."""
        scheduled, self._scheduled = self._scheduled, {}
        for record, request in scheduled.values():
            if self._cache.holds(record):
                self._commit(record, request)

    def _commit(self, record: RequestRecord, request: Any) -> None:
        """Index the full blocks of a request's computed tokens. A request whose tokens or table are
        wrong is not indexed: the call may be another request's."""
        try:
            table = sequence_of(request, "block_tables")
            tokens = min(computed_tokens(request), record.tokens_of(request))
            full = min(tokens // self.block_size, len(table))
            own = self._cache.uncommitted(record, table, full)
            record.extend(request)
        except (TypeError, ValueError) as error:
            log.error("request not cached", request=record.request, error=str(error))
            return
        self._cache.commit(record, own)

    def request_finish(self, request: Any) -> None:
        """A request has ended, is preempted or was not admitted: index what it has computed, and
        take all its blocks back. To be called before its block table is emptied."""
        with self._turn():
            name = name_of(request)
            ids = block_ids("a block id", sequence_of(request, "block_tables"))
            record = self._cache.requests.get(name)
            if record is not None:
                self._commit(record, request)
                if self._backs_up and self.enable_host_cache and record.num_cached:
                    self._finished.append(record)
            self._cache.blocks.give_held(ids, name)
            self._drop(name)

    def _drop(self, name: str) -> None:
        """A request holds nothing any more."""
        record = self._cache.requests.get(name)
        self._scheduled.pop(name, None)
        if record is not None and record.host and self._slots is not None:
            self._slots.tiers.complete_load(record.host)
            record.host = []
        self._cache.release(name)

    def write_cache_to_storage(self, request: Any) -> None:
        """A request has finished: `request_finish` reports it to indexes. The workers write blocks
        to storage when they have come to the host."""
        record = self._cache.requests.get(name_of(request))
        if record is not None:
            record.finished = True

    # -- storage

    def prefetch_storage(self, request: Any) -> bool:
        """Look a request's blocks up in storage, after those that device and host have, and take
        host blocks for those found. The reads are in the next `drain_pending_prefetches`. Waits for
        storage, without the turn.

        Returns:
            Whether there are blocks to read.

        Raises:
            TypeError, ValueError, ConfigError: as `match_prefix`.
        """
        slots, storage = self._slots, self._storage
        if slots is None or storage is None or not self.enable_prefix_caching:
            return False
        with self._turn():
            tree = self._cache.tree
            record = RequestRecord(name_of(request), request, tree, self._root())
            path = record.path
            keys = split_hashes(path.hashes(0, path.num_full_blocks))
            tree.pin(path, used=False)
            start = record.num_cached
            self._cache.blocks.push(tree.release(path))
            slots.enter()
            start += leading_keys(slots.tiers, keys[start:])[0]
        lacking = keys[start:][: slots.slots]
        if not lacking:
            return False
        try:
            job = storage.submit_lookup(next(self._lookups), lacking)
            found = job.result(storage.timeout + MARGIN).ok
            storage.poll()  # the end was seen
        except (CacheClosed, TimeoutError) as error:
            log.error("storage not asked", request=record.request, error=repr(error))
            return False
        stop = start + next((i for i, ok in enumerate(found) if not ok), len(found))
        with self._turn():
            if self._closed or record.tree.retired or start == stop:  # retired: other weights
                return False
            slots.enter()
            parents = [path.root, *keys][start:stop]
            metadata = slots.begin_reads(keys[start:stop], parents)
            metadata.storage_type = self.settings.backend
            metadata.timeout = storage.timeout
            if not metadata.block_ids:
                return False
            if self._cache.reports is not None:
                self._cache.reports.describe(path, start, stop)
            pending = PendingPrefetch(record.request, metadata, metadata.block_ids)
            self._prefetches.append(pending)
            return True

    def drain_pending_prefetches(self) -> list[PendingPrefetch]:
        """The prefetches since the last call, each for `CacheController.prefetch_from_storage` of
        every worker. When all have answered, each of its host blocks must be reported, once, to
        `update_storage_blocks_to_host` or to `abort_prefetch_blocks`."""
        with self._turn():
            found, self._prefetches = self._prefetches, []
            return found

    def update_storage_blocks_to_host(self, host_block_ids: Sequence[int]) -> None:
        """Every worker has read these host blocks: requests can have them."""
        self._end_reads(host_block_ids, success=True)

    def abort_prefetch_blocks(self, host_block_ids: Sequence[int]) -> None:
        """A worker has not read these host blocks. They are free."""
        self._end_reads(host_block_ids, success=False)

    def _end_reads(self, blocks: Sequence[int], *, success: bool) -> None:
        ids = block_ids("host_block_ids", blocks)
        with self._turn():
            if self._slots is not None and not self._closed:
                self._slots.end_reads(ids, success=success)
                self._cache.report_moves()

    @property
    def troubles(self) -> tuple[str, ...]:
        storage = self._storage
        trouble = "" if storage is None else storage.trouble
        return (*super().troubles, *filter(None, [trouble]))

    def _close_tiers(self) -> None:
        storage, self._storage = self._storage, None
        if storage is not None:
            storage.close(self.settings.storage.close_timeout_s)
        super()._close_tiers()

    # -- steps

    def get_pending_backup_count(self) -> int:
        """Finished requests whose blocks are to be backed up."""
        return len(self._finished)

    def issue_pending_backup_to_batch_request(self) -> SwapMetadata | None:
        """The copies to the host of blocks of finished requests that were used often enough, for
        the batch of this step. None if there are none."""
        if self._slots is None:
            return None
        with self._turn():
            self._slots.enter()
            self._cache.settle()
            finished, self._finished = self._finished, []
            for record in finished:
                if record.writers:  # still held for this step
                    self._finished.append(record)
                elif not record.tree.retired:
                    self._back_up(self._slots, record)
            return next(iter(self._slots.take_stores()), None)

    def _back_up(self, slots: WorkerSlots, record: RequestRecord) -> None:
        tree, path = record.tree, record.path
        start = tree.referenced_run(path)  # may be computed in this step, after its copies
        tree.pin(path, used=False)
        keys, blocks = split_hashes(path.hashes(0, path.num_committed)), path.blocks()
        parents = [path.root, *keys]
        least = self.settings.cache.write_through_threshold
        some = [i for i in range(start, len(keys)) if self._uses[keys[i]] + 1 >= least]
        slots.store([keys[i] for i in some], [parents[i] for i in some], [blocks[i] for i in some])
        self._cache.blocks.push(tree.release(path))

    def check_and_add_pending_backup(self) -> None:
        """The step ends: a later one may use the slots and blocks of its copies. To be called at
        the end of each `schedule()`, after its copies were added to the batch."""
        with self._turn():
            held, self._held = self._held, []
            for record in held:
                record.writers.pop()
            if self._slots is not None:
                self._slots.end_step()
            self._cache.settle()
            self._cache.report_moves()
            if len(self._uses) > 4 * (self.num_gpu_blocks + self.num_cpu_blocks):
                self._uses.clear()  # most of them are of blocks that have left

    def reset_cache(self) -> bool:
        """Forget every block of device and host, and every request."""
        with self._turn():
            for name in [*self._cache.requests]:
                self._drop(name)
            self._reset()
            self._finished.clear()
            self._uses.clear()
        return True
