"""Clears of the host tier and the store."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

from kvactors.actor import Envelope
from kvactors.cpu_evictor.messages import ClearHost, ClearHostSalt
from kvactors.errors import StoreError
from kvactors.prefix_index.actions import Action, Refusal, Reply
from kvactors.prefix_index.messages import Ack

# Clears whose salt is known. With more than these on their way to the host tier, each prompt is
# taken for cleared.
_RECENT = 64


class Clears:
    """Clears that are answered when the store is empty, by operation.

    Attributes:
        sent: clears that the present incarnation of the host tier was sent.
    """

    def __init__(self, ops: Iterator[int]) -> None:
        self.sent = 0
        self._ops = ops
        self._waiting: dict[int, tuple[Envelope[Ack], int]] = {}
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

    def start(self, envelope: Envelope[Ack], freed: int, *, storage: bool) -> list[Action]:
        """Clear the host tier, and the store if `storage`.

        Args:
            envelope: answered when that is done.
            freed: device blocks, for the answer.
            storage: whether the store is emptied.
        """
        self._send(None)
        op = next(self._ops)
        clear = ClearHost(storage, op)
        if storage:
            self._waiting[op] = (envelope, freed)
            return [clear]
        return [clear, Reply(envelope, Ack(freed))]

    def start_salt(self, salt: int) -> Action:
        """Clear the host tier's blocks of a salt."""
        self._send(salt)
        return ClearHostSalt(salt)

    def _send(self, salt: int | None) -> None:
        self.sent += 1
        self._recent.appendleft(salt)

    def finish(self, op: int, error: str) -> list[Action]:
        """The store is empty, or it could not be emptied for the reason `error`."""
        envelope, freed = self._waiting.pop(op, (None, 0))
        if envelope is None:
            return []
        if error:
            return [Refusal(envelope, StoreError(error))]
        return [Reply(envelope, Ack(freed))]

    def host_lost(self) -> None:
        """The host tier has restarted."""
        self.sent = 0

    def again(self) -> list[Action]:
        """Send the clears without an answer to a restarted host tier."""
        for _ in self._waiting:
            self._send(None)
        return [ClearHost(True, op) for op in self._waiting]
