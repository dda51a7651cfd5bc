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
)
