"""The tables of the settings, as frozen structs. Sizes are in blocks or bytes, times in seconds."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kvactors.mooncake_config import MooncakeConfig
from kvactors.ranks_config import RanksConfig
from kvactors.sink_config import AnySinkConfig, AttentionStoreConfig


class CacheConfig(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """block_size: tokens a block. model: the model's name and version; blocks of different models
    never mix, in any tier or store. namespace: requests of different namespaces never share (a
    weight version, say).

    split_media: whether a media item may be cached in part; without it `cached_tokens` ends before
    an item that would be split. recompute_last_token: on a hit of the whole prompt give the last
    block back, so that there is a token to compute. deadline: seconds an operation may take unless
    its caller says otherwise.
    """

    block_size: int = 64
    model: str = ""
    namespace: str = "default"
    recompute_last_token: bool = True
    split_media: bool = False
    deadline: float = 30.0


class DeviceConfig(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """kind: host (numpy arrays standing in for device memory), paddle (tensors of Paddle's, at
    `place`: cpu, gpu:0, ..) or cuda (memory of the GPU numbered `ordinal`, without any framework).
    num_blocks: device blocks. free_low / free_high: fractions of them; when fewer than low are
    free, evict until high are (both 0: evict on demand only). layerwise: load layer by layer
    (`Lease.wait_layer`)."""

    kind: Literal["host", "paddle", "cuda"] = "host"
    place: str = "cpu"
    ordinal: int = 0
    num_blocks: int = 1024
    free_low: float = 0.0
    free_high: float = 0.0
    layerwise: bool = False


class LayoutConfig(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a block is made of; the defaults are a small GQA model's.

    kind: gqa (num_kv_heads, head_dim, dtype, quantization, scale_dtype), mla (kv_lora_rank,
    qk_rope_head_dim, dtype), dsa (kv_lora_rank, qk_rope_head_dim, index_head_dim), or
    package.module:Class. num_layers, layer_offset: main layers, and the number of the first.
    extra_layers, extra_block_ratio: MTP or draft layers after them, and their blocks for each main
    block. tensor_parallel: ranks that num_kv_heads are shared among. options: of a layout of
    another package.
    """

    kind: str = "gqa"
    num_layers: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    dtype: Literal["float32", "float16", "bfloat16", "uint8", "int8"] = "float16"
    quantization: Literal["none", "block_wise_fp8"] = "none"
    scale_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    index_head_dim: int = 128
    layer_offset: int = 0
    extra_layers: int = 0
    extra_block_ratio: float = 1.0
    tensor_parallel: int = 1
    options: dict[str, Any] = msgspec.field(default_factory=dict)


class HostConfig(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The host tier. slots: blocks it may hold (0: no host tier). transit_slots: extra slots for
    blocks on their way through.

    mode: exclusive (a loaded block leaves the host) or inclusive (blocks are copied to the host at
    request finish and stay). low / high watermark: fractions of `slots`; above high, evict down to
    low (both 0: evict on demand only). pinned: try to lock the arena's pages (a CUDA device's are
    in any case). copy_threads: threads that move bytes between device and arena. batch_from: for a
    CUDA device, bytes from which on a piece goes by the copy engines instead of our kernel;
    measured at start if not set.
    """

    slots: int = 0
    transit_slots: int = 256
    mode: Literal["exclusive", "inclusive"] = "exclusive"
    policy: Literal["lru"] = "lru"
    low_watermark: float = 0.0
    high_watermark: float = 0.0
    pinned: bool = False
    copy_threads: int = 1
    batch_from: int | None = None

    def arena_slots(self, *, stored: bool) -> int:
        """Slots of the arena: those of the tier and those for passing through, if anything passes.
        stored: whether a store does."""
        return self.slots + self.transit_slots if self.slots or stored else 0


class StorageConfig(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The storage tier. backend: none, memory, file, mooncake, attention_store, or
    package.module:Class. capacity_blocks, capacity_bytes: objects and bytes it may hold (the
    smaller counts); with neither a file store takes 80 % of what its file system has to give, and
    the others have no limit of their own. namespace, rank, ranks: objects of different ones never
    mix.

    Of the file store: directory. free_space_floor: bytes of the file system it leaves free.
    durability: an object counts as stored when the system has it (written) or the device has it
    (synced). read_only: a view beside the process that writes. io_depth: reads and writes at once.
    keep_tokens: each block's tokens are kept beside it, so that stored blocks are announced to the
    sinks after a restart (not those under a salt). Sizes may be written "4GB".

    exclusive: a block loaded from storage leaves it. write_policy: none, write_through (at request
    finish), write_through_selective (at finish, blocks used at least `min_hits` times), write_back
    (when the host tier evicts). fetch: whether acquire looks in storage beyond what the index
    knows, and takes what it finds if that is min_fetch_blocks at least. timeout: seconds one batch
    may take. mooncake: settings of that back end.
    """

    backend: str = "none"
    directory: str = ""
    capacity_blocks: int | None = None
    namespace: str = "default"
    rank: int = 0
    ranks: int = 1
    capacity_bytes: int | str | None = None
    free_space_floor: int | str = "64MB"
    durability: Literal["written", "synced"] = "written"
    read_only: bool = False
    io_depth: int = 4
    exclusive: bool = False
    keep_tokens: bool = True
    write_policy: Literal["none", "write_through", "write_through_selective", "write_back"] = (
        "write_back"
    )
    min_hits: int = 2
    fetch: bool = True
    min_fetch_blocks: int = 1
    readers: int = 2
    writers: int = 2
    timeout: float = 10.0
    mooncake: MooncakeConfig = MooncakeConfig()


class FlushConfig(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The flush notifier. only: flush-only mode, in which storage is neither read nor written, and
    which needs a sink; left out, FD_AS_ONLY_FLUSH decides. timeout: seconds a sink may take for a
    batch. retry_min / retry_max: back-off in seconds. batch: blocks reported in one call at
    most."""

    sinks: tuple[AnySinkConfig, ...] = ()
    only: bool | None = None
    timeout: float = 10.0
    retry_min: float = 0.05
    retry_max: float = 5.0
    batch: int = 512


class ActorsConfig(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The runtime. channel_bound: messages a forward channel holds. start: seconds that each part
    (store, sink, copy engine) may take to open. drain: seconds a stop may take. restarts: deaths a
    group may have in 60 s."""

    channel_bound: int = 256
    start: float = 120.0
    drain: float = 10.0
    restarts: int = 5


class ConfigTables(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """All tables. `Config` adds how they are read and checked."""

    cache: CacheConfig = CacheConfig()
    device: DeviceConfig = DeviceConfig()
    layout: LayoutConfig = LayoutConfig()
    host: HostConfig = HostConfig()
    storage: StorageConfig = StorageConfig()
    flush: FlushConfig = FlushConfig()
    attention_store: AttentionStoreConfig = AttentionStoreConfig()
    actors: ActorsConfig = ActorsConfig()
    ranks: RanksConfig = RanksConfig()
