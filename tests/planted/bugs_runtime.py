"""Planted bugs: cancellation, failures that spread, the end of a cache, checks and logs."""

from __future__ import annotations

from mutation import Mutation

LIFECYCLE = "tests/cache/test_cancelled_lifecycle.py::test_cancelled_at_any_step_nothing_is_left_and_it_opens_again"
LEAKED = "tests/actor/test_leaked_errors.py"
INSTRUMENT = "tests/actor/test_instrument.py"
TYPES = "tests/actor/test_types.py"
DEGRADED = "tests/cache/test_degraded.py"
CLOSE = "tests/cache/test_close.py"

BUGS = (
    Mutation(
        "shields_of_anyio_alone",
        "actor/uncancelled.py",
        "    return await _ended(asyncio.get_running_loop().create_task(work), None, None)\n",
        "    with anyio.CancelScope(shield=True):\n        return await work\n",
        "a native cancellation interrupts a clean-up",
        (f"{LEAKED}::test_uncancelled_work_ends_and_the_cancellation_is_raised_then",),
    ),
    Mutation(
        "the_cancellation_is_swallowed",
        "actor/uncancelled.py",
        "                cancelled = error\n            except BaseException:",
        "            except BaseException:",
        "a cancelled task continues",
        (f"{LEAKED}::test_uncancelled_work_ends_and_the_cancellation_is_raised_then",),
    ),
    Mutation(
        "the_system_runs_in_the_callers_task",
        "system.py",
        "        await ended(task)\n        SYSTEMS",
        "        await asyncio.sleep(0)\n        SYSTEMS",
        "open returns while the actors, the store's lock and the sockets are still there",
        (LIFECYCLE,),
    ),
    Mutation(
        "the_arena_is_unmapped_while_it_is_touched",
        "device/arena.py",
        "        if self._fresh.busy:\n            self.keep()\n",
        "",
        "a thread writes to unmapped memory",
        ("tests/device/test_arena.py::test_memory_that_a_thread_touches_stays_mapped",),
    ),
    Mutation(
        "a_turns_leaked_error_is_a_cancellation",
        "actor/mailbox_loop.py",
        "    raise failure from error\n",
        "    raise error\n",
        "a turn that raises CancelledError ends its actor without a failure: every ask waits for "
        "its deadline",
        (f"{LEAKED}::test_a_turn_that_raises_it_fails_its_actor_at_once",),
    ),
    Mutation(
        "a_jobs_leaked_error_is_a_cancellation",
        "actor/jobs.py",
        "            if isinstance(error, asyncio.CancelledError) and (task is None or "
        "task.cancelling()):\n",
        "            if not isinstance(error, Exception):\n",
        "a job that raises CancelledError never answers",
        (f"{LEAKED}::test_a_job_that_raises_it_is_a_job_that_failed",),
    ),
    Mutation(
        "a_completion_that_cannot_be_built_is_only_logged",
        "actor/jobs.py",
        "        return JobBroken(second)\n",
        "        raise second\n",
        "the work stays in flight without end",
        (f"{LEAKED}::test_a_job_whose_completion_cannot_be_built_fails_its_actor",),
    ),
    Mutation(
        "timers_outlive_their_actor",
        "actor/mailbox_loop.py",
        "        for timer in list(context.timers):\n            timer.cancel()\n",
        "",
        "a closed cache stays in memory until the last deadline",
        (f"{LEAKED}::test_timers_end_with_their_actor",),
    ),
    Mutation(
        "optional_actors_end_the_cache",
        "actor/switch.py",
        "        if self._spec is None or self._record is not None:\n            return False\n",
        "        if self._spec is not None or self._record is None:\n            return False\n",
        "a notifier that fails again and again takes the whole cache with it",
        (
            f"{DEGRADED}::test_an_optional_actor_that_fails_too_often_is_switched_off_and_comes_back",
        ),
    ),
    Mutation(
        "switched_off_for_good",
        "actor/supervisor.py",
        "                if not switch.due() or self._stopping:\n",
        "                if True:\n",
        "an optional actor never comes back",
        (
            f"{DEGRADED}::test_an_optional_actor_that_fails_too_often_is_switched_off_and_comes_back",
        ),
    ),
    Mutation(
        "no_longer_pause_after_a_relapse",
        "actor/switch.py",
        "min(SWITCHED_OFF_MOST, 2 * self._delay)",
        "min(SWITCHED_OFF_MOST, self._delay)",
        "a part that always fails is restarted every half minute",
        (f"{DEGRADED}::test_an_actor_that_fails_again_soon_is_switched_off_for_longer",),
    ),
    Mutation(
        "peers_are_blamed",
        "actor/mailbox_loop.py",
        "            name, cause = peer\n",
        "            pass\n",
        "an asker is given the CancelledError of an actor that did not fail",
        (f"{DEGRADED}::test_a_request_in_flight_is_given_the_root_cause",),
    ),
    Mutation(
        "a_failed_cache_ends_in_silence",
        "system.py",
        "        await self._leave(task, started, leave, clean=True)\n"
        "        if (failure := self.supervisor.failure()) is not None:\n            raise "
        "failure\n",
        "        await self._leave(task, started, leave, clean=True)\n",
        "a program whose cache failed ends without an error",
        (f"{DEGRADED}::test_a_failed_cache_raises_in_every_call_and_at_its_end",),
    ),
    Mutation(
        "a_hung_thread_holds_the_end",
        "shutdown.py",
        "            self._timer = asyncio.get_running_loop().call_at(self.at(STOP), "
        "self.waits.abandon)\n",
        "",
        "a cache beside a hung disk cannot be closed",
        (f"{CLOSE}::test_it_ends_in_time_while_a_disk_hangs_and_memory_in_use_stays_mapped",),
    ),
    Mutation(
        "memory_of_a_hung_thread_is_unmapped",
        "shutdown.py",
        "        if self.waits.abandoned:\n            self.arena.keep()\n",
        "        if self.waits.abandoned:\n",
        "a disk that answers late writes to unmapped memory",
        (f"{CLOSE}::test_it_ends_in_time_while_a_disk_hangs_and_memory_in_use_stays_mapped",),
    ),
    Mutation(
        "children_wait_for_the_parents_loop",
        "system.py",
        "        self.forked = self.shutdown.forked = self.shutdown.waits.over = True\n",
        "        return\n",
        "a call in a forked child waits for a loop that does not run there",
        (f"{CLOSE}::test_a_forked_child_is_refused_and_the_parent_goes_on",),
    ),
    Mutation(
        "what_changes_in_between_is_reported",
        "observe/invariants.py",
        "        if _events(system) != before:\n            return\n",
        "",
        "check() reports a false violation under load",
        (
            "tests/observe/test_invariants.py::test_a_comparison_ends_when_the_system_is_not_at_rest_any_more",
        ),
    ),
    Mutation(
        "logs_go_to_stdout",
        "actor/log.py",
        "            if structlog.is_configured() or STANDARD.isEnabledFor(level):\n"
        "                self._emit(",
        "            if structlog.configure() is None or STANDARD.isEnabledFor(level):\n"
        "                self._emit(",
        "warnings appear in the output of the embedding program",
        ("tests/observe/test_logs.py::test_without_settings_nothing_is_written",),
    ),
    Mutation(
        "instruments_fail_actors",
        "actor/instrument.py",
        "            except BaseException as error:\n",
        "            except KeyError as error:\n",
        "an error in a trace or a metric restarts the actors that it observes",
        (f"{INSTRUMENT}::test_an_instrument_that_raises_is_removed_and_fails_no_actor",),
    ),
    Mutation(
        "parked_messages_have_no_cause",
        "actor/context.py",
        '                to.instruments.notify("sent", to, envelope, turn)\n',
        '                to.instruments.notify("sent", to, envelope, None)\n',
        "messages that waited in an outbox cannot be traced to the request that caused them",
        (f"{INSTRUMENT}::test_every_message_is_traced_to_the_ask_that_caused_it",),
    ),
    Mutation(
        "an_injected_failure_leaves_its_ask_open",
        "actor/mailbox_loop.py",
        "                if envelope.reply is not None:\n",
        "                if envelope.reply is None:\n",
        "an ask whose turn is failed on purpose waits for its deadline",
        (f"{INSTRUMENT}::test_an_injected_failure_fails_the_actor_before_or_after_its_turn",),
    ),
    Mutation(
        "channels_accept_any_message",
        "actor/context.py",
        "    def tell(self, to: ActorRef[M], message: M) -> None:\n",
        "    def tell(self, to: ActorRef[M], message: Message) -> None:\n",
        "a message sent to the wrong actor is found when it is sent, not when it is written",
        (f"{TYPES}::test_mypy_rejects_wrong_messages_and_wrong_handlers",),
    ),
    Mutation(
        "handlers_take_any_message",
        "actor/handlers.py",
        "    if not any(_takes(one, message) for one in members_of(annotation)):\n",
        "    if not members_of(annotation):\n",
        "a handler is given messages with fields that it does not handle",
        (f"{TYPES}::test_a_union_that_lacks_a_message_is_refused",),
    ),
    Mutation(
        "checks_are_assert_statements",
        "invariant.py",
        "    if not holds:\n        raise AssertionError(otherwise)\n",
        "    assert holds, otherwise\n",
        "under python -O cache.check() reports nothing, even for damaged structures",
        ("tests/test_optimized.py::test_damage_is_found_without_assert_statements",),
    ),
)
