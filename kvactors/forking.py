"""Forks of a lease: further leases of the same tokens, for several samples of a prompt or beams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, cast

from kvactors.arguments import check_flag, check_int, check_text, kind
from kvactors.device_events import Completion, Stream
from kvactors.lease_hold import LeaseHold
from kvactors.prefix_index.messages import AcquireResult, Fork, ForkedLease

MOST_FORKS = 1024
"""Forks that a call makes at most."""

TURN_BLOCKS = 8192
"""Table entries of the forks that one message makes at most, beyond the first fork."""


class Forked(Protocol):
    """The parts of a `Lease` that forks are made by."""

    request_id: str
    num_tokens: int
    _hold: LeaseHold
    _table: Sequence[int]
    _media: tuple[tuple[int, int], ...]
    _hits: tuple[int, int, int]

    def abandon(self) -> None:
        """See `Lease`."""


L = TypeVar("L", bound=Forked)


async def fork(  # noqa: D417  (a method of Lease)
    self: L,
    request_id: str | None = None,
    *,
    event: Completion | None = None,
    stream: Stream | None = None,
    deadline: float | None = None,
    wait_for_evictions: bool = True,
    wait_for_room: bool = False,
) -> L:
    """Make a second lease of the same tokens, for another sample of a prompt or a beam.

    Both leases share the full blocks, committed or not, and a block that one of them computes is
    computed for both. A last block that is not full is copied within the device before this
    returns, and each lease continues its own. Reserved blocks stay with this lease. The fork has
    the same salt, adapter, media, hints and loads in flight. The leases end independently.

    Fork after the tokens of the last block are computed. Of tokens that are not computed yet,
    those in the last block are computed by each lease that needs them.

    Args:
        request_id: of the fork, as in `KVCache.acquire`. None: that of this lease.
        event: completes when the device has computed the last block (see `commit`). It is waited
            for before the copy begins. None: the block is computed.
        stream: the engine's CUDA stream, in place of an event (see `commit`).
        deadline: seconds from now.
        wait_for_evictions: whether to wait, within the deadline, for evictions and copies in flight
            that will free blocks, as in `KVCache.acquire`.
        wait_for_room: whether to wait, within the deadline, until other requests release device
            blocks. Forks that wait get blocks in the order of their calls, and before requests that
            wait. The lease keeps its blocks: two leases whose forks wait for each other's blocks
            both wait until their deadlines.

    Returns:
        The fork. Finish it as any lease.

    Raises:
        LeaseBusy: as in `extend`.
        NotReady: `wait_ready()` is needed first, as before a commit.
        NoRoom: no device block can be freed for the copy. Nothing changed.
        NeverFits: a NoRoom: the lease and its forks would have more blocks than the device.
        DeadlineExceeded: no block became free in time. Nothing changed.
        DeviceError: the event has failed, the device has no CUDA streams, or the block could not be
            copied. Nothing changed.
    """
    request_ids = None if request_id is None else (request_id,)
    made = await fork_many(
        self,
        1,
        request_ids,
        event=event,
        stream=stream,
        deadline=deadline,
        wait_for_evictions=wait_for_evictions,
        wait_for_room=wait_for_room,
    )
    return made[0]


async def fork_many(  # noqa: D417  (a method of Lease)
    self: L,
    count: int,
    request_ids: Sequence[str] | None = None,
    *,
    event: Completion | None = None,
    stream: Stream | None = None,
    deadline: float | None = None,
    wait_for_evictions: bool = True,
    wait_for_room: bool = False,
) -> tuple[L, ...]:
    """Make `count` forks at once (see `fork`): all of them or none.

    Args:
        count: how many, at least 1.
        request_ids: one for each fork. None: that of this lease.
        event: as in `fork`.
        stream: as in `fork`.
        deadline: seconds from now.
        wait_for_evictions: as in `fork`.
        wait_for_room: as in `fork`.

    Raises:
        LeaseBusy, NotReady, NoRoom, DeadlineExceeded, DeviceError: as in `fork`.
    """
    hold = self._hold
    at = hold.deadline(deadline)
    number = check_int("count", count, 1, MOST_FORKS)
    names = _names(self.request_id, number, request_ids)
    waits = (
        check_flag("wait_for_evictions", wait_for_evictions),
        check_flag("wait_for_room", wait_for_room),
    )
    hold.check_read()
    if event is not None or stream is not None:
        await hold.wait_event(event, stream, self.num_tokens, self.num_tokens, at)
    forks: list[L] = []
    step = max(1, TURN_BLOCKS // max(1, len(self._table)))
    try:
        for start in range(0, number, step):
            part = names[start : start + step]
            numbers = tuple(next(hold.client.lease_numbers) for _ in part)
            message = Fork(hold.id, self.num_tokens, numbers, part, at, *waits)
            made = await hold.fork(message, at)
            forks += [
                _lease_of(self, lease, name, one)
                for lease, name, one in zip(numbers, part, made.leases, strict=True)
            ]
    except BaseException:
        for lease in forks:
            lease.abandon()
        raise
    return tuple(forks)


def _lease_of(parent: L, number: int, request_id: str, made: ForkedLease) -> L:
    """A lease that the index has made of `parent`."""
    ready, hold, kind_of = made.ready, parent._hold, cast("Any", type(parent))
    found = AcquireResult(ready.blocks, ready.cached_tokens, made.pending, ready.device_hits)
    lease: L = kind_of(
        hold.client, number, request_id, made.path, found, hold.loads_end, parent._media
    )
    lease._hits = (ready.device_hits, ready.host_hits, ready.storage_hits)
    return lease


def _names(own: str, count: int, request_ids: Sequence[str] | None) -> tuple[str, ...]:
    if request_ids is None:
        return (own,) * count
    if not isinstance(request_ids, list | tuple):
        raise TypeError(f"request_ids must be a list or tuple of str, not {kind(request_ids)}")
    if len(request_ids) != count:
        raise ValueError(f"{len(request_ids)} request_ids for {count} forks")
    for position, name in enumerate(request_ids):
        check_text(f"request_ids[{position}]", name)
    return tuple(request_ids)
