"""FastDeploy's names of cache tensors, and the layout that the tensors have."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvactors.device.tensors import region_of
from kvactors.errors import LayoutError
from kvactors.layout.base import Layout, Role

ROLES = {
    "key_caches": "key",
    "value_caches": "value",
    "indexer_caches": "indexer",
    "key_cache_scales": "key_scale",
    "value_cache_scales": "value_scale",
}
"""Roles, by the beginning of FastDeploy's names."""

NAME = re.compile(rf"({'|'.join(ROLES)})_(\d+)_rank(\d+)(?:\.device(\d+))?")

RankTensors = dict[tuple[int, str], Any]
"""The tensors of one rank, by layer and role."""


def tensors_by_rank(named: Mapping[str, Any]) -> list[RankTensors]:
    """The tensors of `cache_kvs_map`, by rank.

    Args:
        named: tensors under FastDeploy's names: `key_caches_{layer}_rank{r}.device{d}`, also
            without the device, and the same with value_caches, key_cache_scales,
            value_cache_scales and indexer_caches.

    Raises:
        LayoutError: a name has another form, two names mean one tensor, the ranks are not 0, 1, ..
            or have different tensors.
    """
    if not isinstance(named, Mapping):
        raise LayoutError(
            f"the cache tensors must be a mapping of names to tensors, not {type(named).__name__}"
        )
    ranks: dict[int, RankTensors] = {}
    for name, tensor in named.items():
        found = NAME.fullmatch(str(name))
        if found is None:
            raise LayoutError(
                f"{name!r} is no name of a cache tensor: expected {', '.join(ROLES)} with "
                "_LAYER_rankR.deviceD"
            )
        place = (int(found[2]), ROLES[found[1]])
        of_rank = ranks.setdefault(int(found[3]), {})
        if place in of_rank:
            raise LayoutError(f"{name!r} is a second tensor of layer {place[0]}, {place[1]}")
        of_rank[place] = tensor
    if not ranks:
        raise LayoutError("there are no cache tensors")
    if sorted(ranks) != list(range(len(ranks))):
        raise LayoutError(f"cache tensors of ranks {sorted(ranks)}: they must be 0, 1, ..")
    for rank, tensors in ranks.items():
        if set(tensors) != set(ranks[0]):
            odd = min(set(tensors) ^ set(ranks[0]))
            raise LayoutError(
                f"ranks 0 and {rank} have different tensors: layer {odd[0]}, {odd[1]}"
            )
    return [ranks[rank] for rank in range(len(ranks))]


class CacheKvsLayout(Layout):
    """The layout of FastDeploy's tensors, in the order that its kernels index them by.

    Args:
        block_size: tokens of a block.
        tensors: of one rank.
        extra_layers: layers of drafts (MTP), the last ones.

    Raises:
        LayoutError: the layers have different roles or shapes, or are not consecutive, or a tensor
            has no block axis.
        DeviceError: a tensor cannot be described.
    """

    kind = "fastdeploy"

    def __init__(self, block_size: int, tensors: RankTensors, extra_layers: int = 0) -> None:
        self._regions = {place: region_of(tensor) for place, tensor in tensors.items()}
        layers = sorted({layer for layer, _ in tensors})
        if layers != list(range(layers[0], layers[0] + len(layers))):
            raise LayoutError(f"cache tensors of layers {layers}: they must be consecutive")
        if extra_layers >= len(layers):
            raise LayoutError(f"{extra_layers} layers of drafts, and {len(layers)} layers in all")
        super().__init__(
            block_size,
            len(layers) - extra_layers,
            layer_offset=layers[0],
            extra_layers=extra_layers,
        )
        for piece in self.pieces:
            place = (piece.layer, piece.role)
            found = self._regions.pop(place, None)
            if found is None or (found.shape[1:], found.dtype) != (piece.shape, piece.dtype):
                shape = None if found is None else (*found.shape, found.dtype)
                raise LayoutError(
                    f"layer {piece.layer}, {piece.role}: {shape}, and the first layer has "
                    f"{(*piece.shape, piece.dtype)} after the block axis"
                )
        if self._regions:
            layer, role = min(self._regions)
            raise LayoutError(f"layer {layer} has {role!r}, and the first layer has not")

    def make_roles(self) -> Sequence[Role]:
        """See `Layout`."""
        first = min(layer for layer, _ in self._regions)
        return [
            Role(role, tuple(region.shape[1:]), region.dtype)
            for (layer, role), region in self._regions.items()
            if layer == first
        ]

    def ordered(self, tensors: RankTensors) -> list[Any]:
        """Tensors of a rank in the order of the pieces."""
        return [tensors[piece.layer, piece.role] for piece in self.pieces]
