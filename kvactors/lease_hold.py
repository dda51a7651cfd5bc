"""A lease as its caller's side holds it: deadlines, asks, and the end of the lease."""

from __future__ import annotations

from collections.abc import Awaitable
from types import CoroutineType
from typing import Any

import msgspec

from kvactors.actor import Ask
from kvactors.actor.uncancelled import CANCELLED
from kvactors.client import Client
from kvactors.device_events import Completion, Stream
from kvactors.errors import ActorFailed, LeaseBusy, LeaseEnded, NotReady
from kvactors.native import Path
from kvactors.prefix_index.messages import (
    Ack,
    AcquireResult,
    Commit,
    Extend,
    Finish,
    Fork,
    ForkResult,
    Preempt,
    Reserve,
    Truncate,
    Withdrawn,
)

AFTER_LOADS = 2.0
"""Seconds past the deadline of a request's loads until which `wait_ready` waits by default. The
index gives loads up `GRACE` seconds after their deadline. They are misses then, not an error."""


class LeaseHold(msgspec.Struct, eq=False):
    """The number of a lease at the index, and whether the lease can still be used.

    Attributes:
        client: of the lease's cache.
        id: the lease's number.
        request_id: for messages.
        loads_end: the deadline of the loads.
        ended: whether the lease has ended for its caller.
        changing: the call in progress that changes the block table, "" if there is none.
        committing: tokens of the commits in progress that take several steps, or wait for a pass
            of the loop. They must stay until the commits are answered.
        unread: whether the caller, or a stream, works with loads whose result it has not read.
    """

    client: Client
    id: int
    request_id: str
    loads_end: float
    ended: bool = False
    changing: str = ""
    committing: list[int] = []
    unread: bool = False

    def deadline(self, deadline: float | None) -> float:
        """Check that the lease can be used here and now. Returns the absolute deadline."""
        at = self.client.deadline(deadline)
        if self.ended:
            self.check_ended()
        return at

    def after_loads(self, at: float) -> float:
        """The default deadline of a wait for loads: `at` or later, when each of them has completed
        or was given up."""
        return max(at, self.loads_end + AFTER_LOADS)

    def check_ended(self) -> None:
        """LeaseEnded once the lease has ended."""
        if self.ended:
            raise LeaseEnded(f"the lease of {self.request_id!r} has ended")

    def begin_change(self, call: str) -> None:
        """A call is going to change the block table. LeaseBusy if another one is."""
        self.check_change()
        self.changing = call

    def check_change(self) -> None:
        """LeaseBusy while a call changes the block table."""
        if self.changing:
            raise LeaseBusy(
                f"another {self.changing} of the lease of {self.request_id!r} has not returned yet"
            )

    async def ask(self, message: Ask[Any], at: float, *, has_effect: bool = False) -> Any:
        """Ask the index, in the same step as the call of `deadline`. has_effect: the call changes
        the lease, so the lease ends if the caller is cancelled after the change."""
        asked = self.begin_ask(message, at, has_effect=has_effect)
        return await asked if isinstance(asked, CoroutineType) else asked

    def begin_ask(self, message: Ask[Any], at: float, *, has_effect: bool = False) -> Any:
        """`ask` up to its first wait: the answer, or a coroutine to be awaited in the same step."""
        lost = self._lost if has_effect else None
        try:
            asked = self.client.index.entrance.begin_ask(message, at, lost)
        except LeaseEnded as error:
            raise self._ended_by(error) from None
        return self._answer(asked) if isinstance(asked, CoroutineType) else asked

    async def _answer(self, asked: CoroutineType[Any, Any, Any]) -> Any:
        try:
            return await asked
        except LeaseEnded as error:
            raise self._ended_by(error) from None
        except ActorFailed as error:
            self.client.refine(error)
            raise

    def _ended_by(self, error: LeaseEnded) -> LeaseEnded:
        """The index has no such lease any more: the error for the caller."""
        self.ended = True
        return LeaseEnded(f"lease of {self.request_id!r}: {error}")

    async def grow(self, call: str, message: Extend | Reserve, at: float) -> AcquireResult:
        """Send a message that adds blocks to the end of the table, while no other call does."""
        self.begin_change(call)
        try:
            return await self.take(message, at)
        finally:
            self.changing = ""

    async def take(self, message: Extend | Reserve, at: float) -> AcquireResult:
        """Send a message of a change that has begun."""
        try:
            asked = self.begin_ask(message, at, has_effect=True)
            granted: AcquireResult = await asked if isinstance(asked, CoroutineType) else asked
        except CANCELLED:
            if not self.ended:
                self.client.tell(
                    Withdrawn(self.id)
                )  # blocks that it has collected go to the next in the queue
            raise
        self.check_ended()
        return granted

    async def fork(self, message: Fork, at: float) -> ForkResult:
        """Send a message that makes further leases. If it fails or is cancelled none is left."""
        self.begin_change("fork")
        try:
            index = self.client.index
            return await index.ask(message, deadline=at, queued=message.wait_for_room)
        except BaseException as error:
            for lease in message.leases:
                self.client.abandon(lease)
            if isinstance(error, LeaseEnded):
                self.ended = True
                raise LeaseEnded(f"lease of {self.request_id!r}: {error}") from None
            if isinstance(error, ActorFailed):
                self.client.refine(error)
            elif isinstance(error, CANCELLED) and not self.ended:
                self.client.tell(Withdrawn(self.id))  # as in `grow`
            raise
        finally:
            self.changing = ""

    async def truncate(self, message: Truncate, at: float, *, drops_blocks: bool) -> int:
        """Send a message that removes tokens, and the blocks that only they need, which no pass may
        use any more. Returns the blocks left."""
        if any(message.num_tokens < computed for computed in self.committing):
            raise LeaseBusy(f"a commit of the lease of {self.request_id!r} has not returned yet")
        self.begin_change("truncate")
        try:
            if drops_blocks and self.client.events.passes:
                await self.client.events.wait_passes(self.id, at)
                self.check_ended()
            left = int((await self.ask(message, at, has_effect=True)).count)
        finally:
            self.changing = ""
        self.check_ended()
        return left

    def check_read(self, computed: int = 1) -> None:
        """NotReady if computed tokens may be on top of a load that has failed since."""
        if computed and self.unread:
            raise NotReady(
                f"loads of the lease of {self.request_id!r} may have failed after the wait for a "
                "stream or a layer: await wait_ready() first"
            )

    async def wait_event(
        self,
        event: Completion | None,
        stream: Stream | None,
        computed: int,
        num_tokens: int,
        at: float,
        *,
        ends: bool = False,
    ) -> None:
        """Wait until the device has computed tokens that are going to be committed, by an event or
        by one that is recorded now. ends: until it has completed every pass of the lease, too."""
        if computed > num_tokens:
            raise ValueError(f"computed_tokens is {computed}, the lease has {num_tokens} tokens")
        if self.changing == "truncate":
            raise LeaseBusy(f"a truncate of the lease of {self.request_id!r} has not returned yet")
        self.committing.append(computed)
        try:
            await self.client.wait_device(event, stream, at)
            if ends:
                await self.client.events.wait_passes(self.id, at)
        finally:
            self.committing.remove(computed)
        self.check_ended()

    async def wait_commit(self, asked: Awaitable[Any], computed: int) -> Any:
        """Wait for the answer of a commit. Until then its tokens must stay: a truncate and an
        extend could overtake it, and it would make blocks shareable that are not computed."""
        self.committing.append(computed)
        try:
            return await asked
        finally:
            self.committing.remove(computed)

    async def commit_in_parts(self, path: Path, computed: int, num_tokens: int, at: float) -> int:
        """Commit more tokens than a turn of the index does. Returns the committed blocks."""
        before = path.num_committed
        try:
            if await self._commit_parts(path, computed, num_tokens, at):
                last = Commit(self.id, computed)
                return int((await self.ask(last, at, has_effect=True)).count)
            return path.num_committed  # another request loads the next block
        except CANCELLED:
            if path.num_committed > before:
                self.give_up()  # some of it has happened
            raise

    async def _commit_parts(self, path: Path, computed: int, num_tokens: int, at: float) -> bool:
        """Commit until at most one turn's part is left. False if that stopped at a block that
        another request loads. A call that will be refused commits nothing: it goes as a whole."""
        if computed > min(num_tokens, path.num_blocks * path.block_size):
            return True
        if self.changing == "truncate":
            raise LeaseBusy(f"a truncate of the lease of {self.request_id!r} has not returned yet")
        size, part = path.block_size, self.client.part_tokens
        upto = path.num_committed * size
        self.committing.append(computed)
        try:
            while upto + part < computed:
                upto += part
                done = await self.ask(Commit(self.id, upto), at, has_effect=True)
                if int(done.count) * size < upto:
                    return False
                self.client.check()
        finally:
            self.committing.remove(computed)
        return True

    async def end(
        self,
        message: Finish | Preempt,
        path: Path,
        num_tokens: int,
        event: Completion | None,
        stream: Stream | None,
        deadline: float | None,
    ) -> Ack:
        """End the lease with a message, which may commit tokens. The lease stays open only if the
        event fails or the message is refused."""
        at, computed = self.client.deadline(deadline), message.computed_tokens or 0
        if self.ended:
            self.check_ended()
        if self.unread:
            self.check_read(computed)
        events = self.client.events
        in_pass = events.passes and events.passes_of(self.id)
        if in_pass or event is not None or stream is not None:
            await self.wait_event(event, stream, computed, num_tokens, at, ends=True)
        try:
            if computed > self.client.part_tokens:
                await self._commit_parts(path, computed, num_tokens, at)
            asked = self.begin_ask(message, at)
            waits = isinstance(asked, CoroutineType)
            reply: Ack = await self.wait_commit(asked, computed) if waits else asked
        except (ValueError, TypeError, NotReady, LeaseBusy):
            raise
        except BaseException:
            self.give_up()
            raise
        self.ended = True
        return reply

    def give_up(self) -> None:
        """End the lease without waiting for an answer."""
        if not self.ended:
            self.ended = True
            self.client.abandon(self.id)

    def _lost(self, reply: object) -> None:
        self.give_up()
