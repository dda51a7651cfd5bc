"""Messages that PrefixIndex handles, with their replies. Completions of the requests that it sends
are defined beside those requests (`cpu_evictor.messages`, `gpu_swapper.messages`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from kvactors.actor import Ask, Control, Later
from kvactors.actor.message import Message
from kvactors.hints import Hints
from kvactors.identity import PLAIN, RequestScope
from kvactors.native import Path, StepTokens
from kvactors.quotas import Quota

R = TypeVar("R")


class IndexAsk(Ask[R], Generic[R], frozen=True, eq=False):
    """An ask of the public API."""


class AcquireResult(Message, frozen=True, eq=False):
    """Blocks for every token of the request. With loads in flight it is pending: the table and
    `cached_tokens` are final only in the `ReadyResult` that answers `Ready`."""

    blocks: Sequence[int]  # the device block table, a copy whose numbers are made when read
    cached_tokens: int  # tokens that are cached or being loaded
    pending: bool
    device_hits: int


class ReadyResult(Message, frozen=True, eq=False):
    """All loads of a lease have completed or were written off. Hits in blocks, by the tier that
    each came from."""

    blocks: tuple[int, ...]
    cached_tokens: int
    device_hits: int
    host_hits: int
    storage_hits: int


class LayerResult(Message, frozen=True, eq=False):
    """A layer of the loads of a lease has arrived. The tokens are cached if the other layers arrive
    as well. The block table is None if it is as granted."""

    cached_tokens: int
    blocks: tuple[int, ...] | None


class Ack(Message, frozen=True, eq=False):
    """The request is carried out."""

    count: int = 0  # blocks concerned
    pinned: int = 0  # blocks that the end of a request has pinned
    unknown: int = 0  # stored objects without a known salt, which a clear of a salt has left


class Stored(NamedTuple):
    """Leading blocks of a path that were in some tier when they were counted, below a root hash."""

    root: bytes
    blocks: int


class Acquire(IndexAsk[AcquireResult], frozen=True, eq=False):
    """Blocks for a request: match, pin, take device blocks. Refused with NoRoom if not even
    eviction can free enough of them."""

    lease: int  # the number that the caller gives the lease
    request_id: str
    path: Path  # owned by the index from here on
    deadline: float  # absolute loop time for everything the lease loads
    wait: bool = True  # for evictions that need a copy first
    scope: RequestScope = PLAIN  # what is in the path's root
    media: tuple[tuple[int, int], ...] = ()  # (offset, length) of what is not cached in part
    wait_for_room: bool = False  # first come, first served, until others release device blocks
    chunk_tokens: int = 0  # tokens after the cached ones that get blocks, 0 for all
    stored: Stored | None = None  # at the call, None if the store cannot tell
    hints: Hints | None = None
    most: int | None = None  # leading blocks that may be hit, None for all


class Prefetch(IndexAsk[Ack], frozen=True, eq=False):
    """A request is expected: the host tier may fetch stored blocks that the device lacks. Ack
    counts the blocks looked for. Fields as in `Acquire`."""

    path: Path
    deadline: float
    scope: RequestScope = PLAIN
    stored: Stored | None = None


class Ready(IndexAsk[ReadyResult], frozen=True, eq=False):
    """Wait until every load of the lease has completed or failed."""

    lease: int


class LayerReady(IndexAsk[LayerResult], frozen=True, eq=False):
    """Wait until one layer of everything that the lease loads is on the device. Layers count from
    the layout's first."""

    lease: int
    layer: int


class Extend(IndexAsk[AcquireResult], frozen=True, eq=False):
    """More tokens. Reply: the blocks added to the end of the table. Refused with LeaseBusy if the
    lease has another number of tokens than its position, or another extend waits."""

    lease: int
    position: int  # tokens of the lease before the added ones, as its holder counts them
    added: Path  # used by this message alone
    extras: tuple[tuple[int, bytes], ...] = ()  # (block of the lease, extra key) of added media

    @property
    def num_tokens(self) -> int:
        """Tokens of the lease afterwards, as in `Reserve`."""
        return self.position + self.added.num_tokens


class Reserve(IndexAsk[AcquireResult], frozen=True, eq=False):
    """Blocks for the first `num_tokens` tokens, which the lease may not have yet. Reply and
    position as of `Extend`."""

    lease: int
    position: int
    num_tokens: int


class ForkedLease(NamedTuple):
    """A lease that a fork has made. `ready` is final unless pending, as in `AcquireResult`."""

    path: Path
    ready: ReadyResult
    pending: bool


class ForkResult(Message, frozen=True, eq=False):
    """The new leases, in the order of the request's numbers. A last block that is not full has been
    copied for each."""

    leases: tuple[ForkedLease, ...]


class Fork(IndexAsk[ForkResult], frozen=True, eq=False):
    """Make leases of the tokens of a lease, which share its full blocks. Fields as in `Extend` and
    `Acquire`. The deadline is that of a wait for blocks."""

    lease: int
    position: int
    leases: tuple[int, ...]
    request_ids: tuple[str, ...]
    deadline: float
    wait: bool = True
    wait_for_room: bool = False


