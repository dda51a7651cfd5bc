"""The recorder of a run: every turn and every message goes into a digest, and actors fail here
according to the plan."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import Any, NoReturn

import xxhash

from kvactors.actor import (
    Actor,
    ActorRef,
    Envelope,
    Group,
    InjectedFailure,
    Instrument,
    Message,
    Turn,
)
from kvactors.cpu_evictor.actor import CpuEvictor
from kvactors.cpu_evictor.messages import Cancel, Load, Loaded, LoadStalled, SetTargets
from kvactors.cpu_evictor.slots import HostBlock, SlotState
from kvactors.data_plane.ranks.leader import Rank, RankState
from kvactors.flush_notifier.actor import FlushNotifier
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.settings import Config
from kvactors.storage.backend import Backend
from kvactors.system import System
from kvactors.testing.faults import Fault
from kvactors.types import count_hashes

AboutLoad = Cancel | SetTargets | LoadStalled
ABOUT = {Cancel: "cancelled", SetTargets: "placed", LoadStalled: "stalled"}

EPOCH = 1
"""In place of the wall clock's."""


class PlannedFailure(InjectedFailure):
    """An actor fails according to the plan."""


class Recorder(Instrument):
    """crashes: of the plan, by actor. failures: how many happened. seen: see `SeedReport`. keep:
    lines of the trace that are kept. step: of a ledger, the notifier's own if None."""

    def __init__(self, crashes: list[Fault], keep: int = 200, step: int | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.seen: Counter[str] = Counter()
        self.lines: deque[str] = deque(maxlen=keep)
        self.digest = xxhash.xxh3_128()
        self.turns: Counter[str] = Counter()
        self.failures = 0
        self._step = step
        self._wanted: dict[int, int] = {}  # blocks, by the load's number
        self._armed: dict[str, str] = {}  # actors that fail at their next message of a type
        self._after: dict[str, str] = {}  # actors that fail at the end of their turn
        self._crashes = {(fault.target, int(fault.at)): fault for fault in crashes}

    def note(self, line: str) -> None:
        """Put a line into the trace."""
        stamped = f"{self.loop.time():.6f} {line}"
        self.lines.append(stamped)
        self.digest.update(stamped.encode())

    def disarm(self) -> None:
        """End all planned crashes."""
        self._crashes.clear()

    # -- see `Instrument`

    def started(self, actor: Actor) -> None:
        """An incarnation begins. The planned crash was for the one before it."""
        self._armed.pop(actor.ref.name, None)
        self._after.pop(actor.ref.name, None)
        if isinstance(actor, CpuEvictor):
            self._watch_places(actor)
        if isinstance(actor, FlushNotifier) and self._step is not None:
            actor.step = self._step

    def sent(self, receiver: ActorRef, envelope: Envelope[Any], turn: Turn | None) -> None:
        """A message is sent. Messages from one actor to another are counted."""
        if turn is not None and turn.actor is not receiver:
            message = envelope.message
            self.seen[f"message {turn.actor.role} {receiver.role} {type(message).__name__}"] += 1
            self._see_load(message)

    def taken(self, receiver: ActorRef, envelope: Envelope[Any]) -> None:
        """A turn begins, unless the plan lets the actor fail before it."""
        name, kind = receiver.name, type(envelope.message).__name__
        self.turns[name] += 1
        self.note(f"{name} takes {kind}")
        fault = self._crashes.pop((name, self.turns[name]), None)
        if fault is not None and fault.amount % 2 == 0:
            self._after[name] = kind
        elif fault is not None:
            self._armed[name] = kind
        skipped = envelope.incarnation != receiver.incarnation or envelope.abandoned
        if self._armed.get(name) == kind and not skipped:
            self._die(receiver, f"before {kind}")

    def finished(self, receiver: ActorRef, envelope: Envelope[Any]) -> None:
        """A turn ends. The actor fails now if the plan requires it."""
        if (kind := self._after.pop(receiver.name, None)) is not None:
            self._die(receiver, f"after {kind}")

    def _die(self, actor: ActorRef, when: str) -> NoReturn:
        self.failures += 1
        self.seen[f"crash {actor.role} {when}"] += 1
        raise PlannedFailure(f"{actor.name} fails at turn {self.turns[actor.name]}, {when}")

    def _see_load(self, message: Message) -> None:
        if isinstance(message, Load):
            self._wanted[message.op] = count_hashes(message.hashes) - message.start
            self.seen["load unplaced"] += not message.blocks
        elif isinstance(message, Loaded):
            wanted = self._wanted.pop(message.op, 0)
            self.seen[
                "load whole"
                if message.num_loaded == wanted
                else "load part"
                if message.num_loaded
                else "load none"
            ] += 1
        elif isinstance(message, AboutLoad):
            self.seen[f"load {ABOUT[type(message)]}"] += 1

    def _watch_places(self, evictor: CpuEvictor) -> None:
        host: Any = evictor.host
        whole_move, whole_drop = host.move, host.drop

        def move(block: HostBlock, state: SlotState) -> None:
            self.seen[f"place {block.state.value} to {state.value}"] += 1
            whole_move(block, state)

        def drop(block: HostBlock) -> None:
            if not block.dropped:
                after = "ghost" if block.pins else "free"
                self.seen[f"place {block.state.value} to {after}"] += 1
            whole_drop(block)

        host.move, host.drop = move, drop


class SimSystem(System):
    """A system whose actors a recorder watches, from their first turn on, in every
    incarnation."""

    def __init__(
        self, config: Config, sinks: list[Sink], backend: Backend | None, recorder: Recorder
    ) -> None:
        super().__init__(config, None, sinks, backend, inline_copies=True)
        self.recorder = recorder
        self.supervisor.instruments.add(recorder)
        self.epoch = EPOCH
        if self.ranks is not None:
            self._watch_health()

    def groups(self) -> tuple[Group, Group]:
        """Without substitutes: here an actor that fails too often fails the system."""
        core, notifier = super().groups()
        return without_substitutes(core), without_substitutes(notifier)

    def _watch_health(self) -> None:
        assert self.ranks is not None

        change = self.ranks._set

        def note(rank: Rank, health: RankState, reason: str) -> None:
            self.recorder.seen[f"health {rank.health.value} to {health.value}"] += 1
            change(rank, health, reason)

        self.ranks._set = note  # type: ignore[method-assign]


def without_substitutes(group: Group) -> Group:
    """The same group, none of whose actors can be switched off."""
    members = (
        without_substitutes(one) if isinstance(one, Group) else one._replace(substitute=None)
        for one in group.members
    )
    return Group(group.name, tuple(members))
