"""Planted bugs: block tables, media of later turns, commits with an event."""

from __future__ import annotations

from mutation import Mutation

TABLES = "tests/prefix_index/test_tables.py::"
CACHE = "tests/cache/test_block_tables.py::"
STEPS = "tests/cache/test_steps.py::"
STREAMS = "tests/data_plane/test_stream_waits.py::"
EVENTS = "tests/cache/test_device_events.py::"
PASSES = "tests/cache/test_passes.py::"

BUGS = (
    Mutation(
        "committed_tokens_are_dropped",
        "prefix_index/tables.py",
        "        if kept < committed:\n",
        "        if False:\n",
        "a truncate of committed tokens makes the index fail",
        (CACHE + "test_committed_tokens_are_not_dropped",),
    ),
    Mutation(
        "tokens_of_a_load_are_dropped",
        "prefix_index/tables.py",
        "        if lease.loads:\n",
        "        if False:\n",
        "a truncate gives back blocks that a copy writes into",
        (TABLES + "test_a_truncate_of_tokens_that_load_is_refused",),
    ),
    Mutation(
        "extra_key_of_a_dropped_item_stays",
        "extra_keys.py",
        "if item[1] < num_tokens)",
        "if item)",
        "tokens after a rejected media item have another hash than in one request",
        (CACHE + "test_media_of_a_later_turn_have_the_identity_of_one_request",),
    ),
    Mutation(
        "media_of_a_later_turn_replace_those_before",
        "prefix_index/tables.py",
        "path.extra_key(block) + extra)",
        "extra)",
        "a block with media of two turns is found for another first image",
        (CACHE + "test_media_of_a_later_turn_have_the_identity_of_one_request",),
    ),
    Mutation(
        "offsets_of_later_media_count_from_the_prompt",
        "arguments.py",
        "    positions = tuple((position + offset, length) for offset, length, _ in items)\n"
        "    blocks = -(",
        "    positions = tuple((offset, length) for offset, length, _ in items)\n    blocks = -(",
        "media of a later turn are in the hashes of other blocks",
        (CACHE + "test_media_of_a_later_turn_have_the_identity_of_one_request",),
    ),
    Mutation(
        "freed_blocks_are_not_offered",
        "prefix_index/tables.py",
        "        return actions + self._admission.serve_waiting() if freed else actions\n",
        "        return actions\n",
        "a request waits for blocks that a truncate has freed",
        (TABLES + "test_freed_blocks_go_to_the_request_that_waits",),
    ),
    Mutation(
        "all_blocks_of_a_truncate_in_one_turn",
        "prefix_index/tables.py",
        "        if len(freed) > self._index.part:\n",
        "        if False:\n",
        "a truncate of a million blocks keeps the loop until all of them are free",
        (TABLES + "test_very_many_blocks_are_given_back_in_parts",),
    ),
    Mutation(
        "reserve_counts_from_the_table",
        "lease.py",
        "Reserve(self._hold.id, self.num_tokens, self.num_tokens + count)",
        "Reserve(self._hold.id, self.num_tokens, len(self._table) * 4 + count)",
        "reserved blocks pile up with every step of a speculation",
        (CACHE + "test_reserved_blocks_are_used_by_the_next_tokens_and_given_back",),
    ),
    Mutation(
        "truncate_between_the_parts_of_a_commit",
        "lease_hold.py",
        "        if any(message.num_tokens < computed for computed in self.committing):\n",
        "        if False:\n",
        "a commit of very many tokens is refused after it has happened in part",
        (CACHE + "test_a_truncate_between_the_parts_of_a_commit_is_refused",),
    ),
    Mutation(
        "blocks_are_shared_before_their_event",
        "lease.py",
        "            await hold.wait_event(event, stream, computed, self.num_tokens, at)\n"
        "        if computed",
        "            hold.client.events  # noqa: B018\n        if computed",
        "a request hits blocks that the device has not computed yet",
        (EVENTS + "test_blocks_are_shared_only_after_their_event",),
    ),
    Mutation(
        "tokens_of_a_waiting_commit_are_dropped",
        "lease_hold.py",
        "        self.committing.append(computed)\n        try:\n            await self.client.wait_device",
        "        self.committing.append(0)\n        computed = 0\n        try:\n"
        "            await self.client.wait_device",
        "a commit that waits for its event shares tokens that came in place of the computed ones",
        (EVENTS + "test_tokens_of_a_commit_that_waits_are_not_dropped",),
    ),
    Mutation(
        "abandoned_blocks_are_free_during_a_pass",
        "client.py",
        "        if not (self.is_open and self.events.passes_of(lease)):\n",
        "        if True:\n",
        "a request gets blocks that the pass of a cancelled request still writes",
        (PASSES + "test_blocks_of_a_pass_are_not_given_to_others_before_its_end",),
    ),
    Mutation(
        "a_lease_finishes_during_its_pass",
        "lease_hold.py",
        "            if ends:\n",
        "            if False:\n",
        "a request gets blocks that the pass of a finished request still writes",
        (PASSES + "test_blocks_of_a_pass_are_not_given_to_others_before_its_end",),
    ),
    Mutation(
        "a_truncate_drops_blocks_during_a_pass",
        "lease_hold.py",
        "            if drops_blocks and self.client.events.passes:\n",
        "            if False:\n",
        "a request gets blocks that a pass still writes rejected drafts to",
        (PASSES + "test_blocks_of_a_pass_are_not_given_to_others_before_its_end",),
    ),
    Mutation(
        "a_failed_event_counts_as_completed",
        "device_events.py",
        "                    waiter.set_exception(_failed(failure.__cause__ or failure))\n",
        "                    waiter.set_result(None)\n",
        "blocks of a failed computation are shared",
        (EVENTS + "test_a_failed_event_shares_nothing_and_the_lease_goes_on",),
    ),
    Mutation(
        "events_of_gone_waiters_are_queried_for_ever",
        "device_events.py",
        "                del self._waiting[id(event)]\n\n\n",
        "                return\n\n\n",
        "every late event costs queries until the process ends",
        (EVENTS + "test_an_event_has_a_deadline",),
    ),
    Mutation(
        "a_future_of_the_caller_is_cancelled",
        "device_events.py",
        "            if not task.done() and task is not awaitable:\n",
        "            if not task.done():\n",
        "a deadline cancels a future that others wait for",
        (EVENTS + "test_an_event_has_a_deadline",),
    ),
    Mutation(
        "a_cancelled_step_stays_in_effect",
        "steps.py",
        "            if outcome is not None and outcome.error is None:\n",
        "            if False:\n",
        "leases go on with tokens that their caller does not have",
        (STEPS + "test_a_step_cancelled_anywhere_did_not_happen_or_ended_each_lease",),
    ),
    Mutation(
        "a_step_commits_what_loads",
        "prefix_index/steps.py",
        " or lease.loads else lease.path",
        " else lease.path",
        "a step that is refused has extended its lease",
        (STEPS + "test_an_error_concerns_its_lease_alone",),
    ),
    Mutation(
        "a_step_commits_after_its_extend_alone",
        "steps.py",
        "await hold.commit_in_parts(path, min(computed, position), position, at)",
        "pass",
        "a step whose commit is refused has extended its lease",
        (STEPS + "test_an_error_concerns_its_lease_alone",),
    ),
    Mutation(
        "a_step_keeps_no_call_out",
        "steps.py",
        '            hold.changing = "step"\n',
        "            pass\n",
        "a call during a step changes the tokens that the step's media and commit are counted from",
        (STEPS + "test_no_call_slips_in_during_a_step",),
    ),
    Mutation(
        "a_stream_does_not_wait_for_blocks_elsewhere",
        "data_plane/cuda/engine.py",
        "        if missing.difference(*(op.blocks for op in loads)):\n            return False\n",
        "",
        "an engine computes on blocks that are still read from storage",
        (STREAMS + "test_a_stream_does_not_wait_for_blocks_that_no_copy_brings",),
    ),
    Mutation(
        "a_stream_waits_for_the_first_layers_only",
        "data_plane/cuda/engine.py",
        "stream, op.events[group], 0)\n        return True\n\n    def check_streams",
        "stream, op.events[0], 0)\n        return True\n\n    def check_streams",
        "an engine computes on layers that have not arrived",
        (STREAMS + "test_a_stream_waits_for_the_layer_of_each_copy",),
    ),
)
