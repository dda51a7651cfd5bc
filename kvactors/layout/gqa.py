"""Grouped-query (and multi-head) attention: a key and a value for each head in every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from kvactors.layout.base import Layout, Role, check_positive, heads_on_rank, picked

Quantization = Literal["none", "block_wise_fp8"]


class GQALayout(Layout):
    """Keys and values per head.

    Args:
        num_layers: at least 1.
        num_kv_heads: heads on this rank, at least 1.
        head_dim: at least 1.
        dtype: a name in `ITEM_BYTES`.
        quantization: with block_wise_fp8 key and value are bytes, and each token of each head has
            a scale of dtype scale_dtype.
        options: `Layout`'s.

    Raises:
        LayoutError: a size or a dtype is invalid.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: str = "float16",
        *,
        quantization: Quantization = "none",
        scale_dtype: str = "float32",
        **options: Any,
    ) -> None:
        check_positive(num_kv_heads=num_kv_heads, head_dim=head_dim)
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.quantization = quantization
        self.dtype = dtype if quantization == "none" else "uint8"
        self.scale_dtype = scale_dtype
        super().__init__(block_size, num_layers, **options)

    @property
    def kind(self) -> str:
        """The layout's name."""
        return "gqa" if self.quantization == "none" else f"gqa-{self.quantization}"

    def make_roles(self) -> Sequence[Role]:
        """Key and value of [num_kv_heads, block_size, head_dim], and scales without head_dim."""
        shape = (self.num_kv_heads, self.block_size, self.head_dim)
        roles = [Role("key", shape, self.dtype), Role("value", shape, self.dtype)]
        if self.quantization != "none":
            scales = ("key_scale", "value_scale")
            roles += [Role(name, shape[:2], self.scale_dtype) for name in scales]
        return roles

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], block_size: int) -> Self:
        """See `Layout.from_settings`. Its `num_kv_heads` counts the heads of all ranks."""
        heads = heads_on_rank(settings["num_kv_heads"], settings["tensor_parallel"])
        names = ("head_dim", "dtype", "quantization", "scale_dtype")
        return cls(num_kv_heads=heads, block_size=block_size, **picked(settings, *names))
