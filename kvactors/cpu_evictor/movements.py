"""Movements through host memory that wait for slots: who gets the next ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

from kvactors.cpu_evictor.actions import Action
from kvactors.cpu_evictor.slots import HostBlock, HostTier

WINDOW = 64
"""Blocks that a movement takes in its turn, at most: one read, copy or write. Several windows of a
movement can be in flight."""

URGENT_TURNS = 4
"""Of so many turns one is for the movements that no request waits for."""


class Movement(Protocol):
    """A job that needs slots, and goes on with those that are free.

    Attributes:
        URGENT: whether a request waits for it.
    """

    URGENT: ClassVar[bool]

    @property
    def op(self) -> int:
        """Number in its `SlotDeadline`, 0 for a movement without one."""

    @property
    def lacking(self) -> int:
        """Blocks that still need a slot."""

    def take(self, most: int) -> list[Action]:
        """Take up to `most` slots, as far as there are free ones, and fill them."""

    def give_up(self) -> list[Action]:
        """No slot will come: end without the blocks that lack one."""


class Movements:
    """Shares slots among movements. Each takes a window in its turn, and waits for its next turn at
    the end of its queue, so a long one does not stop short ones. Those that requests wait for come
    first, in most turns.

    Movements wait only while slots are to come back (`HostMemory.slots_come_back`). Otherwise the
    tier evicts for them, and loads without device blocks let go of slots. If none is found, they
    end.

    Attributes:
        behind: a movement has waited in vain for slots that the store's writes hold. Until half of
            the slots that are not for residents are free, movements to the store do not wait.
    """

    def __init__(
        self,
        host: HostTier,
        *,
        evict: Callable[[Sequence[HostBlock]], list[Action]],
        slots_come_back: Callable[[], bool],
        let_go: Callable[[], list[Action]],
    ) -> None:
        """
        Args:
            host: the slots.
            evict: evicts blocks.
            slots_come_back: whether an event is to come that returns slots.
            let_go: takes back slots that were taken ahead of their use.
        """
        self.behind = False
        self._evict = evict
        self._slots_come_back = slots_come_back
        self._let_go = let_go
        self._host = host
        self._urgent: deque[Movement] = deque()
        self._others: deque[Movement] = deque()
        self._turns = 0

    def __len__(self) -> int:
        return len(self._urgent) + len(self._others)

    def enter(self, movement: Movement) -> list[Action]:
        """A movement takes the slots that are free, and waits for more."""
        self._queue_of(movement).append(movement)
        return self.serve()

    def leave(self, movement: Movement) -> None:
        """A movement needs no more slots."""
        queue = self._queue_of(movement)
        if movement in queue:
            queue.remove(movement)

    def overdue(self, op: int) -> list[Action]:
        """A movement to the store has waited long enough for slots."""
        for movement in (*self._urgent, *self._others):
            if movement.op == op:
                self.behind = True
                self.leave(movement)
                return movement.give_up()
        return []

    def serve(self) -> list[Action]:
        """Hand out free slots. Called at the end of each turn."""
        actions = self._hand_out()
        if len(self) and not self._slots_come_back():
            actions += self._evict(self._host.victims(WINDOW))
            actions += self._hand_out()
        if len(self) and not self._slots_come_back():
            actions += self._let_go()
            actions += self._hand_out()
        if len(self) and not self._slots_come_back():
            for movement in (*self._urgent, *self._others):
                self.leave(movement)
                actions += movement.give_up()
        return actions

    def _hand_out(self) -> list[Action]:
        actions: list[Action] = []
        failed = 0  # turns since slots were taken
        while len(self) > failed:
            others_turn = not self._urgent or not (self._turns + 1) % URGENT_TURNS
            queue = self._others if self._others and others_turn else self._urgent
            movement = queue[0]
            before = movement.lacking
            actions += movement.take(WINDOW)
            if movement.lacking < before:
                failed = 0
                self._turns += 1
            elif not self._host.free:
                return actions  # the turn stays with this one
            else:
                failed += 1  # it waits for blocks that another movement brings
                self._turns += 1
            if queue and queue[0] is movement:
                queue.popleft()
                if movement.lacking:
                    queue.append(movement)
        return actions

    def _queue_of(self, movement: Movement) -> deque[Movement]:
        return self._urgent if movement.URGENT else self._others
