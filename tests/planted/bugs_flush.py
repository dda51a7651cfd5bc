"""Planted bugs of the flush notifier and its sinks. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "forgets_within_a_step",
        "flush_notifier/sink_view.py",
        "                self.compare(block)\n"
        "                looked += 1\n"
        "                if not looked % tree.step:\n"
        "                    yield\n"
        "        for run in batch.runs:\n"
        "            for block in reversed(run.blocks):  # the deepest first, since it is removed first\n"
        "                tree.unpin(block)\n",
        "                self.compare(block)\n"
        "                block.pins -= 1\n"
        "        for run in batch.runs:\n"
        "            for block in reversed(run.blocks):\n"
        "                if block.idle():\n"
        "                    tree.note_idle(block)\n"
        "                    for _ in tree.trim():\n"
        "                        pass\n",
        "an entry is forgotten while the same step still refers to it: the notifier fails with a "
        "KeyError, or a sink stays wrong",
        (
            "tests/flush_notifier/test_ledger_machine.py::test_a_parent_in_the_same_batch_is_not_forgotten_before_it_is_remembered",
        ),
    ),
    Mutation(
        "forgotten_entries_are_met_again",
        "flush_notifier/blocks.py",
        "            if block.number:\n                yield block\n",
        "            yield block\n",
        "a walk through all entries in steps meets some that were forgotten between two steps, "
        "and brings them back",
        (
            "tests/flush_notifier/test_steps.py::test_each_entry_is_visited_once_while_the_order_changes",
        ),
    ),
    Mutation(
        "held_entry_is_kept_for_good",
        "flush_notifier/ledger.py",
        "                tree.unpin(block)\n                tree.version += 1\n        yield",
        "                block.pins -= 1\n                tree.version += 1\n        yield",
        "an entry that was held between two steps of a path, and is nowhere, is never forgotten",
        (
            "tests/flush_notifier/test_ledger_machine.py::test_an_entry_that_was_held_at_the_end_of_a_path_is_forgotten_in_its_turn",
        ),
    ),
    Mutation(
        "sink_stuck_after_a_leaked_cancellation",
        "flush_notifier/sink_calls.py",
        '    except BaseException as error:\n        return described(error)\n    return ""\n',
        '    except Exception as error:\n        return described(error)\n    return ""\n',
        "a sink's error beside Exception ends the call's task with an error that nothing contains",
        (
            "tests/flush_notifier/test_contained_sinks.py::test_a_close_that_fails_neither_ends_in_an_error_nor_keeps_other_sinks_open",
        ),
    ),
    Mutation(
        "two_calls_of_one_sink_at_once",
        "flush_notifier/deliveries.py",
        "self.in_flight or self.backing_off or self.stuck",
        "self.in_flight or self.backing_off",
        "a sink is called again although a call that was given up still runs",
        (
            "tests/flush_notifier/test_contained_sinks.py::test_the_notifier_survives_every_error_of_a_sink_and_the_sink_recovers",
        ),
    ),
    Mutation(
        "sink_counts_more_than_it_took",
        "flush_notifier/deliveries.py",
        "sound = type(count) is int and 0 <= count <= len(self.batch.tasks) and self.begun",
        "sound = True",
        "an impossible count of taken tasks fails the notifier, or tasks count as sent that were "
        "not",
        (
            "tests/flush_notifier/test_contained_sinks.py::test_a_count_of_taken_tasks_that_makes_no_sense_counts_as_none",
        ),
    ),
    Mutation(
        "sink_may_change_its_batch",
        "flush_notifier/caller.py",
        "        tasks = tuple(delivery.batch.tasks)\n",
        "        tasks: Any = delivery.batch.tasks\n",
        "a sink that changes the list of tasks changes the ledger's record of the sent tasks",
        (
            "tests/flush_notifier/test_contained_sinks.py::test_a_sink_that_changes_its_batch_changes_its_own_copy",
        ),
    ),
    Mutation(
        "close_of_a_sink_raises",
        "system.py",
        "partial(close_sink, sink, self.config.flush.timeout_s)",
        "sink.close",
        "leaving the cache raises the error that a sink raises when it is closed",
        (
            "tests/flush_notifier/test_contained_sinks.py::test_a_close_that_fails_neither_ends_in_an_error_nor_keeps_other_sinks_open",
        ),
    ),
    Mutation(
        "replay_number_too_large",
        "flush_notifier/sinks/kv_replay.py",
        "range(start, min(start + limit, end))",
        "range(start, start + min(limit, 1))",
        "a reader that asks for a number of 2**63 or more gets no answer",
        ("tests/flush_notifier/test_kv_exposure.py::test_a_window_takes_any_number",),
    ),
    Mutation(
        "readers_beyond_the_limit_are_dropped",
        "flush_notifier/sinks/kv_replay.py",
        "            await asyncio.wait(tasks, timeout=LOOK, "
        "return_when=asyncio.FIRST_COMPLETED)\n",
        "            await self._socket.recv_multipart()\n",
        "of many readers that ask at once some never get an answer",
        (
            "tests/flush_notifier/test_kv_exposure.py::test_many_readers_at_once_all_get_their_answer",
        ),
    ),
    Mutation(
        "replay_takes_frames_of_any_size",
        "flush_notifier/sinks/kv_sockets.py",
        "        socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_REQUEST)\n",
        "",
        "an unknown client's frame of a gigabyte is taken into memory",
        (
            "tests/flush_notifier/test_kv_exposure.py::test_a_large_frame_ends_its_connection_before_it_is_read",
        ),
    ),
    Mutation(
        "socket_file_for_everybody",
        "flush_notifier/sinks/kv_sockets.py",
        "        path.chmod(0o600)\n",
        "        path.stat()\n",
        "other users of the machine can read the events",
        (
            "tests/flush_notifier/test_kv_exposure.py::test_a_socket_file_is_for_its_user_alone_and_takes_no_place_of_another",
        ),
    ),
    Mutation(
        "exposure_without_a_warning",
        "flush_notifier/sinks/kv_sockets.py",
        "            if listen and endpoint.any_host:\n",
        "            if listen and endpoint.own and endpoint.transport == 'ipc':\n",
        "the token ids of all prompts are published on every interface and nothing is logged",
        (
            "tests/flush_notifier/test_kv_exposure.py::test_listening_on_every_interface_is_one_warning",
        ),
    ),
    Mutation(
        "port_wraps_around",
        "zmq_endpoint.py",
        "        if int(port) > LAST_PORT:\n",
        "        if int(port) > 1000 * LAST_PORT:\n",
        "port 99999 is accepted as another port",
        ("tests/flush_notifier/test_kv_exposure.py::test_an_endpoint_that_cannot_be_is_named",),
    ),
    Mutation(
        "jsonl_path_not_tried_at_open",
        "flush_notifier/sinks/jsonl.py",
        '            async with aiofiles.open(self.path, "ab", opener=open_private, executor=self._threads):\n                pass\n',
        "            self.path.parent.stat()\n",
        "a path that cannot be written opens, and nothing is ever delivered",
        (
            "tests/flush_notifier/test_private_files.py::test_a_path_that_cannot_be_written_is_an_error_at_open",
        ),
    ),
    Mutation(
        "given_up_write_fails_unseen",
        "flush_notifier/sinks/jsonl.py",
        "lambda task: None if task.cancelled() else task.exception()",
        "lambda task: None",
        "asyncio prints that a task's exception was never retrieved",
        (
            "tests/flush_notifier/test_private_files.py::test_a_write_that_is_given_up_and_fails_then_is_no_unseen_exception",
        ),
    ),
    Mutation(
        "tokens_in_the_text_of_messages",
        "actor/message.py",
        "    __repr__ = discreet\n    __rich_repr__ = discreet_rich\n\n\nclass Control",
        "\n\nclass Control",
        "the token ids of prompts are in logs and in error texts",
        ("tests/flush_notifier/test_discretion.py",),
    ),
    Mutation(
        "salt_in_the_text_of_a_scope",
        "discreet.py",
        'HIDDEN = frozenset({"salt", "cache_salt"})',
        'HIDDEN = frozenset({"cache_salt"})',
        "the salts of tenants are in logs and in error texts",
        ("tests/flush_notifier/test_discretion.py",),
    ),
    Mutation(
        "jsonl_for_everybody",
        "flush_notifier/sinks/jsonl.py",
        "            async with aiofiles.open(\n"
        '                self.path, "ab", opener=open_private, executor=self._threads\n'
        "            ) as file:\n",
        '            async with aiofiles.open(self.path, "ab", executor=self._threads) as file:\n',
        "every user of the machine can read the tokens of all prompts",
        ("tests/flush_notifier/test_private_files.py::test_a_new_file_is_for_its_user_alone",),
    ),
    Mutation(
        "batch_made_at_once",
        "flush_notifier/tasks.py",
        '        whole += b"".join(map(field, blocks[i : i + step]))\n        yield\n',
        '        whole += b"".join([field(block) for block in blocks[i : i + step]])\n    yield\n',
        "the loop stands still while a task of very many blocks is made",
        ("tests/flush_notifier/test_steps.py::test_a_path_of_very_many_blocks",),
    ),
    Mutation(
        "refused_clear_in_one_turn",
        "flush_notifier/sink_view.py",
        "                self.doubt(block)\n"
        "                self.compare(block)\n"
        "            if not i % tree.step:\n"
        "                yield\n"
        "        looked = 0\n",
        "                self.doubt(block)\n"
        "                self.compare(block)\n"
        "            if not i:\n"
        "                yield\n"
        "        looked = 0\n",
        "the loop stands still while a clear that a sink did not take is undone",
        ("tests/flush_notifier/test_steps.py::test_a_path_of_very_many_blocks",),
    ),
    Mutation(
        "long_path_forgotten_in_one_turn",
        "flush_notifier/tree.py",
        "                    if not done % self.step:\n",
        "                    if not done:\n",
        "the loop stands still while a long path is forgotten",
        ("tests/flush_notifier/test_steps.py::test_forgetting_a_long_path",),
    ),
    Mutation(
        "late_answer_counts_twice",
        "flush_notifier/caller.py",
        "        delivery.number += 1  # later reports of this call are late\n",
        "",
        "the answer of a call that was given up is taken for the answer of the call",
        (
            "tests/flush_notifier/test_steps.py::test_an_answer_while_the_end_of_its_call_is_settled_is_late",
        ),
    ),
    Mutation(
        "endpoint_in_use_is_not_tried_again",
        "flush_notifier/sinks/kv_sockets.py",
        "            if error.errno != errno.EADDRINUSE or number == last:\n",
        "            if error.errno != errno.EADDRINUSE or number >= 0:\n",
        "a cache that is closed and opened again at once cannot listen at its own endpoint",
        ("tests/flush_notifier/test_kv_exposure.py::test_an_endpoint_that_becomes_free_is_taken",),
    ),
)
