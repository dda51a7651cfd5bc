"""Planted bugs of the eviction policy RETAIN. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

TESTS = "tests/prefix_index/test_policy.py"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "blocks_do_not_age",
        "prefix_index/policy.py",
        """\
        if self.tables is not None:
            tree.advance(self._clock())

""",
        "\n",
        "a request is matched at the time of the last end of another one, so blocks return at the "
        "wrong age",
        (f"{TESTS}::test_the_tree_is_given_the_time_before_a_match_and_before_an_end",),
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
        "    return TierPolicies(tables, now if clock is None else clock)\n",
        "    return TierPolicies(tables, now)\n",
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
        "        lease.prompt_tokens = lease.path.num_tokens\n",
        "",
        "every prompt counts as output",
        (f"{TESTS}::test_the_output_is_what_was_added_or_what_the_caller_gives",),
    ),
    Mutation(
        "ends_do_not_reach_the_policy",
        "prefix_index/endings.py",
        "        self._index.policy.end(tree, path, lease.output())\n",
        "",
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
)
