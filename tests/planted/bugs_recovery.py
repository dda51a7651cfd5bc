"""Planted bugs of restart and recovery of KV events. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

TESTS = "tests/flush_notifier/test_kv_recovery.py::"

RESYNC = "tests/flush_notifier/test_resync.py::"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "resync_forgets_before_the_call_in_flight_is_over",
        "flush_notifier/actor.py",
        "        if delivery.in_flight:\n            delivery.resync_due = True\n        else:\n",
        "        if True:\n",
        "a batch in flight counts as delivered after the index was made to forget it: its blocks "
        "are missing there for good",
        (RESYNC + "test_a_resync_during_a_call_counts_the_delivered_batch",),
    ),
    Mutation(
        "resync_of_a_set_begins_with_nothing",
        "flush_notifier/sinks/attention_store.py",
        "    repeats = True\n",
        "    repeats = False\n",
        "AttentionStore's index is sent resident blocks as gone, for as long as it takes to send "
        "everything again",
        (RESYNC + "test_attention_store_is_never_short_of_a_resident_block",),
    ),
    Mutation(
        "repeated_blocks_are_taken_for_delivered",
        "flush_notifier/sink_view.py",
        "                tree.version += 1\n                self.doubt(block)\n",
        "                tree.version += 1\n",
        "an index that lost its state is sent nothing",
        (RESYNC + "test_an_index_that_lost_its_state_has_everything_after_a_resync",),
    ),
    Mutation(
        "a_slow_repetition_floods",
        "flush_notifier/deliveries.py",
        "        if self.repeat_due and self.view.pending < self._config.batch:\n",
        "        if self.repeat_due:\n",
        "the repetition goes on while the sink takes nothing: everything is pending at once",
        (RESYNC + "test_a_slow_repetition_waits_until_the_sink_has_taken_a_batch",),
    ),
    Mutation(
        "resync_answers_before_it_is_delivered",
        "flush_notifier/sink_set.py",
        "            self.waiters.add(envelope, (delivery,))\n",
        "            self.waiters.add(envelope, ())\n",
        "resync returns before the index has everything",
        (RESYNC + "test_an_index_that_lost_its_state_has_everything_after_a_resync",),
    ),
    Mutation(
        "numbers_begin_again_at_zero",
        "flush_notifier/sinks/kv_events.py",
        '    if numbers == "from_zero":\n        return 0\n    now',
        '    if numbers != "":\n        return 0\n    now',
        "after a restart Dynamo passes over every batch up to the last number of the process "
        "before: its blocks stay there for good",
        (TESTS + "test_numbers_of_a_new_process_go_on_above_those_of_the_one_before",),
    ),
    Mutation(
        "replay_begins_later_than_asked",
        "flush_notifier/sinks/kv_replay.py",
        "                number = await self._send_state(answer, number)\n                "
        "continue\n",
        "                number = window.first\n                continue\n",
        "a reader that lacks more than the window stays wrong for good: it misses removals, or "
        "has no older blocks",
        (TESTS + "test_a_request_for_more_than_is_kept_begins_where_it_asks_and_is_the_state",),
    ),
    Mutation(
        "state_is_the_ledgers_view",
        "flush_notifier/sinks/kv_state.py",
        "            tiers = changes.tiers(held) & ALL_TIERS.value\n",
        "            tiers = held.tiers & ALL_TIERS.value\n",
        "a replay repeats or lacks events published while the ledger was read: llm-d counts a "
        "block twice and never removes it",
        (TESTS + "test_the_state_has_the_last_published_batch_before_the_ledger_counts_it",),
    ),
    Mutation(
        "a_change_after_the_number_is_in_the_state",
        "flush_notifier/sinks/kv_state.py",
        "                    here = resident is holds\n",
        "                    here = resident\n",
        "an event published while a state is made is in it, and is sent once more after it",
        (TESTS + "test_changes_are_looked_at_in_steps",),
    ),
    Mutation(
        "replay_is_not_filled_up",
        "flush_notifier/sinks/kv_replay.py",
        "        fill = room - parts if publisher.fill and room - parts <= FILL else 0\n",
        "        fill = 0\n",
        "an llm-d router that starts late refuses the replay and has no blocks of this node",
        (TESTS + "test_a_request_for_more_than_is_kept_begins_where_it_asks_and_is_the_state",),
    ),
    Mutation(
        "rising_numbers_are_filled_up",
        "flush_notifier/sinks/kv_stream.py",
        '        self.fill = config.numbers == "from_zero"\n',
        "        self.fill = True\n",
        "a reader that asks after a restart is sent an empty batch for every microsecond in "
        "between",
        (TESTS + "test_numbers_that_rise_are_not_filled_up",),
    ),
    Mutation(
        "window_forgets_what_follows_a_state",
        "flush_notifier/sinks/kv_replay.py",
        "            if self._next - len(kept) >= self.needed and self._has_place():\n                "
        "return\n",
        "",
        "under load a state is old before its reader has it, and is made again and again",
        (TESTS + "test_a_window_keeps_the_events_after_a_state_within_bounds",),
    ),
    Mutation(
        "a_state_is_kept_for_good",
        "flush_notifier/sinks/kv_stream.py",
        "        if not self._readers:\n            self.states.release()\n",
        "        if not self._readers:\n",
        "the encoded state stays in memory after its last reader, and the window keeps everything "
        "after it",
        (TESTS + "test_a_state_is_dropped_when_no_reader_needs_it",),
    ),
    Mutation(
        "readers_that_take_nothing_keep_their_turn",
        "flush_notifier/sinks/kv_replay.py",
        "            slow = self._slowest()\n",
        "            slow = None\n",
        "readers that connect and take nothing keep all others waiting",
        (TESTS + "test_any_number_of_readers_at_once_and_readers_that_take_nothing",),
    ),
    Mutation(
        "every_interface_in_long_form_is_not_recognised",
        "zmq_endpoint.py",
        '        return self.transport == "tcp" and (\n'
        '            self.host == "*" or (address is not None and address.is_unspecified)\n'
        "        )\n",
        '        return self.transport == "tcp" and self.host in ("*", "0.0.0.0", "::")\n',
        "a publisher that listens at tcp://[0::0] on every interface logs no warning, or connects "
        "there",
        (
            "tests/flush_notifier/test_kv_exposure.py::test_endpoints_that_every_interface_listens_at",
        ),
    ),
    Mutation(
        "silence_when_idle",
        "flush_notifier/sinks/kv_events.py",
        "            if stream.first < stream.sequence == number:\n",
        "            if stream.first == stream.sequence == number:\n",
        "a router that starts while nothing changes has no blocks of this node",
        (TESTS + "test_an_idle_publisher_sends_heartbeats",),
    ),
    Mutation(
        "a_cancelled_call_is_published_again",
        "flush_notifier/sinks/kv_events.py",
        "                self.num_acknowledged = done\n",
        "",
        "events that a call published before its time was over are published again: llm-d counts "
        "them twice",
        (TESTS + "test_a_cancelled_call_counts_its_published_events",),
    ),
)
