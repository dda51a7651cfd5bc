"""What a block is made of."""

from kvactors.config import LayoutConfig
from kvactors.layout.base import Layout, Piece
from kvactors.layout.gqa import GQALayout

__all__ = ["GQALayout", "Layout", "Piece", "make_layout"]


def make_layout(config: LayoutConfig, block_size: int) -> Layout:
    """The layout a config describes. Raises LayoutError."""
    return GQALayout(config.num_layers, config.num_kv_heads, config.head_dim, block_size, config.dtype)
