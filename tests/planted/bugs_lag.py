"""Planted bugs of the loop's lag: how it is measured, and what keeps the loop. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

LAG = "tests/observe/test_lag.py"
SHARDED = "tests/observe/test_sharded.py"
SERVING = "tests/scenario/test_serving.py"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "waits_for_a_core_count_as_own_lag",
        "observe/lag.py",
        "        return max(0.0, self.lag - self.waited)\n",
        "        return self.lag\n",
        "a report blames the loop for the lag of a busy machine",
        (
            f"{LAG}::test_waits_for_a_core_are_no_lag_of_the_loop",
            f"{LAG}::test_the_parts_are_taken_tick_by_tick",
        ),
    ),
    Mutation(
        "processor_time_of_a_tick_since_the_start",
        "observe/lag.py",
        "            ran, waited = now_ran, now_waited\n",
        "            waited = now_waited\n",
        "every late tick looks like one in which the loop computed",
        (f"{LAG}::test_a_loop_that_waits_has_no_processor_time",),
    ),
    Mutation(
        "batch_of_a_memory_store_in_one_step",
        "storage/backends/owned.py",
        "            await asyncio.sleep(0)\n",
        "",
        "a batch of thousands of objects keeps the loop until the last one is copied",
        ("tests/storage/test_owned_slices.py::test_objects_are_moved_in_slices",),
    ),
    Mutation(
        "collector_runs_while_a_replay_settles",
        "scenario/replay.py",
        "        with uncollected() if timed else nullcontext():\n",
        "        with nullcontext():\n",
        "passes of the cyclic collector stop the loop of a timed replay for hundreds of "
        "milliseconds",
        ("tests/scenario/test_serving.py::test_blocks_are_computed_and_verified_beside_the_loop",),
    ),
    Mutation(
        "blocks_of_a_check_freed_at_once",
        "flush_notifier/checks.py",
        "        del blocks[-tree.step :]\n",
        "        blocks.clear()\n",
        "the last step of a check keeps the loop for 5 ms at 400,000 blocks",
        (f"{SHARDED}::test_a_check_frees_what_it_made_in_steps",),
    ),
    Mutation(
        "tables_of_a_check_freed_at_once",
        "observe/invariants.py",
        "    yield from _sinks(system, where, found)\n    yield from free(where)\n",
        "    yield from _sinks(system, where, found)\n",
        "the last step of a check keeps the loop for 20 ms at 400,000 blocks",
        (f"{SHARDED}::test_a_check_frees_what_it_made_in_steps",),
    ),
    Mutation(
        "counts_of_a_divergence_freed_at_once",
        "flush_notifier/checks.py",
        "        yield from expected.free()\n",
        "",
        "the last step of a comparison of sinks keeps the loop for 10 ms at 400,000 blocks",
        (f"{SHARDED}::test_a_check_frees_what_it_made_in_steps",),
    ),
    Mutation(
        "every_key_in_one_shard",
        "sharded.py",
        "        shards, mask = self.shards, SHARDS - 1\n",
        "        shards, mask = self.shards, 0\n",
        "a set of 400,000 names moves all of them when it grows",
        (f"{SHARDED}::test_no_small_table_has_many_keys",),
    ),
)
