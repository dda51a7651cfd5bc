"""Timers of an actor: control messages to itself in the future."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvactors.actor.message import Control


class Timer:
    """A message of an actor to itself in the future."""

    __slots__ = ("_active", "_handle")

    def __init__(
        self, active: set[Timer], delay: float, send: Callable[[Control], None], message: Control
    ) -> None:
        self._active = active
        self._handle = asyncio.get_running_loop().call_later(delay, self._due, send, message)
        active.add(self)

    def _due(self, send: Callable[[Control], None], message: Control) -> None:
        self._active.discard(self)
        send(message)

    def cancel(self) -> None:
        """Drop the message. No effect if it has been sent."""
        self._active.discard(self)
        self._handle.cancel()
