"""Planted bugs of block tree, loads and host tier. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

MACHINE = "tests/prefix_index/test_index_machine.py"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "lost_load_is_joined",
        "prefix_index/index.py",
        "if load is None or load.lost:",
        "if load is None:",
        "a request joins a load that stalled: it computes into blocks that a copy may still write, and its commit fails the index",
        (f"{MACHINE}::test_a_request_that_waits_for_room_does_not_join_a_load_that_stalled_meanwhile",),
    ),
    Mutation(
        "load_answered_before_its_blocks_stays_with_its_lease",
        "prefix_index/transfers.py",
        "                load.owner.ops.remove(load)\n                load.owner.hoped = min(load.owner.hoped, load.start)\n            return\n",
        "                load.owner.hoped = min(load.owner.hoped, load.start)\n            return\n",
        "a load that the host tier refuses before it is placed is placed later, and nothing answers it",
        (f"{MACHINE}::test_a_load_answered_before_it_is_placed_is_a_miss",),
    ),
    Mutation(
        "blocks_of_a_shared_load_given_back",
        "prefix_index/transfers.py",
        "                lease.tree.replace(lease.path, position, -1)\n",
        "                pass\n",
        "a request that found no blocks in place of a failed load's gives back those of the load",
        (f"{MACHINE}::test_blocks_of_a_load_are_never_given_back_by_a_request_that_found_no_room",),
    ),
    Mutation(
        "commit_error_fails_the_index",
        "prefix_index/actor.py",
        '        except ValueError as error:\n            self.log.error("commit',
        '        except ZeroDivisionError as error:\n            self.log.error("commit',
        "a lease that the block tree refuses fails the index for every request",
        (f"{MACHINE}::test_a_commit_that_the_tree_refuses_ends_that_lease_alone",),
    ),
)
