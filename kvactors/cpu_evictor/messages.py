"""Messages that CpuEvictor, the host tier manager, handles, each beside its completion. It alone
hands out host slots, so it leads every movement through host memory."""

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


class Offloaded(Control, frozen=True, eq=False):
    """Answer to Offload: the device blocks are free now. kept: one byte a key, non-zero if the host
    tier holds it."""

    op: int
    kept: bytes


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


class LayersLoaded(Control, frozen=True, eq=False):
    """Of a load, the first `layers` layers of its first `blocks` blocks are there; nothing more of
    it is looked for."""

    op: int
    layers: int
    blocks: int


class Loaded(Control, frozen=True, eq=False):
    """Answer to Load: the first `good` blocks have their bytes, `from_host` of them came from the
    host tier."""

    op: int
    good: int
    from_host: int


class LoadStalled(Control, frozen=True, eq=False):
    """Whom this load needs does not answer; the load is answered when it does."""

    op: int


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


class Admitted(Control, frozen=True, eq=False):
    """Answer to Admit: the device blocks are not read any more. kept: one byte a key, non-zero if
    the host tier holds it."""

    op: int
    kept: bytes


class Discard(Message, frozen=True, eq=False):
    """The device holds these (again): an exclusive host tier forgets them, an inclusive one ignores
    this."""

    keys: bytes


class ClearHost(Message, frozen=True, eq=False):
    """Forget everything; what is being copied is forgotten when its copy ends. storage: empty the
    store too, and answer with HostCleared."""

    storage: bool
    op: int = 0


class HostCleared(Control, frozen=True, eq=False):
    """Answer to a ClearHost that includes the store. error: why objects from before may still be
    found; empty if none can."""

    op: int
    error: str


class HostGone(Control, frozen=True, eq=False):
    """A hint: the host tier no longer holds these."""

    keys: bytes


class HostGained(Control, frozen=True, eq=False):
    """A hint: the host tier holds these.

    clears, era: how many ClearHost the host tier had handled, and the memory generation, when this
    was sent. The index ignores a hint of before a clear or a loss that it knows of.
    """

    keys: bytes
    clears: int = 0
    era: int = 0


class SaveUnanswered(Control, frozen=True, eq=False):
    """To itself: the store has not answered in time which blocks of a finished request it has."""

    op: int


class Overdue(Control, frozen=True, eq=False):
    """To itself: an operation's deadline has come."""

    op: int


HostRequest = Offload | Load | Place | Cancel | Admit | Discard | ClearHost | Prefetch
"""Messages of PrefixIndex to CpuEvictor."""

HostReply = (
    Offloaded | Loaded | LayersLoaded | LoadStalled | Admitted | HostGained | HostGone | HostCleared
)
"""Messages of CpuEvictor to PrefixIndex."""
