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
from kvactors.integrations.sglang.pages import KV, STATE, PageMoves, Places, device_pages
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
        _check_supported(params)
        self.forward_stream = forward_stream
        self._pages = device_pages(
            params.token_to_kv_pool_allocator.get_kvcache(),
            params.req_to_token_pool,
            params.page_size,
            [one.name for one in components],
        )
        self.pools = {PoolName(name): pages for name, pages in self._pages.items()}
        tiers = open_tiers(
            linker_tier_config(
                settings,
                get_model().model_path,
                self._pages,
                replica=replica_of(0),
                weights=digest_of_models(),
            )
        )
        try:
            caches = {KV: tiers, **tiers.groups}
            copies = {
                name: CopyWorker(pages.tensors, caches[name].memory)
                for name, pages in self._pages.items()
            }
            tiers.start()
        except BaseException:
            tiers.shutdown()
            raise
        super().__init__(tiers, copies, settings.fetch_wait_s)
        self.layer_done_counter = self
        if STATE in self._pages:  # SGLang has the pool of keys and values wait, and not this one
            params.req_to_token_pool.register_layer_transfer_counter(self)
        for name, cache in caches.items():
            slots, nbytes = cache.config.num_slots, cache.config.block_bytes
            log.info("linker: %d host pages of %d bytes (%s)", slots, nbytes, name)

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """The length of the longest prefix that can be loaded, in pages: SGLang takes the longest
        one that every rank has, and there is one rank."""
        keys = {str(one.name): _keys(one) for one in transfers}
        windows = {name: len(some) for name, some in keys.items() if name != KV}
        found = self.find(keys[KV], windows)
        return [found] if found else []

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Have pages loaded with the next batch. False if one was evicted since its look-up."""
        return self.queue_load(rid, self._places(transfers))

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Copy pages to the host tier, and from there to storage."""
        return self.queue_store(self._places(transfers))

    def _places(self, transfers: list[PoolTransfer]) -> Places:
        places = {}
        for one in transfers:
            name, keys = str(one.name), _keys(one)
            places[name] = keys, self._pages[name].numbers(one.device_indices, len(keys))
        return places

    def stream(self) -> int | None:
        """The stream that a copy comes after, with the forward pass that uses the pages."""
        if not self._pages[KV].tensors[0].is_cuda:
            return None
        current = torch.cuda.current_stream()
        if self.forward_stream is not None:
            current.wait_stream(self.forward_stream)
        return int(current.cuda_stream)


def _keys(transfer: PoolTransfer) -> list[bytes]:
    return [bytes.fromhex(key) for key in transfer.keys or ()]


def _check_supported(params: Any) -> None:
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
