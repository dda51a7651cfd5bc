"""Settings of `--hicache-storage-backend-extra-config`, and the identity of SGLang's pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from kvactors.errors import ConfigError
from kvactors.integrations.engine import check_ranks
from kvactors.integrations.sglang.pages import KV, DevicePages, HostPages
from kvactors.settings.check import (
    ByteSize,
    DeviceNumber,
    SecondsOrZero,
    convert,
    in_bytes,
    located,
)
from kvactors.tier_cache import TierConfig, TierGroup, TierStorage
from kvactors.tier_cache.settings import checked_config

WHERE = "--hicache-storage-backend-extra-config"
LINKER_WHERE = "--unified-cache-external-linker-config: linker_extra_config"
NO_EFFECT = ("write_policy", "min_hits", "on_full", "on_full_wait_s", "slot_timeout_s")
"""Settings of the storage below a host tier of kvactors."""
PROCESS_STORES = ("file", "memory")  # their objects belong to one process


class HiCacheSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The keys of `--hicache-storage-backend-extra-config` (docs/how-to/sglang.md)."""

    storage: TierStorage
    model: str | None = None
    backend_name: str | None = None
    module_path: str | None = None
    class_name: str | None = None
    interface_v1: bool | int = False


class LinkerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The keys of `linker_extra_config` (docs/how-to/sglang.md)."""

    host_bytes: ByteSize
    model: str | None = None
    eviction_policy: Literal["lru"] = "lru"
    fetch_wait_s: SecondsOrZero = 1.0
    numa_node: DeviceNumber | None = None
    storage: TierStorage = TierStorage()


def read_linker_settings(extra_config: Mapping[str, Any] | None) -> LinkerSettings:
    """Check `linker_extra_config`."""
    with located(LINKER_WHERE):
        settings = convert(extra_config or {}, LinkerSettings)
        _check_storage(settings.storage)
    return settings


def read_settings(extra_config: Mapping[str, Any] | None) -> HiCacheSettings:
    """Check `--hicache-storage-backend-extra-config`."""
    with located(WHERE):
        settings = convert(extra_config or {}, HiCacheSettings)
        storage = settings.storage
        _check_storage(storage)
        if storage.backend == "none":
            raise ConfigError("storage.backend is needed: file, memory, or package.module:Class")
        for name in NO_EFFECT:
            if getattr(storage, name) != getattr(TierStorage(), name):
                raise ConfigError(
                    f"storage.{name} has no effect: SGLang has the host pool, and its "
                    "--hicache-write-policy decides which pages are saved"
                )
        if not settings.interface_v1:
            raise ConfigError(f"interface_v1 must be 1, not {settings.interface_v1!r}")
    return settings


def _check_storage(storage: TierStorage) -> None:
    checked_config(TierConfig(model="any", block_bytes=1, num_slots=1, storage=storage))
    check_ranks(storage, "SGLang's workers")


def check_shared(storage: TierStorage, config: Any) -> None:
    """Refuse stores that the readers of a rank's pages cannot use."""
    if config.is_mla_model and config.tp_size > 1 and storage.backend in PROCESS_STORES:
        raise ConfigError(
            f"{WHERE}: storage.backend = {storage.backend!r} belongs to one process, and the "
            f"{config.tp_size} tensor parallel ranks of {config.model_name} read pages that one of "
            "them writes (multi-head latent attention)"
        )


def is_replicated(config: Any, pool_kind: str) -> bool:
    """Whether all tensor parallel ranks hold the same pages, which one of them saves. Heads and
    Mamba states are split between ranks in every model."""
    return bool(config.is_mla_model) and not any(kind in pool_kind for kind in ("MHA", "Mamba"))


def place(config: Any, *, replicated: bool) -> tuple[int, int]:
    """The rank of a pool's pages, and the number of such ranks."""
    dimensions = [(config.pp_rank, config.pp_size), (config.attn_cp_rank, config.attn_cp_size)]
    if not replicated:
        dimensions.append((config.tp_rank, config.tp_size))
    rank, ranks = 0, 1
    for index, size in dimensions:
        rank, ranks = rank * size + index, ranks * size
    return rank, ranks


