"""Host memory and storage over an engine's cache tensors."""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from queue import Empty, SimpleQueue
from threading import get_ident
from types import SimpleNamespace
from typing import Any, NamedTuple

from kvactors.actor.log import get_logger
from kvactors.device.tensors import region_of, rows_of
from kvactors.errors import CacheClosed, ConfigError, DeviceError, LayoutError
from kvactors.integrations.fastdeploy.settings import ManagerSettings
from kvactors.layout.base import Layout, Role
from kvactors.settings.check import changed_in
from kvactors.tier_cache import (
    CopyWorker,
    SlotMemory,
    StorageResult,
    StorageTier,
    TierCache,
    TierConfig,
    TierStorage,
)
from kvactors.tier_cache.cache import leading_keys
from kvactors.tier_cache.settings import checked_config
from kvactors.tier_cache.storage import make_storage
from kvactors.types import Tier

log = get_logger()


class RankCopies:
    """Copies whole blocks, and returns when they have ended. A slot has the bytes of rank 0, then
    those of rank 1, and so on: `ranks` are the tensors of each, in that order. One call at a time.

    `stream` gives the handle of the GPU stream that a copy comes after, None for tensors in host
    memory."""

    def __init__(
        self,
        ranks: Sequence[Sequence[Any]],
        memory: SlotMemory,
        *,
        threads: int,
        stream: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.memory = memory
        self._stream = stream
        self._jobs = count()
        self._workers: list[CopyWorker] = []
        offset = 0
        try:
            for tensors in ranks:
                one = CopyWorker(tensors, memory, offset=offset, threads=threads)
                self._workers.append(one)
                offset += one.block_bytes
        except BaseException:
            self.close()
            raise

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> str:
        """Copy device blocks to host slots. Returns why bytes did not arrive, empty if all did.
        DeviceError if a copy does not end: blocks and slots are still in use."""
        return self._move(blocks, slots, to_host=True)

    def load(self, blocks: Sequence[int], slots: Sequence[int]) -> str:
        return self._move(blocks, slots, to_host=False)

    def _move(self, blocks: Sequence[int], slots: Sequence[int], *, to_host: bool) -> str:
        job, errors = next(self._jobs), []
        begun: list[CopyWorker] = []
        for one in self._workers:
            submit = one.submit_store if to_host else one.submit_load
            try:
                submit(job, blocks, slots, stream=self._stream())
            except Exception as error:  # of the engine's function too: this copy has not begun
                errors.append(repr(error))
                break
            begun.append(one)
        for one in begun:
            one.finish([job])
            errors += [ended.error for ended in one.get_finished() if ended.error]
        return "; ".join(errors)

    def close(self) -> None:
        for one in self._workers:
            one.shutdown()


MARGIN = 5.0  # of a job beyond the storage tier's time-out: it ends itself before


class FinishWrites:
    """Copies the blocks of finished requests to staging slots, and saves them. Calls come from any
    threads: each takes the staging slots, and the next one waits for them, for the storage tier's
    time-out at most. While a call of storage does not return, or for good after a copy that does
    not end, blocks are not written: the slots are in use.

    Attributes:
        written, failed: blocks.
    """

    def __init__(self, storage: StorageTier, copies: RankCopies) -> None:
        self.written = self.failed = 0
        self._storage = storage
        self._copies = copies
        self._job: Future[Any] = Future()  # the last one that uses the staging slots
        self._job.set_result(None)
        self._turn: SimpleQueue[None] = SimpleQueue()
        self._turn.put(None)
        self._jobs = count()

    def write(
        self, keys: Sequence[bytes], blocks: Sequence[int], wanted: Callable[[], bool]
    ) -> None:
        """Save blocks that storage lacks, while they are `wanted`. Nothing may change the device
        blocks before this returns. Failures are counted and logged, and never raised: the request
        has its answer."""
        try:
            self._turn.get(timeout=self._storage.timeout)
        except Empty:
            log.error("blocks not written: staging slots in use", blocks=len(keys))
            self.failed += len(keys)
            return
        written, lacking = 0, len(keys)
        try:
            if self._job.done():
                written, lacking = self._write(keys, blocks, wanted)
        except TimeoutError:
            log.error("blocks not written: storage does not return", blocks=len(keys))
        except DeviceError as error:
            self._job = Future()  # never done: the copy may still access the slots
            log.error("writes to storage have stopped", error=str(error))
        except CacheClosed:
            log.warning("blocks not written: storage is closed", blocks=len(keys))
        finally:
            self.written += written
            self.failed += lacking - written
            self._turn.put(None)

    def _write(
        self, keys: Sequence[bytes], blocks: Sequence[int], wanted: Callable[[], bool]
    ) -> tuple[int, int]:
        """The blocks that were written, and those that storage lacked."""
        stored = self._ended(self._storage.submit_lookup(("find", next(self._jobs)), keys)).ok
        known = zip(keys, blocks, stored, strict=True)
        lacking = [(key, block) for key, block, there in known if not there]
        memory, written = self._copies.memory, 0
        for start in range(0, len(lacking), memory.num_slots):
            if not wanted():
                break
            some = lacking[start : start + memory.num_slots]
            slots = range(len(some))
            error = self._copies.store([block for _, block in some], slots)
            if error:
                log.error("blocks not copied for storage", blocks=len(some), error=error)
                break
            views = [memory.view(slot) for slot in slots]
            job = ("finish", next(self._jobs))
            result = self._ended(self._storage.submit_store(job, [key for key, _ in some], views))
            written += sum(result.ok)
            if not all(result.ok):
                break  # a block without those before it cannot be matched
        return written, len(lacking)

    def _ended(self, job: Future[StorageResult]) -> StorageResult:
        self._job = job
        return job.result(self._storage.timeout + MARGIN)

    def close(self) -> None:
        self._copies.close()
        self._copies.memory.close()


@dataclass(eq=False)
class EngineTiers(ABC):
    """The tiers below the device. Calls come from different threads, never two at once.

    Attributes:
        slots: blocks of the host tier. 0: the slots of `tiers` are only for blocks on their way
            from storage, and evicted device blocks are not kept.
    """

    tiers: TierCache
    slots: int
    thread: int = field(default=0, init=False)  # of the last call

    def enter(self) -> None:
        """The calling thread makes the next calls."""
        if self.thread != get_ident():
            self.tiers.adopt()
            self.thread = get_ident()

    @abstractmethod
    def keep(self, keys: Sequence[bytes], parents: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Keep the bytes of evicted blocks, given children before parents. DeviceError if a copy
        does not end: the blocks must not be used any more."""

    def close(self) -> None:
        self.tiers.shutdown()


@dataclass(eq=False)
class LowerTiers(EngineTiers):
    """Moves blocks between the device and a `TierCache`, and returns when they have moved.

    Attributes:
        memory: all host slots, those of `tiers` and the staging slots of `writes`.
        writes: writes of finished requests, None without storage.
    """

    copies: RankCopies
    writes: FinishWrites | None
    memory: SlotMemory
    fetch_wait_s: float

    def keep(self, keys: Sequence[bytes], parents: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Copy evicted blocks, given children before parents, to host slots, and go on as saves to
        storage give slots back. Those nearest to the start of their paths come first: a block
        without its path cannot be matched. DeviceError if a copy does not end: the blocks must not
        be used any more."""
        path = reversed(list(zip(keys, parents, blocks, strict=True)))
        wanted = {key: (parent, block) for key, parent, block in path} if self.slots else {}
        left = tuple(wanted)
        until = time.monotonic() + self.tiers.config.storage.on_full_wait_s
        while left:
            found = self.tiers.prepare_store(left, [wanted[key][0] for key in left])
            left = found.waiting
            if found.keys:
                error = self.copies.store([wanted[key][1] for key in found.keys], found.slots)
                self.tiers.complete_store(found.keys, success=not error)
                if error:
                    log.error("blocks not kept in host memory", blocks=len(found.keys), error=error)
            if time.monotonic() > until or not self.tiers.saving:  # loads end in other calls
                break
            self.tiers.end_step()
        self.tiers.end_step()

    def find(
        self, hashes: Sequence[bytes], waited_s: float, interrupted: Callable[[], bool]
    ) -> tuple[list[Tier], float]:
        """The leading blocks of a path that can be loaded now, no more than there are host slots:
        HOST or STORAGE for each, and the seconds for which storage was waited for.

        Waits while blocks are on their way from storage, until `interrupted`. `waited_s` counts
        already. `end_step` of the tiers ends the hold on the blocks."""
        hashes = hashes[: self.tiers.config.num_slots]
        begun = time.monotonic()
        waited = False
        while True:
            found, waits = leading_keys(self.tiers, hashes)
            now = time.monotonic()
            late = now - begun >= self.fetch_wait_s - waited_s
            if not waits or late or interrupted():
                sources = [self.tiers.source(one) for one in hashes[:found]]
                return sources, now - begun if waited else 0.0
            waited = True
            self.tiers.end_step()  # begins fetches, and pauses

    def close(self) -> None:
        super().close()
        self.copies.close()
        if self.writes is not None:
            self.writes.close()
        self.memory.close()


# -- FastDeploy's names of cache tensors, and the layout that the tensors have.

ROLES = {
    "key_caches": "key",
    "value_caches": "value",
    "indexer_caches": "indexer",
    "key_cache_scales": "key_scale",
    "value_cache_scales": "value_scale",
}
"""Roles, by the beginning of FastDeploy's names."""

NAME = re.compile(rf"({'|'.join(ROLES)})_(\d+)_rank(\d+)(?:\.device(\d+))?")

RankTensors = dict[tuple[int, str], Any]
"""The tensors of one rank, by layer and role."""


def tensors_by_rank(named: Mapping[str, Any]) -> list[RankTensors]:
    """The tensors of `cache_kvs_map`, by rank.

    Args:
        named: tensors under FastDeploy's names: `key_caches_{layer}_rank{r}.device{d}`, also
            without the device, and the same with value_caches, key_cache_scales,
            value_cache_scales and indexer_caches.

    Raises:
        LayoutError: a name has another form, two names mean one tensor, or the ranks are not
            0, 1, ..
    """
    if not isinstance(named, Mapping):
        raise LayoutError(
            f"the cache tensors must be a mapping of names to tensors, not {type(named).__name__}"
        )
    ranks: dict[int, RankTensors] = {}
    for name, tensor in named.items():
        found = NAME.fullmatch(str(name))
        if found is None:
            raise LayoutError(
                f"{name!r} is no name of a cache tensor: expected {', '.join(ROLES)} with "
                "_LAYER_rankR.deviceD"
            )
        place = (int(found[2]), ROLES[found[1]])
        of_rank = ranks.setdefault(int(found[3]), {})
        if place in of_rank:
            raise LayoutError(f"{name!r} is a second tensor of layer {place[0]}, {place[1]}")
        of_rank[place] = tensor
    if sorted(ranks) != list(range(len(ranks))):
        raise LayoutError(f"cache tensors of ranks {sorted(ranks)}: they must be 0, 1, ..")
    return [ranks[rank] for rank in range(len(ranks))]


class CacheKvsLayout(Layout):
    """The layout of FastDeploy's tensors, in the order that its kernels index them by. The last
    `extra_layers` are those of drafts (MTP)."""

    kind = "fastdeploy"

    def __init__(self, block_size: int, tensors: RankTensors, extra_layers: int = 0) -> None:
        self._regions = {place: region_of(tensor) for place, tensor in tensors.items()}
        layers = sorted({layer for layer, _ in tensors})
        if not layers:
            raise LayoutError("there are no cache tensors")
        if layers != list(range(layers[0], layers[0] + len(layers))):
            raise LayoutError(f"cache tensors of layers {layers}: they must be consecutive")
        roles = {layer: sorted(role.name for role in self.roles(layer)) for layer in layers}
        if odd := next((one for one in layers if roles[one] != roles[layers[0]]), None):
            raise LayoutError(
                f"layer {odd} has {', '.join(roles[odd])}, and the first layer has "
                f"{', '.join(roles[layers[0]])}"
            )
        if extra_layers >= len(layers):
            raise LayoutError(f"{extra_layers} layers of drafts, and {len(layers)} layers in all")
        super().__init__(
            block_size,
            len(layers) - extra_layers,
            layer_offset=layers[0],
            extra_layers=extra_layers,
        )

    def roles(self, layer: int) -> Sequence[Role]:
        return [
            Role(role, tuple(region.shape[1:]), region.dtype)
            for (number, role), region in self._regions.items()
            if number == layer
        ]

    def ordered(self, tensors: RankTensors) -> list[Any]:
        return [tensors[piece.layer, piece.role] for piece in self.pieces]


TRANSIT = 64  # host slots at most for blocks from storage, without a host tier

GIB = 1 << 30


class EngineTensors(NamedTuple):
    """The tensors of an engine's cache."""

    ranks: list[list[Any]]
    layout: CacheKvsLayout
    num_blocks: int

    @classmethod
    def read(cls, named: Mapping[str, Any], settings: ManagerSettings) -> EngineTensors:
        ranks = tensors_by_rank(named)
        if len(ranks) != settings.ranks:
            raise LayoutError(
                f"cache tensors of {len(ranks)} ranks, and tensor_parallel_size is {settings.ranks}"
            )
        layouts = [
            CacheKvsLayout(settings.block_size, tensors, settings.draft_layers) for tensors in ranks
        ]
        if len({layout.fingerprint for layout in layouts}) > 1:
            raise LayoutError("the ranks have different tensors, or tensors of different shapes")
        ordered = [layouts[0].ordered(tensors) for tensors in ranks]
        rows = [rows_of(tensor).rows for tensors in ordered for tensor in tensors]
        return cls(ordered, layouts[0], min(rows))

    @property
    def on_gpu(self) -> bool:
        first = rows_of(self.ranks[0][0])
        return first.gpu and not first.host

    def device(self, rank: int) -> SimpleNamespace:
        """The device memory of a rank, as AttentionStore's adapter uses it."""
        rows = [rows_of(tensor) for tensor in self.ranks[rank]]
        return SimpleNamespace(
            layout=self.layout,
            regions=[one.address for one in rows],
            kind="cuda" if self.on_gpu else "tensors",
            ordinal=rows[0].ordinal or 0,
        )


def tier_config(
    settings: ManagerSettings,
    layout: Layout,
    block_bytes: int,
    num_slots: int,
    storage: TierStorage,
) -> TierConfig:
    """The settings of tiers whose blocks have this layout in each rank."""
    config = TierConfig(
        model=settings.config.cache.model,
        block_bytes=block_bytes,
        num_slots=num_slots,
        identity={
            "engine": "fastdeploy",
            "layout": layout.fingerprint.hex(),
            "tokens_per_block": settings.block_size,
            "tp_size": settings.ranks,
        },
        storage=storage,
        events=("host", "storage") if settings.config.flush.sinks else (),
    )
    return checked_config(config)


def open_lower_tiers(
    settings: ManagerSettings, tensors: EngineTensors, *, stream: Callable[[], int | None]
) -> LowerTiers | None:
    """Open host memory and storage. None if neither is configured, or AttentionStore alone."""
    options, storage = settings.options, settings.storage
    slots = host_slots(settings, tensors.layout.block_bytes)
    stored = storage.backend != "none"
    if not slots and not stored:
        return None
    if tensors.on_gpu and "copy_threads" in changed_in(options):
        raise ConfigError(
            "options: copy_threads has no use with tensors of a GPU, whose copy engines move the "
            "bytes: remove it"
        )
    size = tensors.layout.block_bytes * len(tensors.ranks)
    num_slots = slots or min(TRANSIT, settings.most_blocks or TRANSIT)
    staged = options.staging_slots if stored else 0
    memory = SlotMemory(num_slots + staged, size, numa_node=options.numa_node)
    rows = memory.hold()
    cut = num_slots * memory.stride
    host = SlotMemory(num_slots, size, rows[:cut], memory.stride)
    config = tier_config(settings, tensors.layout, size, num_slots, storage)
    store = make_storage(config, memory=memory, environ={}) if stored else None  # read already

    def copies_to(place: SlotMemory) -> RankCopies:
        return RankCopies(tensors.ranks, place, threads=options.copy_threads, stream=stream)

    tiers = TierCache(config, host, storage=store)
    with ExitStack() as opened:
        opened.callback(tiers.shutdown)
        tiers.start()
        copies = copies_to(host)
        opened.callback(copies.close)
        writes = None
        if store is not None:
            staging = SlotMemory(staged, size, rows[cut:], memory.stride)
            writes = FinishWrites(store, copies_to(staging))
        opened.pop_all()
    return LowerTiers(tiers, slots, copies, writes, memory, options.fetch_wait_s)


def host_slots(settings: ManagerSettings, rank_bytes: int) -> int:
    """Blocks of the host tier."""
    blocks, gib = settings.cache.num_cpu_blocks, settings.cache.swap_space
    if blocks or not gib:
        return blocks
    slots = int(gib * GIB) // rank_bytes
    if slots < 1:
        raise ConfigError(f"swap_space is {gib} GiB, and one block takes {rank_bytes} bytes")
    return slots
