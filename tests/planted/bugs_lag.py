"""Planted bugs of the loop's lag: how it is measured, and what keeps the loop. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

LAG = "tests/observe/test_lag.py"
PREFETCH = "tests/cache/test_prefetch.py"
PASSES = "tests/actor/test_passes.py"
DIRECT = "tests/actor/test_direct.py"
ENGINE = "tests/soak/test_oracle_simulated.py"
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
        "actor_steps_aside_for_one_pass",
        "actor/passes.py",
        "ASIDE = 2\n",
        "ASIDE = 1\n",
        "an actor that yields still runs before the timers that are due",
        (
            f"{PASSES}::test_a_timer_that_is_due_runs_before_the_turn_of_an_actor_that_has_stepped_aside",
        ),
    ),
    Mutation(
        "time_of_a_pass_never_ends",
        "actor/passes.py",
        "        self._begun = False\n\n\n",
        "        pass\n\n\n",
        "after the first pass every turn of an actor waits for two passes of the loop",
        (f"{PASSES}::test_the_time_of_a_pass_begins_with_its_first_turn",),
    ),
    Mutation(
        "collector_visits_the_blocks_of_the_host_tier",
        "cpu_evictor/slots.py",
        "class HostBlock(msgspec.Struct, eq=False, gc=False):\n",
        "class HostBlock(msgspec.Struct, eq=False):\n",
        "a full pass of the cyclic collector takes longer with each host slot",
        ("tests/cache/test_collector.py::test_the_collector_visits_few_objects_a_block",),
    ),
    Mutation(
        "clear_of_another_salt_hides_prefetched_blocks",
        "lookup.py",
        "core.clears.reaches(salt_id(salt), handled)\n",
        "bool(path.num_tokens)\n",
        "a lookup misses blocks of a tenant while the clear of another is on its way",
        (f"{PREFETCH}::test_a_clear_of_another_salt_on_its_way_hides_no_prefetched_block",),
    ),
    Mutation(
        "direct_turn_overtakes_queued_messages",
        "actor/channel.py",
        "        self.idle = False\n        if self._receiver",
        "        if self._receiver",
        "a commit is handled before the abandon of another lease that was sent first",
        (f"{DIRECT}::test_it_overtakes_no_message",),
    ),
    Mutation(
        "direct_turn_overtakes_waiting_senders",
        "actor/channel.py",
        "        self.idle = not (self._senders or self._granted)\n",
        "        self.idle = True\n",
        "requests that wait for a place in a full channel are overtaken by hundreds of later ones",
        ("tests/actor/test_channel.py::test_no_sender_overtakes_one_that_waits",),
    ),
    Mutation(
        "direct_turns_without_bound",
        "actor/direct.py",
        "        self._left -= 1\n        self._channel.taken += 1\n",
        "        self._channel.taken += 1\n",
        "a client whose requests all hit the device keeps every other task from running",
        (
            f"{DIRECT}::test_direct_turns_in_one_pass_are_bounded",
            f"{DIRECT}::test_a_caller_that_never_waits_lets_others_run",
        ),
    ),
    Mutation(
        "direct_turns_ignore_time",
        "actor/direct.py",
        "        elif not self._left or self._clock() > self._until:\n            return False\n",
        "        elif not self._left:\n            return False\n",
        "128 long turns in a row stop the loop for many milliseconds",
        ("tests/actor/test_direct_answers.py::test_turns_of_a_pass_end_in_time",),
    ),
    Mutation(
        "direct_turn_in_the_asker_s_context",
        "actor/direct.py",
        "                self._run(self._handle, envelope)\n",
        "                self._handle(envelope)\n",
        "jobs of an actor have the context variables of a caller: its span, its log context, and "
        "another system's waits for threads",
        (f"{DIRECT}::test_turns_and_their_jobs_run_in_the_context_of_the_actor",),
    ),
    Mutation(
        "error_of_a_direct_turn_kept",
        "actor/message.py",
        "        error, self.error = self.error, None\n        try:\n",
        "        error = self.error\n        try:\n",
        "a refused call keeps its lease and its prompt until the cyclic collector runs",
        (f"{DIRECT}::test_an_error_of_a_direct_turn_keeps_nothing_alive",),
    ),
    Mutation(
        "loop_of_a_call_not_checked",
        "client.py",
        "            or self._runner._thread_id != get_ident()  #",
        "            or self._thread != get_ident()  #",
        "a call on another loop of the same thread changes a cache whose own loop stands still",
        ("tests/cache/test_lease_calls.py::test_another_loop_of_the_same_thread_is_refused",),
    ),
    Mutation(
        "exception_of_a_direct_turn_is_lost",
        "actor/direct.py",
        "        self._broken = error\n",
        "",
        "an actor whose turn has raised continues with half a change",
        (f"{DIRECT}::test_an_exception_fails_the_actor_and_not_the_asker",),
    ),
    Mutation(
        "messages_after_a_broken_direct_turn",
        "actor/mailbox_loop.py",
        "                    if direct is not None and (broken := direct.pop_broken()) is not None:\n",
        "                    broken = direct.pop_broken() if direct and not len(channel) else None\n"
        "                    if broken is not None:\n",
        "an actor whose turn has raised handles the messages that the turn sent to itself before",
        (f"{DIRECT}::test_no_message_is_handled_after_an_exception",),
    ),
    Mutation(
        "granted_leases_count_when_received",
        "prefix_index/statistics.py",
        "        leases=len(leases),\n",
        "        leases=0,\n",
        "an engine that waits until the cache has no lease changes its weights below a lease",
        (f"{ENGINE}::test_weights_that_change_in_the_step_of_a_grant",),
    ),
    Mutation(
        "messages_of_a_direct_turn_stay_in_the_outbox",
        "actor/direct.py",
        "            self._channel.wake()  # the actor's task sends",
        "            pass  # the actor's task sends",
        "offloads of a full host tier wait until the index gets another message",
        (f"{DIRECT}::test_the_last_messages_to_a_full_receiver_leave_too",),
    ),
    Mutation(
        "direct_turns_always_on_virtual_time",
        "actor/direct.py",
        "        if self._chosen is not None and not self._chosen():\n",
        "        if False:\n",
        "a simulation has fewer orders of messages than a server",
        (f"{DIRECT}::test_a_loop_of_virtual_time_draws_direct_turns_from_its_seed",),
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
