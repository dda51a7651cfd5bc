"""Conformance suite of layouts: subclass `LayoutContract`, implement `make`, and let pytest collect
the class.

    class TestMyLayout(LayoutContract):
        def make(self):
            return MyLayout(num_layers=2)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, ClassVar

from kvactors.device.arena import Arena
from kvactors.device.host import HostDevice
from kvactors.errors import LayoutError
from kvactors.layout import KINDS, Layout, make_layout
from kvactors.layout.base import ITEM_BYTES, ORDER
from kvactors.settings import LayoutConfig

BLOCKS = 4

FIELDS = set(LayoutConfig.__struct_fields__)
"""Settings of `[layout]` that are no options of a custom layout."""


def refused(call: Callable[[], object]) -> bool:
    """Whether a call raises LayoutError."""
    try:
        call()
    except LayoutError:
        return True
    return False


class LayoutContract(ABC):
    """Tests of one layout.

    Attributes:
        settings: settings that describe the layout of `make`, without `kind`. None: the layout
            cannot be made from settings.
    """

    settings: ClassVar[Mapping[str, Any] | None] = None

    @abstractmethod
    def make(self) -> Layout:
        """The layout, a new object with each call."""

    def variants(self) -> Sequence[Layout]:
        """Layouts that differ from `make` in one setting each, and whose blocks must not mix."""
        return ()

    def test_pieces_are_in_contract_order(self) -> None:
        """Kernels, host slots and stored objects go by this order."""
        layout = self.make()
        last = layout.layer_offset + layout.num_layers + layout.extra_layers
        wanted = [
            (layer, name)
            for layer in range(layout.layer_offset, last)
            for name in sorted(
                (role.name for role in layout.roles(layer)),
                key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name),
            )
        ]
        assert [(piece.layer, piece.role) for piece in layout.pieces] == wanted
        for index, piece in enumerate(layout.pieces):
            assert layout.position(piece.layer, piece.role) == index
            assert piece.nbytes == prod(piece.shape) * ITEM_BYTES[piece.dtype] > 0
            extra = piece.layer >= layout.layer_offset + layout.num_layers
            assert piece.extra is extra
        for i in range(last - layout.layer_offset):
            span = layout.span(range(i, i + 1))
            assert {piece.layer for piece in layout.pieces[span.start : span.stop]} == {
                layout.layer_offset + i
            }
        assert layout.block_bytes == sum(piece.nbytes for piece in layout.pieces)

    def test_the_same_settings_make_the_same_layout(self) -> None:
        one, other = self.make(), self.make()
        assert one is not other
        assert one.pieces == other.pieces
        assert one.fingerprint == other.fingerprint
        assert isinstance(one.fingerprint, bytes)
        assert len(one.fingerprint) == 32

    def test_different_layouts_have_different_fingerprints(self) -> None:
        """Blocks of another layout are never read as this one's."""
        layout = self.make()
        assert layout.kind, "a layout needs a name"
        assert layout.kind not in KINDS or type(layout) is KINDS[layout.kind], (
            f"{layout.kind!r} is a layout of kvactors"
        )
        found = [layout, *self.variants(), self._twin_of_another_block_size(layout)]
        prints = [one.fingerprint for one in found]
        assert len(set(prints)) == len(prints), "layouts that differ have the same fingerprint"

    def _twin_of_another_block_size(self, layout: Layout) -> Layout:
        """The same object's class and roles with one token more in a block."""
        twin = self.make()
        twin.block_size += 1
        twin.fingerprint = twin._fingerprint()
        return twin

    def test_blocks_pass_through_host_slots(self) -> None:
        """Every byte arrives, all layers at once and layer by layer."""
        layout = self.make()
        source, target = HostDevice(layout, BLOCKS), HostDevice(layout, BLOCKS)
        arena = Arena(BLOCKS, layout.block_bytes)
        try:
            names, ids = bytes(range(32 * BLOCKS)), list(range(BLOCKS))
            source.fill(ids, names)
            source.copy_to_host(ids, arena, ids[::-1])
            target.copy_to_device(ids, arena, ids[::-1])
            assert target.check(ids, names) == []
            target.fill(ids, bytes(32 * BLOCKS))
            layers = layout.num_layers + layout.extra_layers
            for layer in range(layers):
                assert target.check(ids, names) == ids
                target.copy_to_device(ids, arena, ids[::-1], range(layer, layer + 1))
            assert target.check(ids, names) == []
        finally:
            arena.close()

    def test_an_engines_regions_are_checked(self) -> None:
        layout = self.make()
        good = [(layout.region_shape(p, BLOCKS), p.dtype) for p in layout.pieces]
        layout.verify(good, BLOCKS)
        shape, dtype = good[-1]
        wrong = "float32" if dtype != "float32" else "float16"
        for bad in (((*shape, 1), dtype), (shape, wrong)):
            given = [*good[:-1], bad]
            assert refused(partial(layout.verify, given, BLOCKS)), f"{bad} is accepted"

    def test_settings_describe_the_layout(self) -> None:
        layout = self.make()
        kind = type(layout)
        named = next((name for name, one in KINDS.items() if one is kind), None)
        path = named or f"{kind.__module__}:{kind.__qualname__}"
        given = dict(self.settings or {})
        own = {name: given.pop(name) for name in list(given) if name in FIELDS}
        config = LayoutConfig(kind=path, options=given, **own)
        if self.settings is None:
            assert refused(lambda: make_layout(config, layout.block_size)), (
                "the layout can be made from settings: name them in `settings`"
            )
            return
        assert make_layout(config, layout.block_size).fingerprint == layout.fingerprint
