"""Messages that PrefixIndex handles, with their replies. Completions of the requests that it sends
are defined beside those requests (`cpu_evictor.messages`, `gpu_swapper.messages`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvactors.actor import Ask, Control, Later
from kvactors.actor.message import Message
from kvactors.hints import Hints
from kvactors.identity import PLAIN, RequestScope
from kvactors.native import Path, StepTokens
from kvactors.quotas import Quota


class AcquireResult(Message, frozen=True, eq=False):
    """Blocks for every token of the request.

    Attributes:
        blocks: the device block table, a copy whose numbers are made when they are read.
        cached_tokens: tokens that are cached or being loaded.
        pending: loads are in flight. Then the table and `cached_tokens` are final only in the
            `ReadyResult` that answers `Ready`.
    """

    blocks: Sequence[int]
    cached_tokens: int
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
    """A layer of the loads of a lease has arrived.

    Attributes:
        cached_tokens: that are cached if the other layers arrive as well.
        blocks: the block table, None if it is as granted.
    """

    cached_tokens: int
    blocks: tuple[int, ...] | None


class Ack(Message, frozen=True, eq=False):
    """The request is carried out.

    Attributes:
        count: blocks concerned, where that applies.
        pinned: blocks that the end of a request has pinned.
        unknown: stored objects that a clear of a salt has left, because their salt is not known.
    """

    count: int = 0
    pinned: int = 0
    unknown: int = 0


class Stored(NamedTuple):
    """Leading blocks of a path that were in some tier when they were counted, below a root hash."""

    root: bytes
    blocks: int


class Acquire(Ask[AcquireResult], frozen=True, eq=False):
    """Blocks for a request: match, pin, take device blocks. Refused with NoRoom if not even
    eviction can free enough of them.

    Attributes:
        lease: the number that the caller gives the lease.
        path: the request's tokens, owned by the index from here on.
        deadline: absolute loop time for everything the lease loads.
        wait: whether to wait for evictions that need a copy first.
        wait_for_room: whether to wait, first come, first served, until other requests release
            device blocks.
        scope: what is in the path's root.
        media: (offset, length) of media items that must not be cached in part.
        chunk_tokens: tokens after the cached ones that get blocks, 0 for all.
        stored: what the tiers had of the path at the call, None if the store cannot tell.
        hints: about the reuse of the request's blocks, None for none.
    """

    lease: int
    request_id: str
    path: Path
    deadline: float
    wait: bool = True
    scope: RequestScope = PLAIN
    media: tuple[tuple[int, int], ...] = ()
    wait_for_room: bool = False
    chunk_tokens: int = 0
    stored: Stored | None = None
    hints: Hints | None = None


class Prefetch(Ask[Ack], frozen=True, eq=False):
    """A request of these tokens is expected: the host tier may fetch from the store the blocks that
    the device lacks. Ack counts the blocks looked for.

    Attributes:
        path: used by this message alone.
        deadline: absolute loop time for the fetch.
        scope: what is in the path's root.
        stored: as in `Acquire`.
    """

    path: Path
    deadline: float
    scope: RequestScope = PLAIN
    stored: Stored | None = None


class Ready(Ask[ReadyResult], frozen=True, eq=False):
    """Wait until every load of the lease has completed or was written off."""

    lease: int


class LayerReady(Ask[LayerResult], frozen=True, eq=False):
    """Wait until one layer, counted from the layout's first, of everything that the lease loads is
    on the device."""

    lease: int
    layer: int


class Extend(Ask[AcquireResult], frozen=True, eq=False):
    """More tokens. Reply: the blocks added to the end of the table.

    Attributes:
        position: tokens of the lease before the added ones, as its holder counts them. Refused with
            LeaseBusy if the lease has another number of tokens, or another extend waits.
        added: a path used by this message alone.
        extras: (block of the lease, extra key) that the added media items add to the extra keys of
            blocks.
    """

    lease: int
    position: int
    added: Path
    extras: tuple[tuple[int, bytes], ...] = ()


class Reserve(Ask[AcquireResult], frozen=True, eq=False):
    """Blocks until the block table covers the first `num_tokens` tokens, which the lease may not
    have yet. Reply: the blocks added to the end of the table.

    Attributes:
        position: as in `Extend`.
    """

    lease: int
    position: int
    num_tokens: int


class ForkedLease(NamedTuple):
    """A lease that a fork has made.

    Attributes:
        path: the tokens of the lease.
        ready: the block table and the cached tokens. Final unless it is pending.
        pending: as in `AcquireResult`.
    """

    path: Path
    ready: ReadyResult
    pending: bool


class ForkResult(Message, frozen=True, eq=False):
    """The new leases, in the order of the request's numbers. A last block that is not full has been
    copied for each."""

    leases: tuple[ForkedLease, ...]


class Fork(Ask[ForkResult], frozen=True, eq=False):
    """Make leases of the tokens of a lease, which share its full blocks.

    Attributes:
        position: as in `Extend`.
        leases: numbers of the new leases.
        request_ids: one for each.
        deadline: absolute loop time until which the call waits for blocks.
        wait, wait_for_room: as in `Acquire`.
    """

    lease: int
    position: int
    leases: tuple[int, ...]
    request_ids: tuple[str, ...]
    deadline: float
    wait: bool = True
    wait_for_room: bool = False


class Truncate(Ask[Ack], frozen=True, eq=False):
    """Drop the tokens beyond the first `num_tokens`, and blocks that the rest does not need. Reply:
    the blocks left in the table.

    Attributes:
        position: as in `Extend`.
    """

    lease: int
    position: int
    num_tokens: int


class Commit(Ask[Ack], frozen=True, eq=False):
    """The first `computed_tokens` tokens are computed, so their full blocks become shareable.
    Reply: committed blocks."""

    lease: int
    computed_tokens: int


class StepResult(Message, frozen=True, eq=False):
    """The outcome of a step.

    Attributes:
        committed: committed blocks of each lease, -1 for a lease that is as before: a separate
            commit and extend carry out its row, or report the error.
        grown: (row, device blocks added to the table) of each lease that got blocks.
    """

    committed: list[int]
    grown: list[tuple[int, tuple[int, ...]]]


class StepLeases(Ask[StepResult], frozen=True, eq=False):
    """Append the tokens of a row to each lease, and commit its computed tokens, where blocks
    are free or can be evicted at once.

    Attributes:
        first: the row of the first lease. The message is about a part of the rows.
        leases: one a row, 0 for a row to be left out.
        tokens: of all rows.
        positions: as in `Extend`, of all rows.
        computed: tokens to commit, those of the row included, None for no commit. Of all rows.
    """

    first: int
    leases: list[int]
    tokens: StepTokens
    positions: list[int]
    computed: list[int | None]


class Finish(Ask[Ack], frozen=True, eq=False):
    """The request has ended: unpin, and by policy save and announce. Reply: blocks left in the
    cache.

    Attributes:
        computed_tokens: tokens to commit first, None for those that were committed before.
        output_tokens: tokens that the model has produced, for the eviction policy. None: those that
            were added after the prompt.
        hints: that replace those of the lease, None for no change.
    """

    lease: int
    computed_tokens: int | None = None
    output_tokens: int | None = None
    hints: Hints | None = None


class Preempt(Ask[Ack], frozen=True, eq=False):
    """The request is preempted: keep the first `computed_tokens` tokens cached and release the
    rest."""

    lease: int
    computed_tokens: int


class Clear(Ask[Ack], frozen=True, eq=False):
    """Empty the cache: nothing cached before can be hit afterwards. Leases keep their blocks.

    Attributes:
        storage: also clear the store. Ack counts the device blocks that are free by it: those that
            no lease and no copy uses.
        salt: of the blocks that are dropped, in the store too, None for all blocks.
        lora: the adapter whose blocks later requests do not find, None for all blocks.
    """

    storage: bool = False
    salt: str | None = None
    lora: str | None = None


class Unpin(NamedTuple):
    """End the pin of the full blocks of a path. Ack counts them, 0 if they were not pinned.

    Attributes:
        path: used by this message alone.
        scope: what is in the path's root.
    """

    path: Path
    scope: RequestScope = PLAIN


class SetQuota(NamedTuple):
    """Change the quota of a salt.

    Attributes:
        quota: None: the default applies again.
    """

    salt: str
    quota: Quota | None


class ChangeShares(Ask[Ack], frozen=True, eq=False):
    """Change a pin or a quota."""

    change: Unpin | SetQuota


class Pause(Ask[Ack], frozen=True, eq=False):
    """Hold new requests. Answered once no transfer is in flight.

    Attributes:
        asleep: in place of holding new requests, refuse them with CacheAsleep, and answer once
            nothing is on the device either. Refused with LeasesOpen if a lease is open.
    """

    asleep: bool = False


class Resume(Ask[Ack], frozen=True, eq=False):
    """Admit requests again, first those that were held.

    Attributes:
        awake: end a `Pause.asleep`, and no other pause.
    """

    awake: bool = False


class SetNamespace(Ask[Ack], frozen=True, eq=False):
    """Requests admitted from now on cannot hit blocks cached under another namespace, for example
    those of other weights."""

    namespace: str


class SetNumBlocks(Control, frozen=True, eq=False):
    """The number of device blocks, for an index that was made without any. An incarnation that was
    made with the number ignores this.

    Attributes:
        free_low, free_high: see `IndexSettings`.
    """

    num_blocks: int
    free_low: int
    free_high: int


class Abandon(Control, frozen=True, eq=False):
    """The holder of a lease has gone (cancelled or garbage collected): release the lease. Unknown
    leases are ignored."""

    lease: int


class Withdrawn(Control, frozen=True, eq=False):
    """The waiting extend of a lease was cancelled: the blocks it has collected go to the next
    request in the queue."""

    lease: int


class LoadDeadline(Control, frozen=True, eq=False):
    """To itself: a load should have been answered by now."""

    op: int


class PinExpired(Control, frozen=True, eq=False):
    """To itself: the time of a pin is over.

    Attributes:
        number: of the pin.
    """

    number: int


class AdmissionDeadline(Control, frozen=True, eq=False):
    """To itself: the deadline of a wait, for blocks or for the end of a pause.

    Attributes:
        ticket: of the wait, since a lease may wait again.
    """

    lease: int
    ticket: int


class Proceed(Later, frozen=True, eq=False):
    """To itself: continue with the requests that wait. One turn takes a part of them."""


class Sweep(Later, frozen=True, eq=False):
    """To itself: return more device blocks, or memory, of cleared trees. One turn takes a part of
    them."""


IndexRequest = (
    Acquire
    | Prefetch
    | Ready
    | LayerReady
    | Extend
    | Reserve
    | Fork
    | Truncate
    | StepLeases
    | Withdrawn
    | Commit
    | Finish
    | Preempt
    | Abandon
    | Clear
    | ChangeShares
    | Pause
    | Resume
    | SetNamespace
    | SetNumBlocks
)
"""Messages of the public API to PrefixIndex."""
