"""Planted bugs of reports on a whole store, and of readers of files. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

PAGES = "tests/storage/test_report_pages.py"
FILES = "tests/scenario/test_damaged_files.py"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "whole_store_in_one_message",
        "storage/reports.py",
        "islice(self._unreported, REPORT_PAGE)",
        "self._unreported",
        "a store of millions of objects is reported in one message, and blocks the loop at start "
        "and after restarts",
        (f"{PAGES}::test_a_large_store_is_reported_in_pages_of_one_turn_each",),
    ),
    Mutation(
        "pages_are_not_compared_with_the_store",
        "storage/reports.py",
        '        return Page(join_hashes(key for key in page if self._inventory.holds(key)), b"")\n',
        '        return Page(join_hashes(page), b"")\n',
        "a block that was removed between two pages of a report is reported as stored",
        (f"{PAGES}::test_names_removed_between_two_pages_are_not_reported",),
    ),
    Mutation(
        "report_is_not_started_anew",
        "storage/reports.py",
        "        self._snapshot_due = True\n",
        "        self._snapshot_due = not self.active\n",
        "a notifier that restarts between two pages of a report never receives the first ones",
        (f"{PAGES}::test_a_notifier_that_restarts_between_two_pages_gets_all_of_them",),
    ),
    Mutation(
        "lost_names_in_one_message",
        "storage/inventory.py",
        "islice(departed, REMOVED_PAGE)",
        "departed",
        "after a clear every name of a store is reported in one message, which blocks the loop",
        (f"{PAGES}::test_lost_names_are_reported_in_pages_of_one_turn_each",),
    ),
    Mutation(
        "journal_lines_are_not_compared_with_their_tokens",
        "flush_notifier/sinks/journal.py",
        "            if start < 0 or len(tokens) != (start - first + len(hashes)) * published.block_bytes:\n",
        "            if start < 0:\n",
        "a damaged journal makes the sink take back paths whose tokens do not belong to their "
        "blocks",
        (f"{FILES}::test_a_journal_line_that_cannot_be_is_named",),
    ),
    Mutation(
        "trace_runs_are_not_bounded",
        "scenario/trace.py",
        "    if blocks > MAX_BLOCKS:\n",
        "    if blocks < 0:\n",
        "a damaged line of a trace takes all memory, or raises MemoryError",
        (f"{FILES}::test_a_trace_line_that_cannot_be_is_named",),
    ),
    Mutation(
        "nested_json_in_a_journal_is_not_contained",
        "flush_notifier/sinks/journal.py",
        "(msgspec.DecodeError, ValueError, RecursionError) as error",
        "(msgspec.DecodeError, ValueError) as error",
        "a damaged journal raises RecursionError instead of SinkError",
        (f"{FILES}::test_a_journal_line_that_cannot_be_is_named",),
    ),
)
