"""The layout of a block: the contract between attention kernels, the copies and the store."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from math import prod
from typing import Any, Literal, NamedTuple, Self, TypeVar

from kvactors.errors import LayoutError

T = TypeVar("T")

Quantization = Literal["none", "block_wise_fp8"]

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1, "int8": 1}
"""Bytes an element, by dtype name."""

ORDER = ("key", "value", "indexer", "key_scale", "value_scale")
"""Order of roles within a layer. Roles that are not listed come last, in alphabetical order."""


class Role(NamedTuple):
    """A tensor of a layer.

    Attributes:
        shape: of one block, without the block axis.
        dtype: a name in `ITEM_BYTES`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class Piece(NamedTuple):
    """One block's share of one region.

    Attributes:
        shape: of one block, without the block axis.
        nbytes: bytes of one block.
        extra: whether the region belongs to an extra (MTP, draft) layer.
    """

    layer: int
    role: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    extra: bool = False


class Layout(ABC):
    """The pieces of a block in contract order: roles in the order of `ORDER` inside ascending
    layers, extra layers last. Kernels index regions by that order (`position`), host slots and
    stored objects hold the pieces one after another in it.

    A subclass defines the kind and the roles of each layer, which may differ. A custom layout needs
    nothing else.

    Attributes:
        block_size: tokens a block.
        num_layers: main layers, numbered from layer_offset on (a pipeline stage's first).
        extra_layers: layers after the main ones, whose regions have extra_block_ratio (at least
            1) times as many blocks.
        fingerprint: 32 bytes. Blocks of different fingerprints can never be mixed up.
        heads_axis: the axis of every shape that counts the KV heads of this rank, in ascending
            order over the ranks. None: blocks are not divided by heads.

    Raises:
        LayoutError: a count or a role is invalid.
    """

    heads_axis: int | None = None

    def __init__(
        self,
        block_size: int,
        num_layers: int,
        *,
        layer_offset: int = 0,
        extra_layers: int = 0,
        extra_block_ratio: float = 1.0,
    ) -> None:
        for name, value, low in (
            ("block_size", block_size, 1),
            ("num_layers", num_layers, 1),
            ("layer_offset", layer_offset, 0),
            ("extra_layers", extra_layers, 0),
            ("extra_block_ratio", extra_block_ratio, 1),
        ):
            if not low <= value < float("inf"):
                raise LayoutError(f"{name} must be at least {low}, not {value}")
        self.block_size = block_size
        self.num_layers = num_layers
        self.layer_offset = layer_offset
        self.extra_layers = extra_layers
        self.extra_block_ratio = extra_block_ratio
        self.pieces = self._make_pieces()
        self._places = {(one.layer, one.role): i for i, one in enumerate(self.pieces)}
        self._layers = [one.layer for one in self.pieces]
        self.block_bytes = sum(piece.nbytes for piece in self.pieces)
        self.fingerprint = self._fingerprint()

    @property
    @abstractmethod
    def kind(self) -> str:
        """The layout's name."""

    @abstractmethod
    def roles(self, layer: int) -> Sequence[Role]:
        """The roles of a layer, in any order. The constructor calls it: set fields first.

        Args:
            layer: number of the layer, from layer_offset on. Extra layers follow the main ones.
        """

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], block_size: int) -> Self:
        """Make the layout that a config describes.

        Args:
            settings: the table `[layout]`, all settings by name.
            block_size: tokens a block.

        Raises:
            LayoutError: the layout cannot be made from settings, or a setting is invalid.
        """
        raise LayoutError(
            f"{cls.__name__} cannot be made from settings: give `open` a device that has it"
        )

    def _sorted(self, layer: int) -> Sequence[Role]:
        roles = tuple(self.roles(layer))  # of another package, and read twice
        names = [role.name for role in roles]
        if not names or len(set(names)) != len(names):
            raise LayoutError(f"layer {layer} needs roles of different names, not {names}")
        for role in roles:
            if role.dtype not in ITEM_BYTES:
                raise LayoutError(
                    f"unknown dtype {role.dtype!r}: choose one of {', '.join(ITEM_BYTES)}"
                )
            if any(size < 1 for size in role.shape):
                raise LayoutError(f"role {role.name!r} has an empty shape: {role.shape}")
        order = {name: place for place, name in enumerate(ORDER)}
        return sorted(roles, key=lambda role: (order.get(role.name, len(order)), role.name))

    def _make_pieces(self) -> tuple[Piece, ...]:
        first_extra = self.layer_offset + self.num_layers
        return tuple(
            Piece(layer, role.name, role.shape, role.dtype, role.nbytes, layer >= first_extra)
            for layer in range(self.layer_offset, first_extra + self.extra_layers)
            for role in self._sorted(layer)
        )

    def _fingerprint(self) -> bytes:
        """SHA-256 over kind, block size and every piece, as length-prefixed text."""
        digest = hashlib.sha256(b"kvactors.layout.v1")
        fields = [self.kind, str(self.block_size)]
        fields += [
            f"{p.layer} {p.role} {'x'.join(map(str, p.shape))} {p.dtype}" for p in self.pieces
        ]
        for field in fields:
            raw = field.encode()
            digest.update(len(raw).to_bytes(4, "little") + raw)
        return digest.digest()

    def head_range(self, ranges: int) -> Self:
        """The layout of one of equal ranges of the KV heads, the same for each range.

        Args:
            ranges: number of them.

        Raises:
            LayoutError: the heads cannot be divided into so many ranges.
        """
        if ranges == 1:
            return self
        axis, pieces = self.heads_axis, []
        if axis is None:
            raise LayoutError(f"blocks of a {self.kind} layout are not divided by KV heads")
        for one in self.pieces:
            shape = list(one.shape)
            if axis >= len(shape) or shape[axis] % ranges:
                raise LayoutError(
                    f"{one.role!r} of layer {one.layer} ({one.shape}) has no {ranges} equal ranges "
                    f"of KV heads at axis {axis}"
                )
            shape[axis] //= ranges
            pieces.append(one._replace(shape=tuple(shape), nbytes=one.nbytes // ranges))
        found = copy(self)
        found.pieces = tuple(pieces)
        found.block_bytes //= ranges
        found.fingerprint = found._fingerprint()
        return found

    # -- regions

    def position(self, layer: int, role: str) -> int:
        """A region's index in the flat list. Where all layers have the same roles that is
        (layer - layer_offset) * number of roles + the role's index.

        Args:
            layer: number of the layer, from layer_offset on.
            role: name of the role.

        Raises:
            LayoutError: there is no such region.
        """
        found = self._places.get((layer, role))
        if found is None:
            raise LayoutError(f"there is no region of layer {layer}, role {role!r}")
        return found

    def span(self, layers: range) -> range:
        """Indices of the regions of consecutive layers, counted from the first one."""
        ends = (
            bisect_left(self._layers, self.layer_offset + i) for i in (layers.start, layers.stop)
        )
        return range(*ends)

    def region_blocks(self, piece: Piece, num_blocks: int) -> int:
        """Blocks in the region of `piece`, for a cache of `num_blocks`."""
        return int(num_blocks * self.extra_block_ratio) if piece.extra else num_blocks

    def region_shape(self, piece: Piece, num_blocks: int) -> tuple[int, ...]:
        """The shape of the region of `piece` for `num_blocks`: [blocks, *piece shape]."""
        return (self.region_blocks(piece, num_blocks), *piece.shape)

    def device_bytes(self, num_blocks: int) -> int:
        """Bytes of all regions for `num_blocks`."""
        return sum(self.region_blocks(piece, num_blocks) * piece.nbytes for piece in self.pieces)

    def blocks_in(self, nbytes: int) -> int:
        """The most blocks whose regions take at most `nbytes`, 0 if not one fits."""
        most = nbytes // self.block_bytes  # extra layers have at least as many blocks
        return max(0, bisect_right(range(most + 1), nbytes, key=self.device_bytes) - 1)

    def allocate(self, make: Callable[[tuple[int, ...], str], T], num_blocks: int) -> list[T]:
        """Allocate all regions in contract order.

        Args:
            make: `make(shape, dtype)` allocates one region, on any device.
            num_blocks: blocks of the cache, at least 1.

        Raises:
            LayoutError: num_blocks is below 1.
        """
        if num_blocks < 1:
            raise LayoutError(f"a cache needs at least 1 block, not {num_blocks}")
        return [make(self.region_shape(piece, num_blocks), piece.dtype) for piece in self.pieces]

    def verify(self, shapes: Sequence[tuple[tuple[int, ...], str]], num_blocks: int) -> None:
        """Check the regions of an engine.

        Args:
            shapes: shape and dtype of each region, in contract order.
            num_blocks: blocks of the cache.

        Raises:
            LayoutError: names the first region that does not match the layout.
        """
        if len(shapes) != len(self.pieces):
            raise LayoutError(
                f"a {self.kind} layout of {len(self.pieces)} regions, and {len(shapes)} were given"
            )
        for piece, (shape, dtype) in zip(self.pieces, shapes, strict=True):
            wanted = self.region_shape(piece, num_blocks)
            if tuple(shape) != wanted or dtype != piece.dtype:
                raise LayoutError(
                    f"region of layer {piece.layer}, {piece.role}, is {dtype} {list(shape)}, not "
                    f"{piece.dtype} {list(wanted)}"
                )


def heads_on_rank(num_kv_heads: int, ranks: int) -> int:
    """KV heads on each of `ranks` ranks: they are split, or repeated where ranks are more."""
    if ranks < 1 or num_kv_heads < 1 or (num_kv_heads % ranks and ranks % num_kv_heads):
        raise LayoutError(f"{num_kv_heads} KV heads cannot be shared among {ranks} ranks")
    return max(1, num_kv_heads // ranks)


def check_positive(**sizes: int) -> None:
    """Raise LayoutError for the first size below 1."""
    for name, value in sizes.items():
        if value < 1:
            raise LayoutError(f"{name} must be at least 1, not {value}")


def of_layers(name: str, sizes: int | Sequence[int], layers: int) -> Sequence[int]:
    """One size for each of the layers: the same for all, or as given. Raises LayoutError."""
    found = list(sizes) if isinstance(sizes, Iterable) else [sizes] * layers
    if len(found) != layers:
        raise LayoutError(f"{name} has {len(found)} entries, and there are {layers} layers")
    check_positive(**{name: min(found, default=1)})
    return found


def picked(settings: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The settings of these names, and those that every layout takes."""
    common = ("num_layers", "layer_offset", "extra_layers", "extra_block_ratio")
    return {name: settings[name] for name in (*names, *common)}
