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
from urllib.parse import urlsplit

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
URL = re.compile(
    r"(?!.*/\.\.(?:/|$))(?:(?:s3|gs|az|abfss?)://[\w.@-]+(?:/[^\s?#]*)?|file:///[^?#]+)"
)

ROUNDING = 1e-5  # a share of blocks that differs from a whole number by less counts as that number


class SaltQuota(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The quota of one salt.

    Attributes:
        device: resident device blocks, or bytes such as "8 GiB". None: no limit.
        host: as `device`, in the host tier.
        storage: as `device`, in the store.
    """

    device: BlockSize | None = None
    host: BlockSize | None = None
    storage: BlockSize | None = None


class QuotaConfig(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The most resident blocks of each salt. Above it the salt's own blocks are evicted first. A
    quota refuses no request.

    Attributes:
        device: device blocks of each salt that is not named, and of requests without one, or bytes
            such as "8 GiB". None: no limit.
        host: as `device`, in the host tier.
        salts: quotas of named salts.
        storage: as `device`, in a file or memory store, which then keeps numbers of salts beside
            the blocks.
    """

    device: BlockSize | None = None
    host: BlockSize | None = None
    salts: dict[str, SaltQuota] = {}
    storage: BlockSize | None = None


class HintsConfig(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Hints of requests.

    Attributes:
        pin_share: share of device and host blocks that may be pinned. A pin beyond it is refused,
            its request served.
    """

    pin_share: Share = 0.25


class LayoutConfig(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The layout of a block. The defaults are those of a small GQA model.

    Attributes:
        kind: gqa (num_kv_heads, head_dim, dtype, quantization, scale_dtype), mla (kv_lora_rank,
            qk_rope_head_dim, dtype, quantization, scale_dtype), dsa (kv_lora_rank,
            qk_rope_head_dim, index_head_dim), state (options, of a group), or package.module:Class.
        num_kv_heads: KV heads of all ranks, or a list with the number of each layer.
        head_dim: elements of a head, or a list.
        dtype: of an element (uint8 for fp8).
        quantization: block_wise_fp8 keeps bytes and a scale for each token of each head (gqa) or
            each token (mla).
        scale_dtype: of the scales.
        kv_lora_rank: elements of the latent.
        qk_rope_head_dim: elements with rotary positions.
        index_head_dim: elements of the indexer.
        num_layers: main layers.
        layer_offset: number of the first main layer of a pipeline stage.
        extra_layers: MTP or draft layers.
        extra_block_ratio: blocks of extra layers for each block of main layers.
        tensor_parallel: ranks that share num_kv_heads.
        options: settings of another package's layout. Of a state: shape and dtype of each tensor of
            a layer, as {ssm = {shape = [16, 128], dtype = "float32"}}.
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
    """Layers that need less than every block of a prefix (docs/groups.md). Those of `[layout]` have
    full attention.

    Attributes:
        name: unique.
        kind: window (attention to a sliding window or a chunk) or state (one a request: Mamba,
            linear attention).
        layout: of a block. For state, layout.kind is state: a block is a snapshot.
        num_blocks: device blocks.
        window: tokens attended to, the newest included, for kind window.
        every: blocks between snapshots of a request, for kind state. 0: only at the end of its
            prompt, and where it leaves a cached prompt.
        slots: host blocks.
        transit_slots: as in `host`.
        stored_blocks: objects in a store with a capacity. None: the store's capacity_blocks or
            capacity_bytes.
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
    """The scope of the cache, and defaults.

    Attributes:
        block_size: tokens a block.
        model: name and version of the model. Models share no blocks.
        namespace: namespaces, for instance versions of weights, share no blocks.
        recompute_last_token: compute the last block of a prompt that is cached completely.
        split_media: cache parts of a media item. If false, `cached_tokens` ends before an item that
            would be split.
        default_deadline_s: seconds of an operation whose caller gives no deadline.
        prefill_tokens_per_s: prompt tokens that the engine computes in a second. A fetch from
            storage that would take longer is not begun. None: measured from commits. 0: every fetch
            is begun.
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
        kind: host (numpy arrays as a stand-in), paddle (Paddle's tensors) or cuda (GPU memory
            without a framework).
        place: of Paddle's tensors: cpu, gpu:0, ..
        ordinal: the GPU's number, for cuda.
        num_blocks: device blocks. 0: the serving loop calls `KVCache.set_num_blocks` after opening.
        capacity_bytes: bytes of the blocks, in place of num_blocks.
        low_watermark: used fraction at which eviction ahead of need ends.
        high_watermark: used fraction above which it begins (both 0: on demand only).
        layerwise: load layer by layer (`Lease.wait_layer`).
        policy: order of eviction: retain (learns which blocks are used again) or lru.
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
        slots: blocks (0: no host tier).
        capacity_bytes: bytes of the blocks, in place of slots.
        transit_slots: extra slots for blocks between device and storage.
        transit_bytes: bytes of these slots, in place of transit_slots.
        policy: as in `device`. None: the device's. The guard of retain on the device covers the
            hits of both tiers only if both have it.
        mode: exclusive (a loaded block leaves the host) or inclusive (blocks are copied at request
            finish and stay).
        low_watermark: as in `device`.
        high_watermark: as in `device`.
        pinned: try to lock the arena's pages (always, with a CUDA device).
        numa_node: NUMA node of the arena (Linux). None: the system's choice.
        copy_threads: threads that copy between device and arena.
        dma_min_bytes: smallest piece in bytes that goes by a CUDA device's copy engines instead of
            the kernel.
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
            file:///FOLDER (which must exist). Credentials come from the environment.
        endpoint: http(s)://HOST:PORT of the object store. None: the provider's.
        region: of an S3 bucket. None: AWS_REGION or us-east-1.
        capacity_blocks: objects at most. With neither capacity, a file store follows 80 % of the
            space that its file system can give, other back ends have no limit.
        capacity_bytes: bytes at most. The smaller of both capacities counts.
        namespace: part of the store's identity. Namespaces share no objects.
        rank: tensor-parallel rank whose share of each block this process stores.
        ranks: number of these ranks. Objects of different ranks or numbers of ranks never mix.
        free_space_floor: bytes that the file store leaves free.
        durability: an object of the file store counts as stored when the system (written) or the
            device (synced) has it.
        io_depth: parallel reads of a file store, or of a batch of an object store.
        min_hits: uses after which write_through_selective writes a block.
        timeout_s: seconds a batch may take.
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
                "or file:///FOLDER with storage.backend = 'object', percent-encoded, with no "
                "password, query or '..', not "
                f"{self.url.rpartition('@')[2].partition('?')[0]!r}"
            )
        if self.url.startswith("file:") and (self.endpoint or self.region):
            return f"storage.endpoint and storage.region have no use with {self.url}"
        if self.endpoint and not _is_http(self.endpoint):
            shown = self.endpoint.rpartition("@")[2].partition("?")[0]
            return f"storage.endpoint must be http(s)://HOST:PORT without password, not {shown!r}"
        return ""


def _is_http(endpoint: str) -> bool:
    """Whether it has a scheme, a host, and neither a password nor a query."""
    try:
        parts = urlsplit(endpoint)
        plain = not (parts.query or parts.fragment or "@" in parts.netloc or parts.port == 0)
        return plain and parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        return False


class StorageConfig(StoreSettings, frozen=True):
    """The storage tier.

    Attributes:
        head_ranges: in a shared store, objects of a block, each with one range of all ranks' KV
            heads, for caches with other numbers of ranks. A multiple of the ranks. None: one a
            rank.
        io_write_depth: parallel writes. None: io_depth.
        keep_tokens: the file store keeps tokens beside blocks, to announce them to sinks after a
            restart (not under a salt).
        exclusive: a loaded block leaves storage.
        write_policy: none, write_through (at request finish), write_through_selective (at finish,
            blocks used `min_hits` times) or write_back (when the host tier evicts). None:
            write_through for attention_store, else write_back.
        fetch: look up stored blocks in acquire.
        max_fetch_blocks: stored blocks that a request fetches at most.
        readers: actors that read a batch each.
        writers: actors that write a batch each.
        on_full: wait or shed (do not write, and count) when writes in flight fill all transit
            slots. After a wait in vain blocks are shed until half of the slots are free.
        on_full_wait_s: seconds that an eviction, and its request, waits for slots. Blocks of a
            finished request wait up to timeout_s.
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
        mode: normal or flush_only (storage is neither read nor written, a sink is needed). None:
            FD_AS_ONLY_FLUSH decides.
        timeout_s: seconds a call of a sink may take.
        retry_min_s: seconds before a failed call is repeated, doubled each time.
        retry_max_s: longest pause in seconds.
        batch: blocks in a call, about: a path is completed.
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
        open_timeout_s: seconds a store, sink or copy engine may take to open.
        drain_timeout_s: seconds a stop may take.
        max_restarts_per_minute: failures that a group may have in 60 s.
    """

    channel_bound: SmallCount = 256
    open_timeout_s: Seconds = 120.0
    drain_timeout_s: Seconds = 10.0
    max_restarts_per_minute: SmallNumber = 5
