"""Planted bugs of long turns: work on very many blocks in one turn. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

COMMIT = "tests/cache/test_commit_in_parts.py"
CLEAR = "tests/prefix_index/test_clear_in_slices.py"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "clear_returns_every_block_in_its_turn",
        "prefix_index/index.py",
        "        self.returning += unused\n        self.retired.append(self.tree)\n",
        "        self.returning += unused\n        self.retired.append(self.tree)\n        "
        "self.bring_back(unused)\n",
        "a clear of very many blocks keeps the loop until the last of them is free",
        (
            f"{CLEAR}::test_the_turn_of_a_clear_returns_nothing_and_later_turns_return_a_bounded_number_of_blocks",
        ),
    ),
    Mutation(
        "blocks_of_a_cleared_tree_do_not_count",
        "prefix_index/index.py",
        "        return self.pool.free + returning - self.reserved\n",
        "        return self.pool.free - self.reserved\n",
        "a request just after a clear gets NoRoom although nothing is in use",
        (f"{CLEAR}::test_a_request_gets_blocks_of_a_clear_at_once_and_no_more_than_it_needs",),
    ),
    Mutation(
        "a_request_brings_back_everything",
        "prefix_index/index.py",
        "            self.bring_back(count - self.pool.free)\n",
        "            self.bring_back(self.returning)\n",
        "the first small request after a clear keeps the loop until the last block is free",
        (f"{CLEAR}::test_a_request_gets_blocks_of_a_clear_at_once_and_no_more_than_it_needs",),
    ),
    Mutation(
        "a_sweep_does_not_go_on",
        "prefix_index/sweeps.py",
        """\
        self._index.sweep()
        return self.later()
""",
        """\
        self._index.sweep()
        return []
""",
        "after its first step a sweep frees nothing more of a cleared tree, and its memory stays",
        (
            f"{CLEAR}::test_the_turn_of_a_clear_returns_nothing_and_later_turns_return_a_bounded_number_of_blocks",
        ),
    ),
    Mutation(
        "memory_of_a_cleared_tree_is_kept",
        "prefix_index/index.py",
        "        return self.returning > 0 or any(tree.idle for tree in self.retired)\n",
        "        return self.returning > 0\n",
        "every clear leaves a tree behind",
        (f"{CLEAR}::test_the_memory_of_a_tree_goes_when_its_last_lease_has_ended",),
    ),
    Mutation(
        "commit_of_any_number_of_blocks_in_one_turn",
        "lease_hold.py",
        "            while upto + part < computed:",
        "            while False:",
        "a commit of a million blocks keeps the loop until the last of them is in the tree",
        (f"{COMMIT}::test_no_message_commits_more_blocks_than_a_turn_may_take",),
    ),
    Mutation(
        "commit_beyond_the_tokens_happens_in_part",
        "lease_hold.py",
        "        if computed > min(num_tokens, path.num_blocks * path.block_size):\n"
        "            return True\n",
        "",
        "a commit that is refused has committed its first parts",
        (f"{COMMIT}::test_a_commit_that_is_refused_changes_nothing",),
    ),
    Mutation(
        "lease_goes_on_after_a_part_of_a_cancelled_commit",
        "lease_hold.py",
        "            if path.num_committed > before:\n                self.give_up()  # "
        "some of it has happened\n",
        "",
        "a cancelled call has happened in part, and the lease does not raise",
        (
            f"{COMMIT}::test_a_commit_cancelled_between_its_parts_ends_the_lease_and_keeps_the_parts",
        ),
    ),
    Mutation(
        "an_answered_call_counts_until_its_caller_has_run",
        "actor/ref.py",
        "        return sum(not reply.done() for reply in self.open)\n",
        "        return len(self.open)\n",
        "check() reports an unanswered call that has its answer, on a cache that works",
        (
            "tests/observe/test_invariants.py::test_nothing_is_reported_in_any_iteration_of_the_loop",
            "tests/actor/test_open_asks.py",
        ),
    ),
)
