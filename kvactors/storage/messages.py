"""Messages that StorageReader and StorageWriter handle, each beside its completion."""

from __future__ import annotations

from enum import IntEnum

from kvactors.actor import Control
from kvactors.actor.message import Message
from kvactors.flush_notifier.messages import PathPart
from kvactors.identity import Lineage


class Outcome(IntEnum):
    """The result for one key: one byte in the answer of a batch."""

    OK = 0
    EXISTS = 1  # the object of a write was in the store already
    MISS = 2
    CORRUPT = 3
    NO_SPACE = 4
    UNAVAILABLE = 5
    LATE = 6  # the deadline came first
    REFUSED = 7  # by a quota, the capacity, a concurrent clear, or memory that does not fit


class ProbeStore(Message, frozen=True, eq=False):
    """How many leading keys can be read. Answered with Probed."""

    op: int
    keys: bytes
    deadline: float


class Probed(Control, frozen=True, eq=False):
    """Answer to ProbeStore: the first `found` keys can be read."""

    op: int
    found: int


class Read(Message, frozen=True, eq=False):
    """Read objects into host slots. Answered with ReadDone once no slot is written any more."""

    op: int
    keys: bytes
    slots: tuple[int, ...]
    deadline: float
    take: bool
    memory_generation: int = 0


class ReadDone(Control, frozen=True, eq=False):
    """Answer to Read: one `Outcome` byte a key."""

    op: int
    outcomes: bytes


class Write(Message, frozen=True, eq=False):
    """Write host slots as objects. Answered with Written once no slot is read any more."""

    op: int
    keys: bytes
    slots: tuple[int, ...]
    deadline: float
    memory_generation: int = 0
    lineages: tuple[Lineage | None, ...] = ()
    salts: tuple[int, ...] = ()  # one a key (`quotas.salt_id`), or none at all


class Written(Control, frozen=True, eq=False):
    """Answer to Write: one `Outcome` byte a key. The slots are not read any more."""

    op: int
    outcomes: bytes


class ClearStore(Message, frozen=True, eq=False):
    """Remove every object of this store, or those of a salt, and drop batches sent before to any
    writer. Answered with StoreCleared."""

    op: int
    salt: int | None = None  # see `quotas.salt_id`


class StoreCleared(Control, frozen=True, eq=False):
    """Answer to ClearStore."""

    op: int
    error: str = ""  # why objects from before may still be found
    salt: int | None = None
    unknown: int = 0  # objects whose salt is not known, which a clear of a salt leaves


class ReportLost(Message, frozen=True, eq=False):
    """Keys may have left the store: send them to the index. Not answered."""


class FetchDevice(Message, frozen=True, eq=False):
    """Read blocks of a path straight into device blocks. Answered with DeviceFetched once none is
    written any more."""

    op: int
    tokens: bytes  # of the complete path (little-endian uint32), up to the last block wanted
    start: int
    blocks: tuple[int, ...]
    deadline: float
    memory_generation: int = 0  # of the blocks: none is moved in another one


class DeviceFetched(Control, frozen=True, eq=False):
    """Answer to FetchDevice: so many leading blocks have their bytes."""

    op: int
    num_blocks: int


class SaveDevice(Message, frozen=True, eq=False):
    """Write blocks of a path straight from device blocks. Answered with DeviceSaved once none is
    read any more. Fields as in FetchDevice."""

    op: int
    tokens: bytes
    start: int
    blocks: tuple[int, ...]
    deadline: float
    memory_generation: int = 0


class DeviceSaved(Control, frozen=True, eq=False):
    """Answer to SaveDevice: so many leading blocks are stored."""

    op: int
    num_blocks: int


class TransferDone(Control, frozen=True, eq=False):
    """To itself: a transfer of device blocks has ended. `answer` is sent to the evictor."""

    answer: StorageReply


class TransferLate(Control, frozen=True, eq=False):
    """To itself: the deadline of a transfer has passed."""

    number: int


class BatchDone(Control, frozen=True, eq=False):
    """To itself: a batch has ended. `answer` is sent to the evictor."""

    answer: StorageReply
    stored: bytes = b""  # joined keys that became readable, oldest first
    # Joined keys that left the store, by reason.
    evicted: bytes = b""
    corrupt: bytes = b""
    taken: bytes = b""


class Recheck(Control, frozen=True, eq=False):
    """To itself: delayed reports have entered the notifier's lane."""

    held: bytes
    gone: bytes


class NextPage(Control, frozen=True, eq=False):
    """To itself: continue a report on the whole store, after all earlier messages have entered the
    notifier's channel."""


class ReadPaths(Control, frozen=True, eq=False):
    """To itself: read the paths of the next blocks of the store, after all earlier messages have
    entered the notifier's channel."""


class PathsRead(Control, frozen=True, eq=False):
    """To itself: the next parts of paths; None at the end."""

    parts: tuple[PathPart, ...] | None


ReaderMessage = ProbeStore | Read
WriterMessage = Write | ClearStore | ReportLost
DeviceStoreMessage = FetchDevice | SaveDevice
"""Messages of CpuEvictor to the storage actors."""

StorageReply = Probed | ReadDone | Written | StoreCleared | DeviceFetched | DeviceSaved
"""Messages of the storage actors to CpuEvictor."""
