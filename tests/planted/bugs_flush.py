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
)
