"""The host tier before a sleep: its blocks are evicted, a part a turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvactors.actor import Envelope
from kvactors.cpu_evictor.actions import Action
from kvactors.cpu_evictor.memory import HostMemory
from kvactors.cpu_evictor.messages import EmptyHost


class Emptying:
    """Evicts for `EmptyHost`, and answers it once no request is in flight.

    Args:
        memory: of the host tier.
        answer: answers a request.

    Attributes:
        envelope: of the request that waits, None without one.
    """

    def __init__(self, memory: HostMemory, answer: Callable[[Envelope[Any], Any], object]) -> None:
        self.envelope: Envelope[int] | None = None
        self._memory = memory
        self._answer = answer

    def begin(self, message: EmptyHost, envelope: Envelope[int]) -> list[Action]:
        """Evict the next blocks, written back if that is the policy."""
        host, self.envelope = self._memory.host, envelope
        if message.count:
            return self._memory.evict(host.victims(message.count))
        return self._memory.remove([b for b in reversed(host.blocks.values()) if not b.pins])

    def answer(self) -> None:
        """Answer the request that waits, if nothing is in flight."""
        if self.envelope is not None and self._memory.requests.idle:
            envelope, self.envelope = self.envelope, None
            self._answer(envelope, len(self._memory.host.blocks))
