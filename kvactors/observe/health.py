"""Cache health: ok, degraded (an optional part does not work) or failed, with reasons.

The check reads a few fields of each component and iterates over no blocks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from kvactors.actor import State
from kvactors.actor.clock import now
from kvactors.actor.log import described, get_logger
from kvactors.storage.device_store import DeviceStore
from kvactors.storage.guarded import GuardedBackend
from kvactors.system import System

log = get_logger()


class HealthReason(NamedTuple):
    """A reason why a cache is not healthy. since: Unix time in seconds at which the fault began, or
    without a record of that of the first call of `health` that found the fault."""

    component: str
    why: str
    since: float


Trouble = tuple[str, str, float | None]
"""The affected part, its fault, and the loop time at which the fault began, None if the beginning
is not recorded."""


class Health(NamedTuple):
    """The health of a cache.

    Attributes:
        status: `ok`, `degraded` (requests are served, without the parts in `reasons`) or `failed`
            (every call raises CacheFailed).
        reasons: why the status is not `ok`.
    """

    status: Literal["ok", "degraded", "failed"]
    reasons: tuple[HealthReason, ...]

    def as_dict(self) -> dict[str, Any]:
        """Names and values, for JSON."""
        return {"status": self.status, "reasons": [one._asdict() for one in self.reasons]}


def health(system: System) -> Health:
    """The health as of now. A change since the last call is logged once."""
    parts = [("", system.supervisor)]
    parts += [(f"{name}: ", group.supervisor) for name, group in system.layer_groups.items()]
    failed = [
        _reason(f"{name}{one.failed_actor}", described(one.failed), one.failed_at)
        for name, one in parts
        if one.failed is not None
    ]
    if failed:
        found = Health("failed", tuple(failed))
    elif not system.is_open:
        return Health("degraded", (_reason("cache", "closed", None),))
    else:
        begun: dict[tuple[str, str], float] = {}
        for component, why, since in _troubles(system):
            if since is None:
                since = system.troubles.get((component, why), now())
            begun[component, why] = since
        system.troubles = begun
        faults = tuple(_reason(*part, since) for part, since in begun.items())
        found = Health("degraded" if faults else "ok", faults)
    if found.status != system.last_status:
        system.last_status = found.status
        report = log.info if found.status == "ok" else log.warning
        reasons = [f"{one.component}: {one.why}" for one in found.reasons]
        report("cache health", status=found.status, reasons=reasons)
    return found


def _reason(component: str, why: str, since: float | None) -> HealthReason:
    return HealthReason(
        component, why, time.time() - (0.0 if since is None else max(0.0, now() - since))
    )


def _troubles(system: System) -> Iterator[Trouble]:
    yield from _actors(system)
    stores: tuple[tuple[str, GuardedBackend | DeviceStore | None], ...] = (
        ("store", system.store),
        ("device store", system.device_store),
    )
    for name, store in stores:
        if store is not None:
            yield from _store(name, store)
    if system.ranks is not None and system.sized:
        for rank in system.ranks.statistics():
            if rank.health != "healthy":
                why = f"{rank.health}: {rank.reason}" if rank.reason else rank.health
                yield f"rank {rank.rank}", why, rank.since
    if system.asleep:
        yield "cache", f"asleep (level {system.asleep}): wake() it", None
    if not system.sized:
        yield "device", "the number of device blocks is not set (set_num_blocks)", None
    if system.plane.trouble:
        yield "copies", system.plane.trouble, None
    if system.arena.trouble:
        yield "host memory", system.arena.trouble, None
    for name, group in system.layer_groups.items():
        for component, why, since in _troubles(group):
            yield f"{name}: {component}", why, since


def _actors(system: System) -> Iterator[Trouble]:
    off = system.supervisor.switched_off
    for one in off.values():
        yield (one.name, f"switched off after too many failures, the last {one.cause}", one.since)
    for actor in system.supervisor.actors():
        if actor.state in (State.STOPPING, State.STOPPED):
            yield actor.ref.name, "restarting after a failure", actor.mailbox.ended_at
    if system.notifier.name not in off:
        for sink in system.notifier_actor.sinks.deliveries:
            if sink.failures:
                yield f"sink {sink.sink.name}", sink.last_error, sink.failing_since


def _store(name: str, store: GuardedBackend | DeviceStore) -> Iterator[Trouble]:
    for why, since in store.attempts.failing():
        yield name, why, since
    if isinstance(store, DeviceStore):
        if store.late_since is not None:
            yield name, "a call does not return", store.late_since
        return
    if store.clear_pending:
        yield name, "a clear has not been completed", store.clears.pending_since
    elif getattr(store.inner, "clear_pending", False):
        yield name, "a clear has not been completed", None
    if condition := store.condition():
        yield name, condition, None
    overdue = store.overdue()
    if overdue is not None:
        what, since = overdue
        yield name, f"a call of {what} does not return", since
    if store.stuck:
        yield name, "a call to the disk does not return", None
