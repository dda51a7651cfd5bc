"""Planted bugs of waits without a limit, of a fork, and of substitutes. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "open_without_limit",
        "opening.py",
        "            await asyncio.wait((task,), timeout=max(self.limit, least))\n        except",
        "            await asyncio.wait((task,))\n        except",
        "a store, sink or copy engine of another package that does not open keeps `open` without limit",
        ("tests/door/test_open_in_time.py::test_a_part_that_does_not_open_is_a_named_error_in_time",),
    ),
    Mutation(
        "cancelled_open_waits_for_the_part",
        "opening.py",
        "        await asyncio.wait((task,), timeout=self.shutdown.left(STOP) + LEAST_STEP)\n",
        "        await asyncio.wait((task,))\n",
        "a part that ignores its cancellation keeps a cancelled `open` without limit",
        ("tests/door/test_open_in_time.py::test_a_cancelled_open_ends_in_time_although_a_part_ignores_its_cancellation",),
    ),
    Mutation(
        "slow_store_silences_a_rank",
        "ranks/silence.py",
        "if self.closing or operation is None or not operation.stored or rank.link is None:",
        "if True:",
        "a slow disk of one rank stops every copy of all ranks",
        ("tests/ranks/test_slow_stores.py::test_a_rank_whose_store_is_late_is_asked_whether_it_works_and_copies_go_on",),
    ),
    Mutation(
        "ping_of_a_silent_rank_forgotten",
        "ranks/group.py",
        "                self._silence.answered(rank)\n",
        "",
        "a rank that was stopped while its disk hangs stays silent until the disk returns",
        ("tests/ranks/test_slow_stores.py::test_a_stopped_rank_whose_store_is_late_is_silent_until_it_answers_the_ping",),
    ),
    Mutation(
        "rank_waits_for_its_store",
        "ranks/serve.py",
        "        await asyncio.wait(tasks, timeout=self.shutdown.left(STOP) + LEAST_STEP)\n",
        "        await asyncio.wait(tasks)\n",
        "a cancelled serve_rank waits without limit for a store that ignores its cancellation",
        ("tests/ranks/test_slow_stores.py::test_a_rank_ends_in_time_while_its_store_hangs_and_ignores_its_cancellation",),
    ),
)
