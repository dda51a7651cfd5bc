"""Messages that PrefixIndex handles, with their replies. Completions of its own requests to other
actors are defined beside those requests (`cpu_evictor.messages`, `gpu_swapper.messages`)."""

from __future__ import annotations

from collections.abc import Sequence

from kvactors.actor import Ask, Control, Later
from kvactors.actor.message import Message
from kvactors.flush_notifier.messages import PLAIN, Origin
from kvactors.native import Path
from kvactors.prefix_index.actions import Work


class Granted(Message, frozen=True, eq=False):
    """Blocks for every token of the request.

    blocks: the device block table. cached_tokens: tokens whose cache is there or on its way.
    pending: whether copies are still on their way; then the table and `cached_tokens` are final
    only in the `Landed` that answers `Ready`.
    """

    blocks: Sequence[int]
    cached_tokens: int
    pending: bool
    device_hits: int


class Landed(Message, frozen=True, eq=False):
    """All loads of a lease landed or were written off. Hits in blocks, by the tier each came
    from."""

    blocks: tuple[int, ...]
    cached_tokens: int
    device_hits: int
    host_hits: int
    storage_hits: int


class Done(Message, frozen=True, eq=False):
    """It is done. count: blocks concerned, where that means something."""

    count: int = 0


class Acquire(Ask[Granted], frozen=True, eq=False):
    """Blocks for a request: match, pin, take device blocks. Answered with NoRoom if even eviction
    cannot make room.

    lease: the door's number for the lease. path: the request's tokens; the index owns it from here
    on. deadline: absolute loop time for everything the lease loads. wait: whether to wait for
    evictions that need a copy first. origin: what is in the path's root. media: (offset, length) of
    media items that must not be cached in part.
    """

    lease: int
    request_id: str
    path: Path
    deadline: float
    wait: bool = True
    origin: Origin = PLAIN
    media: tuple[tuple[int, int], ...] = ()


class Prefetch(Ask[Done], frozen=True, eq=False):
    """A request of these tokens will come: what storage has of them may be brought nearer
    meanwhile. Done counts the blocks looked for.

    path: for this alone. deadline: absolute loop time for what is fetched. origin: what is in the
    path's root.
    """

    path: Path
    deadline: float
    origin: Origin = PLAIN


class Ready(Ask[Landed], frozen=True, eq=False):
    """Wait until every load of the lease landed or was written off."""

    lease: int


class LayerReady(Ask[int], frozen=True, eq=False):
    """Wait until one layer (counted from the layout's first) of everything the lease loads is on
    the device. Reply: tokens that are cached if the other layers land as well."""

    lease: int
    layer: int


class Extend(Ask[Granted], frozen=True, eq=False):
    """More tokens (those of `added`, a path for this alone): `blocks` of the reply are the ones
    added to the table's end.

    position: tokens of the lease before these, as its holder counts them. Refused with LeaseBusy if
    it is not so, or another waits.
    """

    lease: int
    position: int
    added: Path


class Commit(Ask[Done], frozen=True, eq=False):
    """The first `computed_tokens` tokens are computed: their full blocks become shareable. Reply:
    committed blocks."""

    lease: int
    computed_tokens: int


class Finish(Ask[Done], frozen=True, eq=False):
    """The request is over: unpin, and by policy save and announce. Reply: blocks left in the cache.

    computed_tokens: commit these first, None for what was committed.
    """

    lease: int
    computed_tokens: int | None = None


class Preempt(Ask[Done], frozen=True, eq=False):
    """The request gives way: keep the first `computed_tokens` tokens cached, give the rest back."""

    lease: int
    computed_tokens: int


class Clear(Ask[Done], frozen=True, eq=False):
    """Nothing cached before this can be hit after it. storage: also empty the store. Leases in use
    stay whole. Done counts the device blocks that are free by it: those that no lease and no copy
    uses."""

    storage: bool = False


class Pause(Ask[Done], frozen=True, eq=False):
    """Admit nobody; answered when no transfer is in flight."""


class Resume(Ask[Done], frozen=True, eq=False):
    """Admit again, those that waited first."""


class SetNamespace(Ask[Done], frozen=True, eq=False):
    """New weights, say: requests acquired from now on cannot hit what was cached under another
    name."""

    namespace: str


class Abandon(Control, frozen=True, eq=False):
    """The lease's holder is gone (cancelled or forgotten): give everything back. Unknown leases are
    ignored."""

    lease: int


class Withdrawn(Control, frozen=True, eq=False):
    """The lease's waiting extend was cancelled: the blocks it has collected go to the next in the
    queue."""

    lease: int


class Overdue(Control, frozen=True, eq=False):
    """To itself: a load should have been answered by now."""

    op: int


class Expired(Control, frozen=True, eq=False):
    """To itself: the deadline of a wait, for room or for the end of a pause. ticket: of the wait,
    since a lease may wait again."""

    lease: int
    ticket: int


class Proceed(Later, frozen=True, eq=False):
    """To itself: go on with the requests that wait; one turn takes a part of them only."""


class Sweep(Later, frozen=True, eq=False):
    """To itself: return more device blocks, or memory, of the trees of before a clear; one turn
    takes a part of them only."""


class Continue(Later, frozen=True, eq=False):
    """To itself: the next part of work on very many blocks."""

    work: Work


IndexRequest = (
    Acquire
    | Prefetch
    | Ready
    | LayerReady
    | Extend
    | Withdrawn
    | Commit
    | Finish
    | Preempt
    | Abandon
    | Clear
    | Pause
    | Resume
    | SetNamespace
)
"""Messages of the public API to PrefixIndex."""
