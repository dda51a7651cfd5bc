"""Clears of the host tier and the store."""

from __future__ import annotations

from collections.abc import Iterator

from kvactors.actor import Envelope
from kvactors.cpu_evictor.messages import ClearHost, ClearHostSalt
from kvactors.errors import StoreError
from kvactors.prefix_index.actions import Action, Refusal, Reply
from kvactors.prefix_index.messages import Ack


class Clears:
    """Clears that are answered when the store is empty, by operation.

    Attributes:
        sent: clears that the present incarnation of the host tier was sent.
    """

    def __init__(self, ops: Iterator[int]) -> None:
        self.sent = 0
        self._ops = ops
        self._waiting: dict[int, tuple[Envelope[Ack], int]] = {}

    def start(self, envelope: Envelope[Ack], freed: int, *, storage: bool) -> list[Action]:
        """Clear the host tier, and the store if `storage`.

        Args:
            envelope: answered when that is done.
            freed: device blocks, for the answer.
            storage: whether the store is emptied.
        """
        self.sent += 1
        op = next(self._ops)
        clear = ClearHost(storage, op)
        if storage:
            self._waiting[op] = (envelope, freed)
            return [clear]
        return [clear, Reply(envelope, Ack(freed))]

    def start_salt(self, salt: int) -> Action:
        """Clear the host tier's blocks of a salt."""
        self.sent += 1
        return ClearHostSalt(salt)

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
        self.sent += len(self._waiting)
        return [ClearHost(True, op) for op in self._waiting]
