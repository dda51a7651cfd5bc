"""Planted bugs of reports on a whole store, and of what is read from files. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

PAGES = "tests/storage/test_report_pages.py"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "whole_store_in_one_message",
        "storage/worker.py",
        "islice(self._unreported, REPORT_PAGE)",
        "self._unreported",
        "a store of millions of objects is reported in one message, and blocks the loop at start and after restarts",
        (f"{PAGES}::test_a_large_store_is_reported_in_pages_of_one_turn_each",),
    ),
    Mutation(
        "pages_are_not_compared_with_the_store",
        "storage/worker.py",
        "            held = join_keys(key for key in page if self.backend.holds(key))\n",
        "            held = join_keys(page)\n",
        "a block that was removed between two pages of a report is reported as stored",
        (f"{PAGES}::test_names_removed_between_two_pages_are_not_reported",),
    ),
    Mutation(
        "report_is_not_started_anew",
        "storage/worker.py",
        "        self._snapshot_due = True\n",
        "        self._snapshot_due = not self._paging\n",
        "a notifier that restarts between two pages of a report never receives the first ones",
        (f"{PAGES}::test_a_notifier_that_restarts_between_two_pages_gets_all_of_them",),
    ),
    Mutation(
        "lost_names_in_one_message",
        "storage/backends/owned.py",
        "islice(departed, LOST_PAGE)",
        "departed",
        "after a clear every name of a store is reported in one message, which blocks the loop",
        (f"{PAGES}::test_lost_names_are_reported_in_pages_of_one_turn_each",),
    ),
)
