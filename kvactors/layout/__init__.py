"""Layouts: the pieces of a block, and the layout that a config names."""

from kvactors.errors import LayoutError
from kvactors.layout.base import Layout, Piece, Role, heads_on_rank
from kvactors.layout.gqa import GQALayout
from kvactors.layout.latent import DSALayout, MLALayout
from kvactors.layout.state import StateLayout
from kvactors.settings import LayoutConfig
from kvactors.settings.check import class_at

__all__ = [
    "DSALayout",
    "GQALayout",
    "Layout",
    "MLALayout",
    "Piece",
    "Role",
    "StateLayout",
    "heads_on_rank",
    "make_layout",
]

KINDS: dict[str, type[Layout]] = {
    "gqa": GQALayout,
    "mla": MLALayout,
    "dsa": DSALayout,
    "state": StateLayout,
}


def make_layout(config: LayoutConfig, block_size: int) -> Layout:
    """The layout a config describes. One of another package is named `package.module:Class`."""
    settings = {name: getattr(config, name) for name in config.__struct_fields__}
    return layout_class(config.kind).from_settings({**settings, **config.options}, block_size)


def layout_class(kind: str) -> type[Layout]:
    """The class of a kind."""
    found: type[Layout] = KINDS.get(kind) or class_at(kind, Layout, "layout", KINDS, LayoutError)
    return found
