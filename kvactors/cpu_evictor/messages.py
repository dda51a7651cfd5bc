"""Messages of CpuEvictor, the host tier manager: requests, each beside its completion."""

from __future__ import annotations

from math import inf

from kvactors.actor import Ask, Control
from kvactors.actor.message import Message
from kvactors.hints import BlockHints
from kvactors.identity import Lineages


class Offload(Message, frozen=True, eq=False):
    """The device evicts blocks: the host tier keeps as many as its capacity allows. Answered with
    Offloaded."""

    op: int
    hashes: bytes  # least recently used first, deeper first on ties
    parents: bytes
    blocks: tuple[int, ...]
    memory_generation: int = 0  # of the device blocks. Blocks of another one are not kept
    lineages: Lineages | None = None
    traits: BlockHints | None = None


class Offloaded(Control, frozen=True, eq=False):
    """Answer to Offload: the device blocks are free."""

    op: int
    kept_mask: bytes  # one byte a block, non-zero if the host tier holds it


class Load(Message, frozen=True, eq=False):
    """Load blocks of a path from the host tier, and from storage, into device blocks. Answered with
    Loaded.

    Attributes:
        hashes: of the path from its first block on, up to the last one to load.
        start: position of the first block to load. It goes to blocks[0], the next to blocks[1].
        blocks: device blocks. If empty, they follow in a SetTargets. The sources are pinned and
            fetched before that, so that an eviction for the device blocks cannot evict the sources.
        deadline: absolute loop time after which storage is not waited for.
        fetch: whether blocks that the host tier lacks may come from storage.
        tokens: token ids of the path (little-endian uint32), for a store addressed by tokens.
        block_s: seconds that the engine needs to compute a block, 0.0 if not known.
    """

    op: int
    root: bytes
    hashes: bytes
    start: int
    blocks: tuple[int, ...]
    deadline: float
    fetch: bool
    tokens: bytes = b""
    memory_generation: int = 0
    lineages: Lineages | None = None
    salt: int = 0
    block_s: float = 0.0


class LayersLoaded(Control, frozen=True, eq=False):
    """The first layers of the first blocks of a load have arrived. No more blocks will come from
    storage."""

    op: int
    layers: int
    blocks: int


class Loaded(Control, frozen=True, eq=False):
    """Answer to Load: leading blocks have their bytes, from the host tier or storage."""

    op: int
    num_loaded: int
    from_host: int


class LoadStalled(Control, frozen=True, eq=False):
    """A rank that the load needs is not responding. Loaded follows when its copies end."""

    op: int


class PrefetchToHost(Message, frozen=True, eq=False):
    """A request is expected: read the stored blocks of its path from `start` on into the host
    tier. Not answered. `Load` explains the fields."""

    root: bytes
    hashes: bytes
    start: int
    deadline: float
    lineages: Lineages | None = None
    salt: int = 0


class SetTargets(Message, frozen=True, eq=False):
    """The device blocks of a Load that was sent without."""

    op: int
    blocks: tuple[int, ...]


class Cancel(Message, frozen=True, eq=False):
    """Drop a Load that was never placed. Its sources stay on the host as far as the capacity
    allows, and the others are evicted. Not answered."""

    op: int


class Save(Message, frozen=True, eq=False):
    """Save the path of a finished request, which the device holds until the answer. Answered with
    Saved. `Load` explains the fields without a comment."""

    op: int
    root: bytes
    hashes: bytes
    blocks: tuple[int, ...]
    keep: bool  # the host tier keeps a copy (inclusive tiers)
    save: tuple[int, ...]  # positions of the blocks to write to storage
    tokens: bytes = b""
    memory_generation: int = 0
    lineages: Lineages | None = None
    salt: int = 0
    priority: int = 0
    expiry: float = inf


class Saved(Control, frozen=True, eq=False):
    """Answer to Save: the device blocks are no longer read."""

    op: int
    kept_mask: bytes  # as in Offloaded


class DropHostCopies(Message, frozen=True, eq=False):
    """The device holds these blocks. An exclusive host tier drops them, an inclusive one ignores
    the message."""

    hashes: bytes


class KeepHostCopies(Message, frozen=True, eq=False):
    """The device did not take these loaded blocks: their parents were not loaded. Those that
    were leaving an exclusive host tier stay as far as the capacity allows, and the others are
    evicted. An inclusive one ignores the message."""

    hashes: bytes


class EvictFirst(Message, frozen=True, eq=False):
    """The next victims, in this order, by the host tier's policy. Without this message the least
    recently used blocks are evicted."""

    hashes: bytes


class PinHostBlocks(Message, frozen=True, eq=False):
    """Blocks of a path are pinned: the host tier does not evict them, within its share of pinned
    blocks."""

    hashes: bytes


class UnpinHostBlocks(Message, frozen=True, eq=False):
    """The pin of a PinHostBlocks ends."""

    hashes: bytes


class ClearHost(Message, frozen=True, eq=False):
    """Drop every block, or the blocks of a salt. A block in flight leaves when its copy ends. With
    `storage` the store is cleared as well, and HostCleared answers."""

    storage: bool
    op: int = 0
    salt: int | None = None  # None: every block


class EmptyHost(Ask[int], frozen=True, eq=False):
    """Evict blocks, written back if that is the policy, as before a sleep. Answered with the blocks
    that are left once no request is in flight."""

    count: int  # 0: drop all that can be dropped


class SetHostQuota(Message, frozen=True, eq=False):
    """Change the quota of a salt in the host tier."""

    salt: int
    blocks: int | None  # the most resident blocks, None for no limit
    named: bool  # without it the default applies again


class HostCleared(Control, frozen=True, eq=False):
    """Answer to a ClearHost that includes the store."""

    op: int
    error: str  # why objects from before may still be found, empty if none can
    unknown: int = 0  # as in StoreCleared


class HostBlocksRemoved(Control, frozen=True, eq=False):
    """A hint: the host tier no longer holds these blocks."""

    hashes: bytes


class HostBlocksAdded(Control, frozen=True, eq=False):
    """A hint: the host tier holds these blocks. The index ignores hints from before its last clear
    or loss of memory."""

    hashes: bytes
    clears: int = 0  # ClearHost messages that the host tier had handled
    memory_generation: int = 0


class JobDeadline(Control, frozen=True, eq=False):
    """To itself: the time of a load that waits for storage is over, or that of an offload or a save
    that waits for slots, or of a save that waits for the store's answer."""

    number: int  # of the timer


ShareMessage = EvictFirst | PinHostBlocks | UnpinHostBlocks | SetHostQuota
"""Changes of the order of eviction, pins and quotas."""

HostRequest = (
    Offload
    | Load
    | SetTargets
    | Cancel
    | Save
    | DropHostCopies
    | KeepHostCopies
    | EvictFirst
    | ClearHost
    | SetHostQuota
    | PinHostBlocks
    | UnpinHostBlocks
    | PrefetchToHost
)
"""Messages of PrefixIndex to CpuEvictor."""

HostReply = (
    Offloaded
    | Loaded
    | LayersLoaded
    | LoadStalled
    | Saved
    | HostBlocksAdded
    | HostBlocksRemoved
    | HostCleared
)
"""Messages of CpuEvictor to PrefixIndex."""
