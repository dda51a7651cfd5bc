"""Settings that `kv_connector_extra_config` holds, and the identity of vLLM's blocks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from kvactors.actor.log import get_logger
from kvactors.errors import ConfigError
from kvactors.integrations.engine import FileStoreSettings, check_ranks, model_digest
from kvactors.settings.check import ByteSize, DeviceNumber, convert, in_bytes, located
from kvactors.tier_cache import TierStorage

WHERE = "kv_connector_extra_config"
TIER = "secondary_tiers: KVActorsTier"

log = get_logger(component="integrations")


class OffloadingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The keys of `kv_connector_extra_config`."""

    cpu_bytes_to_use: ByteSize
    eviction_policy: Literal["lru"] = "lru"
    storage: TierStorage = TierStorage()
    model: str | None = None
    numa_node: DeviceNumber | None = None
    copy_worker: Literal["auto", "vllm", "kvactors"] = "auto"
    spec_name: str | None = None
    spec_module_path: str | None = None
    block_size: int | None = None
    blocks_per_chunk: int | None = None
    offload_prompt_only: bool = True
    self_describing_kv_events: bool = False
    sync_load_budget_bytes: int | None = None


class TierSettings(FileStoreSettings, frozen=True, kw_only=True):
    """The keys of an entry of `secondary_tiers`, beside those that vLLM reads."""

    capacity_blocks: int | None = None
    capacity_bytes: int | str | None = None
    model: str | None = None
    enable_kv_events: bool = False
    locality: str | None = None


def read_settings(extra_config: Mapping[str, Any]) -> OffloadingSettings:
    """Check `kv_connector_extra_config`."""
    with located(WHERE):
        settings = convert(extra_config, OffloadingSettings)
        size = in_bytes(settings.cpu_bytes_to_use, "cpu_bytes_to_use")
        if size < 1:
            raise ConfigError(f"cpu_bytes_to_use must be at least 1, not {size}")
        check_ranks(settings.storage, "vLLM's data parallel replicas")
    return msgspec.structs.replace(settings, cpu_bytes_to_use=size)


def chosen_worker(settings: OffloadingSettings, platform: Any) -> Literal["vllm", "kvactors"]:
    """The worker that copies on a platform."""
    wanted = settings.copy_worker
    if platform.is_cpu():
        if wanted == "vllm":
            raise ConfigError(
                f"{WHERE}: copy_worker = 'vllm' needs an accelerator: vLLM has no worker for a CPU"
            )
        return "kvactors"
    if wanted == "kvactors" and not platform.is_cuda():
        raise ConfigError(
            f"{WHERE}: copy_worker = 'kvactors' supports CPUs and NVIDIA GPUs, and this platform "
            f"is {platform.device_name}"
        )
    return "kvactors" if wanted == "kvactors" else "vllm"


def read_tier_settings(settings: Mapping[str, Any]) -> tuple[TierSettings, TierStorage]:
    """An entry of `secondary_tiers`, checked, and those of its settings that the store has."""
    with located(TIER):
        found = convert(dict(settings), TierSettings)
        storage = found.storage()
        if found.locality not in (None, "LOCAL", "REMOTE"):  # vLLM's tests want its enum's name
            raise ConfigError(f"unknown Locality {found.locality!r}: there are LOCAL, REMOTE")
    return found, storage


def storage_of_replica(storage: TierStorage, config: Any) -> TierStorage:
    """Storage with the rank of a data parallel replica."""
    parallel = config.parallel
    return msgspec.structs.replace(
        storage, rank=parallel.data_parallel_index, ranks=parallel.data_parallel_size
    )


def check_cache(config: Any) -> None:
    """Refuse caches that kvactors cannot hold."""
    if config.canonical_layout:
        raise ConfigError(f"{WHERE}: canonical_layout is not supported")
    if config.worker_kv_bytes_per_block < 1:
        raise ConfigError("vLLM gives no size for a block of the KV cache")


def check_engine(vllm_config: Any, platform: Any) -> None:
    """Refuse engines that compute wrong tokens behind loaded blocks, and warn of block hashes that
    no other process finds."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if platform.is_cpu() and model.use_mla and not cache.enable_prefix_caching:
        raise ConfigError(
            f"{model.model} has multi-head latent attention, and prefix caching is off: on a CPU "
            "without AMX vLLM cannot compute a prompt behind blocks that are cached, and its "
            "answers would be wrong. Run the model without kvactors, or on a CPU with AMX"
        )
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    hashed_by = str(cache.prefix_caching_hash_algo)
    stores = "storage" in extra or "secondary_tiers" in extra
    if stores and hashed_by.startswith("xxhash") and "PYTHONHASHSEED" not in os.environ:
        log.warning(
            "nothing that is stored will be found after a restart: block hashes begin with a seed "
            "that each process draws. Set PYTHONHASHSEED, or take sha256",
            prefix_caching_hash_algo=hashed_by,
        )


def stored_model(name: str | None, model_path: str, vllm_config: Any) -> str:
    """The name of a model in a store, with its digest."""
    if vllm_config is None:
        raise ConfigError(
            "set kv_connector to KVActorsConnector: under vLLM's own connector overrides of the "
            "configuration are no part of a chunk's identity"
        )
    load, model = vllm_config.load_config, vllm_config.model_config
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    models = [model] if draft is None or draft.model == model.model else [model, draft]
    return "@".join([name or model_path, *(_digest(each, load) for each in models)])


def _digest(model: Any, load: Any) -> str:
    settings = {
        "hf_overrides": model.hf_overrides,
        "quantization": model.quantization,
        "dtype": str(model.dtype),
        "load_format": str(load.load_format),
    }
    return model_digest(model.model, settings, revision=model.revision, cache=load.download_dir)


def identity(config: Any, *, copied_by: str) -> dict[str, str | int | float | bool | None]:
    """The facts that two engines must share for their blocks to be interchangeable."""
    parallel = config.parallel
    return {
        "engine": "vllm",
        "copied_by": copied_by,
        "dtype": config.model.dtype,
        "kv_cache_layout": config.kv_cache_layout,
        "tokens_per_hash": config.cache.tokens_per_hash,
        "tokens_per_block": ",".join(str(group.tokens_per_block) for group in config.groups),
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "worker_kv_bytes_per_block": config.worker_kv_bytes_per_block,
        "layers": ";".join(",".join(group.layer_names) for group in config.groups),
        "canonical_layout": config.canonical_layout,
        "replicated_layout": config.replicated_layout,
        "world_size": parallel.world_size,
        "tp_size": parallel.tp_size,
        "pp_size": parallel.pp_size,
        "pcp_size": parallel.pcp_size,
        "dcp_size": parallel.dcp_size,
    }
