"""Planted bugs of ranks in other processes: who may join, what they may send, and what their stores
hold. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

SIMULATED = "tests/ranks/test_ranks_simulated.py::"
POOL = "tests/ranks/test_ranks_shared_pool.py::"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "a_rank_tells_of_every_miss_again",
        "data_plane/ranks/store.py",
        "        return self._without_checksum - before\n",
        "        return self._without_checksum\n",
        "the leader counts each object without a checksum once more with every answer",
        (f"{POOL}test_objects_without_checksums_are_counted_by_the_leader",),
    ),
    Mutation(
        "the_leader_adds_up_the_misses_of_ranks",
        "data_plane/ranks/store.py",
        "        self.counters.without_checksum += max(\n",
        "        self.counters.without_checksum += sum(\n",
        "a block without checksums counts once for each rank",
        (f"{POOL}test_objects_without_checksums_are_counted_by_the_leader",),
    ),
    Mutation(
        "proof_of_a_rank_not_compared",
        "data_plane/ranks/entrance.py",
        'if not hmac.compare_digest(proof.mac, mac(secret, b"rank", hello.nonce, nonce)):',
        'if not hmac.compare_digest(proof.mac, proof.mac) and mac(secret, b"rank", hello.nonce, nonce):',
        "every process that can connect joins as a rank",
        (
            "tests/ranks/test_rank_security.py::test_a_rank_with_another_secret_or_none_is_refused_and_nothing_changes",
        ),
    ),
    Mutation(
        "proof_of_a_leader_not_compared",
        "data_plane/ranks/entrance.py",
        'if not hmac.compare_digest(proof.mac, mac(secret, b"leader", nonce, challenge.nonce)):',
        "if not hmac.compare_digest(proof.mac, proof.mac):",
        "a rank hands its store to any process that listens at the endpoint",
        ("tests/ranks/test_rank_security.py::test_a_leader_with_another_secret_is_not_served",),
    ),
    Mutation(
        "large_messages_before_the_proof",
        "data_plane/ranks/entrance.py",
        '    the other end (`refuse`). The reason is empty if the other end has the secret."""\n'
        "    connection.limit = UNPROVEN_BYTES\n",
        '    the other end (`refuse`). The reason is empty if the other end has the secret."""\n'
        "    connection.limit = MOST_BYTES\n",
        "unauthenticated clients fill the leader's memory with messages of many megabytes",
        (
            "tests/ranks/test_rank_security.py::test_an_unauthenticated_client_makes_the_leader_read_no_more_than_a_small_message",
        ),
    ),
    Mutation(
        "strangers_without_limit",
        "data_plane/ranks/entrance.py",
        "Unclaimed(UNCLAIMED + 2 * leader.config.count, self._displace)",
        "Unclaimed(UNCLAIMED * 1000, self._displace)",
        "unauthenticated clients hold any number of connections",
        (
            "tests/ranks/test_rank_security.py::test_unauthenticated_clients_hold_no_more_connections_than_the_limit_and_displace_no_rank",
        ),
    ),
    Mutation(
        "second_process_takes_the_number",
        "data_plane/ranks/leader.py",
        "            if await link.answers():\n",
        "            if False and await link.answers():\n",
        "two processes of one rank number evict each other again and again",
        (
            "tests/ranks/test_rank_protocol.py::test_a_second_process_of_one_number_is_refused_while_the_first_answers",
        ),
    ),
    Mutation(
        "outcomes_not_counted",
        "data_plane/ranks/state.py",
        "        if len(answer.outcomes) != self.outcomes:\n",
        "        if len(answer.outcomes) > self.outcomes:\n",
        "an answer with too few outcomes counts as a copy that was made",
        (
            "tests/ranks/test_rank_protocol.py::test_an_answer_that_cannot_be_costs_the_connection_and_no_bytes",
        ),
    ),
    Mutation(
        "another_model_joins",
        "data_plane/ranks/entrance.py",
        '        ("model", identity.model, ours.model),\n',
        "",
        "a rank with the objects of another model joins",
        (
            "tests/ranks/test_rank_protocol.py::test_an_identity_that_does_not_fit_is_refused_with_both_values",
        ),
    ),
    Mutation(
        "all_names_in_one_page",
        "data_plane/ranks/names.py",
        '    page = b"".join(islice(source, size))\n',
        '    page = b"".join(source)\n',
        "a rank with millions of objects blocks the loop and exceeds the size of a message",
        (
            "tests/ranks/test_names.py::test_one_page_is_taken_ahead",
            "tests/ranks/test_names.py::test_ten_million_names_are_sent_page_by_page",
        ),
    ),
    Mutation(
        "pages_without_flow_control",
        "data_plane/ranks/state.py",
        "        more = WINDOW - self._asked - len(self._pages)\n",
        "        more = WINDOW\n",
        "more pages than the window are in flight",
        ("tests/ranks/test_names.py::test_at_most_a_window_of_pages_is_in_flight",),
    ),
    Mutation(
        "generations_not_compared",
        "data_plane/ranks/names.py",
        "        self.uneven = self.uneven or len(others | {generation}) > 1\n",
        "",
        "after a clear that reached only some ranks, objects that the others kept are written "
        "over as one object of two generations",
        (
            "tests/ranks/test_rank_clears.py::test_ranks_of_different_generations_hold_nothing_until_all_are_cleared",
        ),
    ),
    Mutation(
        "unconfirmed_clear_returns",
        "data_plane/ranks/store.py",
        "        if missing and (self.shared or not done):\n",
        "        if missing and self.shared:\n",
        "clear(storage=True) returns although no rank has cleared its store",
        (
            "tests/ranks/test_rank_clears.py::test_a_clear_that_no_rank_confirms_raises_and_stays_to_be_done",
        ),
    ),
    Mutation(
        "socket_for_everybody",
        "data_plane/ranks/connection.py",
        "    os.fchmod(sock.fileno(), 0o600)  # Linux takes the mode of the path from it\n    "
        "sock.bind(path)\n    Path(path).chmod(0o600)",
        "    sock.bind(path)\n    Path(path).chmod(0o666)",
        "every user of the machine can connect to the rank endpoint",
        ("tests/ranks/test_rank_security.py::test_a_socket_is_for_its_user_alone_and_is_removed",),
    ),
    Mutation(
        "other_users_accepted",
        "data_plane/ranks/connection.py",
        "            if not is_trusted(uid):\n                self.foreign(",
        "            if uid < 0:\n                self.foreign(",
        "processes of other users connect to the rank endpoint",
        ("tests/ranks/test_rank_security.py::test_other_users_are_refused_on_both_sides",),
    ),
    Mutation(
        "rank_leaves_before_its_steps_end",
        "data_plane/ranks/worker.py",
        "            task.cancel()\n            await ended(task)\n",
        "            task.cancel()\n",
        "a cancelled serve_rank returns while its store is open and its threads run",
        ("tests/ranks/test_serve_cancelled.py::test_cancelled_by_asyncio_at_every_step",),
    ),
    Mutation(
        "ranks_chunks_take_all_blocks",
        "data_plane/ranks/store.py",
        "        return not self.shared\n\n    def take_removed",
        "        return False\n\n    def take_removed",
        "with several ranks, a prompt that is computed in chunks takes all its blocks at once",
        (SIMULATED + "test_a_chunk_begins_after_the_blocks_that_all_ranks_have_stored",),
    ),
    Mutation(
        "ranks_chunk_without_blocks_for_a_pool",
        "data_plane/ranks/store.py",
        "        return not self.shared\n\n    def take_removed",
        "        return True\n\n    def take_removed",
        "blocks that other nodes stored in a pool are not loaded in a chunked prefill",
        (POOL + "test_a_chunk_of_a_prompt_takes_blocks_for_all_that_a_pool_may_hold",),
    ),
)
