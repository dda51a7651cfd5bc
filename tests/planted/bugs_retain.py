"""Planted bugs of the eviction policy RETAIN. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

TESTS = "tests/prefix_index/test_policy.py"
HOST_VICTIMS = "tests/prefix_index/test_host_victims.py"
POLICIES = "tests/cpu_evictor/test_policy.py"
MODEL = "tests/support/retain_model.py"
MODELLED = "tests/native/test_retain.py::test_it_evicts_what_the_model_evicts"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "blocks_do_not_age",
        "prefix_index/policy.py",
        """\
        if self.tables is not None:
            tree.advance(self.now())

""",
        "\n",
        "a request is matched at the time of the last end of another one, so blocks return at the "
        "wrong age",
        (f"{TESTS}::test_the_tree_is_given_the_time_before_a_match_and_before_an_end",),
    ),
    Mutation(
        "retain_begins_at_once",
        "prefix_index/policy.py",
        "LifeTables(first=FIRST)",
        "LifeTables()",
        "the first victims after a start are chosen by next to no observations",
        (
            "tests/cache/test_tier_policies.py::test_the_first_requests_after_a_start_are_evicted_by_lru",
        ),
    ),
    Mutation(
        "long_requests_match_in_the_past",
        "prefix_index/long_requests.py",
        "        index.policy.advance(tree)\n",
        "",
        "a long request is matched at the time of the last end of another one",
        (f"{TESTS}::test_every_match_comes_with_the_time",),
    ),
    Mutation(
        "ages_by_the_loops_clock",
        "prefix_index/policy.py",
        "    clock = now if clock is None else clock\n",
        "    clock = now\n",
        "a replay learns the speed of the replay instead of the times of its trace",
        (f"{TESTS}::test_ages_are_those_of_the_given_clock",),
    ),
    Mutation(
        "output_of_the_caller_ignored",
        "prefix_index/endings.py",
        "        lease.output_tokens = message.output_tokens\n",
        "",
        "the number of output tokens that an engine passes to finish has no effect",
        (f"{TESTS}::test_the_output_is_what_was_added_or_what_the_caller_gives",),
    ),
    Mutation(
        "prompt_counted_as_output",
        "prefix_index/leases.py",
        "        self._leases[lease.id] = lease\n        lease.granted, lease.prompt_tokens = True, tokens\n        if self._preempted",
        "        self._leases[lease.id] = lease\n        lease.granted = True\n        if self._preempted",
        "every prompt counts as output",
        (f"{TESTS}::test_the_output_is_what_was_added_or_what_the_caller_gives",),
    ),
    Mutation(
        "ends_do_not_reach_the_policy",
        "prefix_index/endings.py",
        "            policy.end(lease.tree, lease.path, lease.output(), lease.hints)\n",
        "            pass\n",
        "the policy learns nothing, and every block is a stray one to it",
        (f"{TESTS}::test_every_end_of_a_lease_reaches_the_policy",),
    ),
    Mutation(
        "clear_forgets_the_policy",
        "prefix_index/index.py",
        "    make = index.policy.tree\n",
        "    make = TierPolicies().tree\n",
        "after a clear of the cache its policy is LRU",
        (f"{TESTS}::test_a_clear_keeps_what_was_learned",),
    ),
    Mutation(
        "replay_in_wall_time",
        "scenario/replay.py",
        "        clock.at = request.timestamp\n",
        "",
        "a sequential replay serves every request at one instant",
        ("tests/scenario/test_replay.py::test_retain_learns_in_the_time_of_the_trace",),
    ),
    Mutation(
        "victims_of_the_host_not_named",
        "prefix_index/evictions.py",
        "[*self._victims.before(self.blocks_being_freed), offload]",
        "[offload]",
        "an exclusive host tier evicts the least recently used blocks under RETAIN too",
        (f"{HOST_VICTIMS}::test_an_offload_to_a_full_host_tier_comes_with_victims",),
    ),
    Mutation(
        "copies_in_flight_not_counted",
        "prefix_index/host_victims.py",
        "tree.host_kept(self._exclusive) + incoming",
        "tree.host_kept(self._exclusive)",
        "victims are named after the host tier had to choose its own ones",
        (f"{HOST_VICTIMS}::test_an_offload_to_a_full_host_tier_comes_with_victims",),
    ),
    Mutation(
        "named_victims_evicted_though_used",
        "cpu_evictor/slots.py",
        "        if self._chosen:\n",
        "        if not self._chosen:\n",
        "a block that was named as a victim is evicted first although it was used since",
        (f"{POLICIES}::test_a_victim_that_is_used_again_is_not_evicted_first",),
    ),
    Mutation(
        "victims_that_stay_are_candidates_twice",
        "cpu_evictor/slots.py",
        "            if block.hash not in tried:\n",
        "            if True:\n",
        "one block is evicted twice by one eviction",
        (f"{POLICIES}::test_every_block_is_a_candidate_once",),
    ),
    Mutation(
        "chosen_victims_tried_again",
        "cpu_evictor/slots.py",
        "chosen.popitem(last=False)",
        "next(item for item in chosen.items() if item[0] not in tried)",
        "victims that cannot be evicted are tried again by every eviction",
        (f"{POLICIES}::test_a_victim_that_cannot_be_evicted_is_tried_once",),
    ),
    Mutation(
        "sessions_never_end",
        "prefix_index/policy.py",
        "hints.session_ends, later)",
        "False, later)",
        "the hint that a session ends has no effect",
        (f"{TESTS}::test_hints_of_a_return_reach_the_tree",),
    ),
    Mutation(
        "hints_not_passed_on",
        "prefix_index/endings.py",
        "lease.output(), lease.hints)",
        "lease.output())",
        "no hint of a return has an effect",
        (f"{TESTS}::test_hints_reach_the_policy_and_those_of_the_end_replace_the_first",),
    ),
    Mutation(
        "guard_of_a_new_cache_is_generous",
        MODEL,
        "    INITIAL, GRANTED = 4.0, 0.0013",
        "    INITIAL, GRANTED = 16.0, 0.0013",
        "a new cache may lose more than a few blocks, and the native guard differs from the model",
        (MODELLED,),
    ),
    Mutation(
        "no_choice_outside_the_shadow",
        MODEL,
        "if edge is not None and one.order < edge.order]",
        "if False]",
        "while the limit is reached, the blocks that LRU no longer has leave in the order of LRU",
        (MODELLED,),
    ),
)
