"""Messages that GpuSwapper handles, each beside its completion."""

from __future__ import annotations

from kvactors.actor import Control
from kvactors.actor.message import Message
from kvactors.data_plane.base import Direction

__all__ = [
    "Copied",
    "CopiesStalled",
    "Copy",
    "CopyFinished",
    "CopyLayers",
    "CopyProgress",
    "DeviceLost",
    "Direction",
    "HostChanged",
    "PlaneChanged",
]


class Copy(Message, frozen=True, eq=False):
    """Copy pairs (blocks[j], slots[j]) between the device and the arena; answered with Copied.
    layerwise: with CopyProgress before that.

    era: see `CopyEngine`; a copy of another era arrives nowhere."""

    op: int
    direction: Direction
    blocks: tuple[int, ...]
    slots: tuple[int, ...]
    layerwise: bool = False
    era: int = 0


class CopyProgress(Control, frozen=True, eq=False):
    """Of a layerwise Copy, the first `layers` layers have arrived."""

    op: int
    layers: int


class Copied(Control, frozen=True, eq=False):
    """Answer to Copy. failed: indices of pairs whose bytes did not arrive."""

    op: int
    failed: tuple[int, ...]


class HostChanged(Control, frozen=True, eq=False):
    """Copies can be made (again), or cannot for now. lost: what was in the slots may be gone, and a
    new era begins."""

    possible: bool
    lost: bool
    era: int


class CopiesStalled(Control, frozen=True, eq=False):
    """Somebody whom copies need does not answer: those under way end nobody knows when."""


class DeviceLost(Control, frozen=True, eq=False):
    """What device blocks held may be lost; a new era begins."""

    era: int


class CopyFinished(Control, frozen=True, eq=False):
    """To itself: a child job is over. failed: indices of pairs whose bytes did not arrive. seconds:
    time it took."""

    op: int
    direction: Direction
    failed: tuple[int, ...]
    pairs: int
    seconds: float


class PlaneChanged(Control, frozen=True, eq=False):
    """To itself: copies can be made, or cannot. lost: what was in device memory may be gone, and a
    new era begins."""

    possible: bool
    lost: bool
    era: int


class CopyLayers(Control, frozen=True, eq=False):
    """To itself: the first `layers` layers of a copy are there."""

    op: int
    layers: int
