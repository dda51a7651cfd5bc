"""Planted bugs of the flush notifier and its sinks. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "forgets_within_a_step",
        "flush_notifier/ledger.py",
        "        self._limbo[entry] = None\n\n",
        "        self._limbo[entry] = None\n        self._trim()\n\n",
        "an entry is forgotten while the same step still refers to it: the notifier fails with a KeyError, or a sink stays wrong",
        (
            "tests/flush_notifier/test_ledger_machine.py::test_a_parent_in_the_same_batch_is_not_forgotten_before_it_is_remembered",
        ),
    ),
    Mutation(
        "refused_clear_remembers_the_forgotten",
        "flush_notifier/ledger.py",
        "                if entry.states[sink]:  # others may have been forgotten since\n",
        "                if entry is not None:\n",
        "a clear that a sink did not take brings back entries that were forgotten while it was in flight",
        ("tests/flush_notifier/test_ledger_machine.py::test_random_walks_with_small_limits",),
    ),
    Mutation(
        "held_entry_is_kept_for_good",
        "flush_notifier/ledger.py",
        "                if entry.idle():\n                    self._remember(entry)\n        self._trim()\n",
        "        self._trim()\n",
        "an entry that was held between two steps of a path, and is nowhere, is never forgotten",
        ("tests/flush_notifier/test_ledger_machine.py::test_random_walks_with_small_limits",),
    ),
    Mutation(
        "sink_stuck_after_a_leaked_cancellation",
        "flush_notifier/deliveries.py",
        '    except BaseException as error:\n        return described(error)\n    return ""\n',
        '    except Exception as error:\n        return described(error)\n    return ""\n',
        "what a sink raises beside Exception ends the call's task with an error that nothing contains",
        (
            "tests/flush_notifier/test_contained_sinks.py::test_a_close_that_fails_neither_ends_in_an_error_nor_keeps_other_sinks_open",
        ),
    ),
    Mutation(
        "two_calls_of_one_sink_at_once",
        "flush_notifier/deliveries.py",
        "self.in_flight or self.waiting or self.stuck",
        "self.in_flight or self.waiting",
        "a sink is called again although a call that was given up still runs",
        (
            "tests/flush_notifier/test_contained_sinks.py::test_whatever_a_sink_raises_the_notifier_goes_on_and_the_sink_recovers",
        ),
    ),
    Mutation(
        "sink_counts_more_than_it_took",
        "flush_notifier/deliveries.py",
        "sound = type(taken) is int and 0 <= taken <= len(self.batch.tasks) and self.begun",
        "sound = True",
        "a count of taken tasks that makes no sense fails the notifier, or tasks count as sent that were not",
        ("tests/flush_notifier/test_contained_sinks.py::test_a_count_of_taken_tasks_that_makes_no_sense_counts_as_none",),
    ),
    Mutation(
        "sink_may_change_its_batch",
        "flush_notifier/actor.py",
        "tuple(delivery.batch.tasks), delivery.begun",
        "delivery.batch.tasks, delivery.begun",
        "a sink that changes the list of tasks changes what the ledger takes for sent",
        ("tests/flush_notifier/test_contained_sinks.py::test_a_sink_that_changes_its_batch_changes_its_own_copy",),
    ),
    Mutation(
        "close_of_a_sink_raises",
        "system.py",
        "partial(close_sink, sink, self.config.flush.timeout)",
        "sink.close",
        "leaving the cache raises what a sink raises when it is closed",
        (
            "tests/flush_notifier/test_contained_sinks.py::test_a_close_that_fails_neither_ends_in_an_error_nor_keeps_other_sinks_open",
        ),
    ),
    Mutation(
        "replay_number_too_large",
        "flush_notifier/sinks/kv_replay.py",
        "min(max(0, number - self._kept[0][0]), len(self._kept))",
        "max(0, number - self._kept[0][0])",
        "a reader that asks for a number of 2**63 or more gets no answer",
        ("tests/flush_notifier/test_kv_exposure.py::test_a_window_takes_any_number",),
    ),
    Mutation(
        "readers_beyond_the_limit_are_dropped",
        "flush_notifier/sinks/kv_replay.py",
        "                        await asyncio.wait(self._answers.values(), return_when=asyncio.FIRST_COMPLETED)\n",
        "                        await self._socket.recv_multipart()\n                        continue\n",
        "of many readers that ask at once some never get an answer",
        ("tests/flush_notifier/test_kv_exposure.py::test_many_readers_at_once_all_get_their_answer",),
    ),
    Mutation(
        "replay_takes_frames_of_any_size",
        "flush_notifier/sinks/kv_sockets.py",
        "        socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_REQUEST)\n",
        "",
        "a stranger's frame of a gigabyte is taken into memory",
        ("tests/flush_notifier/test_kv_exposure.py::test_a_large_frame_ends_its_connection_before_it_is_read",),
    ),
    Mutation(
        "socket_file_for_everybody",
        "flush_notifier/sinks/kv_sockets.py",
        "        path.chmod(0o600)\n",
        "        path.stat()\n",
        "other users of the machine can read the events",
        ("tests/flush_notifier/test_kv_exposure.py::test_a_socket_file_is_for_its_user_alone_and_takes_no_place_of_another",),
    ),
    Mutation(
        "exposure_without_a_warning",
        "flush_notifier/sinks/kv_sockets.py",
        "            if listen and endpoint.any_host:\n",
        "            if listen and endpoint.own and endpoint.transport == 'ipc':\n",
        "the token ids of all prompts are published on every interface and nothing is logged",
        ("tests/flush_notifier/test_kv_exposure.py::test_listening_on_every_interface_is_one_warning",),
    ),
    Mutation(
        "port_wraps_around",
        "zmq_endpoint.py",
        "        if int(port) > LAST_PORT:\n",
        "        if int(port) > 1000 * LAST_PORT:\n",
        "port 99999 is taken as another one",
        ("tests/flush_notifier/test_kv_exposure.py::test_an_endpoint_that_cannot_be_is_named",),
    ),
)
