"""Waits of a lease for its loads, by its caller or by a CUDA stream."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import CoroutineType
from typing import Any, Protocol

from kvactors.actor.uncancelled import retrieve
from kvactors.arguments import check_int
from kvactors.device_events import Stream, stream_handle
from kvactors.lease_hold import LeaseHold
from kvactors.native import Path
from kvactors.prefix_index.messages import LayerReady, LayerResult, Ready


class Loading(Protocol):
    """The parts of a `Lease` that its loads change."""

    cached_tokens: int
    pending: bool
    _hold: LeaseHold
    _table: Sequence[int]
    _hits: tuple[int, int, int]
    _path: Path


async def wait_ready(  # noqa: D417  (a method of Lease)
    self: Loading, *, stream: Stream | None = None, deadline: float | None = None
) -> None:
    """Wait until every load has completed or has become a miss, also of a store that does not
    answer. `block_table` and `cached_tokens` are final then.

    With a stream the call returns as soon as the copies of all loads are on kvactors' stream, and
    the engine's stream waits for them: work put on it from then on finds the bytes, if the copies
    succeed. `pending` stays true, and `cached_tokens` stays an upper bound. Call `wait_ready()`
    afterwards for the result: `commit`, `fork` and a `finish` with computed tokens raise NotReady
    until then. If `cached_tokens` is smaller after it, discard the KV computed on top of the
    missing tokens, and compute them in the new `block_table`.

    Args:
        stream: the engine's CUDA stream, as the driver's handle or with an attribute `cuda_stream`.
            Loads that ended before, or that a store makes itself, are waited for by the caller.
        deadline: seconds from now. None: wait until the loads, which have the deadline of
            `acquire`, have completed or been given up.

    Raises:
        NoRoom: a failed load left blocks that could not be replaced.
        DeviceError: the device has no CUDA streams, or the driver refused to let the stream wait.
    """
    hold = self._hold
    if deadline is None and stream is None and not self.pending:
        hold.client.check_call()  # of most requests that hit: a clock is not needed
        if hold.ended:
            hold.check_ended()
        return
    at = hold.client.deadline(deadline)
    if hold.ended:
        hold.check_ended()
    handle = None if stream is None else _checked(hold, stream)
    if not self.pending:
        return
    if deadline is None:
        at = hold.after_loads(at)
    waits = (
        None
        if handle is None
        else hold.client.system.plane.streams.begin_stream_wait(handle, _blocks(self))
    )
    if waits is None:
        landed = await hold.ask(Ready(hold.id), at)
    elif (landed := await _ready_before(hold, waits, at)) is None:
        hold.unread = True
        return
    self._table = (
        *landed.blocks,
        *self._table[len(landed.blocks) :],
    )  # an extend may have been answered since
    self.cached_tokens, self.pending, hold.unread = landed.cached_tokens, False, False
    self._hits = (landed.device_hits, landed.host_hits, landed.storage_hits)


async def wait_layer(  # noqa: D417  (a method of Lease)
    self: Loading, layer: int, *, stream: Stream | None = None, deadline: float | None = None
) -> int:
    """Wait until one layer of every load has arrived, so that attention on it can start while
    later layers still load. Layers arrive one by one with `device.layerwise`, else all at once.

    `wait_ready()` has the final result, and is needed before a commit, as with a stream there. If
    fewer tokens are cached than before, a load has failed: compute the others in the new
    `block_table`. Such a call may return only when all loads have ended.

    Args:
        layer: counted from the layout's first, which is 0.
        stream: as in `wait_ready`. If all copies of the loads are on kvactors' stream, this stream
            waits for the layer in place of the caller: work put on it from now on finds the layer.
        deadline: as in `wait_ready`.

    Returns:
        Tokens that are cached in this layer, with a waiting stream if the copies succeed.

    Raises:
        NoRoom, DeviceError: as in `wait_ready`.
        ValueError: the layout has no such layer.
    """
    hold = self._hold
    at = hold.deadline(deadline)
    number = check_int("layer", layer, 0, hold.client.layers - 1)
    handle = None if stream is None else _checked(hold, stream)
    if not self.pending:
        return self.cached_tokens
    if handle is not None and hold.client.system.plane.streams.make_stream_wait(
        handle, _blocks(self), number
    ):
        hold.unread = True
        return self.cached_tokens
    if deadline is None:
        at = hold.after_loads(at)
    arrived: LayerResult = await hold.ask(LayerReady(hold.id, number), at)
    if arrived.blocks is not None:
        self._table = (*arrived.blocks, *self._table[len(arrived.blocks) :])
    hold.unread |= self.pending
    return arrived.cached_tokens


def _checked(hold: LeaseHold, stream: Stream) -> int:
    """The driver's handle. DeviceError if the device has no streams."""
    handle = stream_handle(stream)
    hold.client.system.plane.streams.check_streams()
    return handle


def _blocks(self: Loading) -> Sequence[int]:
    """Device blocks that loads bring."""
    return self._table[self._hits[0] : self.cached_tokens // self._path.block_size]


async def _ready_before(hold: LeaseHold, waits: asyncio.Future[None], at: float) -> Any:
    """The result of the loads, or None if `waits` is done before."""
    begun = hold.begin_ask(Ready(hold.id), at)
    if not isinstance(begun, CoroutineType):
        waits.cancel()
        return begun
    asked: asyncio.Future[Any] = asyncio.ensure_future(begun)
    try:
        await asyncio.wait((asked, waits), return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result()
        waits.result()
        return None
    finally:
        waits.cancel()
        asked.cancel()
        for one in (asked, waits):
            one.add_done_callback(retrieve)
