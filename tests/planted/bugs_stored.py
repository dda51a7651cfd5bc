"""Planted bugs of what the file store announces after a restart, and of its tasks. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

TASKS = "tests/storage/test_store_tasks.py"
PAGES = "tests/storage/test_report_pages.py"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "growth_swallows_cancellation",
        "storage/backends/slab_steps.py",
        "        outcome = await asyncio.wrap_future(self._call)\n",
        "        outcome = await to_the_end(asyncio.wrap_future(self._call))\n",
        "a loop that ends waits for a disk that hangs, because the store was growing",
        (f"{TASKS}::test_a_loop_ends_although_a_step_of_the_store_hangs",),
    ),
    Mutation(
        "advance_swallows_cancellation",
        "storage/backends/slab_steps.py",
        "            await asyncio.wrap_future(self._threads.submit(lambda: self._files.advance(number)))\n",
        "            await to_the_end(asyncio.wrap_future(self._threads.submit(lambda: self._files.advance(number))))\n",
        "a loop that ends waits for a disk that hangs, because the store was being cleared",
        (f"{TASKS}::test_a_loop_ends_although_a_step_of_the_store_hangs",),
    ),
    Mutation(
        "lock_tried_without_end",
        "storage/backends/slab_lock.py",
        "    for _ in range(ATTEMPTS):\n",
        "    while ATTEMPTS:\n",
        "opening a store whose lock is replaced again and again keeps a thread busy without end",
        (f"{TASKS}::test_a_lock_that_is_replaced_again_and_again_is_an_error",),
    ),
    Mutation(
        "flush_does_not_wait_for_the_report",
        "storage/worker.py",
        "        while self._paging or self._reading or self.state is State.STARTING:\n",
        "        while self._reading or self.state is State.STARTING:\n",
        "flush_settled(at_rest=False) right after opening returns before the store's blocks were reported",
        (f"{PAGES}::test_a_flush_waits_for_every_page_of_the_report_at_the_start",),
    ),
)
