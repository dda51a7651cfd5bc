"""Steps of a file store that run in tasks, one at a time: a new slab, and the next generation.

Neither works on memory that a caller lent, so a cancelled task ends at once and its thread's call
is left to itself. Such a task is cancelled only when the loop ends (`asyncio.run` cancels every
task): a disk that hangs must not keep it from ending.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

from kvactors.actor.clock import now
from kvactors.actor.uncancelled import wait_uncancelled
from kvactors.errors import StoreError
from kvactors.storage.backends.slab_files import SlabFiles
from kvactors.storage.backends.slots import Slots
from kvactors.storage.messages import Outcome
from kvactors.threads import Workers

GROW_AGAIN = 10.0
"""Seconds after which a store on a full disk tries to grow again. Until then it evicts."""


class Growth:
    """Adds slabs to a store, up to the capacity.

    Attributes:
        capacity: objects at most, known once the store is open.
        pause_until: time before which it does not grow, because the disk was full.
        refused: why the last slab could not be added, empty if it could.
    """

    def __init__(self, files: SlabFiles, slots: Slots, threads: Workers) -> None:
        self.capacity = 0
        self.pause_until = 0.0
        self.refused = ""
        self._files = files
        self._slots = slots
        self._threads = threads
        self._task: asyncio.Task[Outcome] | None = None
        self._call: Future[Outcome] | None = None  # in a thread, may outlast a cancelled task

    async def more(self) -> Outcome:
        """One more slab, with all that wait for it: OK, NO_SPACE or UNAVAILABLE. A caller that is
        cancelled raises that when the step has ended."""
        if now() < self.pause_until:
            return Outcome.NO_SPACE
        task = self._task
        # One that is done, and whose callbacks have not run yet, gives nothing more.
        if task is None or task.done():
            # Slots that wait for their readers, or are in quarantine, may ask for one slab more
            # than the capacity does.
            if self._call is not None and not self._call.done():
                return Outcome.UNAVAILABLE
            if len(self._files.slabs) >= self._wanted() + 1:
                return Outcome.NO_SPACE
            task = self._begin()
        return await _outcome(task)

    def ahead(self) -> None:
        """Begin to add a slab if less than half of one is free: a batch that needs it then does not
        wait, while the disk has nothing to write."""
        enough = 2 * len(self._slots.free) >= self._files.meta.slots_per_slab
        if enough or len(self._files.slabs) >= self._wanted() or now() < self.pause_until:
            return
        if self._task is None and (self._call is None or self._call.done()):
            self._begin()

    def concern(self) -> str:
        """Why the store cannot grow to its capacity. Empty if it can."""
        return self.refused if len(self._files.slabs) < self._wanted() else ""

    def _wanted(self) -> int:
        """Slabs that the capacity needs."""
        return -(-self.capacity // self._files.meta.slots_per_slab)

    def _begin(self) -> asyncio.Task[Outcome]:
        slabs = len(self._files.slabs)
        # Submitted now, so that a store that is closed next waits for the call.
        self._call = self._threads.submit(self._files.grow)
        self._task = asyncio.get_running_loop().create_task(self._grow(self._call, slabs))
        self._task.add_done_callback(self._ended)
        return self._task

    def _ended(self, task: asyncio.Task[Outcome]) -> None:
        if self._task is task:
            self._task = None
        if not task.cancelled():
            task.exception()  # of a task whose callers were all cancelled

    async def _grow(self, call: Future[Outcome], slabs: int) -> Outcome:
        per_slab = self._files.meta.slots_per_slab
        outcome = await asyncio.wrap_future(call)
        self.refused = "" if outcome == Outcome.OK else self._files.trouble
        if outcome == Outcome.OK:
            self._slots.add(range(slabs * per_slab, (slabs + 1) * per_slab))
        elif outcome == Outcome.NO_SPACE:
            self.pause_until = now() + GROW_AGAIN
        return outcome


async def _outcome(growing: asyncio.Task[Outcome]) -> Outcome:
    try:
        return await wait_uncancelled(growing)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling() or not growing.cancelled():
            raise
        return Outcome.UNAVAILABLE  # the step alone was cancelled


class Generations:
    """Writes the store's generation to the first page.

    Attributes:
        pending: whether the last one is not there yet.
    """

    def __init__(self, files: SlabFiles, threads: Workers) -> None:
        self.pending = False
        self._files = files
        self._threads = threads
        self._last: asyncio.Task[None] | None = None

    async def advance(self, generation: Callable[[], int]) -> None:
        """Make the generation of the moment durable, after every earlier step: the first page never
        goes back. StoreError if the disk refuses."""
        self.pending = True
        advancing = self._last = asyncio.get_running_loop().create_task(
            self._advance(self._last, generation)
        )
        try:
            await wait_uncancelled(advancing)
        finally:
            if self._last is advancing:
                self._last = None

    async def _advance(
        self, before: asyncio.Task[None] | None, generation: Callable[[], int]
    ) -> None:
        if before is not None:
            await asyncio.wait([before])
        number = generation()
        try:
            await asyncio.wrap_future(self._threads.submit(lambda: self._files.advance(number)))
        except OSError as error:
            raise StoreError(
                f"{self._files.folder}: the store could not be cleared: {error}"
            ) from error
        if number == generation():
            self.pending = False
