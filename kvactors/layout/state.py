"""States of recurrent layers (Mamba, linear attention): tensors a request, in place of a key and a
value a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec

from kvactors.errors import LayoutError
from kvactors.layout.base import Layout, Role, picked


class StateTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor of one layer's state, without the block axis."""

    shape: tuple[int, ...]
    dtype: str = "float32"


class StateLayout(Layout):
    """A block is a snapshot of the state after the block's last token.

    Args:
        num_layers: at least 1.
        tensors: by name, what each layer keeps: for Mamba a convolution's last inputs and the state
            of the recurrence. Their shapes do not depend on block_size.
        options: `Layout`'s.

    Raises:
        LayoutError: a shape or a dtype is invalid, or there is no tensor.
    """

    def __init__(
        self, num_layers: int, tensors: Mapping[str, StateTensor], block_size: int, **options: Any
    ) -> None:
        self._roles = [Role(name, one.shape, one.dtype) for name, one in tensors.items()]
        super().__init__(block_size, num_layers, **options)

    @property
    def kind(self) -> str:
        """The layout's name."""
        return "state"

    def roles(self, layer: int) -> Sequence[Role]:
        """The tensors, the same in each layer."""
        return self._roles

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], block_size: int) -> Self:
        """See `Layout.from_settings`. `options` has the tensors, for one rank."""
        try:
            tensors = msgspec.convert(settings["options"], dict[str, StateTensor])
        except msgspec.ValidationError as error:
            raise LayoutError(f"layout.options: {error}") from None
        return cls(tensors=tensors, block_size=block_size, **picked(settings))
