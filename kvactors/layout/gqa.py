"""Grouped-query (and multi-head) attention: a key and a value of shape [kv heads, block size, head dim] in every layer."""

from __future__ import annotations

from kvactors.errors import LayoutError
from kvactors.layout.base import ITEM_BYTES, Layout, Piece


class GQALayout(Layout):
    """num_layers, num_kv_heads (on this rank), head_dim: at least 1. dtype: a name in `ITEM_BYTES`. Raises LayoutError."""

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: str = "float16") -> None:
        for name, value in (("num_layers", num_layers), ("num_kv_heads", num_kv_heads), ("head_dim", head_dim)):
            if value < 1:
                raise LayoutError(f"{name} must be at least 1, not {value}")
        if dtype not in ITEM_BYTES:
            raise LayoutError(f"unknown dtype {dtype!r}; known: {', '.join(ITEM_BYTES)}")
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        super().__init__(block_size)

    @property
    def kind(self) -> str:
        """The layout's name."""
        return "gqa"

    def make_pieces(self) -> tuple[Piece, ...]:
        """Key and value of every layer, each [num_kv_heads, block_size, head_dim]."""
        shape = (self.num_kv_heads, self.block_size, self.head_dim)
        nbytes = shape[0] * shape[1] * shape[2] * ITEM_BYTES[self.dtype]
        return tuple(
            Piece(layer, role, shape, self.dtype, nbytes) for layer in range(self.num_layers) for role in ("key", "value")
        )
