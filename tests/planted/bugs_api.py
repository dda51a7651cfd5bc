"""Planted bugs of the public API: arguments, cancelled and concurrent calls, admission, waiting.
See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

CALLS = "tests/cache/test_lease_calls.py::"
ADMISSION = "tests/cache/test_admission.py::"
ARGUMENTS = "tests/cache/test_arguments.py::"
CANCELLED = CALLS + "test_a_call_cancelled_at_every_step_did_not_happen_or_ended_the_lease"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "cancelled_extend_stays_in_effect",
        "actor/ref.py",
        "                lost(reply.result())\n",
        "                pass\n",
        "an extend that was cancelled after it was answered leaves the index with tokens that the "
        "lease has not",
        (CANCELLED + "[extend-task.cancel]",),
    ),
    Mutation(
        "two_extends_at_once",
        "lease_hold.py",
        "        if self.changing:\n",
        "        if False:\n",
        "a second extend is sent while the first one waits",
        (CALLS + "test_an_extend_while_another_waits_is_refused_and_changes_nothing",),
    ),
    Mutation(
        "extends_overlap_in_the_index",
        "prefix_index/tables.py",
        """\
        if call is None and position == lease.path.num_tokens:
""",
        """\
        if True:
""",
        "the index takes an extend while another one waits, or in the wrong place",
        ("tests/prefix_index/test_index_machine.py::test_long_walks_through_every_order",),
    ),
    Mutation(
        "cancelled_extend_keeps_its_place",
        "lease_hold.py",
        "                self.client.tell(\n"
        "                    Withdrawn(self.id)\n"
        "                )  # blocks that it has collected go to the next in the queue\n",
        "                pass\n",
        "a cancelled extend keeps the blocks it has collected until its deadline",
        (CALLS + "test_a_cancelled_extend_releases_its_collected_blocks",),
    ),
    Mutation(
        "buffer_read_after_the_call",
        "prefix_index/tables.py",
        """\
        path.append(message.added)
""",
        """\
        path.extend([7] * message.added.num_tokens)
""",
        "the index has other tokens than were given to extend",
        (ARGUMENTS + "test_a_buffer_is_copied_before_the_call_returns_to_the_loop",),
    ),
    Mutation(
        "floats_are_integers",
        "arguments.py",
        "        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):\n",
        "        if isinstance(value, bool):\n",
        "commit(4.0) is accepted",
        (ARGUMENTS + "test_a_wrong_argument_is_refused_and_changes_nothing",),
    ),
    Mutation(
        "namespace_of_any_type",
        "calls.py",
        'SetNamespace(check_text("namespace", namespace))',
        "SetNamespace(namespace)",
        "set_namespace(5) is accepted, and every later request fails",
        (ARGUMENTS + "test_every_wrong_argument_is_refused",),
    ),
    Mutation(
        "waiting_requests_keep_the_old_namespace",
        "prefix_index/grants.py",
        """\
            path.set_root(root)
""",
        """\
            pass
""",
        "a request that waited for resume hits blocks computed with other weights",
        (
            ADMISSION
            + "test_a_request_that_waits_for_resume_is_admitted_under_the_namespace_of_its_admission",
        ),
    ),
    Mutation(
        "loads_of_the_old_namespace_are_placed",
        "prefix_index/grants.py",
        """\
            not changed
            and again == match
""",
        """\
            again == match
""",
        "loads sent ahead under the old namespace fill blocks of the new one",
        (ADMISSION + "test_a_waiting_request_is_admitted_under_the_namespace_of_its_admission",),
    ),
    Mutation(
        "timer_of_an_earlier_wait_counts",
        "prefix_index/admission.py",
        """\
        if waiter is None or waiter.ticket != ticket:
""",
        """\
        if waiter is None:
""",
        "an extend fails at the deadline of an earlier one of its lease",
        ("tests/prefix_index/test_waits.py::test_a_late_timer_of_an_earlier_wait_is_ignored",),
    ),
    Mutation(
        "timers_outlast_their_waits",
        "prefix_index/held.py",
        """\
        held.stop_timer()
""",
        "",
        "timers of requests that were admitted after a pause stay until their deadline",
        ("tests/prefix_index/test_waits.py::test_no_timer_is_left_when_a_wait_is_over",),
    ),
    Mutation(
        "all_waiters_in_one_turn",
        "prefix_index/requests.py",
        """\
        for _ in range(STEPS):
            held = self._held.take_next()
""",
        """\
        for _ in range(10**9):
            held = self._held.take_next()
""",
        "after a pause every request is admitted in one turn",
        (ADMISSION + "test_thousands_of_waiting_requests_are_served_a_few_a_turn",),
    ),
    Mutation(
        "wrong_loop_hangs",
        "client.py",
        "            if asyncio.get_running_loop() is self.loop:\n",
        "            if asyncio.get_running_loop() is not None:\n",
        "a lease that is awaited on another loop waits without end",
        (CALLS + "test_a_lease_awaited_on_another_loop_raises_at_once[commit]",),
    ),
    Mutation(
        "late_answers_to_threads_stay_in_effect",
        "from_thread.py",
        "                    lost(done.result())\n",
        "                    pass\n",
        "a thread that gave up has extended its lease all the same",
        (CALLS + "test_a_thread_that_gave_up_has_no_effect_or_no_lease",),
    ),
    Mutation(
        "media_item_cached_in_part",
        "prefix_index/index.py",
        "            if offset < blocks * self.block_size < offset + length:\n",
        "            if False:\n",
        "a request computes half an image on top of the other half",
        (ADMISSION + "test_cached_tokens_never_end_inside_a_media_item",),
    ),
    Mutation(
        "loads_end_inside_a_media_item",
        "prefix_index/leases.py",
        """\
        if kept == committed or lease.fault is not None:
""",
        """\
        if True:
""",
        "after a load that came short, half an image counts as cached",
        (
            ADMISSION + "test_a_load_that_ends_inside_a_media_item_is_cut_before_it",
            "tests/prefix_index/test_index_machine.py",
        ),
    ),
    Mutation(
        "resumed_requests_counted_again",
        "prefix_index/endings.py",
        """\
        self._leases.remember_preempted(lease.request_id)
""",
        "",
        "the hit rate counts a preempted request twice",
        (ADMISSION + "test_a_request_preempted_and_resumed_is_counted_once",),
    ),
    Mutation(
        "abandoned_requests_are_not_announced",
        "prefix_index/endings.py",
        """\
        return self._close(lease, None)
""",
        """\
        return self.give_back(lease)
""",
        "indexes that follow finished requests never get what an abandoned one has committed",
        (ADMISSION + "test_the_committed_blocks_of_an_abandoned_request_are_announced",),
    ),
    Mutation(
        "ended_lease_is_ready",
        "lease_hold.py",
        "        at = self.client.deadline(deadline)\n        if self.ended:\n            "
        "self.check_ended()\n",
        "        at = self.client.deadline(deadline)\n",
        "`wait_ready` of a lease that has ended returns",
        (CALLS + "test_every_call_on_an_ended_lease_raises",),
    ),
    Mutation(
        "finish_ignores_what_is_computed",
        "prefix_index/endings.py",
        """\
        committed = [] if computed is None else self._commits.enter(lease, computed)
""",
        """\
        committed = []
""",
        "finish(computed_tokens=n) does not commit",
        (ADMISSION + "test_finish_commits_the_computed_blocks_or_changes_nothing",),
    ),
)
