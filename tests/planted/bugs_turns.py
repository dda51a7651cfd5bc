"""Planted bugs of long turns: work on very many blocks that one turn does, or that goes wrong
between two. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

TURNS = "tests/prefix_index/test_turns.py::"
WALKS = "tests/prefix_index/test_index_machine.py::test_long_walks_through_every_order"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "long_path_released_in_one_turn",
        "prefix_index/index.py",
        """\
        for keep in range(blocks - self.part, 0, -self.part):
""",
        """\
        for keep in range(0):
""",
        "the end of a request of a million blocks keeps the loop until the last of them is free",
        (TURNS + "test_no_turn_handles_more_blocks_than_a_part",),
    ),
    Mutation(
        "finish_announces_in_one_turn",
        "prefix_index/endings.py",
        """\
                if start:
                    yield actions
                    actions = []
""",
        "",
        "the finish of a request of a million blocks keeps the loop until all are announced",
        (TURNS + "test_no_turn_handles_more_blocks_than_a_part",),
    ),
    Mutation(
        "announcement_of_any_number_of_blocks",
        "prefix_index/announcements.py",
        """\
        ranges = ((start, stop),) if stop - start <= part else parts(start, stop, part)
""",
        """\
        ranges = ((start, stop),)
""",
        "one message carries the tokens of a million blocks",
        (WALKS,),
    ),
    Mutation(
        "changes_overtake_the_announcement_of_everything",
        "prefix_index/announcements.py",
        """\
        if self._walk is None:
            return list(messages)
""",
        """\
        if True:
            return list(messages)
""",
        "after a restart of the notifier blocks are announced before their parents, and never get "
        "a path",
        (TURNS + "test_changes_during_a_full_announcement_are_sent_after_it",),
    ),
    Mutation(
        "hints_of_before_a_restart_stay",
        "prefix_index/core.py",
        """\
        actions += next_part(self._sweep_host(self.index.tree))
""",
        "",
        "after a restart of the host tier the tree keeps the blocks that only the host held",
        (WALKS,),
    ),
    Mutation(
        "path_released_before_all_parts_are_saved",
        "prefix_index/saves.py",
        "        return not self.parts\n",
        "        return True\n",
        "a block is overwritten while its copy to the host or to the store is still made",
        (WALKS,),
    ),
    Mutation(
        "long_work_keeps_requests_waiting",
        "actor/channel.py",
        "        if self._later and (self._later_next or not self._data):\n",
        "        if self._later:\n",
        "requests wait until work on a million blocks is over, although it is done in parts",
        ("tests/actor/test_channel.py::test_an_actors_own_work_and_the_data_lane_take_turns",),
    ),
    Mutation(
        "reserved_blocks_are_free_for_others",
        "prefix_index/index.py",
        "        return self.pool.free + returning - self.reserved\n",
        "        return self.pool.free + returning\n",
        "a request that comes between two parts of a long one gets its blocks, and PrefixIndex "
        "fails",
        (WALKS, TURNS + "test_a_request_cancelled_between_two_parts_leaves_nothing"),
    ),
    Mutation(
        "blocks_of_forgotten_scopes_are_not_reported",
        "prefix_index/announcements.py",
        "                messages.append(BlocksAdded(hashes, Tier.DEVICE, reason))\n",
        "",
        "an index is not sent that a block it has came back to the device",
        (TURNS + "test_a_block_that_comes_back_is_reported_although_its_scope_was_forgotten",),
    ),
    Mutation(
        "long_request_does_not_notice_a_clear",
        "prefix_index/long_requests.py",
        """\
        return (
            not envelope.abandoned
            and not is_past(tree, message.path)
            and message.path.root == self._roots.root(message.scope)
        )
""",
        """\
        return not envelope.abandoned and message.path.root == self._roots.root(message.scope)
""",
        "a long request that was being admitted hits cleared blocks",
        (
            TURNS
            + "test_a_request_between_two_parts_does_not_hit_cleared_blocks_or_those_of_another_namespace",
        ),
    ),
    Mutation(
        "long_request_does_not_notice_a_namespace",
        "prefix_index/long_requests.py",
        """\
        return (
            not envelope.abandoned
            and not is_past(tree, message.path)
            and message.path.root == self._roots.root(message.scope)
        )
""",
        """\
        return not envelope.abandoned and not is_past(tree, message.path)
""",
        "a long request that was being admitted hits blocks computed with other weights",
        (
            TURNS
            + "test_a_request_between_two_parts_does_not_hit_cleared_blocks_or_those_of_another_namespace",
        ),
    ),
    Mutation(
        "long_request_is_admitted_in_one_turn",
        "prefix_index/requests.py",
        """\
        if needed > self._index.part:
""",
        """\
        if False:
""",
        "a request of a million blocks keeps the loop until it has all of them",
        (TURNS + "test_a_long_request_is_admitted_in_parts_whether_it_hits_or_must_evict",),
    ),
    Mutation(
        "evictions_of_any_number_of_blocks",
        "prefix_index/evictions.py",
        """\
        op = self._index.evict(min(wanted, part), next(self._ops), salt, incoming)
""",
        """\
        op = self._index.evict(wanted, next(self._ops), salt, incoming)
""",
        "a request of a million blocks evicts as many in one turn",
        (TURNS + "test_a_long_request_is_admitted_in_parts_whether_it_hits_or_must_evict",),
    ),
    Mutation(
        "joined_load_is_searched_for_each_block",
        "prefix_index/index.py",
        "self.loading.get(path.blocks(stop, stop + 1)[0]) is load",
        "path.blocks(stop, stop + 1)[0] in load.blocks",
        "a request that joins a load of very many blocks keeps the loop for the square of their "
        "number",
        (TURNS + "test_joining_a_long_load_takes_a_look_at_each_block",),
    ),
    Mutation(
        "parts_of_a_commit_after_close",
        "lease_hold.py",
        "                self.client.check()\n",
        "",
        "a commit of very many blocks goes on after the cache was closed between two of its parts",
        (
            "tests/cache/test_commit_in_parts.py::test_a_commit_in_parts_ends_when_the_cache_is_closed",
        ),
    ),
    Mutation(
        "names_of_a_tier_are_listed_in_one_step",
        "observe/invariants.py",
        "            for page in pages(names()):\n",
        "            for page in pages(keys()):\n",
        "a check of a store of millions of blocks keeps the loop until all are listed",
        (
            "tests/observe/test_invariants.py::test_no_step_looks_at_more_names_of_a_tier_than_a_page",
        ),
    ),
    Mutation(
        "names_that_change_end_a_check",
        "observe/invariants.py",
        "        except RuntimeError:  # they have changed\n            continue\n",
        "        except RuntimeError:  # they have changed\n            pass\n",
        "blocks that a tier holds count as differing, because others came while they were listed",
        (
            "tests/observe/test_invariants.py::test_names_that_change_while_they_are_gathered_are_gathered_again",
        ),
    ),
)
