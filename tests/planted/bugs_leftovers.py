"""Planted bugs of waits without a limit, of a fork, and of substitutes. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "open_without_limit",
        "opening.py",
        "            await asyncio.wait((task,), timeout=max(self.limit, least))\n        except",
        "            await asyncio.wait((task,))\n        except",
        "a store, sink or copy engine of another package that does not open keeps `open` without "
        "limit",
        (
            "tests/cache/test_open_in_time.py::test_a_part_that_does_not_open_is_a_named_error_in_time",
        ),
    ),
    Mutation(
        "cancelled_open_waits_for_the_part",
        "opening.py",
        "        await asyncio.wait((task,), timeout=self._time_to_end())\n",
        "        await asyncio.wait((task,))\n",
        "a part that ignores its cancellation keeps a cancelled `open` without limit",
        (
            "tests/cache/test_open_in_time.py::test_a_cancelled_open_ends_in_time_although_a_part_ignores_its_cancellation",
        ),
    ),
    Mutation(
        "slow_store_silences_a_rank",
        "data_plane/ranks/state.py",
        "if self.closing or operation is None or not operation.stored or rank.link is None:",
        "if True:",
        "a slow disk of one rank stops every copy of all ranks",
        (
            "tests/ranks/test_slow_stores.py::test_a_rank_whose_store_is_late_is_asked_whether_it_works_and_copies_go_on",
        ),
    ),
    Mutation(
        "ping_of_a_silent_rank_forgotten",
        "data_plane/ranks/leader.py",
        "                self._silence.answered(rank)\n",
        "",
        "a rank that was stopped while its disk hangs stays silent until the disk returns",
        (
            "tests/ranks/test_slow_stores.py::test_a_stopped_rank_whose_store_is_late_is_silent_until_it_answers_the_ping",
        ),
    ),
    Mutation(
        "rank_waits_for_its_store",
        "data_plane/ranks/worker.py",
        "        await asyncio.wait(tasks, timeout=self.shutdown.left(STOP) + LEAST_STEP)\n",
        "        await asyncio.wait(tasks)\n",
        "a cancelled serve_rank waits without limit for a store that ignores its cancellation",
        (
            "tests/ranks/test_slow_stores.py::test_a_rank_ends_in_time_while_its_store_hangs_and_ignores_its_cancellation",
        ),
    ),
    Mutation(
        "restart_waits_for_a_hung_call",
        "actor/jobs.py",
        "await asyncio.wait(list(self.running), timeout=limit)",
        "await asyncio.wait(list(self.running))",
        "an actor that fails while a disk does not answer never restarts",
        (
            "tests/cache/test_jobs_run_on.py::test_slots_that_a_call_to_a_store_accesses_are_not_handed_out_before_it_ends",
        ),
    ),
    Mutation(
        "slots_of_a_hung_call_are_free",
        "cpu_evictor/slots.py",
        "(self._withheld if slot in self._in_use else self._free).append(slot)",
        "self._free.append(slot)",
        "after a restart of a reader or writer, slots that a late call still accesses hold other "
        "blocks",
        (
            "tests/cache/test_jobs_run_on.py::test_slots_that_a_call_to_a_store_accesses_are_not_handed_out_before_it_ends",
        ),
    ),
    Mutation(
        "slots_of_a_hung_call_are_free_after_a_restart",
        "cpu_evictor/slots.py",
        "[slot for slot in range(num_slots - 1, -1, -1) if slot not in in_use]",
        "[slot for slot in range(num_slots - 1, -1, -1)]",
        "after a restart of the host tier, slots that a late call still accesses hold other blocks",
        ("tests/cache/test_jobs_run_on.py::test_slots_in_use_are_withheld_and_come_back",),
    ),
    Mutation(
        "late_write_not_reported",
        "storage/worker.py",
        "            self.ref.try_tell(Recheck(keys, keys))\n",
        "            pass\n",
        "blocks stored by a write that ended after its writer's restart are not sent to any index",
        (
            "tests/cache/test_jobs_run_on.py::test_slots_that_a_call_to_a_store_accesses_are_not_handed_out_before_it_ends",
        ),
    ),
    Mutation(
        "copies_run_on_into_the_next_incarnation",
        "gpu_swapper/actor.py",
        "        if restart:\n            raise JobsRunOn",
        "        if False:\n            raise JobsRunOn",
        "a copy of an earlier incarnation writes into device blocks that were handed out again",
        (
            "tests/cache/test_jobs_run_on.py::test_copies_that_do_not_end_after_a_failure_end_the_cache_in_time",
        ),
    ),
    Mutation(
        "substitute_preferred",
        "cpu_evictor/requests.py",
        "(actor.switched_off, self._load[actor.name])",
        "self._load[actor.name]",
        "one reader that is switched off turns every look-up in storage into a miss, although "
        "another works",
        (
            "tests/cache/test_degraded.py::test_one_of_a_pool_that_is_switched_off_is_not_asked_while_another_works",
        ),
    ),
    Mutation(
        "child_closes_the_parents_parts",
        "shutdown.py",
        "        if self.forked:\n            return\n",
        "",
        "a forked child that ends the parent's loop closes the parent's store and sinks",
        (
            "tests/cache/test_fork.py::test_a_child_that_ends_the_parents_loop_writes_and_unlocks_nothing",
        ),
    ),
    Mutation(
        "child_waits_for_the_end_of_the_parents_cache",
        "system.py",
        "        if self.forked:\n            return\n",
        "",
        "a forked child that leaves the block gets RuntimeError('no running event loop')",
        (
            "tests/cache/test_fork.py::test_a_child_that_leaves_the_block_closes_nothing_and_raises_only_its_own",
        ),
    ),
    Mutation(
        "child_is_refused_the_end_of_its_block",
        "calls.py",
        "        if not self.system.forked:\n            self._client.check_thread()\n            "
        "self._client.close()\n",
        "        self._client.check_thread()\n        self._client.close()\n",
        "a forked child that leaves the block gets CacheClosed in place of its own exception",
        (
            "tests/cache/test_fork.py::test_a_child_that_leaves_the_block_closes_nothing_and_raises_only_its_own",
        ),
    ),
    Mutation(
        "substitute_reports_nothing",
        "storage/worker.py",
        "        if self.incarnation:\n            self.reporter.report_all()\n",
        "        if self.life and not type(self).__name__.startswith('No'):\n"
        "            self.reporter.report_all()\n",
        "while a writer is switched off, indexes list blocks whose write it did not complete, or "
        "lack them",
        (
            "tests/cache/test_degraded.py::test_an_optional_actor_that_fails_too_often_is_switched_off_and_comes_back",
        ),
    ),
    Mutation(
        "files_in_the_default_executor",
        "flush_notifier/sinks/jsonl.py",
        "            async with aiofiles.open(\n"
        '                self.path, "ab", opener=open_private, executor=self._threads\n'
        "            ) as file:\n",
        '            async with aiofiles.open(self.path, "ab", opener=open_private) as file:\n',
        "a disk that does not answer keeps the process from its end, because of a JSON-lines file",
        (
            "tests/flush_notifier/test_sinks.py::test_a_process_ends_although_a_disk_does_not_answer",
        ),
    ),
    Mutation(
        "ready_raises_before_loads_are_given_up",
        "lease_hold.py",
        "max(at, self.loads_end + AFTER_LOADS)",
        "at",
        "a store that does not answer is DeadlineExceeded instead of misses with default deadlines",
        (
            (
                "tests/storage/test_attention_store_backend.py"
                "::test_a_call_that_does_not_return_is_shown_and_no_request_waits_for_it"
            ),
        ),
    ),
    Mutation(
        "sigterm_by_an_ignored_signal",
        "terminable.py",
        "        loop.call_soon_threadsafe(task.cancel)\n",
        "        signal.raise_signal(signal.SIGINT)\n",
        "a command that a script started in the background goes on after SIGTERM",
        (
            "tests/cli/test_terminable.py::TestRunTerminable::test_sigterm_in_a_callback_of_the_loop_cancels_the_main_task",
        ),
    ),
    Mutation(
        "sigterm_before_the_loop_is_forgotten",
        "terminable.py",
        "    if received or dropped:  # before this handler was set, and the exception was dropped\n"
        "        task.cancel()\n",
        "",
        "SIGTERM that arrives in a finalizer before the event loop starts is lost",
        (
            (
                "tests/cli/test_terminable.py::TestRunTerminable"
                "::test_sigterm_in_a_finalizer_before_the_loop_cancels_the_main_task"
            ),
        ),
    ),
    Mutation(
        "sigterm_raises_where_the_loop_is",
        "terminable.py",
        "        loop.call_soon_threadsafe(task.cancel)\n",
        "        raise KeyboardInterrupt\n",
        "SIGTERM that arrives in a finalizer is lost, and the command runs on",
        (
            "tests/cli/test_terminable.py::TestRunTerminable::test_sigterm_in_a_finalizer_cancels_the_main_task",
        ),
    ),
)
