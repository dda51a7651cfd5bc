"""FastDeploy's config and requests, with the attributes that its manager reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

BLOCK_SIZE = 4


def make_config(
    gpu_blocks: int = 8,
    cpu_blocks: int = 0,
    *,
    backend: str | None = None,
    model: str = "/models/tiny",
    max_model_len: int | None = None,
    drafts: int | None = None,
    ranks: int = 1,
    layers: int = 2,
    **cache: Any,
) -> Any:
    """An `FDConfig`. `drafts`: layers of an MTP model. `ranks`, `layers`: as v1 reads them."""
    fields = {
        "block_size": BLOCK_SIZE,
        "total_block_num": gpu_blocks,
        "num_cpu_blocks": cpu_blocks,
        "swap_space": None,
        "kvcache_storage_backend": backend,
        "write_policy": "write_through",
        "enable_prefix_caching": True,
        "enable_output_caching": True,
        **cache,
    }
    method = None if drafts is None else "mtp"
    return SimpleNamespace(
        cache_config=SimpleNamespace(**fields),
        model_config=SimpleNamespace(
            model=model, max_model_len=max_model_len, num_hidden_layers=layers, dtype="uint8"
        ),
        speculative_config=SimpleNamespace(
            method=method, num_extra_cache_layer=drafts or 0, num_gpu_block_expand_ratio=1
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks, data_parallel_size=1),
    )


class Position(NamedTuple):
    """A media item's place."""

    offset: int
    length: int


class Request:
    """A request, with the attributes that the scheduler and the manager share."""

    def __init__(self, request_id: str, prompt: Any, media: Any = None) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt
        self.output_token_ids: list[int] = []
        self.block_tables: list[int] = []
        self.num_cached_blocks = 0
        self.num_computed_tokens = 0
        self.need_prefill_tokens = len(prompt)
        self._match_result: Any = None
        self.cache_swap_metadata: list[Any] = []
        self.cache_evict_metadata: list[Any] = []
        self.prefill_end_index: int | None = None
        self.multimodal_inputs: dict[str, Any] = {}
        if media is not None:
            self.multimodal_inputs = {
                "mm_positions": [Position(offset, length) for offset, length, _ in media],
                "mm_hashes": [digest for _, _, digest in media],
            }

    @property
    def match_result(self) -> Any:
        return self._match_result

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt_token_ids, *self.output_token_ids]
