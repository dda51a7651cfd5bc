"""Leases: a request's hold on its device blocks, as `KVCache.acquire` returns it, and its hits.

A cancelled call of a lease either did not happen or has ended the lease. A `deadline` is in seconds
from now, None for `cache.default_deadline_s`. Beside the errors that it lists, every method raises
LeaseEnded once the lease has ended, DeadlineExceeded, ActorFailed, WrongLoop outside the event loop
of its cache, CacheClosed once the cache is closed, and ValueError or TypeError for bad arguments
(then nothing changed).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import CoroutineType
from typing import NamedTuple, Self

from kvactors import forking, growth, lease_loads
from kvactors.arguments import Media, added_media, check_int, extend_path
from kvactors.client import Client
from kvactors.device_events import Completion, Stream
from kvactors.hints import Hints, check_hints
from kvactors.lease_hold import LeaseHold
from kvactors.native import Path
from kvactors.prefix_index.messages import (
    AcquireResult,
    Commit,
    Extend,
    Finish,
    Preempt,
)
from kvactors.types import Tokens


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

    wait_ready = lease_loads.wait_ready
    wait_layer = lease_loads.wait_layer

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
        return await self._extend(added, extras, media, at)

    covered_tokens = property(growth.covered_tokens)
    next_chunk = growth.next_chunk
    reserve = growth.reserve
    truncate = growth.truncate
    fork = forking.fork
    fork_many = forking.fork_many

    async def _extend(
        self,
        added: Path,
        extras: tuple[tuple[int, bytes], ...],
        media: tuple[tuple[int, int], ...],
        at: float,
    ) -> tuple[int, ...]:
        message = Extend(self._hold.id, self.num_tokens, added, extras)
        granted: AcquireResult = await self._hold.grow("extend", message, at)
        return self._appended(added, media, granted.blocks)

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
            message, direct = Commit(hold.id, computed), hold.client.index.direct
            done = None
            if direct is not None:
                done = direct.answer(message)
                if done is None and direct.is_spent:
                    done = await hold.wait_commit(direct.answer_later(message), computed)
            if done is None:
                done = hold.begin_ask(message, at, has_effect=True, queued=True)
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
