"""Carries out a fault plan: each fault is injected into one fake at its time, and ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from kvactors.testing.fault import Fault
from kvactors.testing.loop import SimLoop


class Injectable(Protocol):
    """A fake that faults can be injected into."""

    async def inject(self, fault: Fault) -> None:
        """Begin the failure that `fault` describes."""

    async def recover(self, fault: Fault) -> None:
        """End a fault that lasts. One that happens once has no end."""


class Injector:
    """Runs the timed faults of plans on a simulated loop.

    Args:
        target_of: the fake that a fault is for, None if there is none.
        begun: called with each fault when it begins.
    """

    def __init__(
        self, target_of: Callable[[Fault], Injectable | None], begun: Callable[[Fault], None]
    ) -> None:
        self._target_of = target_of
        self._begun = begun
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, faults: Iterable[Fault]) -> None:
        """Carry out faults. Their times count from now."""
        loop = asyncio.get_running_loop()
        self._tasks += [
            loop.create_task(self._carry_out(fault), name=f"fault {fault.kind}") for fault in faults
        ]

    async def stop(self) -> list[Exception]:
        """Cancel the faults that have not begun or ended yet.

        Returns:
            Errors of faults that could not be carried out.
        """
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        return [result for result in results if isinstance(result, Exception)]

    async def _carry_out(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at)
        self._begun(fault)
        if fault.kind == "clock_jump":
            loop = asyncio.get_running_loop()
            if not isinstance(loop, SimLoop):
                raise TypeError("only the clock of a SimLoop jumps")
            loop.jump(fault.duration)
            return
        target = self._target_of(fault)
        if target is None:
            return
        await carry_out(target, fault)


async def carry_out(target: Injectable, fault: Fault) -> None:
    """Inject a fault, let its duration pass, and end it."""
    await target.inject(fault)
    await asyncio.sleep(fault.duration)
    await target.recover(fault)
