"""Waits for a cache at rest: until nothing is in flight, until every sink's view equals the
tiers."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import anyio

from kvactors.actor.clock import now
from kvactors.arguments import check_flag, check_seconds
from kvactors.errors import DeadlineExceeded
from kvactors.flush_notifier.messages import WaitFlushed
from kvactors.open_cache import OpenCache


async def wait_idle(self: OpenCache, deadline: float = 30.0) -> None:
    """Return when nothing is in flight, or raise DeadlineExceeded."""
    self._client.check()
    seconds = check_seconds("deadline", deadline)
    with anyio.move_on_after(seconds) as scope:
        await asyncio.sleep(0)  # callbacks that finalisers scheduled run first
        await self.system.in_flight.wait_idle()
    if scope.cancelled_caught:
        raise DeadlineExceeded(
            f"{self.system.in_flight.count} messages or jobs are in flight after {seconds} s"
        )


async def wait_flushed(
    self: OpenCache,
    deadline: float = 30.0,
    *,
    at_rest: bool = True,
    sinks: Collection[str] | None = None,
) -> None:
    """Return when every sink's view equals the tiers.

    Args:
        self: the cache.
        deadline: seconds from now.
        at_rest: first wait until the cache is idle. Without it, under load, the barrier covers
            residency as of this call: later changes, transfers now in flight included, may or
            may not have been delivered. The first wait after a failure of the notifier is one at
            rest in any case.
        sinks: names of the sinks to wait for, all if None. ValueError for an unknown one.
    """
    at = self._client.deadline(deadline)
    check_flag("at_rest", at_rest)
    names = self._sink_names(sinks)
    notifier = self.system.notifier
    while True:
        # after a restart the notifier's ledger is empty until the other actors have filled it
        if at_rest or notifier.incarnation != self._stated_to:
            await wait_idle(self, max(at - now(), 1e-9))
            self._stated_to = notifier.incarnation
        incarnation = self._stated_to
        with anyio.CancelScope(deadline=at) as scope:
            for actor in self.system.supervisor.actors():
                await actor.sent()
        if scope.cancelled_caught:
            raise DeadlineExceeded(
                f"the actors' messages to the notifier were not taken in {deadline} s"
            )
        await notifier.ask(WaitFlushed(names), deadline=at)
        if notifier.incarnation == incarnation:
            return
