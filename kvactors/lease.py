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
from collections.abc import Awaitable, Sequence
from types import CoroutineType
from typing import Any, NamedTuple, Self

import msgspec

from kvactors.actor import Ask
from kvactors.actor.uncancelled import CANCELLED, retrieve
from kvactors.call_context import CallContext
from kvactors.checks import Media, added_media, check_flag, check_int, check_text, extend_path, kind
from kvactors.device.events import Completion, Stream, stream_handle
from kvactors.errors import ActorFailed, LeaseBusy, LeaseEnded, NotReady
from kvactors.hints import Hints, check_hints
from kvactors.native import Path
from kvactors.prefix_index.messages import (
    Ack,
    AcquireResult,
    Commit,
    DropLeading,
    Extend,
    Finish,
    Fork,
    ForkedLease,
    ForkResult,
    LayerReady,
    LayerResult,
    Preempt,
    Ready,
    Reserve,
    Truncate,
    Withdrawn,
)
from kvactors.types import Tokens

AFTER_LOADS_S = 2.0
"""Seconds past the deadline of a request's loads until which `wait_ready` waits by default. The
index gives loads up `GRACE` seconds after their deadline. They are misses then, not an error."""

MAX_FORKS = 1024
"""Forks that a call makes at most."""

FORK_TURN_BLOCKS = 8192
"""Table entries of the forks that one message makes at most, beyond the first fork."""


class Hits(NamedTuple):
    """Blocks of a request that need not be computed, by the tier that held them."""

    device: int
    host: int
    storage: int

    @property
    def total(self) -> int:
        """The sum over the tiers."""
        return self.device + self.host + self.storage


