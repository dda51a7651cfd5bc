"""What may be said to GpuSwapper."""

from __future__ import annotations

from enum import Enum

from kvactors.actor import Control
from kvactors.actor.message import Message


class Direction(Enum):
    """Which way a copy goes."""

    TO_HOST = "to_host"
    TO_DEVICE = "to_device"


class Copy(Message, frozen=True, eq=False):
    """Copy pairs (blocks[j], slots[j]) between the device and the arena; answered with Copied.
    layerwise: with CopyProgress before that.

    era: see `Executor`; a copy of another era arrives nowhere."""

    op: int
    direction: Direction
    blocks: tuple[int, ...]
    slots: tuple[int, ...]
    layerwise: bool = False
    era: int = 0


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
