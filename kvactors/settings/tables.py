"""The tables of the settings, as frozen structs. Times are in seconds.

A size is a number of blocks, or in the setting whose name ends in `_bytes` a number of bytes or a
text with a unit ("8 GiB", see `in_bytes`). For device and host one of the two is given. The sizes
are those of one rank.

A setting has its rules beside it: its range, the configs in which it has a use, the setting whose
place it takes, and the variables that fill it. A new one is a line here and an entry of
`Attributes`, from which `python -m tests.docs.generators` writes the reference.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec

from kvactors.settings.check import (
    BlockSize,
    BlockTokens,
    ByteCount,
    ByteSize,
    Count,
    Depth,
    DeviceNumber,
    Dimension,
    InPlaceOf,
    LayerCount,
    Multiple,
    Number,
    ObjectCount,
    RankCount,
    Rate,
    Seconds,
    Share,
    SmallCount,
    SmallNumber,
    Threads,
    UsedIf,
    Variable,
    WritePolicy,
)
from kvactors.settings.mooncake import MooncakeConfig
from kvactors.settings.sinks import AnySinkConfig
from kvactors.settings.valkey import ValkeyConfig

LAYOUTS = ("gqa", "mla", "dsa", "state")
BACKENDS = ("none", "memory", "file", "mooncake", "object", "valkey", "attention_store")
"""Kinds of `[layout]` and `[storage]`. One of another package may use every setting."""

SHARED = ("mooncake", "object", "valkey")
"""Stores that several nodes share, which list no keys and evict by themselves."""


def _of_device(kind: str) -> UsedIf:
    return UsedIf(lambda c: c.device.kind == kind, "with device.kind {0.device.kind!r}")


def _of_layout(*kinds: str) -> UsedIf:
    return UsedIf(
        lambda c: c.layout.kind in kinds or c.layout.kind not in LAYOUTS,
        "with layout.kind {0.layout.kind!r}",
    )


def _of_store(*backends: str) -> UsedIf:
    return UsedIf(
        lambda c: c.storage.backend in backends or c.storage.backend not in BACKENDS,
        "with storage.backend {0.storage.backend!r}",
    )


_WITH_HOST = UsedIf(
    lambda c: c.host.slots or c.host.capacity_bytes is not None,
    "without a host tier (host.slots = 0)",
    at_default=False,  # watermarks of 0 are off
)
_QUANTIZED = UsedIf(
    lambda c: c.layout.quantization != "none" or c.layout.kind not in LAYOUTS,
    "without layout.quantization",
)
_EXTRA = UsedIf(
    lambda c: c.layout.extra_layers or c.layout.kind not in LAYOUTS, "without layout.extra_layers"
)
_HEADS, _LATENT, _INDEXED = _of_layout("gqa"), _of_layout("mla", "dsa"), _of_layout("dsa")
_SCALED = _of_layout("gqa", "mla")
_BY_SLOTS = _of_store("none", "memory", "file", *SHARED)
_ONE_GROUP = UsedIf(lambda c: not c.cache.groups, "with cache.groups")
_BOUNDED, _FILE = _of_store("memory", "file"), _of_store("file")
_OBJECT, _DEEP = _of_store("object"), _of_store("file", "object")
_SHARED = UsedIf(
    lambda c: c.storage.backend in SHARED, "with storage.backend {0.storage.backend!r}"
)
URL = re.compile(r"(?:s3|gs|az|abfss?)://[\w.@-]+(?:/\S*)?|file:///.+")

ROUNDING = 1e-5  # a share of blocks that differs from a whole number by less counts as that number


class SaltQuota(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The quota of one salt.

    Attributes:
        device: the most resident device blocks, or bytes such as "8 GiB". None: no limit.
        host: as `device`, in the host tier.
        storage: as `device`, in the store.
    """

    device: BlockSize | None = None
    host: BlockSize | None = None
    storage: BlockSize | None = None