class LeaseHandle(msgspec.Struct, eq=False):
    """The number of a lease at the index, and whether the lease can still be used. Calls in
    progress refer to the handle, so that a forgotten lease is collected.

    Attributes:
        changing: the call in progress that changes the block table, "" if there is none.
        committing: tokens of the commits in progress that take several steps, or wait for a pass
            of the loop. They must stay until the commits are answered.
        unread: whether the caller, or a stream, works with loads whose result it has not read.
        bound: handles of the request in several groups of layers. One that ends ends all of them.
    """

    context: CallContext
    id: int
    request_id: str
    loads_end: float
    ended: bool = False
    changing: str = ""
    committing: list[int] = []
    unread: bool = False
    bound: list[LeaseHandle] = []

    # -- checks

    def begin_call(self, deadline: float | None) -> float:
        """Check that the lease can be used here and now. Returns the absolute deadline."""
        at = self.context.begin_call(deadline)
        if self.ended:
            self.check_ended()
        return at

    def check_ended(self) -> None:
        if self.ended:
            raise LeaseEnded(f"the lease of {self.request_id!r} has ended")

    def check_change(self) -> None:
        if self.changing:
            raise LeaseBusy(
                f"another {self.changing} of the lease of {self.request_id!r} has not returned yet"
            )

    def check_truncate(self) -> None:
        """LeaseBusy while a truncate may remove the tokens of a commit."""
        if self.changing == "truncate":
            raise LeaseBusy(f"a truncate of the lease of {self.request_id!r} has not returned yet")

    def begin_change(self, call: str) -> None:
        """A call is going to change the block table. LeaseBusy if another one is."""
        self.check_change()
        self.changing = call

    def check_read(self, computed: int = 1) -> None:
        """NotReady if computed tokens may be on top of a load that has failed since."""
        if computed and self.unread:
            raise NotReady(
                f"loads of the lease of {self.request_id!r} may have failed after the wait for a "
                "stream or a layer: await wait_ready() first"
            )

    # -- asks

    async def ask(
        self, message: Ask[Any], at: float, *, has_effect: bool = False, queued: bool = False
    ) -> Any:
        """Ask the index, in the same step as the call of `begin_call`. has_effect: the call changes
        the lease, so the lease ends if the caller is cancelled after the change."""
        asked = self.begin_ask(message, at, has_effect=has_effect, queued=queued)
        return await asked if isinstance(asked, CoroutineType) else asked

    def begin_ask(
        self, message: Ask[Any], at: float, *, has_effect: bool = False, queued: bool = False
    ) -> Any:
        """`ask` up to its first wait: the answer, or a coroutine to be awaited in the same step."""
        lost = self._lost if has_effect else None
        try:
            asked = self.context.index.entrance.begin_ask(message, at, lost, queued=queued)
        except LeaseEnded as error:
            raise self.ended_by(error) from None
        return self._answer(asked) if isinstance(asked, CoroutineType) else asked

    async def _answer(self, asked: CoroutineType[Any, Any, Any]) -> Any:
        try:
            return await asked
        except LeaseEnded as error:
            raise self.ended_by(error) from None
        except ActorFailed as error:
            self.context.raise_if_closed(error)
            raise

    def ended_by(self, error: LeaseEnded) -> LeaseEnded:
        """The index has no such lease any more: the error for the caller."""
        self.ended = True
        self.end_bound()
        return LeaseEnded(f"lease of {self.request_id!r}: {error}")

    async def take(self, message: Extend | Reserve, at: float, call: str = "") -> AcquireResult:
        """Send a message that adds blocks to the end of the table, as a separate change (`call`)
        or as a part of one that has begun."""
        if call:
            self.begin_change(call)
        try:
            granted: Any = self.begin_ask(message, at, has_effect=True)
            if isinstance(granted, CoroutineType):
                granted = await granted
                self.check_ended()
        except CANCELLED:
            self.withdraw()
            raise
        finally:
            if call:
                self.changing = ""
        return granted  # type: ignore[no-any-return]

    def withdraw(self) -> None:
        """A change is cancelled: blocks that it has collected go to the next in the queue."""
        if not self.ended:
            self.context.tell(Withdrawn(self.id))

    async def wait_commit(self, asked: Awaitable[Any], computed: int) -> Any:
        """Wait for the answer of a commit. Until then its tokens must stay: a truncate and an
        extend could overtake it, and it would make blocks shareable that are not computed."""
        self.committing.append(computed)
        try:
            return await asked
        finally:
            self.committing.remove(computed)

    def give_up(self) -> None:
        if not self.ended:
            self.ended = True
            self.context.abandon(self.id)
            self.end_bound()

    def end_bound(self) -> None:
        while self.bound:
            self.bound.pop().give_up()

    def _lost(self, reply: object) -> None:
        self.give_up()


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
        context: CallContext,
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
        self._handle = LeaseHandle(context, lease, request_id, loads_end)
        self._path = path
        self._media = media  # (offset, length) of the media items

    def __repr__(self) -> str:
        state = "ended" if self._handle.ended else "pending" if self.pending else "ready"
        counts = f"{self.cached_tokens} of {self.num_tokens} tokens cached"
        return f"<{type(self).__name__} of {self.request_id!r}: {counts}, {state}>"

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

    @property
    def block_tables(self) -> tuple[tuple[int, ...], ...]:
        """The block table of each group of layers, that of `[layout]` first (see
        docs/groups.md). One entry for each block of the request, -1 where the group has
        none."""
        return (self.block_table,)

    @property
    def covered_tokens(self) -> int:
        """Leading tokens that the block table has blocks for: all, except after an `acquire` with
        `chunk_tokens`."""
        return min(self.num_tokens, len(self._table) * self._handle.context.block_size)

    def pass_end(self, start: int, stop: int) -> int:
        """The token before which a pass over the lease's tokens must end. It is `stop`, or an
        earlier token before which a group of layers wants a snapshot of its state (docs/groups.md).

        Args:
            start: the first token of the pass.
            stop: the token before which the pass ends without groups.
        """
        self._handle.context.check_thread()
        return check_int("stop", stop, check_int("start", start))

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
        handle = self._handle
        if deadline is None and stream is None and not self.pending:
            handle.context.check_call()  # of most requests that hit: a clock is not needed
            if handle.ended:
                handle.check_ended()
            return
        at = handle.context.begin_call(deadline)
        if handle.ended:
            handle.check_ended()
        number = None if stream is None else self._stream(stream)
        if not self.pending:
            return
        if deadline is None:
            at = self._after_loads(at)
        waits = None
        if number is not None:
            streams = handle.context.system.plane.streams
            waits = streams.begin_stream_wait(number, self._loaded_blocks())
        if waits is None:
            landed = await handle.ask(Ready(handle.id), at)
        elif (landed := await self._ready_before(waits, at)) is None:
            handle.unread = True
            return
        self._replace_leading(landed.blocks)
        self.cached_tokens, self.pending, handle.unread = landed.cached_tokens, False, False
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
        handle = self._handle
        at = handle.begin_call(deadline)
        number = check_int("layer", layer, 0, handle.context.layers - 1)
        waiting = None if stream is None else self._stream(stream)
        if not self.pending:
            return self.cached_tokens
        if waiting is not None and handle.context.system.plane.streams.make_stream_wait(
            waiting, self._loaded_blocks(), number
        ):
            handle.unread = True
            return self.cached_tokens
        if deadline is None:
            at = self._after_loads(at)
        arrived: LayerResult = await handle.ask(LayerReady(handle.id, number), at)
        if arrived.blocks is not None:
            self._replace_leading(arrived.blocks)
        handle.unread |= self.pending
        return arrived.cached_tokens

    def _stream(self, stream: Stream) -> int:
        """The driver's handle. DeviceError if the device has no streams."""
        number = stream_handle(stream)
        self._handle.context.system.plane.streams.check_streams()
        return number

    def _after_loads(self, at: float) -> float:
        """The default deadline of a wait for loads: until each has completed or was given up."""
        return max(at, self._handle.loads_end + AFTER_LOADS_S)

    async def _ready_before(self, waits: asyncio.Future[None], at: float) -> Any:
        """The result of the loads, or None if `waits` is done before."""
        begun = self._handle.begin_ask(Ready(self._handle.id), at)
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

    def _loaded_blocks(self) -> Sequence[int]:
        """Device blocks that loads bring."""
        return self._table[self._hits[0] : self.cached_tokens // self._path.block_size]

    def _replace_leading(self, blocks: Sequence[int]) -> None:
        """Loads have ended. An extend may have added blocks since."""
        self._table = (*blocks, *self._table[len(blocks) :])

    # -- tokens and blocks

    async def extend(
        self, tokens: Tokens, *, extra_keys: Sequence[Media] = (), deadline: float | None = None
    ) -> tuple[int, ...]:
        """Append tokens to the request and take the device blocks that they need. Blocks that were
        reserved are used first.

        Args:
            tokens: token ids as in `KVCache.acquire`, possibly none. They are copied.
            extra_keys: media items as in `KVCache.acquire`. Offsets count from the first of
                `tokens`.

        Returns:
            The device blocks added to the table.

        Raises:
            LeaseBusy: another `extend`, `reserve` or `truncate` of this lease waits. Nothing
                changed.
            NoRoom: fewer device blocks than needed can be freed. Nothing changed.
            NeverFits: a NoRoom: the lease would have more blocks than the device.
        """
        at = self._handle.begin_call(deadline)
        added = Path(self._path.block_size, self._path.root)
        extend_path(added, "tokens", tokens)
        extras, media = added_media(added.block_size, self.num_tokens, added.num_tokens, extra_keys)
        message = Extend(self._handle.id, self.num_tokens, added, extras)
        blocks = await self._grow(message, at, "extend")
        self.num_tokens += added.num_tokens
        self._media += media
        return blocks

    async def next_chunk(
        self, num_tokens: int, *, deadline: float | None = None
    ) -> tuple[int, ...]:
        """Take device blocks for the next tokens of a prompt that was acquired with `chunk_tokens`.

        Args:
            num_tokens: tokens after the first `covered_tokens` that the block table shall have
                place for. The rest of the lease's tokens if they are fewer.

        Returns:
            The device blocks added to the table.

        Raises:
            LeaseBusy: as in `extend`.
            NoRoom: as in `extend`.
        """
        at = self._handle.begin_call(deadline)
        count = check_int("num_tokens", num_tokens, 1)
        upto = min(self.num_tokens, self.covered_tokens + count)
        message = Reserve(self._handle.id, self.num_tokens, upto)
        return await self._grow(message, at, "next_chunk")

    async def reserve(self, num_tokens: int, *, deadline: float | None = None) -> tuple[int, ...]:
        """Take device blocks ahead of tokens, for speculation or asynchronous scheduling. A later
        `extend` uses them, and `truncate` gives them back.

        Args:
            num_tokens: tokens beyond those of the lease that the block table shall have place for.
                Blocks that were reserved before count. At most the tokens of one turn (131,072, or
                2,048 blocks if that is less).

        Returns:
            The device blocks added to the table.

        Raises:
            LeaseBusy: as in `extend`.
            NoRoom: as in `extend`.
        """
        at = self._handle.begin_call(deadline)
        count = check_int("num_tokens", num_tokens, 0, self._handle.context.part_tokens)
        message = Reserve(self._handle.id, self.num_tokens, self.num_tokens + count)
        return await self._grow(message, at, "reserve")

    async def _grow(self, message: Extend | Reserve, at: float, call: str) -> tuple[int, ...]:
        """Add tokens or blocks to the end. Returns the added blocks."""
        return self._append_blocks((await self._handle.take(message, at, call)).blocks)

    def _append_blocks(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """Add blocks to the end of the table."""
        if blocks:
            if not isinstance(self._table, list):
                self._table = list(self._table)
            self._table.extend(blocks)
        return tuple(blocks)

    async def truncate(self, num_tokens: int, *, deadline: float | None = None) -> tuple[int, ...]:
        """Drop the tokens beyond the first `num_tokens`, such as rejected drafts, and the device
        blocks that only they or a `reserve` needed. `truncate(num_tokens)` with the lease's own
        number drops reserved blocks alone. Blocks are dropped when every pass of
        `KVCache.record_pass` that the lease takes part in is over.

        Args:
            num_tokens: tokens to keep.

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
        handle = self._handle
        at = handle.begin_call(deadline)
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
        if any(kept < computed for computed in handle.committing):
            raise LeaseBusy(f"a commit of the lease of {self.request_id!r} has not returned yet")
        block_size, events = handle.context.block_size, handle.context.events
        message = Truncate(handle.id, self.num_tokens, kept)
        handle.begin_change("truncate")
        try:
            if len(self._table) * block_size - kept >= block_size and events.passes:
                await events.wait_passes(handle.id, at)  # it drops blocks, which no pass may use
                handle.check_ended()
            left = int((await handle.ask(message, at, has_effect=True)).count)
        finally:
            handle.changing = ""
        handle.check_ended()
        self.num_tokens = kept
        self._media = tuple(item for item in self._media if item[0] < kept)
        dropped = tuple(self._table[left:])
        if dropped:
            self._table = self._table[:left]
        return dropped

    async def _drop_leading(self, blocks: int, deadline: float) -> None:
        """Give up the first blocks of a lease of a group (see `kvactors.groups`)."""
        handle = self._handle
        at = handle.begin_call(deadline)
        handle.begin_change("commit")
        try:
            await handle.ask(DropLeading(handle.id, self.num_tokens, blocks), at, has_effect=True)
        finally:
            handle.changing = ""
        handle.check_ended()
        self.num_tokens -= blocks * self._path.block_size
        self._table = self._table[blocks:]

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
            NotReady: `wait_ready()` is needed first, as before a commit. With groups of layers
                also a commit, if a snapshot of a state is not computed.
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
        """Make `count` forks at once: all of them or none. `request_ids` has an id for each. None
        stands for that of this lease. The arguments `event`, `stream`, `wait_for_evictions` and
        `wait_for_room`, and the errors, are those of `fork`."""
        handle = self._handle
        at = handle.begin_call(deadline)
        number = check_int("count", count, 1, MAX_FORKS)
        names = _fork_names(self.request_id, number, request_ids)
        waits = (
            check_flag("wait_for_evictions", wait_for_evictions),
            check_flag("wait_for_room", wait_for_room),
        )
        handle.check_read()
        if event is not None or stream is not None:
            await self._wait_event(event, stream, self.num_tokens, at)
        forks: list[Self] = []
        step = max(1, FORK_TURN_BLOCKS // max(1, len(self._table)))
        try:
            for start in range(0, number, step):
                part = names[start : start + step]
                numbers = tuple(next(handle.context.lease_numbers) for _ in part)
                message = Fork(handle.id, self.num_tokens, numbers, part, at, *waits)
                made = await self._ask_forks(message, at)
                forks += [
                    self._fork(lease, name, one)
                    for lease, name, one in zip(numbers, part, made.leases, strict=True)
                ]
        except BaseException:
            for lease in forks:
                lease.abandon()
            raise
        return tuple(forks)

    async def _ask_forks(self, message: Fork, at: float) -> ForkResult:
        """Send a message that makes further leases. If it fails or is cancelled none is left."""
        handle = self._handle
        handle.begin_change("fork")
        try:
            made: ForkResult = await handle.ask(message, at, queued=message.wait_for_room)
            return made
        except BaseException as error:
            for lease in message.leases:
                handle.context.abandon(lease)
            if isinstance(error, CANCELLED):
                handle.withdraw()
            raise
        finally:
            handle.changing = ""

    def _fork(self, number: int, request_id: str, made: ForkedLease) -> Self:
        """A lease that the index has made of this one."""
        ready, handle = made.ready, self._handle
        found = AcquireResult(ready.blocks, ready.cached_tokens, made.pending, ready.device_hits)
        lease = type(self)(
            handle.context, number, request_id, made.path, found, handle.loads_end, self._media
        )
        lease._hits = (ready.device_hits, ready.host_hits, ready.storage_hits)
        return lease

    # -- commit

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
        handle = self._handle
        at = handle.context.begin_call(deadline)
        if handle.ended:
            handle.check_ended()
        computed = computed_tokens
        if type(computed) is not int or not 0 <= computed <= handle.context.part_tokens:
            computed = check_int("computed_tokens", computed_tokens)
        if handle.unread:
            handle.check_read(computed)
        if event is not None or stream is not None:
            await self._wait_event(event, stream, computed, at)
        if computed > handle.context.part_tokens:
            return await self._commit_in_parts(computed, at)
        done = handle.begin_ask(Commit(handle.id, computed), at, has_effect=True)
        if isinstance(done, CoroutineType):
            done = await handle.wait_commit(done, computed)
        return int(done.count)

    async def _wait_event(
        self,
        event: Completion | None,
        stream: Stream | None,
        computed: int,
        at: float,
        *,
        ends: bool = False,
    ) -> None:
        """Wait until the device has computed tokens that are going to be committed, by an event or
        by one that is recorded now. ends: until it has completed every pass of the lease, too."""
        handle = self._handle
        if computed > self.num_tokens:
            raise ValueError(
                f"computed_tokens is {computed}, the lease has {self.num_tokens} tokens"
            )
        handle.check_truncate()
        handle.committing.append(computed)
        try:
            await handle.context.wait_device(event, stream, at)
            if ends:
                await handle.context.events.wait_passes(handle.id, at)
        finally:
            handle.committing.remove(computed)
        handle.check_ended()

    async def _commit_in_parts(self, computed: int, at: float) -> int:
        """Commit more tokens than a turn of the index does. Returns the committed blocks."""
        path, handle = self._path, self._handle
        before = path.num_committed
        try:
            if await self._commit_parts(computed, at):
                last = Commit(handle.id, computed)
                return int((await handle.ask(last, at, has_effect=True)).count)
            return path.num_committed  # another request loads the next block
        except CANCELLED:
            if path.num_committed > before:
                handle.give_up()  # some of it has happened
            raise

    async def _commit_parts(self, computed: int, at: float) -> bool:
        """Commit until at most one turn's part is left. False if that stopped at a block that
        another request loads. A call that will be refused commits nothing: it goes as a whole."""
        path, handle = self._path, self._handle
        size, part = path.block_size, handle.context.part_tokens
        if computed > min(self.num_tokens, path.num_blocks * size):
            return True
        handle.check_truncate()
        upto = path.num_committed * size
        handle.committing.append(computed)
        try:
            while upto + part < computed:
                upto += part
                done = await handle.ask(Commit(handle.id, upto), at, has_effect=True)
                if int(done.count) * size < upto:
                    return False
                handle.context.check()
        finally:
            handle.committing.remove(computed)
        return True

    # -- end

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
        message = Finish(self._handle.id, computed, output, hints)
        self.pinned_blocks = (await self._end(message, event, stream, deadline)).pinned

    async def preempt(
        self,
        computed_tokens: int = 0,
        *,
        event: Completion | None = None,
        stream: Stream | None = None,
        deadline: float | None = None,
    ) -> None:
        """End the lease of a request that will be resumed. The next `acquire` with its request_id
        continues it: statistics count the hits of the request once. `event`, `stream` and the
        errors are those of `finish`.

        Args:
            computed_tokens: commit that many tokens first (see `commit`).
        """
        message = Preempt(self._handle.id, check_int("computed_tokens", computed_tokens))
        await self._end(message, event, stream, deadline)

    async def _end(
        self,
        message: Finish | Preempt,
        event: Completion | None,
        stream: Stream | None,
        deadline: float | None,
    ) -> Ack:
        """End the lease with a message, which may commit tokens. The lease stays open only if the
        event fails or the message is refused."""
        handle, context = self._handle, self._handle.context
        at, computed = context.begin_call(deadline), message.computed_tokens or 0
        if handle.ended:
            handle.check_ended()
        if handle.unread:
            handle.check_read(computed)
        events = context.events
        in_pass = events.passes and events.passes_of(handle.id)
        if in_pass or event is not None or stream is not None:
            await self._wait_event(event, stream, computed, at, ends=True)
        try:
            if computed > context.part_tokens:
                await self._commit_parts(computed, at)
            asked = handle.begin_ask(message, at)
            waits = isinstance(asked, CoroutineType)
            reply: Ack = await handle.wait_commit(asked, computed) if waits else asked
        except (ValueError, TypeError, NotReady, LeaseBusy):
            raise
        except BaseException:
            handle.give_up()
            raise
        handle.ended = True
        return reply

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
        handle = self._handle
        handle.context.check_thread()
        if not handle.ended and (event is not None or stream is not None):
            handle.context.record_pass(frozenset((handle.id,)), event, stream)
        handle.give_up()

    async def __aenter__(self) -> Self:
        self._handle.begin_call(None)
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        if self._handle.ended:
            return
        try:
            if error is None:
                await self.finish()
        finally:
            self._handle.give_up()

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle is not None and not handle.ended:
            handle.ended = True
            if handle.context.abandon_unused(handle.id):
                warnings.warn(
                    f"lease of {self.request_id!r} was never finished",
                    ResourceWarning,
                    source=self,
                    stacklevel=1,
                )

    def hashes(self, start: int, stop: int) -> bytes:
        """Hashes of the full blocks from `start` to before `stop`, 32 bytes each."""
        self._handle.context.check_thread()
        last = check_int("stop", stop, 0, self._path.num_full_blocks)
        return self._path.hashes(check_int("start", start, 0, last), last)


def _fork_names(own: str, count: int, request_ids: Sequence[str] | None) -> tuple[str, ...]:
    if request_ids is None:
        return (own,) * count
    if not isinstance(request_ids, list | tuple):
        raise TypeError(f"request_ids must be a list or tuple of str, not {kind(request_ids)}")
    if len(request_ids) != count:
        raise ValueError(f"{len(request_ids)} request_ids for {count} forks")
    for position, name in enumerate(request_ids):
        check_text(f"request_ids[{position}]", name)
    return tuple(request_ids)
