"""Carries out the actions that the objects of PrefixIndex return."""

from __future__ import annotations

from kvactors.actor import ActorRef, Context
from kvactors.actor.clock import now
from kvactors.cpu_evictor.messages import (
    Cancel,
    ClearHost,
    DropHostCopies,
    EvictFirst,
    HostRequest,
    KeepHostCopies,
    Load,
    Offload,
    PinHostBlocks,
    PrefetchToHost,
    Save,
    SetHostQuota,
    SetTargets,
    UnpinHostBlocks,
)
from kvactors.flush_notifier.messages import (
    BlocksAdded,
    BlocksRemoved,
    NamespaceChanged,
    PathCached,
    Report,
    TierCleared,
)
from kvactors.gpu_swapper.messages import CopyWithin
from kvactors.prefix_index.actions import Action, Refusal, Reply, StartTimer
from kvactors.prefix_index.at_once import AtOnce
from kvactors.prefix_index.messages import Continue, Proceed, Sweep

TO_EVICTOR = (
    Offload,
    Load,
    SetTargets,
    Cancel,
    Save,
    DropHostCopies,
    KeepHostCopies,
    ClearHost,
    EvictFirst,
    PinHostBlocks,
    UnpinHostBlocks,
    SetHostQuota,
    PrefetchToHost,
)
TO_NOTIFIER = (PathCached, BlocksAdded, BlocksRemoved, TierCleared, NamespaceChanged)
TO_ITSELF = (Continue, Proceed, Sweep)
SENDS = {
    "cpu_evictor": TO_EVICTOR,
    "gpu_swapper": (CopyWithin,),
    "flush_notifier": TO_NOTIFIER,
}


class ActionRunner:
    """Sends, answers and starts timers.

    Attributes:
        works: works in parts that have parts left.
    """

    def __init__(
        self,
        context: Context,
        evictor: ActorRef[HostRequest],
        swapper: ActorRef[CopyWithin],
        notifier: ActorRef[Report],
        at_once: AtOnce,
    ) -> None:
        self.works = 0
        self._at_once = at_once
        self._context = context
        self._answer, self._tell = context.answer, context.tell
        self._evictor = evictor
        self._swapper = swapper
        self._notifier = notifier

    def perform(self, actions: list[Action]) -> None:
        """Carry out the actions of a turn in order."""
        self._at_once.calm = False  # the turn may have changed it
        for action in actions:
            if type(action) is Reply:
                self._answer(action.envelope, action.value)
            elif isinstance(action, TO_NOTIFIER):
                self._tell(self._notifier, action)
            elif isinstance(action, TO_EVICTOR):
                self._tell(self._evictor, action)
            elif isinstance(action, Refusal):
                self._context.refuse(action.envelope, action.error)
            elif isinstance(action, StartTimer):
                self._start(action)
            elif isinstance(action, CopyWithin):
                self._tell(self._swapper, action)
            elif isinstance(action, TO_ITSELF):
                self.works += isinstance(action, Continue)
                self._context.to_self(action)
            else:
                raise TypeError(f"no receiver for {type(action).__name__}")

    def _start(self, timer: StartTimer) -> None:
        if not timer.operation.over:
            delay = max(0.0, timer.deadline - now()) + timer.grace
            timer.operation.timer = self._context.after(delay, timer.message)
