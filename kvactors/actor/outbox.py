"""Messages of an actor that wait for a place in their receivers' channels."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from kvactors.actor.instrument import Turn
from kvactors.actor.message import Envelope
from kvactors.actor.ref import ActorRef


class Outbox:
    """Unsent messages in order. Each counts as in flight until it is sent or dropped.

    Attributes:
        waiting: the messages. The actor takes no turn before this is empty.
    """

    __slots__ = ("_in_flight", "_instruments", "_waiters", "waiting")

    def __init__(self, sender: ActorRef) -> None:
        self.waiting: deque[tuple[ActorRef, Envelope[Any], Turn | None]] = deque()
        self._in_flight = sender.in_flight
        self._instruments = sender.instruments
        self._waiters: list[asyncio.Future[None]] = []

    def add(self, to: ActorRef, envelope: Envelope[Any]) -> None:
        """Keep a message until the channel of `to` has a place."""
        self.waiting.append((to, envelope, self._instruments.turn))
        self._in_flight.begin()

    async def flush(self) -> None:
        """Send every message, waiting for places."""
        waiting = self.waiting
        while waiting:
            to, envelope, turn = waiting[0]
            await to.channel.put(envelope)
            if to.instruments.active:
                to.instruments.notify("sent", to, envelope, turn)
            waiting.popleft()
        self._wake()

    def clear(self) -> None:
        """Drop every message."""
        self._in_flight.end(len(self.waiting))
        self.waiting.clear()
        self._wake()

    async def wait_empty(self) -> None:
        """Return when no message waits for a place."""
        while self.waiting:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
