"""Grouped-query (and multi-head) attention: a key and a value for each head in every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from kvactors.layout.base import Layout, Quantization, Role, heads_on_rank, of_layers, picked


class GQALayout(Layout):
    """Keys and values per head.

    Args:
        num_layers: at least 1.
        num_kv_heads: heads on this rank, at least 1. One number for all layers, or one for each,
            extra layers last.
        head_dim: at least 1. Likewise.
        dtype: a name in `ITEM_BYTES`.
        quantization: with block_wise_fp8 key and value are bytes, and each token of each head has
            a scale of dtype scale_dtype.
        options: `Layout`'s.

    Raises:
        LayoutError: a size or a dtype is invalid.
    """

    heads_axis = 0

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int | Sequence[int],
        head_dim: int | Sequence[int],
        block_size: int,
        dtype: str = "float16",
        *,
        quantization: Quantization = "none",
        scale_dtype: str = "float32",
        **options: Any,
    ) -> None:
        layers = num_layers + options.get("extra_layers", 0)
        self._heads = of_layers("num_kv_heads", num_kv_heads, layers)
        self._head_dims = of_layers("head_dim", head_dim, layers)
        self.quantization = quantization
        self.dtype = dtype if quantization == "none" else "uint8"
        self.scale_dtype = scale_dtype
        super().__init__(block_size, num_layers, **options)

    @property
    def kind(self) -> str:
        """The layout's name."""
        return "gqa" if self.quantization == "none" else f"gqa-{self.quantization}"

    def roles(self, layer: int) -> Sequence[Role]:
        """Key and value of [num_kv_heads, block_size, head_dim], and scales without head_dim."""
        place = layer - self.layer_offset
        shape = (self._heads[place], self.block_size, self._head_dims[place])
        roles = [Role("key", shape, self.dtype), Role("value", shape, self.dtype)]
        if self.quantization != "none":
            scales = ("key_scale", "value_scale")
            roles += [Role(name, shape[:2], self.scale_dtype) for name in scales]
        return roles

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], block_size: int) -> Self:
        """See `Layout.from_settings`. Its `num_kv_heads` counts the heads of all ranks."""
        given, ranks = settings["num_kv_heads"], settings["tensor_parallel"]
        each = isinstance(given, int)
        heads = heads_on_rank(given, ranks) if each else [heads_on_rank(n, ranks) for n in given]
        names = ("head_dim", "dtype", "quantization", "scale_dtype")
        return cls(num_kv_heads=heads, block_size=block_size, **picked(settings, *names))
