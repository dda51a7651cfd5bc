"""Planted bugs of the Mooncake back end and the fleet's scenario. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

RULES = "tests/storage/test_mooncake_rules.py"
FLEET = "tests/scenario/test_fleet.py"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "mooncake_warm_up_result_is_dropped",
        "storage/backends/mooncake_client.py",
        """\
            check_result(code, self.config.master_server_address)
""",
        "",
        "a pool that stores nothing is found at the first write only",
        (f"{RULES}::test_a_pool_that_stores_nothing_fails_at_start_and_is_left",),
    ),
    Mutation(
        "mooncake_full_pool_keeps_a_node_out",
        "storage/backends/mooncake_warm_up.py",
        """\
    if code == NO_SPACE:
""",
        """\
    if code == NO_SPACE and not master:
""",
        "no node can start while the pool is full",
        (f"{RULES}::test_a_full_pool_does_not_keep_a_node_from_starting",),
    ),
    Mutation(
        "mooncake_warm_up_is_not_tried_again",
        "storage/backends/mooncake_client.py",
        """\
                if code in (OK, NO_SPACE) or anyio.current_time() + RETRY > until:
                    break
""",
        """\
                break
""",
        "a node does not start while the master still places objects on one that has ended",
        (f"{RULES}::test_a_put_that_reaches_a_node_that_has_ended_is_tried_again",),
    ),
    Mutation(
        "mooncake_warm_up_stays_in_the_pool",
        "storage/backends/mooncake_warm_up.py",
        """\
    store.remove(name, True)
""",
        "",
        "every start of a node leaves an object in the pool",
        (f"{RULES}::test_the_first_object_is_put_read_and_removed",),
    ),
    Mutation(
        "mooncake_pieces_cut_slots",
        "storage/backends/mooncake_registration.py",
        """\
    step = largest // stride * stride
""",
        """\
    step = largest
""",
        "a transfer crosses two registrations, which RDMA refuses",
        (
            f"{RULES}::test_pieces_hold_whole_slots",
            f"{RULES}::test_an_arena_is_registered_in_pieces_and_moves_whole",
        ),
    ),
    Mutation(
        "mooncake_refused_registration_leaves_the_others",
        "storage/backends/mooncake_registration.py",
        """\
                await self.remove()
                raise StoreError(
""",
        """\
                raise StoreError(
""",
        "memory of an arena that the back end does not use stays registered",
        (f"{RULES}::test_a_refused_piece_is_an_error_and_the_others_are_taken_back",),
    ),
    Mutation(
        "mooncake_closes_without_an_elected_master",
        "storage/backends/mooncake_client.py",
        """\
            return int(self._store.batch_is_exist([PREFIX])[0]) >= 0
""",
        """\
            return bool(self._store.batch_is_exist([PREFIX]))
""",
        "closing blocks the interpreter for half a minute while no master is elected",
        (f"{RULES}::test_a_pool_whose_master_is_gone_is_not_left",),
    ),
    Mutation(
        "mooncake_asks_one_server_of_an_election",
        "storage/backends/mooncake_client.py",
        """\
    for host, port in servers:
""",
        """\
    for host, port in servers[:1]:
""",
        "a node does not start while one of several etcd servers is down",
        (f"{RULES}::test_any_server_of_an_election_will_do",),
    ),
    Mutation(
        "placement_counts_blocks_behind_a_missing_one",
        "scenario/fleet/placement.py",
        """\
        else:
            break
""",
        "",
        "a prompt goes to a node that must compute all of it",
        (f"{FLEET}::test_a_prompt_goes_where_the_fewest_tokens_are_missing",),
    ),
)
