"""SGLang's entry point for caches below the device pool: the `UnifiedCacheLinker` that SGLang loads
by module path."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
from sglang.srt.runtime_context import get_model

from kvactors.errors import ConfigError
from kvactors.integrations.sglang.pages import DevicePages, PageMoves
from kvactors.integrations.sglang.runtime import digest_of_models, replica_of
from kvactors.integrations.sglang.settings import (
    LINKER_WHERE,
    linker_tier_config,
    read_linker_settings,
)
from kvactors.tier_cache import CopyWorker, open_tiers

log = logging.getLogger("kvactors")


class KVActorsLinker(PageMoves, UnifiedCacheLinker):
    """kvactors as host tier and storage below SGLang's device pool, with `LinkerSettings`.

    SGLang aborts the requests of a load that fails. So a page counts as found once its bytes are in
    host memory, verified, and a load is a copy within memory."""

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: dict[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        settings = read_linker_settings(extra_config)
        _check_supported(params, components)
        self.forward_stream = forward_stream
        self._pages = DevicePages(params.token_to_kv_pool_allocator.get_kvcache(), params.page_size)
        self.pools = {PoolName.KV: self._pages}
        tiers = open_tiers(
            linker_tier_config(
                settings,
                get_model().model_path,
                self._pages.facts,
                page_bytes=self._pages.page_bytes,
                replica=replica_of(0),
                weights=digest_of_models(),
            )
        )
        try:
            copies = CopyWorker(self._pages.tensors, tiers.memory)
            tiers.start()
        except BaseException:
            tiers.shutdown()
            raise
        super().__init__(tiers, copies, settings.fetch_wait_s)
        self.layer_done_counter = self
        log.info(
            "linker: %d host pages of %d bytes", tiers.config.num_slots, self._pages.page_bytes
        )

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """The lengths of prefixes that can be loaded, in pages."""
        return list(range(1, self.find(_keys(_kv(transfers))) + 1))

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Have pages loaded with the next batch. False if one was evicted since its look-up."""
        return self.queue_load(rid, *self._moved(transfers))

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Copy pages to the host tier, and from there to storage."""
        return self.queue_store(*self._moved(transfers))

    def _moved(self, transfers: list[PoolTransfer]) -> tuple[list[bytes], list[int]]:
        transfer = _kv(transfers)
        keys = _keys(transfer)
        return keys, self._pages.numbers(transfer.device_indices, len(keys))

    def stream(self) -> int | None:
        """The stream that a copy comes after, with the forward pass that uses the pages."""
        if not self._pages.tensors[0].is_cuda:
            return None
        current = torch.cuda.current_stream()
        if self.forward_stream is not None:
            current.wait_stream(self.forward_stream)
        return int(current.cuda_stream)


def _kv(transfers: list[PoolTransfer]) -> PoolTransfer:
    """The transfer of keys and values, the only one that SGLang makes for the supported models."""
    (found,) = transfers
    return found


def _keys(transfer: PoolTransfer) -> list[bytes]:
    return [bytes.fromhex(key) for key in transfer.keys or ()]


def _check_supported(params: Any, components: Any) -> None:
    found = [str(one.name) for one in components if one.name != "FULL"]
    if found:
        raise ConfigError(
            f"{LINKER_WHERE}: KVActorsLinker supports models with full attention alone, not with "
            f"{', '.join(found)}: use KVActorsHiCache"
        )
    if params.mtp_draft_device_pools or getattr(params, "sidecar_draft_device_pools", ()):
        raise ConfigError(f"{LINKER_WHERE}: KVActorsLinker supports no draft models")
    group = params.attn_tp_cache_group or params.tp_cache_group
    ranks = torch.distributed.get_world_size(group) if torch.distributed.is_initialized() else 1
    if max(ranks, params.pp_size, params.attn_cp_size) > 1:
        raise ConfigError(
            f"{LINKER_WHERE}: KVActorsLinker supports one rank, not {ranks} tensor parallel, "
            f"{params.pp_size} pipeline and {params.attn_cp_size} context parallel ones: use "
            "KVActorsHiCache"
        )