class Truncate(IndexAsk[Ack], frozen=True, eq=False):
    """Drop the tokens beyond the first `num_tokens`, and their blocks. Reply: the blocks left in
    the table. Position as in `Extend`."""

    lease: int
    position: int
    num_tokens: int


class DropLeading(IndexAsk[Ack], frozen=True, eq=False):
    """A lease of a flat path gives its first blocks back: the others take their positions.
    Reply: the blocks left in the table. Position as in `Extend`."""

    lease: int
    position: int
    blocks: int


class Commit(IndexAsk[Ack], frozen=True, eq=False):
    """The first `computed_tokens` tokens are computed, so their full blocks become shareable.
    Reply: committed blocks."""

    lease: int
    computed_tokens: int


class StepResult(Message, frozen=True, eq=False):
    """The outcome of a step. A lease that is as before has -1 committed blocks: a separate commit
    and extend carry out its row, or report the error."""

    committed: list[int]  # blocks of each lease
    grown: list[tuple[int, tuple[int, ...]]]  # (row, device blocks) of each lease that got some


class StepLeases(IndexAsk[StepResult], frozen=True, eq=False):
    """Append and commit tokens of many leases, where blocks are free or can be evicted at once.
    The message is about a part of the rows, and the fields after `leases` are of all."""

    first: int  # row of the first lease
    leases: list[int]  # one a row, 0 for a row to be left out
    tokens: StepTokens
    positions: list[int]  # as in `Extend`
    computed: list[int | None]  # tokens to commit, those of the row included, None for no commit


class Finish(IndexAsk[Ack], frozen=True, eq=False):
    """The request has ended: unpin, and by policy save and announce. Reply: blocks left in the
    cache.

    Attributes:
        computed_tokens: tokens to commit first, None for those that were committed before.
        output_tokens: tokens that the model has produced, for the eviction policy. None: those that
            were added after the prompt.
    """

    lease: int
    computed_tokens: int | None = None
    output_tokens: int | None = None
    hints: Hints | None = None  # that replace those of the lease, None for no change


class Preempt(IndexAsk[Ack], frozen=True, eq=False):
    """The request is preempted: keep the first `computed_tokens` tokens cached and release the
    rest."""

    lease: int
    computed_tokens: int


class Clear(IndexAsk[Ack], frozen=True, eq=False):
    """Empty the cache: nothing cached before can be hit afterwards. Leases keep their blocks.

    Ack counts the device blocks that are free by it: those that no lease and no copy uses.

    Attributes:
        lora: the adapter whose blocks later requests do not find, None for all blocks.
    """

    storage: bool = False  # also clear the store
    salt: str | None = None  # of the blocks that are dropped, None for all blocks
    lora: str | None = None


class Unpin(NamedTuple):
    """End the pin of the full blocks of a path. Ack counts them, 0 if they were not pinned."""

    path: Path
    scope: RequestScope = PLAIN


class SetQuota(NamedTuple):
    """Change the quota of a salt. None: the default applies again."""

    salt: str
    quota: Quota | None


class ChangeShares(IndexAsk[Ack], frozen=True, eq=False):
    """Change a pin or a quota."""

    change: Unpin | SetQuota


class Pause(IndexAsk[Ack], frozen=True, eq=False):
    """Hold new requests. Answered once no transfer is in flight.

    `asleep`: refuse new requests with CacheAsleep, and answer once nothing is on the device either.
    Refused with LeasesOpen if a lease is open.
    """

    asleep: bool = False


class Resume(IndexAsk[Ack], frozen=True, eq=False):
    """Admit requests again, the held requests first. `awake`: end a `Pause.asleep`, and no other
    pause."""

    awake: bool = False


class SetNamespace(IndexAsk[Ack], frozen=True, eq=False):
    """Requests admitted from now on cannot hit blocks of another namespace."""

    namespace: str


class SetNumBlocks(Control, frozen=True, eq=False):
    """The number of device blocks, for an index that was made without any. An incarnation that was
    made with the number ignores this."""

    num_blocks: int
    free_low: int
    free_high: int


class Abandon(Control, frozen=True, eq=False):
    """The holder of a lease was cancelled or garbage collected: release the lease. Unknown
    leases are ignored."""

    lease: int


class Withdrawn(Control, frozen=True, eq=False):
    """A waiting extend was cancelled: its blocks go to the next request in the queue."""

    lease: int


class LoadDeadline(Control, frozen=True, eq=False):
    """To itself: a load should have been answered by now."""

    op: int


class Proceed(Later, frozen=True, eq=False):
    """To itself: continue with the requests that wait. One turn takes a part of them."""


IndexRequest = IndexAsk[Any] | Withdrawn | Abandon | SetNumBlocks
"""Messages of the public API to PrefixIndex."""
