"""Layouts: the pieces of a block, and the layout that a config names."""

from importlib import import_module

from kvactors.config import LayoutConfig
from kvactors.errors import LayoutError
from kvactors.layout.base import Layout, Piece, Role, heads_on_rank
from kvactors.layout.gqa import GQALayout
from kvactors.layout.latent import DSALayout, MLALayout

__all__ = [
    "DSALayout",
    "GQALayout",
    "Layout",
    "MLALayout",
    "Piece",
    "Role",
    "heads_on_rank",
    "make_layout",
]

KINDS: dict[str, type[Layout]] = {"gqa": GQALayout, "mla": MLALayout, "dsa": DSALayout}


def make_layout(config: LayoutConfig, block_size: int) -> Layout:
    """The layout a config describes. A layout of another package is named `package.module:Class`.

    Raises:
        LayoutError: there is no such layout, or its settings are invalid.
    """
    settings = {
        **{name: getattr(config, name) for name in config.__struct_fields__},
        **config.options,
    }
    return layout_class(config.kind).from_settings(settings, block_size)


def layout_class(kind: str) -> type[Layout]:
    """The class of a kind.

    Raises:
        LayoutError: there is no such class.
    """
    if kind in KINDS:
        return KINDS[kind]
    module, _, name = kind.partition(":")
    if not name:
        raise LayoutError(
            f"unknown layout {kind!r}: choose {', '.join(KINDS)} or package.module:Class"
        )
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise LayoutError(f"layout {kind!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Layout)):
        raise LayoutError(f"{kind!r} is not a Layout")
    return found
