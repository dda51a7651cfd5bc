"""A serving loop on the public API: every await is timed, may be cancelled by the plan, and must
end in an answer or in an error with a name."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kvactors.errors import (
    ActorFailed,
    CacheClosed,
    ChannelError,
    KVActorsError,
    LeaseEnded,
    NeverFits,
    NoRoom,
    NotReady,
    RankLost,
    StoreUnsupported,
)
from tests.simulation.world import World

T = TypeVar("T")

SLACK = 0.25
"""Seconds past its deadline by which an ask must be over: the sweeps of open asks come every 0.05
s, and the second one decides."""


class CacheClient:
    """One client's way to the cache. awaits: so far. ended: requests that ended somehow, answered:
    those that went to their end."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.rng = random.Random(world.drawn.seed * 1009 + number)
        self.awaits = 0
        self.task: asyncio.Task[None] | None = None
        plan = world.drawn.plan.fault
        self._cancels = {
            int(f.at): f for f in plan if f.kind == "cancel" and f.target == str(number)
        }

    async def ask(
        self,
        what: str,
        make: Callable[[], Awaitable[T]],
        seconds: float,
        *,
        fits: bool | None = None,
        space: bool = False,
    ) -> T:
        """Await one call of the cache, which may take `seconds`. An error with a name passes if the
        world's state allows it, which is tested here. fits: whether an acquire asks for no more
        blocks than the device has. space: it waits for space."""
        world, loop = self.world, asyncio.get_running_loop()
        self.awaits += 1
        began, jumped = loop.time(), world.jumped
        fault = self._cancels.pop(self.awaits, None)
        if fault is not None and self.task is not None:
            world.seen["fault cancel"] += 1
            loop.call_later(fault.duration, self.task.cancel)
        outcome = "ok"
        try:
            return await make()
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except KVActorsError as error:
            outcome = type(error).__name__
            self.judge_error(what, error)
            # `ProgressWatch` compares refusals with the pins.
            if (
                isinstance(error, NoRoom)
                and fits is not None
                and fits == isinstance(error, NeverFits)
            ):
                world.violated(f"{what} ended with {error!r}: fits {fits}, waits {space}")
            raise
        finally:
            world.seen[f"outcome {what} {outcome}"] += 1
            world.recorder.note(f"client {self.number} {what} {outcome}")
            took = loop.time() - began - (world.jumped - jumped)
            if took > seconds + SLACK:
                world.violated(
                    f"{what} took {took:.3f} s of {seconds:.3f} and ended with {outcome}"
                )

    def judge_error(self, what: str, error: KVActorsError) -> None:
        """Some errors need a reason."""
        world = self.world
        if world.closing:
            return
        kinds = {fault.kind for fault in world.drawn.plan.fault}
        crashed = world.recorder.failures > 0
        unfounded = (
            (isinstance(error, ActorFailed | LeaseEnded) and not crashed)
            or (isinstance(error, RankLost) and not kinds & {"rank_cut", "rank_lost"})
            or isinstance(error, CacheClosed | ChannelError | NotReady)
            or (isinstance(error, StoreUnsupported) and world.system.device_store is None)
        )
        if unfounded:
            world.violated(f"{what} ended with {error!r}, and nothing accounts for that")
