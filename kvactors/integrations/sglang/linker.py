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


class LayerCounter:
    """SGLang's wait for a layer of a batch: for all, since a page is copied with all layers."""

    def __init__(self, moves: PageMoves) -> None:
        self._moves = moves
        self.consumer_index = -1

    def set_consumer(self, index: int) -> None:
        """Name the batch that the next forward pass needs, -1 for none."""
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        self._moves.wait_for_batch(self.consumer_index)


class KVActorsLinker(UnifiedCacheLinker):
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
        self._moves = PageMoves(tiers, copies, settings.fetch_wait_s, self._stream)
        self.layer_done_counter = LayerCounter(self._moves)
        log.info(
            "linker: %d host pages of %d bytes", tiers.config.num_slots, self._pages.page_bytes
        )

    # -- look-up

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """The lengths of prefixes that can be loaded, in pages."""
        return list(range(1, self._moves.find(_keys(_kv(transfers))) + 1))

    # -- loads

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Have pages loaded with the next batch. False if one was evicted since its look-up."""
        transfer = _kv(transfers)
        keys = _keys(transfer)
        return self._moves.queue_load(
            rid, keys, self._pages.numbers(transfer.device_indices, len(keys))
        )

    def cancel_queued_load(self, rid: str) -> bool:
        return self._moves.cancel_load(rid)

    def start_layer_wise_loading(self) -> int:
        return self._moves.start_loads()

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait for the loads of a batch. Returns whether all pages were loaded."""
        return self._moves.finish_loads(counter_index)

    # -- stores

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Copy pages to the host tier, and from there to storage."""
        transfer = _kv(transfers)
        keys = _keys(transfer)
        pages = self._pages.numbers(transfer.device_indices, len(keys))
        return self._moves.queue_store(keys, pages)

    def num_completed_offloads(self) -> int:
        """Stores that have ended. SGLang's scheduler asks at the start of every step."""
        self._moves.end_step()
        return self._moves.stored()

    def pop_completed_offload(self) -> bool:
        """Forget the oldest store. Returns whether all of its pages were stored."""
        return self._moves.take_stored()

    def _stream(self) -> int | None:
        """The stream that a copy comes after, with the forward pass that uses the pages."""
        if not self._pages.tensors[0].is_cuda:
            return None
        current = torch.cuda.current_stream()
        if self.forward_stream is not None:
            current.wait_stream(self.forward_stream)
        return int(current.cuda_stream)

    # -- control

    def reset(self) -> None:
        self._moves.reset()

    def close(self) -> None:
        self._moves.close()


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
