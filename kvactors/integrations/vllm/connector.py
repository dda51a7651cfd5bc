"""vLLM's connector for `KVActorsOffloadingSpec` and `KVActorsTier`: chunks without a host slot are
stored later, and the tiers get the model's configuration."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import get_offload_group_idx
from vllm.v1.request import RequestStatus

from kvactors.integrations.engine import log_to
from kvactors.integrations.vllm.settings import check_engine


@dataclass
class ConnectorMetadata(OffloadingConnectorMetadata):
    """vLLM's message to workers. `stored`: finished requests whose blocks are kept no longer."""

    stored: set[str] = field(default_factory=set)


class KVActorsConnector(OffloadingConnector):
    """vLLM's `OffloadingConnector`, whose stores go on when slots of the host tier return.

    vLLM offers the chunks of a request once, and when the request has finished its blocks are free.
    Here chunks that wait for a slot are offered again in every step, and vLLM keeps the blocks of a
    finished request until none waits, at most for `storage.timeout_s`.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        log_to(logging.getLogger("vllm"))
        check_engine(vllm_config, current_platform)
        # vLLM's own configuration for specs and tiers has the model's path only
        with set_current_vllm_config(vllm_config):
            super().__init__(vllm_config, role, kv_cache_config)
        self._kept: dict[str, Any] = {}  # vLLM's states of finished requests, by request
        self._stored: set[str] = set()  # requests that the workers are to report
        self._waiting: dict[str, Sequence[bytes]] = {}  # the chunks that wait, by request
        if role is KVConnectorRole.SCHEDULER:
            self.scheduler.manager.waiting = self._waiting

    # -- the scheduler's side

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether vLLM keeps the blocks of a request: a chunk was not offered, or waits."""
        keeps, parameters = super().request_finished_all_groups(request, block_ids)
        state = self.scheduler._req_status.get(request.request_id)
        if state is not None and self._has_more(state):
            self._kept[request.request_id] = state
            keeps = True
        return keeps, parameters

    def _has_more(self, state: Any) -> bool:
        request, scheduler = state.req, self.scheduler
        computed = request.num_tokens - 1
        if request.status is RequestStatus.FINISHED_ABORTED:
            computed = request.num_computed_tokens
        tokens = scheduler._calc_num_offloadable_tokens(state, computed)
        return any(
            group.next_stored_chunk_idx < state.storable_chunks(config, group, tokens)
            for config, group in zip(
                scheduler.config.kv_group_configs, state.group_states, strict=True
            )
        )

    def build_connector_meta(self, scheduler_output: Any) -> ConnectorMetadata:
        """The work of a step. Chunks of finished requests that wait are offered again."""
        states = self.scheduler._req_status
        states.update(self._kept)  # vLLM forgets them with each step
        self._waiting.clear()
        finished = {*scheduler_output.finished_req_ids, *self._kept}
        made = super().build_connector_meta(replace(scheduler_output, finished_req_ids=finished))
        states.update(self._kept)
        configs = self.scheduler.config.kv_group_configs
        for request, keys in self._waiting.items():
            first = {get_offload_group_idx(key): key for key in reversed(keys)}
            for config, group in zip(configs, states[request].group_states, strict=True):
                key = first.get(config.group_idx)
                if key in group.offload_keys:  # a state within a chunk has another key
                    group.next_stored_chunk_idx = group.offload_keys.index(key)
        for request in self._kept.keys() - self._waiting.keys():
            del self._kept[request]
            self._stored.add(request)
        stored, self._stored = self._stored, set()
        return ConnectorMetadata(**vars(made), stored=stored)

    def has_pending_push_work(self) -> bool:
        return bool(self._kept or self._stored) or super().has_pending_push_work()

    def reset_cache(self) -> bool | None:
        """Forget every chunk. No block is kept for one."""
        self._stored.update(self._kept)
        self._kept.clear()
        return super().reset_cache()

    # -- the workers' side

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Requests whose blocks are free, and those whose chunks are loaded."""
        sent, received = super().get_finished(finished_req_ids)
        return sent | self._connector_metadata.stored, received
