"""Messages that GpuSwapper handles, each beside its completion."""

from __future__ import annotations

from kvactors.actor import Control
from kvactors.actor.message import Message
from kvactors.data_plane.base import Direction


class Copy(Message, frozen=True, eq=False):
    """Copy pairs (blocks[j], slots[j]) between the device and the arena. Copied answers it.

    Attributes:
        memory_generation: that the blocks and slots are in. A copy of another one moves nothing.
    """

    op: int
    direction: Direction
    blocks: tuple[int, ...]
    slots: tuple[int, ...]
    layerwise: bool = False
    memory_generation: int = 0


class CopyWithin(Message, frozen=True, eq=False):
    """Copy device block sources[j] to targets[j], of which none is a source. CopiedWithin answers
    it.
    """

    op: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    memory_generation: int = 0


class CopiedWithin(Control, frozen=True, eq=False):
    """Answer to CopyWithin.

    Attributes:
        failed: indices of pairs whose bytes did not arrive.
    """

    op: int
    failed: tuple[int, ...]


class CopyProgress(Control, frozen=True, eq=False):
    """The first `layers` layers of a layerwise Copy have arrived."""

    op: int
    layers: int


class Copied(Control, frozen=True, eq=False):
    """Answer to Copy.

    Attributes:
        failed: indices of pairs whose bytes did not arrive.
    """

    op: int
    failed: tuple[int, ...]


class DataPlaneStatus(Control, frozen=True, eq=False):
    """The data plane's status has changed.

    GpuSwapper sends it to itself, and forwards it to the evictor and the index.

    Attributes:
        available: whether copies can be made. While not, copies in flight may never complete.
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


class CopyWithinFinished(Control, frozen=True, eq=False):
    """To itself: the child job of a CopyWithin has ended. Attributes as in CopyFinished."""

    op: int
    failed: tuple[int, ...]
    pairs: int


class CopyLayers(Control, frozen=True, eq=False):
    """To itself: the first `layers` layers of a copy have arrived."""

    op: int
    layers: int


CopyReply = Copied | CopyProgress | DataPlaneStatus
"""Messages of GpuSwapper to CpuEvictor."""
