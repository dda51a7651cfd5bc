"""Opens host memory and storage over an engine's cache tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, NamedTuple

from kvactors.device.tensors import rows_of
from kvactors.errors import ConfigError, LayoutError
from kvactors.integrations.fastdeploy.finish_writes import FinishWrites, Staging
from kvactors.integrations.fastdeploy.host_tiers import HostTiers
from kvactors.integrations.fastdeploy.rank_copies import RankCopies
from kvactors.integrations.fastdeploy.settings import ManagerSettings, check_tensor_uses
from kvactors.integrations.fastdeploy.tensor_names import (
    CacheKvsLayout,
    RankTensors,
    tensors_by_rank,
)
from kvactors.tier_cache import SlotMemory, TierCache, TierConfig
from kvactors.tier_cache.settings import checked_config
from kvactors.tier_cache.stores import make_storage

TRANSIT = 64
"""Host slots at most for blocks on their way from storage, without a host tier."""

GIB = 1 << 30


class EngineTensors(NamedTuple):
    """The tensors of an engine's cache.

    Attributes:
        ranks: by rank.
        layout: of one rank.
        num_blocks: device blocks that every tensor has.
    """

    ranks: list[RankTensors]
    layout: CacheKvsLayout
    num_blocks: int

    @classmethod
    def read(cls, named: Mapping[str, Any], settings: ManagerSettings) -> EngineTensors:
        """Read `cache_kvs_map`.

        Raises:
            LayoutError: names or shapes do not fit.
            DeviceError: a tensor cannot be described.
        """
        ranks = tensors_by_rank(named)
        if len(ranks) != settings.ranks:
            raise LayoutError(
                f"cache tensors of {len(ranks)} ranks, and tensor_parallel_size is {settings.ranks}"
            )
        layouts = [
            CacheKvsLayout(settings.block_size, tensors, settings.draft_layers) for tensors in ranks
        ]
        if len({layout.fingerprint for layout in layouts}) > 1:
            raise LayoutError("the ranks have tensors of different shapes")
        rows = [rows_of(tensor).rows for one in ranks for tensor in layouts[0].ordered(one)]
        return cls(ranks, layouts[0], min(rows))

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, of all ranks."""
        return self.layout.block_bytes * len(self.ranks)

    @property
    def on_gpu(self) -> bool:
        """Whether copies pass through the driver of a GPU."""
        first = rows_of(self.ordered[0][0])
        return first.gpu and not first.host

    def device(self, rank: int) -> SimpleNamespace:
        """The device memory of a rank, as AttentionStore's adapter uses it: layout, addresses of
        the tensors, kind, and number of the GPU."""
        rows = [rows_of(tensor) for tensor in self.ordered[rank]]
        return SimpleNamespace(
            layout=self.layout,
            regions=[one.address for one in rows],
            kind="cuda" if self.on_gpu else "tensors",
            ordinal=rows[0].ordinal or 0,
        )

    @property
    def ordered(self) -> list[list[Any]]:
        """The tensors of each rank in the order of a block's bytes."""
        return [self.layout.ordered(tensors) for tensors in self.ranks]


class LowerTiers(NamedTuple):
    """The tiers below the device.

    Attributes:
        host: host memory, and the store below it.
        writes: writes of finished requests. None without storage.
        memory: all host slots.
        slots: blocks of the host tier, 0 if there is none.
    """

    host: HostTiers
    writes: FinishWrites | None
    memory: SlotMemory
    slots: int

    def close(self) -> None:
        """End all moves and close storage."""
        self.host.close()
        if self.writes is not None:
            self.writes.close()
        self.memory.close()


def needs_tensors(settings: ManagerSettings) -> bool:
    """Whether a tier below the device is configured."""
    backend = "none" if settings.flush_only else settings.backend
    return bool(settings.host_blocks or settings.swap_gib or backend != "none")


def open_lower_tiers(
    settings: ManagerSettings,
    tensors: EngineTensors,
    *,
    stream: Callable[[], int | None],
) -> LowerTiers | None:
    """Open host memory and storage. None if neither is configured, or AttentionStore alone.

    Raises:
        ConfigError: a setting does not fit the tensors, or has no use with them.
        StoreError: storage cannot be used.
        DeviceError: tensors cannot be copied.
    """
    storage = settings.storage
    slots = host_slots(settings, tensors.layout.block_bytes)
    stored = storage.backend != "none"
    if not slots and not stored:
        return None
    check_tensor_uses(settings, on_gpu=tensors.on_gpu)
    options, size = settings.options, tensors.block_bytes
    num_slots = slots or min(TRANSIT, settings.most_blocks or TRANSIT)
    staged = options.staging_slots if stored else 0
    memory = SlotMemory(num_slots + staged, size, numa_node=options.numa_node)
    rows = memory.hold()
    cut = num_slots * memory.stride
    host = SlotMemory(num_slots, size, rows[:cut], memory.stride)
    config = checked_config(_tier_config(settings, tensors, num_slots))
    store = make_storage(config, memory=memory, environ={}) if stored else None  # read already

    def copies_to(place: SlotMemory) -> RankCopies:
        return RankCopies(tensors.ordered, place, threads=options.copy_threads, stream=stream)

    tiers = TierCache(config, host, storage=store)
    with ExitStack() as opened:
        opened.callback(tiers.shutdown)
        tiers.start()
        copies = copies_to(host)
        opened.callback(copies.close)
        writes = None
        if store is not None:
            staging = SlotMemory(staged, size, rows[cut:], memory.stride)
            writes = FinishWrites(store, Staging(staging, copies_to(staging)), storage.timeout_s)
        opened.pop_all()
    moves = HostTiers(
        tiers, copies, keeps=slots > 0, reads=stored, fetch_wait_s=options.fetch_wait_s
    )
    return LowerTiers(moves, writes, memory, slots)


def host_slots(settings: ManagerSettings, rank_bytes: int) -> int:
    """Blocks of the host tier.

    Args:
        settings: of the manager.
        rank_bytes: bytes of a block on one rank.

    Raises:
        ConfigError: the swap space holds no block.
    """
    if settings.host_blocks or not settings.swap_gib:
        return settings.host_blocks
    slots = int(settings.swap_gib * GIB) // rank_bytes
    if slots < 1:
        raise ConfigError(
            f"swap_space is {settings.swap_gib} GiB, and one block takes {rank_bytes} bytes"
        )
    return slots


def _tier_config(settings: ManagerSettings, tensors: EngineTensors, slots: int) -> TierConfig:
    return TierConfig(
        model=settings.model,
        block_bytes=tensors.block_bytes,
        num_slots=slots,
        identity={
            "engine": "fastdeploy",
            "layout": tensors.layout.fingerprint.hex(),
            "tokens_per_block": settings.block_size,
            "tp_size": settings.ranks,
        },
        policy=settings.options.eviction_policy,
        storage=settings.storage,
        events=("host", "storage") if settings.config.flush.sinks else (),
    )