def _config(
    settings: HiCacheSettings | LinkerSettings,
    model: str | None,
    pool: Mapping[str, str | int | None],
    storage: TierStorage,
    *,
    replica: int,
    weights: str,
    **more: Any,
) -> TierConfig:
    """Settings of the tiers of one pool, which its `facts` describe. Each data parallel replica has
    its own folder. `weights`: digest of the model's files. `more`: of `TierConfig`."""
    if not (settings.model or model):
        raise ConfigError("the setting model is needed: SGLang gives the model no name")
    if storage.directory:
        parts = [storage.directory]
        parts += [f"replica-{replica}"] if replica else []
        parts += [f"pool-{pool['name']}"] if pool["name"] != KV else []
        storage = replace(storage, directory="/".join(parts))
    more["identity"] |= _identity(pool)
    return TierConfig(model=f"{settings.model or model}@{weights}", storage=storage, **more)


def tier_config(
    settings: HiCacheSettings,
    config: Any,
    pool: Mapping[str, str | int | None],
    *,
    page_bytes: int,
    pages: int | None,
    **more: Any,
) -> TierConfig:
    """Settings of the store of one host pool, which holds `pages`, None: as configured."""
    replicated = is_replicated(config, str(pool["kind"]))
    rank, ranks = place(config, replicated=replicated)
    storage = replace(settings.storage, rank=rank, ranks=ranks)
    if pages is not None:
        storage = replace(storage, capacity_blocks=pages, capacity_bytes=None)
    identity = {
        "engine": "sglang",
        "replicated": replicated,
        "tp_size": 1 if replicated else config.tp_size,
        "pp_size": config.pp_size,
        "attn_cp_size": config.attn_cp_size,
        "dcp_size": config.dcp_size,
        "dcp_rank": config.dcp_rank,
        "split_heads": bool(config.should_split_heads),
    }
    more |= {"block_bytes": page_bytes, "num_slots": 1, "identity": identity}
    return _config(settings, config.model_name, pool, storage, **more)


def _identity(pool: Mapping[str, str | int | None]) -> dict[str, str | int | None]:
    return {f"pool_{name}": value for name, value in pool.items()}


def linker_tier_config(
    settings: LinkerSettings, model: str | None, pools: Mapping[str, DevicePages], **more: Any
) -> TierConfig:
    """Settings of the host tier and the storage below SGLang's device pools, as `_config`. Pools
    share the host memory in the proportions of the device's."""
    total = in_bytes(settings.host_bytes, "host_bytes")
    device = sum(one.num_pages * one.page_bytes for one in pools.values())
    slots = {name: total * one.num_pages // device for name, one in pools.items()}
    for name, one in pools.items():
        if slots[name] < 1:
            raise ConfigError(
                f"{LINKER_WHERE}: host_bytes = {settings.host_bytes} holds no page of "
                f"{one.page_bytes} bytes (pool {name!r}, whose share of the device's memory is "
                f"{one.num_pages * one.page_bytes / device:.0%})"
            )
    groups = {
        name: TierGroup(one.page_bytes, slots[name], identity=_identity(one.facts))
        for name, one in pools.items()
        if name != KV
    }
    sizes = {"block_bytes": pools[KV].page_bytes, "num_slots": slots[KV], "groups": groups}
    more |= {"identity": {"engine": "sglang"}, "policy": settings.eviction_policy, **sizes}
    more |= {"numa_node": settings.numa_node}
    with located(LINKER_WHERE):
        config = _config(settings, model, pools[KV].facts, settings.storage, **more)
        return checked_config(config)


def stored_share(storage: TierStorage, pools: Mapping[str, HostPages]) -> float | None:
    """Stored pages for each page of a host pool. None if one pool takes all that `storage` gives.
    So pools share the capacity in the proportions that SGLang gives their host memory."""
    if len(pools) == 1:
        return None
    names = ", ".join(pools)
    if storage.capacity_blocks is None and storage.capacity_bytes is None:
        raise ConfigError(
            f"{WHERE}: storage.capacity_bytes or storage.capacity_blocks is needed for a model "
            f"with several pools ({names})"
        )
    shares = []
    if storage.capacity_blocks is not None:
        shares.append(storage.capacity_blocks / pools[KV].num_pages)
    if storage.capacity_bytes is not None:
        host = sum(one.num_pages * one.page_bytes for one in pools.values())
        shares.append(in_bytes(storage.capacity_bytes, "storage.capacity_bytes") / host)
    share = min(shares)
    for name, one in pools.items():
        if share * one.num_pages < 1:
            raise ConfigError(
                f"{WHERE}: storage.capacity_bytes and capacity_blocks hold no page of pool "
                f"{name!r}: {one.page_bytes} bytes, and pools ({names}) share as their host memory"
            )
    return share
