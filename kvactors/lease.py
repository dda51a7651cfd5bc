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
from types import TracebackType
from typing import Any, NamedTuple, Self

from kvactors.actor import Ask
from kvactors.arguments import check_int, extend_path
from kvactors.client import Client
from kvactors.deprecated import renamed
from kvactors.errors import ActorFailed, LeaseBusy, LeaseEnded, NotReady
from kvactors.native import Path
from kvactors.prefix_index.messages import (
    AcquireResult,
    Commit,
    Extend,
    Finish,
    LayerReady,
    Preempt,
    Ready,
    Withdrawn,
)
from kvactors.types import Tokens

AFTER_LOADS = 2.0
"""Seconds past the deadline of a request's loads until which `wait_ready` waits by default. The
index gives loads up `GRACE` seconds after their deadline. They are misses then, not an error."""


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
        hits: blocks that were cached, by tier. Final once `wait_ready` has returned.
        num_tokens: tokens of the request, those of `extend` included.
    """

    def __init__(
        self,
        client: Client,
        lease: int,
        request_id: str,
        path: Path,
        granted: AcquireResult,
        loads_end: float,
    ) -> None:
        self.request_id = request_id
        self._table: Sequence[int] = granted.blocks
        self.cached_tokens = granted.cached_tokens
        self.pending = granted.pending
        self.hits = Hits(granted.device_hits, 0, 0)
        self.num_tokens = path.num_tokens
        self._client = client
        self._id = lease
        self._path = path
        self._loads_end = loads_end
        self._ended = self._extending = False

    @property
    def block_table(self) -> tuple[int, ...]:
        """Device block ids in the order of the tokens. The first access after an `extend` copies
        the table, which takes noticeable time for a very long request."""
        if not isinstance(self._table, tuple):
            self._table = tuple(self._table)
        return self._table

    async def wait_ready(self, *, deadline: float | None = None) -> None:
        """Wait until every load has completed or has become a miss, also of a store that does not
        answer. `block_table` and `cached_tokens` are final then.

        Args:
            deadline: seconds from now. None: wait until the loads, which have the deadline of
                `acquire`, have completed or been given up.

        Raises:
            NoRoom: a failed load left blocks that could not be replaced.
        """
        at = self._loads_deadline(deadline)
        if not self.pending:
            return
        landed = await self._ask(Ready(self._id), at)
        self._table = (
            *landed.blocks,
            *self._table[len(landed.blocks) :],
        )  # an extend may have been answered since
        self.cached_tokens, self.pending = landed.cached_tokens, False
        self.hits = Hits(landed.device_hits, landed.host_hits, landed.storage_hits)

    async def wait_layer(self, layer: int, *, deadline: float | None = None) -> int:
        """Wait until one layer of every load has arrived, so that attention on it can start while
        later layers still load. Layers arrive one by one with `device.layerwise`, else all at once.

        `wait_ready` has the final result: if `cached_tokens` is smaller after it, discard the KV
        computed on top of the missing tokens.

        Args:
            layer: counted from the layout's first, which is 0.
            deadline: as in `wait_ready`.

        Returns:
            Tokens that are cached in this layer.

        Raises:
            NoRoom: as in `wait_ready`.
            ValueError: the layout has no such layer.
        """
        at = self._loads_deadline(deadline)
        number = check_int("layer", layer, 0, self._client.layers - 1)
        if not self.pending:
            return self.cached_tokens
        return int(await self._ask(LayerReady(self._id, number), at))

    ready = renamed("ready", wait_ready)
    layer_ready = renamed("layer_ready", wait_layer)

    async def extend(self, tokens: Tokens, *, deadline: float | None = None) -> tuple[int, ...]:
        """Append tokens to the request and take the device blocks that they need.

        Args:
            tokens: token ids as in `KVCache.acquire`, possibly none. They are copied.
            deadline: seconds from now.

        Returns:
            The device blocks added to the table.

        Raises:
            LeaseBusy: another `extend` of this lease waits. Nothing changed.
            NoRoom: fewer device blocks than needed can be freed. Nothing changed.
        """
        at = self._deadline(deadline)
        added = Path(self._path.block_size, self._path.root)
        extend_path(added, "tokens", tokens)
        if self._extending:
            raise LeaseBusy(
                f"another extend of the lease of {self.request_id!r} has not returned yet"
            )
        self._extending = True
        try:
            granted: AcquireResult = await self._ask(
                Extend(self._id, self.num_tokens, added), at, has_effect=True
            )
        except asyncio.CancelledError:
            if not self._ended:
                self._client.tell(
                    Withdrawn(self._id)
                )  # blocks that it has collected go to the next in the queue
            raise
        finally:
            self._extending = False
        self._check_ended()
        if granted.blocks:
            if not isinstance(self._table, list):
                self._table = list(self._table)
            self._table.extend(granted.blocks)
        self.num_tokens += added.num_tokens
        return tuple(granted.blocks)

    async def commit(self, computed_tokens: int, *, deadline: float | None = None) -> int:
        """Make the full blocks among the first `computed_tokens` tokens shareable.

        Args:
            computed_tokens: tokens whose KV is in device memory. A sampled token has none before
                the next forward pass: after `extend([token])` pass `num_tokens - 1` until then. The
                same or a smaller number than before changes nothing.
            deadline: seconds from now.

        Returns:
            Committed blocks of the lease.

        Raises:
            NotReady: loads are in flight.
        """
        at = self._deadline(deadline)
        computed = check_int("computed_tokens", computed_tokens)
        if computed <= self._client.part_tokens:
            return int((await self._ask(Commit(self._id, computed), at, has_effect=True)).count)
        before = self._path.num_committed
        try:
            if await self._commit_parts(computed, at):
                return int((await self._ask(Commit(self._id, computed), at, has_effect=True)).count)
            return self._path.num_committed  # another request loads the next block
        except asyncio.CancelledError:
            if self._path.num_committed > before:
                self._give_up()  # some of it has happened
            raise

    async def _commit_parts(self, computed: int, at: float) -> bool:
        """Commit until at most one turn's part is left. False if that stopped at a block that
        another request loads. A call that will be refused commits nothing: it goes as a whole."""
        size, part = self._path.block_size, self._client.part_tokens
        upto = self._path.num_committed * size
        while upto + part < computed <= self.num_tokens:
            upto += part
            if (
                int((await self._ask(Commit(self._id, upto), at, has_effect=True)).count) * size
                < upto
            ):
                return False
            self._client.check()
        return True

    async def finish(
        self, computed_tokens: int | None = None, *, deadline: float | None = None
    ) -> None:
        """End the request and release its blocks, also after an error or a cancellation.

        Args:
            computed_tokens: commit that many tokens first (see `commit`). None: only the blocks
                committed before stay cached.
            deadline: seconds from now.

        Raises:
            NotReady: loads are in flight. This, ValueError and TypeError leave the lease open.
        """
        computed = (
            None if computed_tokens is None else check_int("computed_tokens", computed_tokens)
        )
        await self._end(Finish(self._id, computed), computed or 0, self._deadline(deadline))

    async def preempt(self, computed_tokens: int = 0, *, deadline: float | None = None) -> None:
        """End the lease of a request that will be resumed. The next `acquire` with its request_id
        continues it: statistics count the hits of the request once.

        Args:
            computed_tokens: commit that many tokens first (see `commit`).
            deadline: seconds from now.

        Raises:
            NotReady: as in `finish`.
        """
        computed = check_int("computed_tokens", computed_tokens)
        await self._end(Preempt(self._id, computed), computed, self._deadline(deadline))

    def hashes(self, start: int, stop: int) -> bytes:
        """Hashes of the full blocks from `start` to before `stop`, 32 bytes each."""
        self._client.check_thread()
        last = check_int("stop", stop, 0, self._path.num_full_blocks)
        return self._path.hashes(check_int("start", start, 0, last), last)

    keys = renamed("keys", hashes)

    def abandon(self) -> None:
        """Release the blocks, without an answer. Committed ones stay cached. No effect if ended."""
        self._client.check_thread()
        self._give_up()

    # -- inner parts

    def _deadline(self, deadline: float | None) -> float:
        """Check that the lease can be used here and now. Returns the absolute deadline."""
        at = self._client.deadline(deadline)
        if self._ended:
            self._check_ended()
        return at

    def _loads_deadline(self, deadline: float | None) -> float:
        at = self._deadline(deadline)
        return max(at, self._loads_end + AFTER_LOADS) if deadline is None else at

    def _check_ended(self) -> None:
        if self._ended:
            raise LeaseEnded(f"the lease of {self.request_id!r} has ended")

    async def _ask(self, message: Ask[Any], at: float, *, has_effect: bool = False) -> Any:
        """Ask the index. has_effect: the call changes the lease, so the lease ends if the caller
        is cancelled after the change."""
        try:
            return await self._client.index.ask(
                message, deadline=at, lost=self._lost if has_effect else None
            )
        except LeaseEnded as error:
            self._ended = True
            raise LeaseEnded(f"lease of {self.request_id!r}: {error}") from None
        except ActorFailed as error:
            self._client.refine(error)
            raise

    def _lost(self, reply: object) -> None:
        self._give_up()

    async def _end(self, message: Ask[Any], computed: int, at: float) -> None:
        try:
            if computed > self._client.part_tokens:
                await self._commit_parts(computed, at)
            await self._ask(message, at)
        except (ValueError, TypeError, NotReady):
            raise  # the message was refused: the lease stays open
        except BaseException:
            self._give_up()
            raise
        self._ended = True

    def _give_up(self) -> None:
        if not self._ended:
            self._ended = True
            self._client.abandon(self._id)

    async def __aenter__(self) -> Self:
        self._deadline(None)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._ended:
            return
        if error is None:
            await self.finish()
        else:
            self._give_up()

    def __del__(self) -> None:
        if not getattr(self, "_ended", True):
            self._ended = True
            if self._client.abandon_unused(self._id):
                warnings.warn(
                    f"lease of {self.request_id!r} was never finished",
                    ResourceWarning,
                    source=self,
                    stacklevel=1,
                )
