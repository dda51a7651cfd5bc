"""Arguments of AttentionStore's SDK: the settings, and values derived from the scope, the layout,
the device and the ranks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

from kvactors.identity import StoreIdentity
from kvactors.layout.base import Layout
from kvactors.settings import CacheConfig, Config, StorageConfig
from kvactors.settings.sinks import MODEL_VERSION, NAMESPACE, POD_NAME, AttentionStoreConfig

if TYPE_CHECKING:
    from kvactors.device.base import DeviceBlocks

SLICE_BLOCKS, SLICE_TIMEOUT = 100, 10.0


class Shard(NamedTuple):
    """One tensor-parallel rank's part of the service: a process has one SDK object for it."""

    package: str
    namespace: str
    pod: str
    version: str
    shard_id: int

    @property
    def names(self) -> str:
        """The names that all shards of one cache have in common."""
        return f"{self.namespace}/{self.pod}/{self.version}"


class SdkSettings(NamedTuple):
    """Complete settings of one shard, with no value left unset.

    Attributes:
        shard: its pod includes the suffix.
        latent: the layout has keys without values (MLA).
        write_total_timeout: seconds, 0 for the rest of the operation's time.
    """

    shard: Shard
    shard_num: int
    layers: int
    block_size: int
    piece_bytes: int
    device_id: int
    dp_id: int
    cuda: bool
    latent: bool
    ready_timeout: float
    ready_interval: float
    write_slice_blocks: int
    write_slice_timeout: float
    write_total_timeout: float


def complete(
    store: AttentionStoreConfig,
    layout: Layout,
    *,
    model: str = "",
    version_suffix: str = "",
    shard: tuple[int, int] = (0, 1),
    gpu: int | None = None,
) -> SdkSettings:
    """Fill the values that `[attention_store]` leaves unset.

    Args:
        store: the settings.
        layout: gives the sizes of a block.
        model: passed as the namespace where neither namespace nor model_version is set.
        version_suffix: appended to the version.
        shard: rank and number of ranks.
        gpu: the number of the GPU that has the device memory, None for host memory.
    """
    named = store.namespace or store.model_version
    namespace = store.namespace or (NAMESPACE if named or not model else model)
    pod = store.pod_name or POD_NAME
    if store.role_suffix is not False:
        pod = f"{pod}_{store.splitwise_role}_{store.dp_id}"
    version = (store.model_version or MODEL_VERSION) + version_suffix
    return SdkSettings(
        Shard(
            store.sdk,
            namespace,
            pod,
            version,
            shard[0] if store.shard_id is None else store.shard_id,
        ),
        shard_num=shard[1] if store.shard_num is None else store.shard_num,
        layers=store.layer_num or len({piece.layer for piece in layout.pieces}),
        block_size=layout.block_size,
        piece_bytes=store.bytes_per_shard_layer_per_block or layout.pieces[0].nbytes,
        device_id=(gpu or 0) if store.device_id is None else store.device_id,
        dp_id=store.dp_id,
        cuda=(gpu is not None) if store.platform is None else store.platform == "cuda",
        latent=[role.name for role in layout.roles] == ["key"],
        ready_timeout=store.ready_timeout_s,
        ready_interval=store.ready_interval_s,
        write_slice_blocks=SLICE_BLOCKS
        if store.write_slice_blocks is None
        else store.write_slice_blocks,
        write_slice_timeout=SLICE_TIMEOUT
        if store.write_slice_timeout_s is None
        else store.write_slice_timeout_s,
        write_total_timeout=store.write_total_timeout_s or 0.0,
    )


def sdk_settings(
    config: Config,
    layout: Layout,
    device: DeviceBlocks | None = None,
    shard: tuple[int, int] | None = None,
) -> SdkSettings:
    """The SDK's settings for this cache. Its names stand for the scope that the cache is
    opened with.

    A `cache.namespace` other than the default is appended to the version, so that one version of
    the weights never reads blocks that another version wrote.

    Args:
        config: the settings of the cache.
        layout: gives the sizes of a block.
        device: the device memory, None on a leader.
        shard: rank and number of ranks of the calling process. If None, the leader's rank 0 of
            `ranks.count` or, without ranks, of `layout.tensor_parallel`.
    """
    namespace = config.cache.namespace
    ranks = config.ranks.count if config.ranks.count > 1 else config.layout.tensor_parallel
    return complete(
        config.attention_store,
        layout,
        model=config.cache.model,
        version_suffix="" if namespace == CacheConfig().namespace else f";namespace={namespace}",
        shard=shard or (0, ranks),
        gpu=gpu_of(config, device),
    )


def store_identity(
    config: Config, storage: StorageConfig, layout: Layout, rank: int, ranks: int
) -> StoreIdentity:
    """The identity of a rank's store. With AttentionStore its namespace is the names of the shards,
    which all ranks must have in common."""
    direct = storage.backend == "attention_store"
    namespace = sdk_settings(config, layout).shard.names if direct else storage.namespace
    return StoreIdentity(config.cache.model, namespace, layout.fingerprint, rank, ranks)


def gpu_of(config: Config, device: DeviceBlocks | None) -> int | None:
    """The number of the GPU that the device memory is on, None if it is host memory.

    The device reports it. A leader has no device memory: it goes by `[device]`, or by the Paddle
    that this process has imported.
    """
    if device is not None and device.kind != "ranks":
        return int(getattr(device, "ordinal", 0)) if device.kind == "cuda" else None
    settings = config.device
    if settings.kind == "cuda":
        return settings.ordinal
    if settings.kind == "paddle":
        kind, _, number = settings.place.partition(":")
        return int(number or 0) if kind == "gpu" else None
    paddle = sys.modules.get("paddle") if config.ranks.count > 1 else None
    return 0 if paddle is not None and paddle.is_compiled_with_cuda() else None
