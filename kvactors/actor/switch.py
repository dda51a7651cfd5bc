"""Optional actors: switched off when they fail too often, and on again some time later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from kvactors.actor.actor import Actor
from kvactors.actor.clock import now
from kvactors.actor.failures import brief
from kvactors.actor.groups import ActorSpec, Group, RestartBudget
from kvactors.actor.log import get_logger
from kvactors.actor.message import Stop
from kvactors.actor.ref import ActorRef

log = get_logger()

SWITCHED_OFF, SWITCHED_OFF_MOST = 30.0, 600.0
"""Seconds an optional actor stays switched off at first, and at most. Doubled each time it fails
again soon."""


class SwitchedOff(NamedTuple):
    """An optional actor that failed more often than its budget allows. Times of the loop's
    clock."""

    name: str
    cause: str
    since: float
    again_at: float


class Switch:
    """Whether the optional actor of a group runs, or its substitute. Does nothing for any other
    group.

    Args:
        group: the group.
        switched_off: of the system, by name. The switch adds and removes its actor.
        is_stopping: whether the system stops.
    """

    def __init__(
        self,
        group: Group,
        switched_off: dict[str, SwitchedOff],
        is_stopping: Callable[[], bool],
    ) -> None:
        first = group.members[0]
        optional = (
            len(group.members) == 1
            and isinstance(first, ActorSpec)
            and first.substitute is not None
        )
        self._spec = first if optional and isinstance(first, ActorSpec) else None
        self._switched_off = switched_off
        self._is_stopping = is_stopping
        self._delay = SWITCHED_OFF
        self._on_since: float | None = None  # on trial after it was switched off
        self._timer: asyncio.TimerHandle | None = None

    @property
    def _record(self) -> SwitchedOff | None:
        return None if self._spec is None else self._switched_off.get(self._spec.ref.name)

    def factory(self, spec: ActorSpec) -> Callable[[ActorRef], Actor]:
        """The factory of the next incarnation. For a substitute, also starts the timer that ends
        it."""
        record = self._record
        spec.ref.switched_off = record is not None
        if record is None or spec.substitute is None:
            return spec.factory
        self._timer = asyncio.get_running_loop().call_at(record.again_at, self._end_substitute)
        return spec.substitute

    def _end_substitute(self) -> None:
        if self._spec is not None and not self._is_stopping():
            self._spec.ref.try_tell(Stop())

    def stop_timer(self) -> None:
        """The substitute has ended, if one ran."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def relapse(self, budget: RestartBudget) -> bool:
        """Whether it failed soon after it was switched on again: it is switched off at once, for
        longer."""
        if self._record is not None or self._on_since is None:
            return False
        again = now() - self._on_since < budget.within
        self._delay = min(SWITCHED_OFF_MOST, 2 * self._delay) if again else SWITCHED_OFF
        self._on_since = None
        return again

    def off(self, cause: BaseException) -> bool:
        """Switch off; False if that cannot be done, or the substitute itself has failed."""
        if self._spec is None or self._record is not None:
            return False
        name = self._spec.ref.name
        self._switched_off[name] = SwitchedOff(name, brief(cause), now(), now() + self._delay)
        log.error("actor switched off", actor=name, error=brief(cause), again_in=self._delay)
        return True

    def due(self) -> bool:
        """Whether the time of the substitute is over."""
        record = self._record
        return record is not None and now() >= record.again_at

    def on(self) -> None:
        """Let the actor itself run again."""
        if self._spec is not None:
            del self._switched_off[self._spec.ref.name]
            self._on_since = now()
            log.warning("actor switched on again", actor=self._spec.ref.name)
