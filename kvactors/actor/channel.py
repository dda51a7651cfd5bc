"""Channels with one receiver: a bounded data lane, a control lane that overtakes it, and a lane for
the receiver's own work that alternates with the data lane.

An item lies in a lane until the receiver takes it, and stays with its sender until the sender
itself has put it there. So a cancelled `put` has not delivered and a cancelled `get` has not taken:
no item is lost or duplicated, at any point of a cancellation of the sender or the receiver,
natively or by an anyio scope. Handing items to the waiting task directly (as anyio's memory streams
do) cannot promise that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

from kvactors.errors import ChannelClosed

T = TypeVar("T")


class ChannelStatistics(NamedTuple):
    """A moment's picture of a channel.

    Attributes:
        bound: places in the data lane.
        queued: items in it.
        control: items in the control lane, and steps of the receiver's own work.
        senders_waiting: senders parked because the data lane is full.
        peak: most items that the data lane held.
        taken: items taken, both lanes.
    """

    bound: int
    queued: int
    control: int
    senders_waiting: int
    peak: int
    taken: int


class Channel(Generic[T]):
    """Two lanes and one receiver.

    Attributes:
        bound: places in the data lane, at least 1. A sender waits while they are taken.
        idle: whether an item may reach the receiver without a lane: the receiver waits, no sender
            waits for a place or has one that it has not used yet, and nothing was put since, which
            would have ended the wait.
        taken: items that the receiver has taken.
    """

    def __init__(self, name: str, bound: int) -> None:
        if bound < 1:
            raise ValueError(f"channel {name!r} needs a bound of at least 1, not {bound}")
        self.name = name
        self.bound = bound
        self._data: deque[T] = deque()
        self._control: deque[T] = deque()
        self._later: deque[T] = deque()
        self._later_next = True  # whose turn it is, if neither this lane nor the data lane is empty
        self._receiver: asyncio.Future[None] | None = None
        self._senders: deque[asyncio.Future[None]] = deque()
        self._granted = 0  # places promised to senders that were woken but have not run yet
        self._closed: Callable[[], Exception] | None = None
        self._peak = self.taken = 0
        self.idle = False

    # -- sending

    def put_control(self, item: T) -> None:
        """Put into the control lane. Never waits. Raises ChannelClosed if the channel is closed."""
        self._check_open()
        self._control.append(item)
        self.wake()

    def put_later(self, item: T) -> None:
        """Put into the lane that alternates with the data lane. Never waits. ChannelClosed."""
        self._check_open()
        self._later.append(item)
        self.wake()

    def try_put(self, item: T) -> bool:
        """Put into the data lane if it has a place, else return False. ChannelClosed."""
        if self._closed is not None:
            raise self._closed()
        if self._senders or self._granted or len(self._data) >= self.bound:
            return False  # senders that wait, or are woken and have not run, come first
        self._append(item)
        return True

    async def put(self, item: T) -> None:
        """Put into the data lane, waiting while it is full. If cancelled, it was not put."""
        if self.try_put(item):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._senders.append(turn)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._granted -= 1  # the place was promised to us: pass it on
                self._grant()
            elif turn in self._senders:
                self._senders.remove(turn)
            raise
        self._granted -= 1
        self._append(item)

    # -- receiving

    def get_nowait(self) -> T | None:
        """Take the next item, control lane first, or None if all lanes are empty."""
        if self._control:
            self.taken += 1
            return self._control.popleft()
        if self._later and (self._later_next or not self._data):
            self._later_next = False
            self.taken += 1
            return self._later.popleft()
        if not self._data:
            return None
        self._later_next = True
        item = self._data.popleft()
        self.taken += 1
        if self._senders:
            self._grant()
        return item

    async def get(self) -> T:
        """Wait for the next item. ChannelClosed once empty. If cancelled, nothing was taken."""
        while (item := self.get_nowait()) is None:
            await self.wait_for_item()
        return item

    async def wait_for_item(self) -> None:
        """Wait until an item was put or the channel is closed, in the step in which `get_nowait`
        returned None. Only one task may wait. ChannelClosed if it is closed already."""
        if self._closed is not None:
            raise self._closed()
        if self._receiver is not None and not self._receiver.done():
            raise RuntimeError(f"channel {self.name!r} has a receiver already")
        self._receiver = asyncio.get_running_loop().create_future()
        self.idle = not (self._senders or self._granted)
        try:
            await self._receiver
        finally:
            self._receiver, self.idle = None, False

    def wake(self) -> None:
        """End the receiver's wait, also without an item."""
        self.idle = False
        if self._receiver is not None and not self._receiver.done():
            self._receiver.set_result(None)

    # -- ending

    def purge(self) -> Iterator[T]:
        """Take every item out, control lane first, because the receiver failed. Waiting senders get
        the freed places."""
        while (item := self.get_nowait()) is not None:
            yield item

    def close(self, error: Callable[[], Exception] | None = None) -> None:
        """Refuse every item from now on. Waiting senders get ChannelClosed, or the exception that
        `error` makes. Queued items can still be taken."""
        self._closed = refused = error or self._channel_closed
        self.wake()
        senders, self._senders = self._senders, deque()
        for turn in senders:
            if not turn.done():
                turn.set_exception(refused())

    def refuse(self, error: Callable[[], Exception]) -> None:
        """Refuse every item from now on with the exception that `error` makes. Wakes no task: the
        caller may be in another process than the receiver, after a fork."""
        self._closed, self.idle = error, False

    @property
    def backlog(self) -> int:
        """Items in the lanes, and senders that wait for a place."""
        return len(self) + len(self._senders)

    def __len__(self) -> int:
        return len(self._data) + len(self._control) + len(self._later)

    def statistics(self) -> ChannelStatistics:
        return ChannelStatistics(
            self.bound,
            len(self._data),
            len(self._control) + len(self._later),
            len(self._senders),
            self._peak,
            self.taken,
        )

    # -- inner parts

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed()

    def _channel_closed(self) -> Exception:
        return ChannelClosed(f"channel {self.name!r} is closed")

    def _append(self, item: T) -> None:
        self._data.append(item)
        if len(self._data) > self._peak:
            self._peak = len(self._data)
        if self._receiver is not None:
            self.wake()

    def _grant(self) -> None:
        while self._senders and len(self._data) + self._granted < self.bound:
            turn = self._senders.popleft()
            if not turn.done():
                self._granted += 1
                turn.set_result(None)
