"""PrefixIndex, the part that clears: a new tree at once, and an answer when host tier and store are
empty as well."""

from __future__ import annotations

from typing import Any

from kvactors.actor import ActorRef, Envelope, on
from kvactors.cpu_evictor.messages import ClearHost, HostCleared
from kvactors.errors import StoreError
from kvactors.prefix_index.long_requests import LongRequests
from kvactors.prefix_index.messages import Clear, Done
from kvactors.types import Reason


class Clearing(LongRequests):
    """Owns the clears that wait for the store."""

    def __init__(self, ref: ActorRef, **rest: Any) -> None:
        super().__init__(ref, **rest)
        self.clearing: dict[
            int, tuple[Envelope[Done], int]
        ] = {}  # by operation: the ask, and the device blocks it freed

    @on(Clear)
    def clear(self, message: Clear, envelope: Envelope[Done]) -> None:
        """A new, empty tree; leases in use keep their blocks in the old one until they end. With
        the store, it is answered when that is empty."""
        freed = self.index.retire()
        self.device_cleared(Reason.CLEAR)
        self.clears += 1
        op = next(self.ops)
        self.tell(self.evictor, ClearHost(message.storage, op))
        if message.storage:
            self.clearing[op] = (envelope, freed)
        else:
            self.answer(envelope, Done(freed))
        self.room_changed()

    @on(HostCleared)
    def host_cleared(self, message: HostCleared) -> None:
        """Host tier and store are empty, or the store could not be emptied."""
        envelope, freed = self.clearing.pop(message.op, (None, 0))
        if envelope is None:
            return
        if message.error:
            self.refuse(envelope, StoreError(message.error))
        else:
            self.answer(envelope, Done(freed))

    def clear_again(self) -> None:
        """A new incarnation of the host tier does not have what the one before was asked."""
        for op in self.clearing:
            self.clears += 1
            self.tell(self.evictor, ClearHost(True, op))
