"""Messages that GpuSwapper handles, each beside its completion."""

from __future__ import annotations

from kvactors.actor import Control
from kvactors.actor.message import Message
from kvactors.data_plane.base import Direction


class Copy(Message, frozen=True, eq=False):
    """Copy pairs (blocks[j], slots[j]) between the device and the arena. Copied answers it, after
    CopyProgress messages if it is layerwise."""

    op: int
    direction: Direction
    blocks: tuple[int, ...]
    slots: tuple[int, ...]
    layerwise: bool = False
    memory_generation: int = 0  # of blocks and slots. A copy of another one moves nothing


class CopyWithin(Message, frozen=True, eq=False):
    """Copy device block sources[j] to targets[j], of which none is a source. CopiedWithin answers
    it."""

    op: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    memory_generation: int = 0


class CopiedWithin(Control, frozen=True, eq=False):
    """Answer to CopyWithin."""

    op: int
    failed: tuple[int, ...]  # indices of pairs whose bytes did not arrive


class CopyProgress(Control, frozen=True, eq=False):
    """The first `layers` layers of a layerwise Copy have arrived.

    GpuSwapper sends it to itself, and forwards it to the evictor.
    """

    op: int
    layers: int


class Copied(Control, frozen=True, eq=False):
    """Answer to Copy."""

    op: int
    failed: tuple[int, ...]  # indices of pairs whose bytes did not arrive


class DataPlaneStatus(Control, frozen=True, eq=False):
    """Whether copies can be made, whether bytes in blocks and slots may be lost, and the memory
    generation from here on. While copies cannot be made, those in flight may never complete.

    GpuSwapper sends it to itself, and forwards it to the evictor and the index.
    """

    available: bool
    memory_lost: bool
    generation: int


class CopyFinished(Control, frozen=True, eq=False):
    """To itself: a copy's child job has ended."""

    op: int
    direction: Direction
    failed: tuple[int, ...]
    pairs: int
    seconds: float


CopyReply = Copied | CopyProgress | DataPlaneStatus
"""Messages of GpuSwapper to CpuEvictor."""
