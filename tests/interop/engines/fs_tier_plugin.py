"""A pytest plug-in for vLLM's tests of its file tier: `KVActorsTier` in its place.

It runs in vLLM's environment. The tests ask the tier for the file of a chunk. kvactors' store keeps
many chunks in one file, so each of them has the name of that file.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.v1.kv_offload.tiering.fs import manager

from kvactors.integrations.vllm import KVActorsTier

CHUNKS = 64


@lru_cache
def engine_config() -> VllmConfig:
    """The configuration that `KVActorsConnector` gives to tiers."""
    return VllmConfig(model_config=ModelConfig(os.environ["ENGINE_TEST_MODEL"]))


class FileTier(KVActorsTier):
    """`KVActorsTier` with the arguments of vLLM's file tier."""

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        root_dir: str,
        n_read_threads: int = 16,
        n_write_threads: int = 16,
        enable_kv_events: bool = False,
        locality: str | None = None,
        backpressure_detector: Any = None,
    ) -> None:
        with set_current_vllm_config(engine_config()):
            super().__init__(
                offloading_spec,
                primary_kv_view,
                tier_type,
                backpressure_detector,
                directory=root_dir,
                capacity_blocks=CHUNKS,
                io_depth=n_read_threads,
                enable_kv_events=enable_kv_events,
                locality=locality,
            )
        files = Path(root_dir)
        self.file_mapper = SimpleNamespace(get_file_name=lambda key: next(files.rglob("slab-*")))
        # a helper of the tests waits for vLLM's thread of look-ups
        done = SimpleNamespace(empty=lambda: False)
        self._lookup_manager = SimpleNamespace(_pending_results=done)


manager.FileSystemTierManager = FileTier
