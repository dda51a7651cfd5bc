"""Layouts with one latent per token instead of keys and values per head: MLA, and DSA.

Source of the sizes: DeepSeek-V2 (multi-head latent attention) and DeepSeek-V3.2 (sparse attention),
as FastDeploy stores them. The latent is the same on every tensor-parallel rank, so it is not split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from kvactors.errors import LayoutError
from kvactors.layout.base import Layout, Quantization, Role, check_positive, picked

SCALE_GROUP = 128  # elements that share a float32 scale in DSA's bytes


class MLALayout(Layout):
    """One key of kv_lora_rank + qk_rope_head_dim elements a token, and no value.

    Args:
        dtype: a name in `ITEM_BYTES`.
        quantization: with block_wise_fp8 the key is bytes, and each token has a scale of dtype
            scale_dtype.
        options: `Layout`'s.

    Raises:
        LayoutError: a size or a dtype is invalid.
    """

    def __init__(
        self,
        num_layers: int,
        block_size: int,
        kv_lora_rank: int = 512,
        qk_rope_head_dim: int = 64,
        dtype: str = "bfloat16",
        *,
        quantization: Quantization = "none",
        scale_dtype: str = "float32",
        **options: Any,
    ) -> None:
        check_positive(kv_lora_rank=kv_lora_rank, qk_rope_head_dim=qk_rope_head_dim)
        self.width = kv_lora_rank + qk_rope_head_dim
        self.quantization = quantization
        self.dtype = dtype if quantization == "none" else "uint8"
        self.scale_dtype = scale_dtype
        super().__init__(block_size, num_layers, **options)

    @property
    def kind(self) -> str:
        """The layout's name."""
        return "mla" if self.quantization == "none" else f"mla-{self.quantization}"

    def roles(self, layer: int) -> Sequence[Role]:
        """A key of [1, block_size, kv_lora_rank + qk_rope_head_dim], and a scale without the last
        axis."""
        key = Role("key", (1, self.block_size, self.width), self.dtype)
        scale = Role("key_scale", key.shape[:2], self.scale_dtype)
        return [key] if self.quantization == "none" else [key, scale]

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], block_size: int) -> Self:
        """See `Layout.from_settings`."""
        names = ("kv_lora_rank", "qk_rope_head_dim", "dtype", "quantization", "scale_dtype")
        return cls(block_size=block_size, **picked(settings, *names))


class DSALayout(Layout):
    """Bytes only: a key of kv_lora_rank fp8 values with their scales and 2 * qk_rope_head_dim bytes
    of rope (656 bytes a token at 512 and 64), and an indexer of index_head_dim fp8 values with
    their scales (132 bytes at 128).

    Args:
        options: `Layout`'s.

    Raises:
        LayoutError: a size is invalid.
    """

    def __init__(
        self,
        num_layers: int,
        block_size: int,
        kv_lora_rank: int = 512,
        qk_rope_head_dim: int = 64,
        index_head_dim: int = 128,
        **options: Any,
    ) -> None:
        scaled = {"kv_lora_rank": kv_lora_rank, "index_head_dim": index_head_dim}
        check_positive(qk_rope_head_dim=qk_rope_head_dim, **scaled)
        for name, value in scaled.items():
            if value % SCALE_GROUP:
                raise LayoutError(f"{name} must be a multiple of {SCALE_GROUP}, not {value}")
        self.key_bytes = kv_lora_rank + 4 * (kv_lora_rank // SCALE_GROUP) + 2 * qk_rope_head_dim
        self.indexer_bytes = index_head_dim + 4 * (index_head_dim // SCALE_GROUP)
        super().__init__(block_size, num_layers, **options)

    @property
    def kind(self) -> str:
        """The layout's name."""
        return "dsa"

    def roles(self, layer: int) -> Sequence[Role]:
        """A key of [1, block_size, key_bytes] and an indexer of [block_size, indexer_bytes]."""
        key = Role("key", (1, self.block_size, self.key_bytes), "uint8")
        return [key, Role("indexer", (self.block_size, self.indexer_bytes), "uint8")]

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], block_size: int) -> Self:
        """See `Layout.from_settings`."""
        names = ("kv_lora_rank", "qk_rope_head_dim", "index_head_dim")
        return cls(block_size=block_size, **picked(settings, *names))
