"""Leases: a request's hold on its device blocks, as `KVCache.acquire` returns it, and its hits.

A cancelled call of a lease either did not happen or has ended the lease. A `deadline` is in seconds
from now, None for `cache.default_deadline_s`. Beside the errors that it lists, every method raises
LeaseEnded once the lease has ended, DeadlineExceeded, ActorFailed, WrongLoop outside the event loop
of its cache, CacheClosed once the cache is closed, and ValueError or TypeError for bad arguments
(then nothing changed).
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Sequence
from types import CoroutineType
from typing import Any, NamedTuple, Self

from kvactors.actor.uncancelled import retrieve
from kvactors.arguments import (
    Media,
    added_media,
    check_flag,
    check_int,
    check_text,
    extend_path,
    kind,
)
from kvactors.client import Client
from kvactors.device_events import Completion, Stream, stream_handle
from kvactors.errors import NotReady
from kvactors.hints import Hints, check_hints
from kvactors.lease_hold import LeaseHold
from kvactors.native import Path
from kvactors.prefix_index.messages import (
    AcquireResult,
    Commit,
    Extend,
    Finish,
    Fork,
    ForkedLease,
    LayerReady,
    LayerResult,
    Preempt,
    Ready,
    Reserve,
    Truncate,
)
from kvactors.types import Tokens

MOST_FORKS = 1024
"""Forks that a call makes at most."""

TURN_BLOCKS = 8192
"""Table entries of the forks that one message makes at most, beyond the first fork."""


class Hits(NamedTuple):
    """Blocks of a request that need not be computed, by the tier that held them."""

    device: int
    host: int
    storage: int


class Lease:
    """A request's hold on its device blocks. Use it as an async context manager, or `finish` it.

    Attributes:
        request_id: the id that `KVCache.acquire` was given.
        cached_tokens: number of leading tokens whose KV is cached. Final after `wait_ready`:
            prefill from here on. Before, an upper bound: it includes loads in flight and blocks
            that storage is still asked for.
        pending: whether loads are in flight.
        num_tokens: tokens of the request, those of `extend` included.
        pinned_blocks: that `finish` has pinned, 0 if `hints.pin_share` did not allow it.
    """

    def __init__(
        self,
        client: Client,
        lease: int,
        request_id: str,
        path: Path,
        granted: AcquireResult,
        loads_end: float,
        media: tuple[tuple[int, int], ...] = (),
    ) -> None:
        self.request_id = request_id
        self._table: Sequence[int] = granted.blocks
        self.cached_tokens, self.pending = granted.cached_tokens, granted.pending
        self._hits = (granted.device_hits, 0, 0)
        self.num_tokens, self.pinned_blocks = path.num_tokens, 0
        self._hold = LeaseHold(client, lease, request_id, loads_end)
        self._path = path
        self._media = media  # (offset, length) of the media items

    @property
    def hits(self) -> Hits:
        """Blocks that were cached, by tier. Final once `wait_ready` has returned."""
        return Hits(*self._hits)

    @property
    def block_table(self) -> tuple[int, ...]:
        """Device block ids in the order of the tokens. The first access after an `extend` copies
        the table, which takes noticeable time for a very long request."""
        if not isinstance(self._table, tuple):
            self._table = tuple(self._table)
        return self._table

    # -- loads

    async def wait_ready(
        self, *, stream: Stream | None = None, deadline: float | None = None
    ) -> None:
        """Wait until every load has completed or has become a miss, also of a store that does not
        answer. `block_table` and `cached_tokens` are final then.

        With a stream the call returns as soon as the copies of all loads are on kvactors' stream,
        and the engine's stream waits for them: work put on it from then on finds the bytes, if the
        copies succeed. `pending` stays true, and `cached_tokens` stays an upper bound. Call
        `wait_ready()` afterwards for the result: `commit`, `fork` and a `finish` with computed
        tokens raise NotReady until then. If `cached_tokens` is smaller after it, discard the KV
        computed on top of the missing tokens, and compute them in the new `block_table`.

        Args:
            stream: the engine's CUDA stream, as the driver's handle or with an attribute
                `cuda_stream`. Loads that ended before, or that a store makes itself, are waited for
                by the caller.
            deadline: seconds from now. None: wait until the loads, which have the deadline of
                `acquire`, have completed or been given up.

        Raises:
            NoRoom: a failed load left blocks that could not be replaced.
            DeviceError: the device has no CUDA streams, or the driver refused to let the stream
                wait.
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
            else hold.client.system.plane.streams.begin_stream_wait(handle, self._loaded_blocks())
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

    async def wait_layer(
        self, layer: int, *, stream: Stream | None = None, deadline: float | None = None
    ) -> int:
        """Wait until one layer of every load has arrived, so that attention on it can start while
        later layers still load. Layers arrive one by one with `device.layerwise`, else all at once.

        `wait_ready()` has the final result, and is needed before a commit, as with a stream there.
        If fewer tokens are cached than before, a load has failed: compute the others in the new
        `block_table`. Such a call may return only when all loads have ended.

        Args:
            layer: counted from the layout's first, which is 0.
            stream: as in `wait_ready`. If all copies of the loads are on kvactors' stream, this
                stream waits for the layer in place of the caller: work put on it from now on finds
                the layer.
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
            handle, self._loaded_blocks(), number
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

    def _loaded_blocks(self) -> Sequence[int]:
        """Device blocks that loads bring."""
        return self._table[self._hits[0] : self.cached_tokens // self._path.block_size]

    # -- tokens and blocks

    async def extend(
        self,
        tokens: Tokens,
        *,
        extra_keys: Sequence[Media] = (),
        deadline: float | None = None,
    ) -> tuple[int, ...]:
        """Append tokens to the request and take the device blocks that they need. Blocks that were
        reserved are used first.

        Args:
            tokens: token ids as in `KVCache.acquire`, possibly none. They are copied.
            extra_keys: media items as in `KVCache.acquire`. Offsets count from the first of
                `tokens`.
            deadline: seconds from now.

        Returns:
            The device blocks added to the table.

        Raises:
            LeaseBusy: another `extend`, `reserve` or `truncate` of this lease waits. Nothing
                changed.
            NoRoom: fewer device blocks than needed can be freed. Nothing changed.
            NeverFits: a NoRoom: the lease would have more blocks than the device.
        """
        at = self._hold.deadline(deadline)
        added = Path(self._path.block_size, self._path.root)
        extend_path(added, "tokens", tokens)
        extras, media = added_media(added.block_size, self.num_tokens, added.num_tokens, extra_keys)
        message = Extend(self._hold.id, self.num_tokens, added, extras)
        granted = await self._hold.grow("extend", message, at)
        return self._appended(added, media, granted.blocks)

    @property
    def covered_tokens(self) -> int:
        """Leading tokens that the block table has blocks for: all, except after an `acquire` with
        `chunk_tokens`."""
        return min(self.num_tokens, len(self._table) * self._hold.client.block_size)

    async def next_chunk(
        self, num_tokens: int, *, deadline: float | None = None
    ) -> tuple[int, ...]:
        """Take device blocks for the next tokens of a prompt that was acquired with `chunk_tokens`.

        Args:
            num_tokens: tokens after the first `covered_tokens` that the block table shall have
                place for. The rest of the lease's tokens if they are fewer.
            deadline: seconds from now.

        Returns:
            The device blocks added to the table.

        Raises:
            LeaseBusy: as in `extend`.
            NoRoom: as in `extend`.
        """
        at = self._hold.deadline(deadline)
        count = check_int("num_tokens", num_tokens, 1)
        upto = min(self.num_tokens, self.covered_tokens + count)
        message = Reserve(self._hold.id, self.num_tokens, upto)
        granted: AcquireResult = await self._hold.grow("next_chunk", message, at)
        return self._append_blocks(granted.blocks)

    async def reserve(self, num_tokens: int, *, deadline: float | None = None) -> tuple[int, ...]:
        """Take device blocks ahead of tokens, for speculation or asynchronous scheduling. A later
        `extend` uses them, and `truncate` gives them back.

        Args:
            num_tokens: tokens beyond those of the lease that the block table shall have place for.
                Blocks that were reserved before count. At most the tokens of one turn (131,072, or
                2,048 blocks if that is less).
            deadline: seconds from now.

        Returns:
            The device blocks added to the table.

        Raises:
            LeaseBusy: as in `extend`.
            NoRoom: as in `extend`.
        """
        at = self._hold.deadline(deadline)
        count = check_int("num_tokens", num_tokens, 0, self._hold.client.part_tokens)
        message = Reserve(self._hold.id, self.num_tokens, self.num_tokens + count)
        granted: AcquireResult = await self._hold.grow("reserve", message, at)
        return self._append_blocks(granted.blocks)

    async def truncate(self, num_tokens: int, *, deadline: float | None = None) -> tuple[int, ...]:
        """Drop the tokens beyond the first `num_tokens`, such as rejected drafts, and the device
        blocks that only they or a `reserve` needed. `truncate(num_tokens)` with the lease's own
        number drops reserved blocks alone. Blocks are dropped when every pass of
        `KVCache.record_pass` that the lease takes part in is over.

        Args:
            num_tokens: tokens to keep.
            deadline: seconds from now.

        Returns:
            The device blocks removed from the end of the table.

        Raises:
            TokensCommitted: some of the tokens are in committed blocks, which other requests may
                share, or the number is within a full block that a fork shares. Nothing changed.
            NotReady: loads are in flight. Nothing changed.
            LeaseBusy: as in `extend`, or a commit of this lease has not returned yet. Nothing
                changed.
            ValueError: the lease has fewer tokens, or a media item would be cut. Nothing changed.
        """
        hold = self._hold
        at = hold.deadline(deadline)
        kept = check_int("num_tokens", num_tokens, 0, self.num_tokens)
        for offset, length in self._media:
            if offset < kept < offset + length:
                raise ValueError(
                    f"num_tokens is {kept}, within the media item of {length} tokens at {offset}"
                )
        if self.pending:
            raise NotReady(
                f"lease of {self.request_id!r} waits for loads: await wait_ready() before "
                "truncate()"
            )
        drops_blocks = len(self._table) * hold.client.block_size - kept >= hold.client.block_size
        message = Truncate(hold.id, self.num_tokens, kept)
        left = await hold.truncate(message, at, drops_blocks=drops_blocks)
        self.num_tokens = kept
        self._media = tuple(item for item in self._media if item[0] < kept)
        dropped = tuple(self._table[left:])
        if dropped:
            self._table = self._table[:left]
        return dropped

    # -- forks

    async def fork(
        self,
        request_id: str | None = None,
        *,
        event: Completion | None = None,
        stream: Stream | None = None,
        deadline: float | None = None,
        wait_for_evictions: bool = True,
        wait_for_room: bool = False,
    ) -> Self:
        """Make a second lease of the same tokens, for another sample of a prompt or a beam.

        Both leases share the full blocks, committed or not, and a block that one of them computes
        is computed for both. A last block that is not full is copied within the device before this
        returns, and each lease continues its own. Reserved blocks stay with this lease. The fork
        has the same salt, adapter, media, hints and loads in flight. The leases end independently.

        Fork after the tokens of the last block are computed. Of tokens that are not computed yet,
        those in the last block are computed by each lease that needs them.

        Args:
            request_id: of the fork, as in `KVCache.acquire`. None: that of this lease.
            event: completes when the device has computed the last block (see `commit`). It is
                waited for before the copy begins. None: the block is computed.
            stream: the engine's CUDA stream, in place of an event (see `commit`).
            deadline: seconds from now.
            wait_for_evictions: whether to wait, within the deadline, for evictions and copies in
                flight that will free blocks, as in `KVCache.acquire`.
            wait_for_room: whether to wait, within the deadline, until other requests release device
                blocks. Forks that wait get blocks in the order of their calls, and before requests
                that wait. The lease keeps its blocks: two leases whose forks wait for each other's
                blocks both wait until their deadlines.

        Returns:
            The fork. Finish it as any lease.

        Raises:
            LeaseBusy: as in `extend`.
            NotReady: `wait_ready()` is needed first, as before a commit.
            NoRoom: no device block can be freed for the copy. Nothing changed.
            NeverFits: a NoRoom: the lease and its forks would have more blocks than the device.
            DeadlineExceeded: no block became free in time. Nothing changed.
            DeviceError: the event has failed, the device has no CUDA streams, or the block could
                not be copied. Nothing changed.
        """
        request_ids = None if request_id is None else (request_id,)
        made = await self.fork_many(
            1,
            request_ids,
            event=event,
            stream=stream,
            deadline=deadline,
            wait_for_evictions=wait_for_evictions,
            wait_for_room=wait_for_room,
        )
        return made[0]

    async def fork_many(
        self,
        count: int,
        request_ids: Sequence[str] | None = None,
        *,
        event: Completion | None = None,
        stream: Stream | None = None,
        deadline: float | None = None,
        wait_for_evictions: bool = True,
        wait_for_room: bool = False,
    ) -> tuple[Self, ...]:
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
        forks: list[Self] = []
        step = max(1, TURN_BLOCKS // max(1, len(self._table)))
        try:
            for start in range(0, number, step):
                part = names[start : start + step]
                numbers = tuple(next(hold.client.lease_numbers) for _ in part)
                message = Fork(hold.id, self.num_tokens, numbers, part, at, *waits)
                made = await hold.fork(message, at)
                forks += [
                    self._fork(lease, name, one)
                    for lease, name, one in zip(numbers, part, made.leases, strict=True)
                ]
        except BaseException:
            for lease in forks:
                lease.abandon()
            raise
        return tuple(forks)

    def _fork(self, number: int, request_id: str, made: ForkedLease) -> Self:
        """A lease that the index has made of this one."""
        ready, hold = made.ready, self._hold
        found = AcquireResult(ready.blocks, ready.cached_tokens, made.pending, ready.device_hits)
        lease = type(self)(
            hold.client, number, request_id, made.path, found, hold.loads_end, self._media
        )
        lease._hits = (ready.device_hits, ready.host_hits, ready.storage_hits)
        return lease

    def _appended(
        self, added: Path, media: tuple[tuple[int, int], ...], blocks: Sequence[int]
    ) -> tuple[int, ...]:
        """The index has appended tokens."""
        self.num_tokens += added.num_tokens
        self._media += media
        return self._append_blocks(blocks)

    def _append_blocks(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """Add blocks to the end of the table."""
        if blocks:
            if not isinstance(self._table, list):
                self._table = list(self._table)
            self._table.extend(blocks)
        return tuple(blocks)

    async def commit(
        self,
        computed_tokens: int,
        *,
        event: Completion | None = None,
        stream: Stream | None = None,
        deadline: float | None = None,
    ) -> int:
        """Make the full blocks among the first `computed_tokens` tokens shareable.

        Args:
            computed_tokens: tokens whose KV is in device memory. A sampled token has none before
                the next forward pass: after `extend([token])` pass `num_tokens - 1` until then. The
                same or a smaller number than before changes nothing.
            event: completes when the device has computed them: a GPU event with `query()`, as
                PyTorch's and Paddle's, or an awaitable. The blocks are shareable only then. None:
                they are computed.
            stream: the engine's CUDA stream, in place of an event, as the driver's handle or with
                an attribute `cuda_stream`. An event is recorded on it when the call begins.
            deadline: seconds from now, for the event as well.

        Returns:
            Committed blocks of the lease.

        Raises:
            NotReady: loads are in flight, or a stream or layer was waited for and `wait_ready()`
                has not returned since.
            DeviceError: the event has failed, or the device has no CUDA streams. Nothing changed.
        """
        hold = self._hold
        at = hold.client.deadline(deadline)
        if hold.ended:
            hold.check_ended()
        computed = computed_tokens
        if type(computed) is not int or not 0 <= computed <= hold.client.part_tokens:
            computed = check_int("computed_tokens", computed_tokens)
        if hold.unread:
            hold.check_read(computed)
        if event is not None or stream is not None:
            await hold.wait_event(event, stream, computed, self.num_tokens, at)
        if computed <= hold.client.part_tokens:
            done = hold.begin_ask(Commit(hold.id, computed), at, has_effect=True)
            if isinstance(done, CoroutineType):
                done = await hold.wait_commit(done, computed)
            return int(done.count)
        return await hold.commit_in_parts(self._path, computed, self.num_tokens, at)

    async def finish(
        self,
        computed_tokens: int | None = None,
        *,
        event: Completion | None = None,
        stream: Stream | None = None,
        deadline: float | None = None,
        output_tokens: int | None = None,
        hints: Hints | None = None,
    ) -> None:
        """End the request and release its blocks, also after an error or a cancellation. Waits for
        the passes of `KVCache.record_pass` that the lease takes part in.

        Args:
            computed_tokens: commit that many tokens first (see `commit`). None: only the blocks
                committed before stay cached.
            event: completes when the device uses no block of the lease any more (see `commit`).
            stream: in place of an event, the only one that uses the blocks still (see `commit`).
            deadline: seconds from now.
            output_tokens: tokens that the model has produced, which the eviction policy `retain`
                learns from. None: those that were added by `extend`, if any.
            hints: in place of those of `acquire`, whose pin is of the prompt's blocks only.

        Raises:
            NotReady: loads are in flight. This, ValueError and TypeError leave the lease open, as
                does an event that fails, is late, or is waited for when the call is cancelled.
            DeviceError: the event has failed.
        """
        computed = (
            None if computed_tokens is None else check_int("computed_tokens", computed_tokens)
        )
        output = None if output_tokens is None else check_int("output_tokens", output_tokens, 0)
        if hints is not None:
            hints = check_hints(hints)
        message = Finish(self._hold.id, computed, output, hints)
        ended = await self._hold.end(message, self._path, self.num_tokens, event, stream, deadline)
        self.pinned_blocks = ended.pinned

    async def preempt(
        self,
        computed_tokens: int = 0,
        *,
        event: Completion | None = None,
        stream: Stream | None = None,
        deadline: float | None = None,
    ) -> None:
        """End the lease of a request that will be resumed. The next `acquire` with its request_id
        continues it: statistics count the hits of the request once.

        Args:
            computed_tokens: commit that many tokens first (see `commit`).
            event: as in `finish`.
            stream: as in `finish`.
            deadline: seconds from now.

        Raises:
            NotReady, DeviceError: as in `finish`.
        """
        message = Preempt(self._hold.id, check_int("computed_tokens", computed_tokens))
        await self._hold.end(message, self._path, self.num_tokens, event, stream, deadline)

    def hashes(self, start: int, stop: int) -> bytes:
        """Hashes of the full blocks from `start` to before `stop`, 32 bytes each."""
        self._hold.client.check_thread()
        last = check_int("stop", stop, 0, self._path.num_full_blocks)
        return self._path.hashes(check_int("start", start, 0, last), last)

    def abandon(self, *, event: Completion | None = None, stream: Stream | None = None) -> None:
        """End the lease without waiting for an answer. Committed blocks stay cached. No effect on a
        lease that has ended.

        The blocks are released when every pass of `KVCache.record_pass` that the lease takes part
        in is over.

        Args:
            event: completes when the device uses no block of the lease any more, as an event of
                `record_pass`.
            stream: in place of an event (see `commit`).

        Raises:
            DeviceError: the device has no CUDA streams. The lease is as before.
        """
        hold = self._hold
        hold.client.check_thread()
        if not hold.ended and (event is not None or stream is not None):
            hold.client.record_pass(frozenset((hold.id,)), event, stream)
        hold.give_up()

    async def __aenter__(self) -> Self:
        self._hold.deadline(None)
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        if self._hold.ended:
            return
        try:
            if error is None:
                await self.finish()
        finally:
            self._hold.give_up()

    def __del__(self) -> None:
        hold = getattr(self, "_hold", None)
        if hold is not None and not hold.ended:
            hold.ended = True
            if hold.client.abandon_unused(hold.id):
                warnings.warn(
                    f"lease of {self.request_id!r} was never finished",
                    ResourceWarning,
                    source=self,
                    stacklevel=1,
                )


def _checked(hold: LeaseHold, stream: Stream) -> int:
    """The driver's handle. DeviceError if the device has no streams."""
    handle = stream_handle(stream)
    hold.client.system.plane.streams.check_streams()
    return handle


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
