"""What may be said to CpuEvictor. It alone hands out host slots, so it leads every movement through
host memory."""

from __future__ import annotations

from kvactors.actor import Control
from kvactors.actor.message import Message
from kvactors.lineage import Lineages


class Offload(Message, frozen=True, eq=False):
    """These device blocks must go: take what the host tier wants of them. Answered with Offloaded.

    keys, parents: n x 32 bytes, least recently used first (deeper first on ties). blocks: their
    device blocks. era: of the memory they are in, see `Executor`; nothing is kept of another era's.
    lineages: of these blocks, if the store keeps them.
    """

    op: int
    keys: bytes
    parents: bytes
    blocks: tuple[int, ...]
    era: int = 0
    lineages: Lineages | None = None


class Load(Message, frozen=True, eq=False):
    """Bring blocks back into device blocks. Answered with Loaded (how long a leading run arrived).

    keys: names of the path from its first block on, up to the last one to load. start: first block
    to load, into blocks[0], the next into blocks[1] ... An empty `blocks` means that they follow in
    a Place: the sources are secured (and fetched) meanwhile, so that making room for them cannot
    evict them. root: what the first key's parent is. deadline: absolute loop time. fetch: whether
    what the host tier lacks may come from storage. tokens: of the same path, for a store that is
    addressed by them. lineages: of the blocks of `keys`, if the store keeps them.
    """

    op: int
    root: bytes
    keys: bytes
    start: int
    blocks: tuple[int, ...]
    deadline: float
    fetch: bool
    tokens: bytes = b""
    era: int = 0
    lineages: Lineages | None = None


class Prefetch(Message, frozen=True, eq=False):
    """Somebody will want these: bring what storage has of them, from `start` on, to the host tier,
    if there is one. Not answered.

    root, keys, start, deadline, lineages: as in Load.
    """

    root: bytes
    keys: bytes
    start: int
    deadline: float
    lineages: Lineages | None = None


class Fetched(Control, frozen=True, eq=False):
    """Answer to FetchDevice: so many blocks, from the first on, have their bytes."""

    op: int
    good: int


class Saved(Control, frozen=True, eq=False):
    """Answer to SaveDevice: so many blocks, from the first on, are stored."""

    op: int
    good: int


class Place(Message, frozen=True, eq=False):
    """The device blocks for a Load that came without."""

    op: int
    blocks: tuple[int, ...]


class Cancel(Message, frozen=True, eq=False):
    """Drop a Load that was never placed; its sources are as before. Not answered."""

    op: int


class Admit(Message, frozen=True, eq=False):
    """A finished request's path, all of it on the device (and held there until answered with
    Admitted).

    keys: names of the path from its first block on; blocks: their device blocks. keep: whether the
    host tier should hold them from now on (inclusive tiers). save: positions to write to storage.
    tokens, lineages: as in Load.
    """

    op: int
    root: bytes
    keys: bytes
    blocks: tuple[int, ...]
    keep: bool
    save: tuple[int, ...]
    tokens: bytes = b""
    era: int = 0
    lineages: Lineages | None = None


class Discard(Message, frozen=True, eq=False):
    """The device holds these (again): an exclusive host tier forgets them, an inclusive one ignores
    this."""

    keys: bytes


class ClearHost(Message, frozen=True, eq=False):
    """Forget everything; what is being copied is forgotten when its copy ends. storage: empty the
    store too, and answer with HostCleared."""

    storage: bool
    op: int = 0


class Copied(Control, frozen=True, eq=False):
    """Answer to Copy. failed: indices of pairs whose bytes did not arrive."""

    op: int
    failed: tuple[int, ...]


class CopyProgress(Control, frozen=True, eq=False):
    """Of a layerwise Copy, the first `layers` layers have arrived."""

    op: int
    layers: int


class HostChanged(Control, frozen=True, eq=False):
    """Copies can be made (again), or cannot for now. lost: what was in the slots may be gone, and a
    new era begins."""

    possible: bool
    lost: bool
    era: int


class Probed(Control, frozen=True, eq=False):
    """Answer to Probe: the first `found` keys can be read."""

    op: int
    found: int


class ReadDone(Control, frozen=True, eq=False):
    """Answer to Read: one `storage.messages.Outcome` byte a key."""

    op: int
    outcomes: bytes


class Written(Control, frozen=True, eq=False):
    """Answer to Write: one `storage.messages.Outcome` byte a key. The slots are not read any
    more."""

    op: int
    outcomes: bytes


class StoreCleared(Control, frozen=True, eq=False):
    """Answer to ClearStore. error: why objects from before may still be found; empty if none
    can."""

    op: int
    error: str = ""


class SaveUnanswered(Control, frozen=True, eq=False):
    """To itself: the store has not answered in time which blocks of a finished request it has."""

    op: int


class Overdue(Control, frozen=True, eq=False):
    """To itself: an operation's deadline has come."""

    op: int
