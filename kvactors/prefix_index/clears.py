"""Clears of the host tier and the store."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from kvactors.actor import Envelope
from kvactors.cpu_evictor.messages import ClearHost, HostCleared
from kvactors.errors import StoreError
from kvactors.prefix_index.actions import Action, Refusal, Reply
from kvactors.prefix_index.messages import Ack

# Clears whose salt is known. With more than these on their way to the host tier, each prompt is
# taken for cleared.
_RECENT = 64


@dataclass(slots=True)
class StoreClear:
    """A clear that includes the store.

    Attributes:
        message: to the host tier.
        envelope: answered when both parts are done.
        freed: device blocks, None until the device is done.
        cleared: the answer of the host tier and the store, None until it comes.
    """

    message: ClearHost
    envelope: Envelope[Ack]
    freed: int | None = None
    cleared: HostCleared | None = None


class Clears:
    """Clears of the host tier and the store, by operation.

    Attributes:
        sent: clears that the present incarnation of the host tier was sent.
    """

    def __init__(self, ops: Iterator[int]) -> None:
        self.sent = 0
        self._ops = ops
        self._waiting: dict[int, StoreClear] = {}
        self._recent: deque[int | None] = deque(maxlen=_RECENT)  # salts, None for all, newest first

    def reaches(self, salt: int, handled: int) -> bool:
        """Whether a clear of this salt's blocks, or of all, is on its way to the host tier.

        Args:
            salt: number of the salt.
            handled: clears that the host tier has handled.
        """
        pending = self.sent - handled
        newest = islice(self._recent, max(0, pending))
        return pending > _RECENT or any(one is None or one == salt for one in newest)

    def start(self, envelope: Envelope[Ack], salt: int | None, *, storage: bool) -> ClearHost:
        """Clear the host tier, and the store if `storage`.

        Args:
            envelope: of the clear.
            salt: whose blocks are cleared, None for all.
            storage: whether the store is cleared.
        """
        message = ClearHost(storage, next(self._ops), salt)
        if storage:
            self._waiting[message.op] = StoreClear(message, envelope)
        return self._send(message)

    def _send(self, message: ClearHost) -> ClearHost:
        self.sent += 1
        self._recent.appendleft(message.salt)
        return message

    def device_cleared(self, op: int, envelope: Envelope[Ack], freed: int) -> list[Action]:
        """The device part of a clear is done. freed: device blocks, for the answer."""
        waiting = self._waiting.get(op)
        if waiting is None:
            return [Reply(envelope, Ack(freed))]
        waiting.freed = freed
        return self._answer(waiting)

    def finish(self, message: HostCleared) -> list[Action]:
        """The store is cleared, or it could not be."""
        waiting = self._waiting.get(message.op)
        if waiting is None:
            return []
        waiting.cleared = message
        return self._answer(waiting)

    def _answer(self, waiting: StoreClear) -> list[Action]:
        freed, cleared = waiting.freed, waiting.cleared
        if freed is None or cleared is None:
            return []
        del self._waiting[cleared.op]
        if cleared.error:
            return [Refusal(waiting.envelope, StoreError(cleared.error))]
        return [Reply(waiting.envelope, Ack(freed, unknown=cleared.unknown))]

    def host_lost(self) -> None:
        """The host tier has restarted."""
        self.sent = 0

    def again(self) -> list[Action]:
        """Send the clears without an answer to a restarted host tier."""
        unanswered = [one.message for one in self._waiting.values() if one.cleared is None]
        return [self._send(message) for message in unanswered]