class QuotaConfig(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The most resident blocks of each salt, beyond which its own blocks are evicted first. A quota
    refuses no request, and applies only while blocks must be evicted.

    Attributes:
        device: device blocks of a salt that is not named, and of requests without a salt, or bytes
            such as "8 GiB". None: no limit.
        host: as `device`, in the host tier.
        salts: quotas of named salts, in place of the defaults.
        storage: as `device`, in a store of this process (`storage.backend` "file" or "memory").
            Numbers of salts are written to it beside the blocks then.
    """

    device: BlockSize | None = None
    host: BlockSize | None = None
    salts: dict[str, SaltQuota] = {}
    storage: BlockSize | None = None


class HintsConfig(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Hints of requests.

    Attributes:
        pin_share: share of the device blocks, and of the host tier, that may be pinned. A pin
            beyond it is refused, and the request is not.
    """

    pin_share: Share = 0.25


class LayoutConfig(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The layout of a block. The defaults are a small GQA model's.

    Attributes:
        kind: gqa (num_kv_heads, head_dim, dtype, quantization, scale_dtype), mla (kv_lora_rank,
            qk_rope_head_dim, dtype, quantization, scale_dtype), dsa (kv_lora_rank,
            qk_rope_head_dim, index_head_dim), state (options, of a group), or package.module:Class.
        num_kv_heads: KV heads of all ranks together, or a list of them, a number for each layer.
        head_dim: elements of a head, or a list of them.
        dtype: of an element. uint8 for fp8.
        quantization: block_wise_fp8 keeps bytes, and a scale for each token of each head (of gqa)
            or for each token (of mla).
        scale_dtype: of these scales.
        kv_lora_rank: elements of the latent.
        qk_rope_head_dim: elements with rotary positions.
        index_head_dim: elements of the indexer.
        num_layers: main layers.
        layer_offset: number of the first main layer (of a pipeline stage).
        extra_layers: MTP or draft layers after the main ones.
        extra_block_ratio: blocks of the extra layers for each block of the main ones.
        tensor_parallel: ranks that num_kv_heads are shared among.
        options: settings of a layout of another package. Of a state: by name of each tensor of a
            layer, its shape and dtype, as {ssm = {shape = [16, 128], dtype = "float32"}}.
    """

    kind: str = "gqa"
    num_layers: Dimension = 4
    num_kv_heads: Annotated[Dimension | list[Dimension], _HEADS] = 2
    head_dim: Annotated[Dimension | list[Dimension], _HEADS] = 32
    dtype: Annotated[Literal["float32", "float16", "bfloat16", "uint8", "int8"], _SCALED] = (
        "float16"
    )
    quantization: Annotated[Literal["none", "block_wise_fp8"], _SCALED] = "none"
    scale_dtype: Annotated[Literal["float32", "float16", "bfloat16"], _SCALED, _QUANTIZED] = (
        "float32"
    )
    kv_lora_rank: Annotated[SmallCount, _LATENT] = 512
    qk_rope_head_dim: Annotated[Dimension, _LATENT] = 64
    index_head_dim: Annotated[Dimension, _INDEXED] = 128
    layer_offset: LayerCount = 0
    extra_layers: LayerCount = 0
    extra_block_ratio: Annotated[Multiple, _EXTRA] = 1.0
    tensor_parallel: RankCount = 1
    options: Annotated[dict[str, Any], _of_layout("state")] = msgspec.field(default_factory=dict)


class GroupConfig(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Layers of a model that need less than every block of a prefix (docs/groups.md). The
    layers of `[layout]` are those with full attention.

    Attributes:
        name: unique.
        kind: window (layers with a sliding window, or that attend within a chunk) or state (layers
            that keep a state a request: Mamba, linear attention).
        layout: of a block. For state, layout.kind is state: a block is a snapshot.
        num_blocks: device blocks of the group.
        window: tokens that the layers attend to, the newest included. For kind window.
        every: blocks between two snapshots of a request. 0: only at the end of its prompt, and
            where its prompt leaves a cached one. For kind state.
        slots: blocks of the group that the host tier may hold.
        transit_slots: as in `host`, of this group.
        stored_blocks: objects of the group in a store that `storage.capacity_blocks` or
            `storage.capacity_bytes` bounds, None for as many blocks as those settings allow.
    """

    name: str
    kind: Literal["window", "state"]
    layout: LayoutConfig
    num_blocks: Count
    window: Number = 0
    every: Number = 32
    slots: Number = 0
    transit_slots: Count = 64
    stored_blocks: Count | None = None


class CacheConfig(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The scope of the cache, and defaults of its operations.

    Attributes:
        block_size: tokens a block.
        model: the model's name and version. Blocks of different models never mix.
        namespace: requests of different ones, for instance weight versions, never share blocks.
        recompute_last_token: on a hit of the whole prompt give the last block back, to compute.
        split_media: whether a media item may be cached in part. Without it `cached_tokens` ends
            before an item that would be split.
        default_deadline_s: seconds an operation may take unless its caller gives a deadline.
        prefill_tokens_per_s: tokens of prompts that the engine computes in a second. A fetch from
            storage that takes longer than computing its tokens is not begun. None: measured from
            commits. 0: every fetch is begun.
        groups: layers with a sliding window or a state, one table for each group of them.
    """

    block_size: BlockTokens = 64
    model: Annotated[str, Variable("KVACTORS_MODEL")] = ""
    namespace: str = "default"
    recompute_last_token: bool = True
    split_media: bool = False
    default_deadline_s: Seconds = 30.0
    prefill_tokens_per_s: Annotated[Rate | None, _BY_SLOTS, _ONE_GROUP] = None
    groups: tuple[GroupConfig, ...] = ()


class DeviceConfig(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The device memory.

    Attributes:
        kind: host (numpy arrays standing in for device memory), paddle (Paddle's tensors, at
            `place`) or cuda (memory of the GPU numbered `ordinal`, without any framework).
        place: where Paddle's tensors are: cpu, gpu:0, ..
        ordinal: number of the GPU, for cuda.
        num_blocks: device blocks. 0: `KVCache.set_num_blocks` sets the number after opening, when
            the serving loop has measured how much device memory is left.
        capacity_bytes: bytes of the device blocks, in place of num_blocks.
        low_watermark: the used fraction of `num_blocks` at which an eviction ahead of need ends.
        high_watermark: the used fraction of `num_blocks` above which blocks are evicted ahead of
            need (both 0: on demand only).
        layerwise: load layer by layer (`Lease.wait_layer`).
        policy: order of eviction: retain, which learns which blocks are used again, or lru.
    """

    kind: Literal["host", "paddle", "cuda"] = "host"
    place: Annotated[str, _of_device("paddle")] = "cpu"
    ordinal: Annotated[DeviceNumber, _of_device("cuda")] = 0
    num_blocks: Number = 1024
    capacity_bytes: Annotated[ByteSize | None, InPlaceOf("num_blocks")] = None
    low_watermark: Share = 0.0
    high_watermark: Share = 0.0
    layerwise: bool = False
    policy: Literal["lru", "retain"] = "retain"

    def free_blocks(self, blocks: int) -> tuple[int, int]:
        """The watermarks as free blocks: below the first, evict until there are the second.

        Args:
            blocks: device blocks.
        """
        if not self.high_watermark:
            return 0, 0
        return (
            int((1.0 - self.high_watermark) * blocks + ROUNDING),
            int((1.0 - self.low_watermark) * blocks + ROUNDING),
        )


class HostConfig(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The host tier.

    Attributes:
        slots: blocks it may hold (0: no host tier).
        capacity_bytes: bytes of those blocks, in place of slots.
        transit_slots: extra slots for blocks in transit between device and storage.
        transit_bytes: bytes of these slots, in place of transit_slots.
        policy: order of eviction, lru or retain as in `device`. None: that of the device. The guard
            of retain on the device covers the hits of both tiers only if both have it.
        mode: exclusive (a loaded block leaves the host) or inclusive (blocks are copied to the
            host at request finish and stay).
        low_watermark: the used fraction of `slots` at which an eviction ahead of need ends.
        high_watermark: the used fraction of `slots` above which blocks are evicted ahead of need
            (both 0: on demand only).
        pinned: try to lock the arena's pages (a CUDA device's are locked in any case).
        numa_node: the NUMA node of the arena's memory (Linux), None for the system's choice.
        copy_threads: threads that move bytes between device and arena.
        dma_min_bytes: for a CUDA device, the size in bytes from which on a piece goes by the copy
            engines instead of kvactors' kernel.
    """

    slots: Number = 0
    capacity_bytes: Annotated[ByteSize | None, InPlaceOf("slots")] = None
    transit_slots: Count = 256
    transit_bytes: Annotated[ByteSize | None, InPlaceOf("transit_slots")] = None
    mode: Literal["exclusive", "inclusive"] = "exclusive"
    policy: Literal["lru", "retain"] | None = None
    low_watermark: Annotated[Share, _WITH_HOST] = 0.0
    high_watermark: Annotated[Share, _WITH_HOST] = 0.0
    pinned: bool = False
    numa_node: DeviceNumber | None = None
    copy_threads: Threads = 1
    dma_min_bytes: ByteCount = 32 << 10

    def policy_below(self, device: DeviceConfig) -> Literal["lru", "retain"]:
        """The order of eviction under this device tier."""
        return device.policy if self.policy is None else self.policy

    @property
    def kept_blocks(self) -> tuple[int, int]:
        """The watermarks as numbers of blocks: above the first, evict until there are the second.
        Both are the capacity if nothing is evicted ahead of need."""
        if not self.high_watermark:
            return self.slots, self.slots
        return int(self.high_watermark * self.slots), int(self.low_watermark * self.slots)

    def arena_slots(self, *, stored: bool) -> int:
        """Slots of the arena: those of the tier and those for transit.

        Args:
            stored: whether blocks pass through to or from a store. Without a store and without a
                host tier the arena has no slots.
        """
        return self.slots + self.transit_slots if self.slots or stored else 0


class StoreSettings(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Settings of a store, below a cache or below the host slots of an engine.

    Attributes:
        backend: none, memory, file, mooncake, object, valkey, attention_store, or
            package.module:Class.
        directory: of the file store.
        url: of the object store: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX, or
            file:///FOLDER, which must be there. Credentials are those of the environment.
        endpoint: http(s)://HOST:PORT of an object store, None for the provider's.
        region: of an S3 bucket, None for AWS_REGION or us-east-1.
        capacity_blocks: objects it may hold. With neither this nor capacity_bytes a file store
            follows 80 % of the space that its file system can give, and the other back ends set no
            limit.
        capacity_bytes: bytes it may hold. With capacity_blocks too, the smaller of both counts.
        namespace: a part of the store's identity. Objects of different namespaces never mix.
        rank: number of the tensor-parallel rank whose share of each block this process stores.
        ranks: number of these ranks. Objects of different ranks, or numbers of ranks, never mix.
        free_space_floor: bytes of the file system that the file store leaves free.
        durability: an object of the file store counts as stored when the system has it (written)
            or the device has it (synced).
        io_depth: reads at once of a file store, or of a batch of an object store.
        min_hits: uses of a block from which on write_through_selective writes it.
        timeout_s: seconds one batch may take.
    """

    backend: str = "none"
    directory: Annotated[str, Variable("FILE_BACKEND_STORAGE_DIR"), _FILE] = ""
    url: Annotated[str, _OBJECT] = ""
    endpoint: Annotated[str | None, _OBJECT] = None
    region: Annotated[str | None, _OBJECT] = None
    capacity_blocks: Annotated[ObjectCount | None, _BOUNDED] = None
    capacity_bytes: Annotated[ByteSize | None, _BOUNDED] = None
    namespace: Annotated[str, _BY_SLOTS] = "default"
    rank: Annotated[Number, _BY_SLOTS] = 0
    ranks: Annotated[Count, _BY_SLOTS] = 1
    free_space_floor: Annotated[ByteSize, _FILE] = "64MB"
    durability: Annotated[Literal["written", "synced"], _FILE] = "written"
    io_depth: Annotated[Depth, _DEEP] = 16
    min_hits: Count = 2
    timeout_s: Seconds = 10.0
    on_full: Annotated[Literal["wait", "shed"], _BY_SLOTS] = "wait"
    on_full_wait_s: Annotated[Seconds, _BY_SLOTS] = 1.0

    def url_fault(self) -> str:
        """Why no object store can be at `url`, empty if one can, or if the back end is another."""
        if self.backend != "object":
            return ""
        if not URL.fullmatch(self.url):
            return (
                "storage.url must be s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX "
                "or file:///FOLDER with storage.backend = 'object', and have no password, not "
                f"{self.url.rpartition('@')[2]!r}"
            )
        if self.url.startswith("file:") and (self.endpoint or self.region):
            return f"storage.endpoint and storage.region have no use with {self.url}"
        if self.endpoint and not self.endpoint.startswith(("http://", "https://")):
            return f"storage.endpoint must be http(s)://HOST:PORT, not {self.endpoint!r}"
        return ""


class StorageConfig(StoreSettings, frozen=True):
    """The storage tier. Sizes may be written "4GB".

    Attributes:
        head_ranges: objects of a block, in a shared store: each has one of so many ranges of the
            KV heads of all ranks, so that caches with other numbers of ranks find them. A multiple
            of the number of ranks. None: as many as ranks.
        io_write_depth: likewise writes, as many as reads if unset.
        keep_tokens: the file store keeps each block's tokens beside it, so that stored blocks are
            announced to the sinks after a restart (not those under a salt).
        exclusive: a block loaded from storage leaves it.
        write_policy: none, write_through (at request finish), write_through_selective (at finish,
            blocks used at least `min_hits` times), write_back (when the host tier evicts). If it is
            left out, write_through for attention_store and write_back for the others.
        fetch: whether acquire looks in storage beyond the blocks in the index.
        max_fetch_blocks: stored blocks at most that a request fetches. It computes the others.
        readers: actors that read, each with one batch at a time.
        writers: actors that write, each with one batch at a time.
        on_full: whether blocks that are to be written wait while writes in flight use all transit
            slots, or are shed (not written, and counted). A store that falls behind is not waited
            for until half of the slots are free again.
        on_full_wait_s: seconds that an eviction waits for slots, and the request that needs its
            device blocks with it. The blocks of a finished request wait up to timeout_s.
        mooncake: settings of that back end.
        valkey: settings of that back end.
    """

    head_ranges: Annotated[RankCount | None, _SHARED] = None
    io_write_depth: Annotated[Depth | None, _DEEP] = None
    keep_tokens: Annotated[bool, _FILE] = True
    exclusive: bool = False  # another error than that of a setting without use: has_device_store
    write_policy: WritePolicy | None = None
    fetch: bool = True
    max_fetch_blocks: Annotated[Count | None, _BY_SLOTS] = None
    readers: Annotated[Threads, _BY_SLOTS] = 2
    writers: Annotated[Threads, _BY_SLOTS] = 2
    mooncake: Annotated[MooncakeConfig, _of_store("mooncake")] = MooncakeConfig()
    valkey: Annotated[ValkeyConfig, _of_store("valkey")] = ValkeyConfig()

    @property
    def saves(self) -> WritePolicy:
        """The write policy in effect."""
        if self.write_policy is None:
            return "write_through" if self.backend == "attention_store" else "write_back"
        return self.write_policy


class FlushConfig(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The flush notifier.

    Attributes:
        mode: normal, or flush_only, in which storage is neither read nor written, and which needs
            a sink. FD_AS_ONLY_FLUSH decides if it is left out.
        timeout_s: seconds a sink may take for a batch.
        retry_min_s: seconds until a failed call is repeated. Each further pause is twice as long.
        retry_max_s: seconds of the longest pause.
        batch: blocks reported in one call, about: a path that has begun is completed.
        sinks: the indexes to inform, one table each.
    """

    sinks: tuple[AnySinkConfig, ...] = ()
    mode: Annotated[
        Literal["normal", "flush_only"] | None,
        Variable("FD_AS_ONLY_FLUSH", ("normal", "flush_only")),
    ] = None
    timeout_s: Seconds = 10.0
    retry_min_s: Seconds = 0.05
    retry_max_s: Seconds = 5.0
    batch: SmallCount = 512

    @property
    def flush_only(self) -> bool:
        """Whether storage is neither read nor written."""
        return self.mode == "flush_only"


class ActorsConfig(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The runtime.

    Attributes:
        channel_bound: messages a forward channel holds.
        open_timeout_s: seconds that each part (store, sink, copy engine) may take to open.
        drain_timeout_s: seconds a stop may take.
        max_restarts_per_minute: failures a group may have in 60 s.
    """

    channel_bound: SmallCount = 256
    open_timeout_s: Seconds = 120.0
    drain_timeout_s: Seconds = 10.0
    max_restarts_per_minute: SmallNumber = 5
